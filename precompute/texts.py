"""The texts of a bake: each distinct caption is encoded once, whatever the layout.

In layout `zarr` a text becomes a text row when it is first needed; in `webdataset` its states go
into every sample that carries it, and are taken from memory or read back from a store.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from store_format.rows import TOKENS_UNKNOWN, Text, TextRow
from store_format.store import Store

if TYPE_CHECKING:
    from precompute.encoders import TextEncoder

Tensors = list[NDArray[np.generic]]
REMEMBERED_BYTES = 1 << 30


class StoredTexts:
    """Where the texts of one store are: in text rows, or inside of sample rows."""

    def __init__(
        self, store: Store, bad_rows: Collection[int] = (), bad_texts: Collection[str] = ()
    ) -> None:
        """Look into `store`, leaving out sample rows and text keys that cannot be read."""
        self._store = store
        self.rows = {key.hex() for key in store.index.texts["text_key"].to_pylist()}
        self.rows.difference_update(bad_texts)
        self._inline: dict[str, tuple[int, int]] = {}
        if store.manifest.texts_inline:
            for row, keys in enumerate(store.index.samples["text_keys"].to_pylist()):
                if row not in bad_rows:
                    self._inline.update({key.hex(): (row, which) for which, key in enumerate(keys)})

    def __contains__(self, text_key: str) -> bool:
        return text_key in self.rows or text_key in self._inline

    def read(self, text_key: str) -> Tensors:
        """Return the states of a text that is there."""
        specs = self._store.manifest.text_tensors
        if text_key in self.rows:
            states = self._store.read_text(text_key)
            return [states[spec.name] for spec in specs]
        row, which = self._inline[text_key]
        batch = self._store.read([row], [which])
        return [batch[spec.name][0] for spec in specs]

    def num_tokens(self, text_key: str) -> int:
        """Return the number of its tokens, if the store says."""
        if text_key not in self.rows:
            return TOKENS_UNKNOWN
        return self._store.text_row(text_key).num_tokens


class TextBank:
    """Knows which texts are stored, takes over what another store has, and encodes the others."""

    def __init__(
        self,
        stored: StoredTexts,
        load_encoder: "Callable[[], TextEncoder]",
        reopen: Callable[[], Store],
        *,
        inline: bool,
        donor: StoredTexts | None = None,
        others: Collection[str] = (),
    ) -> None:
        """Start from what a store holds.

        Args:
            stored: the store's texts at its last commit.
            load_encoder: called once, when the first text must be encoded.
            reopen: commits what is under way and returns the store anew.
            inline: whether states go into the samples that carry them.
            donor: texts that need not be encoded.
            others: keys of text rows that other writers have committed meanwhile; it may grow.
        """
        self._stored, self._donor, self._others = stored, donor, others
        self._load_encoder, self._reopen = load_encoder, reopen
        self._encoder: TextEncoder | None = None
        self._inline = inline
        self._rows = set(stored.rows)
        self._made_now: set[str] = set()
        self._memory: OrderedDict[str, Tensors] = OrderedDict()
        self._memory_bytes = 0
        self.num_encoded = 0
        self.num_taken_over = 0
        self.cut: list[str] = []

    def add(self, texts: Sequence[Text], *, as_rows: bool) -> list[tuple[TextRow, Tensors]]:
        """Make those of `texts` that are new; return the text rows that must be stored.

        Args:
            texts: captions with keys, in any number, repeats allowed.
            as_rows: whether they become text rows (shared texts, and the empty prompt always).
        """
        self._forget_oldest()  # before the new ones, which `tensors` is asked for next
        new = {text.text_key: text for text in texts if not self._is_held(text.text_key, as_rows)}
        rows = []
        for key, (num_tokens, tensors) in self._make(new).items():
            if as_rows:
                self._rows.add(key)
                rows.append((TextRow(key, new[key].caption, num_tokens), tensors))
            else:
                self._made_now.add(key)
            if self._inline:
                self._remember(key, tensors)
        return rows

    def tensors(self, text: Text) -> Tensors:
        """Return the states of a text that `add` has seen or the store holds, for inline use."""
        key = text.text_key
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if key not in self._stored:
            self._stored = StoredTexts(self._reopen())
        tensors = self._stored.read(key)
        self._remember(key, tensors)
        return tensors

    def _is_held(self, key: str, as_rows: bool) -> bool:
        if as_rows:
            return key in self._rows or key in self._others
        return key in self._stored or key in self._rows or key in self._made_now

    def _make(self, new: dict[str, Text]) -> dict[str, tuple[int, Tensors]]:
        """Return (number of tokens, states) of each new text, taken over or encoded."""
        donor = self._donor
        made: dict[str, tuple[int, Tensors]] = {}
        if donor is not None:
            made = {key: (donor.num_tokens(key), donor.read(key)) for key in new if key in donor}
            self.num_taken_over += len(made)
        left = [text for key, text in new.items() if key not in made]
        if left:
            self._encoder = self._encoder or self._load_encoder()
            encoded = self._encoder.encode([text.caption for text in left])
            self.num_encoded += len(encoded)
            for text, result in zip(left, encoded, strict=True):
                if result.num_tokens > len(result.tensors[0]):
                    self.cut.append(text.caption)
                made[text.text_key] = result.num_tokens, result.tensors
        return {key: made[key] for key in new}

    def _remember(self, key: str, tensors: Tensors) -> None:
        self._memory[key] = tensors
        self._memory_bytes += sum(tensor.nbytes for tensor in tensors)

    def _forget_oldest(self) -> None:
        while self._memory_bytes > REMEMBERED_BYTES:
            _, forgotten = self._memory.popitem(last=False)
            self._memory_bytes -= sum(tensor.nbytes for tensor in forgotten)
