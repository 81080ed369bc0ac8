"""Copying samples from open stores into another: what `convert`, `merge` and `subset` do.

Nothing is encoded: a row keeps its identity, geometry, texts, weights and bytes, and gets another
place. Every read is checked. The copy commits as it goes; killed, it is continued by the same call,
which skips what the target holds.
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format.clashes import find_clashes, select_once
from store_format.errors import DamagedStoreError, OtherBakeError, PrebakeError
from store_format.folders import Folder, Location, folder_of, lie_apart
from store_format.index import Ints, id_bytes, list_starts
from store_format.manifest import MANIFEST_NAME, Layout, Manifest
from store_format.progress import Progress
from store_format.rows import TOKENS_UNKNOWN, SampleRow, TextRow
from store_format.selection import Part, Rows, as_binary, copying_order
from store_format.store import MAX_OPEN_FILES, Store, open_store
from store_format.writer import ShardDraft, StoreWriter, check_target

Tensors = list[NDArray[Any]]
NewText = tuple[TextRow, Tensors]

MAX_DRAFTS = 16  # buckets whose shards are filled at a time
MAX_ROWS = 1 << 14  # of a commit: they are in memory until then
SPARE_OPEN_FILES = 256


@dataclass(frozen=True)
class Copied:
    """What a copy did.

    Attributes:
        num_samples: in the target now.
        num_held: that the target held before.
        num_repeated: statements of a sample that repeat an equal one.
        num_other_states: texts of which the sources hold several states under one key, as from
            different devices; one of them was taken.
    """

    num_samples: int
    num_held: int
    num_repeated: int
    num_other_states: int


def copy_samples(
    parts: Sequence[Part], out: Location | Folder, layout: Layout, *, shard_bytes: int, what: str
) -> Copied:
    """Bring the store at `out` to hold exactly the samples of `parts`.

    Args:
        parts: of stores of one configuration. Of samples with equal content one is taken.
        out: the target: missing, or the beginning of the same copy.
        layout: of the target.
        shard_bytes: a shard is closed at this size.
        what: the work in words, for the person who waits.

    Raises:
        OtherBakeError: the stores are of several configurations, or the target is of another.
        DamagedStoreError: a row cannot be read; what was copied before is kept.
        PrebakeError: samples of equal ids differ; or the target holds something else, or is or lies
            in a source.
    """
    root = folder_of(out)
    manifest = common_manifest([part.store for part in parts], layout)
    _check_apart(parts, root)
    check_target(root, manifest)
    rows = Rows(parts)
    chosen = select_once(rows)
    empty_text = _empty_text(parts)
    is_held, known_commits = np.zeros(len(chosen), bool), []
    if root.sizes([MANIFEST_NAME]):
        target = open_store(root)
        is_held, known_commits = _find_held(rows, chosen, target), target.index.commits
    _allow_open_files(parts)
    try:
        with StoreWriter(root, manifest) as writer:
            if root.is_local:
                writer.become_exclusive()
            if writer.index.commits != known_commits:
                is_held = _find_held(rows, chosen, writer.reload())
            missing = copying_order(rows, chosen[~is_held])
            num_samples, num_missing = rows.num_samples(chosen), rows.num_samples(missing)
            num_held = num_samples - num_missing
            with Progress(num_samples, "samples", what, initial=num_held) as progress:
                copier = _Copier(writer, shard_bytes)
                copier.add_texts([empty_text])
                for _, variants in groupby(rows.samples(missing), lambda row: row[0].sample_id):
                    copier.add_sample(list(variants))
                    progress.advance()
                copier.commit()
            writer.tidy()
    except OSError as error:
        error.filename = error.filename or str(root)  # of a full disk, for one
        raise
    return Copied(
        num_samples,
        num_held,
        rows.num_samples(np.arange(len(rows.row))) - num_samples,
        0 if manifest.texts_inline else _num_other_states(parts),
    )


def common_manifest(stores: Sequence[Store], layout: Layout) -> Manifest:
    """Return the manifest of stores that agree but for the layout, in a layout.

    Raises:
        OtherBakeError: they do not; it names each difference.
    """
    first, *others = stores
    mine = _facts(first.manifest.model_dump(mode="json", exclude={"layout"}))
    for other in others:
        theirs = _facts(other.manifest.model_dump(mode="json", exclude={"layout"}))
        differences = [
            f"{key} = {mine.get(key)!r} and {theirs.get(key)!r}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        if differences:
            raise OtherBakeError(
                f"{first.root} and {other.root} are different bakes: {'; '.join(differences)}. "
                f"Only stores of one configuration become one: bake one side anew like the other."
            )
    return first.manifest.model_copy(update={"layout": layout})


def _facts(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested dictionaries by their dotted keys."""
    if not isinstance(value, dict):
        return {prefix.rstrip("."): value}
    return {k: v for name in value for k, v in _facts(value[name], f"{prefix}{name}.").items()}


def _check_apart(parts: Sequence[Part], root: Folder) -> None:
    """Raise PrebakeError where the target is a source, or one of both lies in the other."""
    for part in parts:
        source = part.store.root
        if not lie_apart(source, root):
            raise PrebakeError(
                f"--out {root} and the store {source} are the same, or one lies in the other. "
                f"Choose an --out of its own."
            )


def _empty_text(parts: Sequence[Part]) -> NewText:
    """Return the empty prompt's row and states, from the first store that has them.

    Raises:
        PrebakeError: none has.
    """
    key = parts[0].store.manifest.empty_text_key
    wanted = pa.array([bytes.fromhex(key)], pa.binary(16))
    for part in parts:
        if pc.is_in(wanted, value_set=part.store.index.texts["text_key"])[0].as_py():
            break
    return part.store.text_row(key), list(part.store.read_empty_text().values())


def _find_held(rows: Rows, chosen: Ints, target: Store) -> NDArray[np.bool_]:
    """Return which of the chosen rows the target holds.

    Raises:
        PrebakeError: it also holds what this copy does not make.
    """
    held = Rows([Part.whole(target)])
    at = np.arange(len(target))
    num_clashes, shown = find_clashes(rows, chosen, held, at)
    if num_clashes:
        raise _not_the_beginning(target, f"{num_clashes} of its samples are not theirs: {shown}")
    stores = [part.store for part in rows.parts]
    known = pa.chunked_array([_states(s, s.index.samples, s.index.texts) for s in stores])
    states = _states(target, target.index.samples, target.index.texts)
    num_others = len(states) - pc.sum(pc.is_in(states, value_set=known), min_count=0).as_py()
    if num_others:
        raise _not_the_beginning(target, f"{num_others} states of its texts are not theirs")
    found = pc.is_in(rows.keys(chosen), value_set=held.keys(at))
    return np.asarray(found.to_numpy(zero_copy_only=False))


def _not_the_beginning(target: Store, why: str) -> PrebakeError:
    return PrebakeError(
        f"{target.root} exists and is not the beginning of a copy of these samples: {why}. "
        f"Choose an --out that does not exist yet."
    )


def _num_other_states(parts: Sequence[Part]) -> int:
    """Return how many states of texts a store leaves out that keeps one for each key."""
    states = []
    for part in parts:
        samples = part.store.index.samples.take(pa.array(part.rows))
        keys = pc.list_flatten(samples["text_keys"]).combine_chunks()
        texts = part.store.index.texts
        texts = texts.filter(pc.is_in(texts["text_key"], value_set=keys))
        states.append(_states(part.store, samples, texts))
    distinct = pa.chunked_array(states).unique()
    num_keys = len(pc.binary_slice(distinct.cast(pa.binary()), 0, 16).unique())
    return len(distinct) - num_keys


def _states(store: Store, samples: pa.Table, texts: pa.Table) -> pa.Array:
    """Return of texts in sample rows and in text rows: key and checksums as one value each."""
    num_first, num_tensors = len(store.manifest.variant_tensors), len(store.manifest.text_tensors)
    keys, crcs = [id_bytes(texts["text_key"])], [pc.list_flatten(texts["crc32c"]).to_numpy()]
    if store.manifest.texts_inline:
        starts = list_starts(samples["crc32c"])
        crc = pc.list_flatten(samples["crc32c"]).to_numpy()
        number = np.arange(len(crc)) - np.repeat(starts[:-1], np.diff(starts))  # in its row
        crcs.append(crc[number >= num_first])
        keys.append(id_bytes(pc.list_flatten(samples["text_keys"])))
    key = np.concatenate(keys)
    crc = np.concatenate(crcs).astype("<u4").view(np.uint8)
    return as_binary(np.concatenate([key, crc.reshape(len(key), 4 * num_tensors)], axis=1))


def _allow_open_files(parts: Sequence[Part]) -> None:
    """Raise the process's limit to what reading all stores side by side may take.

    Raises:
        PrebakeError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = [len(part.store.index.files) for part in parts]
    needed = SPARE_OPEN_FILES + sum(min(MAX_OPEN_FILES, num) for num in num_files)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise PrebakeError(
            f"reading {len(parts)} stores side by side takes {needed} open files, and this system "
            f"allows {hard} ('ulimit -Hn'). Merge fewer stores at a time."
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Copier:
    """Fills shards, one a bucket and one of texts, and commits when one is full."""

    def __init__(self, writer: StoreWriter, shard_bytes: int) -> None:
        self._writer = writer
        self._shard_bytes = shard_bytes
        self._texts_inline = writer.manifest.texts_inline
        self._stored = {key.hex() for key in writer.index.texts["text_key"].to_pylist()}
        self._drafts: dict[tuple[int, int], ShardDraft] = {}
        self._text_draft: ShardDraft | None = None
        self._samples: list[SampleRow] = []
        self._texts: list[TextRow] = []

    def add_sample(self, variants: Sequence[tuple[SampleRow, Part, int]]) -> None:
        """Copy all variants of a sample, and its texts as far as they are not there."""
        for row, part, number in variants:
            try:
                tensors = list(part.store.read_variant(number).values())
                if self._texts_inline:
                    for states in part.store.read_texts(number):
                        tensors += states.values()
                else:
                    self.add_texts(self._new_texts(row, part.store, number))
            except DamagedStoreError as error:
                raise DamagedStoreError(
                    f"{row.source}/{row.path} (sample {row.sample_id}) cannot be copied: {error}"
                ) from None
            bucket = row.bucket_px
            if bucket not in self._drafts:
                self._drafts[bucket] = self._writer.new_sample_shard(bucket)
            self._samples.append(row.placed(self._drafts[bucket].append(row, tensors)))
        is_full = any(draft.size_bytes >= self._shard_bytes for draft in self._all_drafts())
        num_rows = len(self._samples) + len(self._texts)
        if is_full or num_rows >= MAX_ROWS or len(self._drafts) >= MAX_DRAFTS:
            self.commit()

    def add_texts(self, texts: Sequence[NewText]) -> None:
        """Store text rows, but for those that are there."""
        for row, tensors in texts:
            if row.text_key not in self._stored:
                self._stored.add(row.text_key)
                self._text_draft = self._text_draft or self._writer.new_text_shard()
                place = self._text_draft.append(row, tensors)
                self._texts.append(replace(row, place=place))

    def _new_texts(self, row: SampleRow, store: Store, number: int) -> list[NewText]:
        """Return a row's texts that are not yet stored, with their states."""
        new = [t for t, text in enumerate(row.texts) if text.text_key not in self._stored]
        if not new:
            return []
        if store.manifest.texts_inline:
            states = store.read_texts(number)
            texts = [row.texts[t] for t in new]
            rows = [TextRow(text.text_key, text.caption, TOKENS_UNKNOWN) for text in texts]
            return [(r, list(states[t].values())) for r, t in zip(rows, new, strict=True)]
        keys = [row.texts[t].text_key for t in new]
        return [(store.text_row(key), list(store.read_text(key).values())) for key in keys]

    def commit(self) -> None:
        """Publish what was added since the last time."""
        if self._samples or self._texts:
            self._writer.commit(self._all_drafts(), self._samples, self._texts)
            self._drafts, self._text_draft = {}, None
            self._samples, self._texts = [], []

    def _all_drafts(self) -> list[ShardDraft]:
        return list(self._drafts.values()) + ([self._text_draft] if self._text_draft else [])
