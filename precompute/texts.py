"""The texts of a bake: each distinct caption is encoded once, whatever the layout.

In layout `zarr` a text becomes a text row when it is first needed; in `webdataset` its states go
into every sample that carries it, and are taken from memory or read back from the store.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from store_format.rows import Text, TextRow
from store_format.store import Store

if TYPE_CHECKING:
    from precompute.encoders import TextEncoder

Tensors = list[NDArray[np.generic]]
REMEMBERED_BYTES = 1 << 30


class TextBank:
    """Knows which texts are stored, and encodes the others."""

    def __init__(
        self,
        store: Store,
        load_encoder: "Callable[[], TextEncoder]",
        reopen: Callable[[], Store],
    ) -> None:
        """Start from what `store` holds.

        Args:
            store: the store at its last commit.
            load_encoder: called once, when the first text must be encoded.
            reopen: commits what is under way and returns the store anew.
        """
        self._load_encoder = load_encoder
        self._reopen = reopen
        self._encoder: TextEncoder | None = None
        self._inline = store.manifest.texts_inline
        self._look_into(store)
        self._stored = set(self._rows)
        self._encoded_now: set[str] = set()
        self._memory: OrderedDict[str, Tensors] = OrderedDict()
        self._memory_bytes = 0
        self.num_encoded = 0
        self.num_cut = 0
        self.first_cut = ""

    def add(self, texts: Sequence[Text], *, as_rows: bool) -> list[tuple[TextRow, Tensors]]:
        """Encode those of `texts` that are new; return the text rows that must be stored.

        Args:
            texts: captions with keys, in any number, repeats allowed.
            as_rows: whether they become text rows (shared texts, and the empty prompt always).
        """
        self._forget_oldest()  # before the new ones, which `tensors` is asked for next
        held = self._stored if as_rows else self._stored | self._places.keys()
        new = {
            text.text_key: text
            for text in texts
            if text.text_key not in held and text.text_key not in self._encoded_now
        }
        if not new:
            return []
        if self._encoder is None:
            self._encoder = self._load_encoder()
        encoded = self._encoder.encode([text.caption for text in new.values()])
        self.num_encoded += len(encoded)
        rows = []
        for text, result in zip(new.values(), encoded, strict=True):
            if result.num_tokens > len(result.tensors[0]):
                self.num_cut += 1
                self.first_cut = self.first_cut or text.caption
            if as_rows:
                self._stored.add(text.text_key)
                row = TextRow(text.text_key, text.caption, result.num_tokens)
                rows.append((row, result.tensors))
            else:
                self._encoded_now.add(text.text_key)
            if self._inline:
                self._remember(text.text_key, result.tensors)
        return rows

    def tensors(self, text: Text) -> Tensors:
        """Return the states of a text that `add` has seen or the store holds, for inline use."""
        if text.text_key in self._memory:
            self._memory.move_to_end(text.text_key)
            return self._memory[text.text_key]
        if text.text_key not in self._places and text.text_key not in self._rows:
            self._look_into(self._reopen())
        if text.text_key in self._places:
            row, which = self._places[text.text_key]
            batch = self._store.read([row], [which])
            tensors = [batch[spec.name][0] for spec in self._store.manifest.text_tensors]
        else:
            states = self._store.read_text(text.text_key)
            tensors = [states[spec.name] for spec in self._store.manifest.text_tensors]
        self._remember(text.text_key, tensors)
        return tensors

    def _remember(self, key: str, tensors: Tensors) -> None:
        self._memory[key] = tensors
        self._memory_bytes += sum(tensor.nbytes for tensor in tensors)

    def _forget_oldest(self) -> None:
        while self._memory_bytes > REMEMBERED_BYTES:
            _, forgotten = self._memory.popitem(last=False)
            self._memory_bytes -= sum(tensor.nbytes for tensor in forgotten)

    def _look_into(self, store: Store) -> None:
        """Note what can be read back: text rows, and texts inside sample rows as (row, which)."""
        self._store = store
        self._rows = {key.hex() for key in store.index.texts["text_key"].to_pylist()}
        self._places: dict[str, tuple[int, int]] = {}
        if self._inline:
            for row, keys in enumerate(store.index.samples["text_keys"].to_pylist()):
                self._places.update({key.hex(): (row, which) for which, key in enumerate(keys)})
