"""A store that proves itself: checks that name what is damaged, and the hash of what it holds."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format.commits import (
    COMMIT_FILE,
    INDEX_FOLDER,
    Commit,
    FileEntry,
    ShardEntry,
    damaged_index,
    parse_commit,
    parse_segment,
)
from store_format.errors import DamagedStoreError, PrebakeError, one_line
from store_format.folders import NOTE_NAME, Folder, Location, folder_of
from store_format.index import SCHEMAS, Ints, id_bytes, id_words, list_starts, rows_with_id
from store_format.keys import sample_id
from store_format.places import text_rows_of_texts
from store_format.store import Store, open_store
from store_format.structure import (
    WrongStructureError,
    check_metadata,
    shard_facts,
    zarr_problems,
)
from store_format.tar_structure import tar_problems
from store_format.views import outdated, view_files, view_sizes, with_files
from store_format.zarr_layout import group_files, group_json

_NO_ROWS: Ints = np.zeros(0, np.int64)
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}
_NAMED_SAMPLES = 3  # of a damaged shard, where not all are asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage, and the samples that are stored in what is damaged.

    Attributes:
        where: the shard, or the file outside of shards.
        what: what is wrong, in one line.
        num_samples: how many live samples have something in it.
        rows: their rows in the store; `damaged_rows` tells which of them cannot be read.
        is_lag: it is a view that is not at the last commit, as while a bake runs or after a kill.
            Only plain readers look at views, and the next bake or repair writes them anew.
    """

    where: str
    what: str
    num_samples: int = 0
    rows: Ints = field(default_factory=lambda: _NO_ROWS, compare=False, repr=False)
    is_lag: bool = False

    def __str__(self) -> str:
        return self.what if self.where in self.what else f"{self.where}: {self.what}"


def verify_store(
    store: Location | Folder | Store,
    *,
    full: bool,
    progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Check a store; an empty list means that nothing is wrong.

    Quick: the index parses, matches its hashes and places every tensor inside of a shard, and every
    file of a shard with live rows exists with the stated size, which is that of the stated number
    of rows. Full: also each such file's sha256, every live tensor's crc32c and finite values, what
    plain readers meet in it (`structure`), and the views made for them.

    Args:
        store: its location; or the opened store, whose rows the findings then name.
        full: whether to read everything.
        progress: is told the bytes of each shard after it was checked.

    Raises:
        NotAStoreError: there is no store to check.
    """
    try:
        opened = store if isinstance(store, Store) else open_store(store)
        opened.prepare()
        if full:
            _ = opened.index.sample_details, opened.index.text_details
    except DamagedStoreError as error:
        return _index_damage(store.root if isinstance(store, Store) else folder_of(store), error)
    contents = _Contents(opened)
    shards = contents.live_shards()
    findings = [*_unfinished_repair(opened.root), *_lost_empty_text(opened)]
    findings += _identity_damage(opened) if full else ()
    sizes = opened.root.sizes([entry.path for shard in shards for entry in shard.files])
    for shard in shards:
        if damage := _shard_damage(contents, shard, sizes, full):
            rows = contents.samples_in(shard)
            num_samples = _num_samples(opened, rows)
            findings += [Finding(shard.name, one_line(w), num_samples, rows) for w in damage]
        if progress:
            progress(sum(entry.bytes for entry in shard.files))
    if full:
        findings += _view_damage(opened)
    return findings


def live_shards(store: Store) -> list[ShardEntry]:
    """Return the shards that hold live rows, sorted by name."""
    return _Contents(store).live_shards()


def name_samples(store: Store, finding: Finding, *, all_of_them: bool = False) -> str:
    """Return which samples a finding concerns, as people know them: by their paths.

    "5 samples: a.png, b.png, c.png and 2 more"; empty where it concerns none.
    """
    if not len(finding.rows):
        return ""
    rows = finding.rows[np.append(True, _is_other_sample(store, finding.rows))]
    shown = rows if all_of_them else rows[:_NAMED_SAMPLES]
    if len(shown) <= _NAMED_SAMPLES:  # without reading those of all samples
        paths = [store.sample(row).path for row in shown.tolist()]
    else:
        paths = store.index.sample_details["path"].take(pa.array(shown)).to_pylist()
    plural = "s" if len(rows) > 1 else ""
    more = f" and {len(rows) - len(shown)} more" if len(shown) < len(rows) else ""
    return one_line(f"{len(rows)} sample{plural}: {', '.join(paths)}{more}")


@dataclass(frozen=True, slots=True)
class Damage:
    """What a full check finds, down to the rows that are lost: what a repair must know.

    Attributes:
        findings: of `verify_store`.
        shards: the damaged ones. All their rows but those below can be copied.
        sample_rows: rows of the store that cannot be read.
        text_rows: rows of `store.index.texts` that cannot be read.
    """

    findings: list[Finding]
    shards: frozenset[str]
    sample_rows: Ints
    text_rows: Ints


def find_damage(store: Store, progress: Callable[[int], None] | None = None) -> Damage:
    """Check an opened store in full, and find out which rows cannot be read.

    Args:
        store: the store.
        progress: is told the bytes of each shard after it was checked.
    """
    findings = verify_store(store, full=True, progress=progress)
    where = frozenset(finding.where for finding in findings if not finding.is_lag)
    shards = where & store.index.shards.keys()
    return Damage(findings, shards, *damaged_rows(store, shards))


def damaged_rows(store: Store, shards: Iterable[str]) -> tuple[Ints, Ints]:
    """Return what cannot be read in some shards, row by row.

    All other live rows of these shards are whole and can be copied: a shard may be damaged where
    only plain readers look, or in a few rows.

    Args:
        store: the store.
        shards: their names, as in `Finding.where`; names of anything else are passed over.

    Returns:
        Rows of the store, and rows of `store.index.texts`, whose bytes are missing, differ from
        their crc32c, or are not finite; sorted.
    """
    contents = _Contents(store)
    found: tuple[list[int], list[int]] = ([], [])
    for name in sorted(set(shards)):
        for is_text, row in contents.rows_in(name):
            try:
                is_whole = not any(_not_finite(store, is_text, row))
            except DamagedStoreError:
                is_whole = False
            if not is_whole:
                found[is_text].append(row)
    samples, texts = (np.array(sorted(rows), np.int64) for rows in found)
    return samples, texts


class _Contents:
    """Which live rows each shard of a store holds; worked out once, for all of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.samples = store.index.rows_by_shard()
        self.texts = store.index.text_rows_by_shard()

    def live_shards(self) -> list[ShardEntry]:
        """Return the shards that hold live rows, sorted by name."""
        return [
            self.store.index.shards[name]
            for name in sorted(self.samples.keys() | self.texts.keys())
        ]

    def rows_in(self, shard: str) -> Iterator[tuple[bool, int]]:
        """Yield the live rows of a shard: (whether it is one of the text rows, its row)."""
        for of_texts, rows_by_shard in ((False, self.samples), (True, self.texts)):
            for row in rows_by_shard.get(shard, _NO_ROWS).tolist():
                yield of_texts, row

    def samples_in(self, shard: ShardEntry) -> Ints:
        """Return the rows of the store that have something in a shard: latents, or a text.

        The empty prompt, which no sample has, belongs to none.
        """
        if shard.kind == "samples":
            return np.sort(self.samples[shard.name])
        if self.store.manifest.texts_inline or not len(self.store):
            return _NO_ROWS
        is_here = np.isin(self._text_rows, self.texts[shard.name])  # [texts of all samples]
        starts = list_starts(self.store.index.samples["text_keys"])
        return np.flatnonzero(np.logical_or.reduceat(is_here, starts[:-1]))

    @cached_property
    def _text_rows(self) -> NDArray[np.int32]:
        return text_rows_of_texts(self.store.index)


def _is_other_sample(store: Store, rows: Ints) -> NDArray[np.bool_]:
    """Return, for each but the first of some sorted rows, whether it is of another sample."""
    words = id_words(store.index.samples["sample_id"])[rows]
    return np.asarray((words[1:] != words[:-1]).any(axis=1))


def _num_samples(store: Store, rows: Ints) -> int:
    return 1 + int(_is_other_sample(store, rows).sum()) if len(rows) else 0


def _index_damage(root: Folder, error: DamagedStoreError) -> list[Finding]:
    """Return all damage to single files of the index, of which `error` is the first."""
    commits: list[Commit] = []
    damaged: dict[str, PrebakeError] = {}
    for name in filter(COMMIT_FILE.fullmatch, root.names(INDEX_FOLDER)):
        path = f"{INDEX_FOLDER}/{name}"
        try:
            commits.append(parse_commit(root.read(path), root.at(path)))
        except PrebakeError as problem:
            damaged[name.removesuffix(".json")] = problem
        except OSError as problem:
            damaged[name.removesuffix(".json")] = damaged_index(root.at(path), problem)
    replaced = {name for commit in commits for name in commit.replaces}
    found = [str(error), *(str(damaged[name]) for name in sorted(damaged.keys() - replaced))]
    for commit in commits:
        for kind, schema in SCHEMAS.items():
            segment = getattr(commit.segments, kind)
            if segment is None or commit.name in replaced:
                continue
            try:
                parse_segment(root.read(segment.path), segment, schema, root.at(segment.path))
            except DamagedStoreError as problem:
                found.append(str(problem))
            except OSError as problem:
                found.append(str(damaged_index(root.at(segment.path), problem)))
    return [Finding(root.at(INDEX_FOLDER), what) for what in dict.fromkeys(found)]


def _unfinished_repair(root: Folder) -> Iterator[Finding]:
    if root.sizes([NOTE_NAME]):
        what = "its index has lost rows, and the repair that was begun is not finished"
        yield Finding(root.at(NOTE_NAME), what)


def _lost_empty_text(store: Store) -> Iterator[Finding]:
    """Check that the empty prompt is there, which no sample need name."""
    key = store.manifest.empty_text_key
    if len(store) and not rows_with_id(id_bytes(store.index.texts["text_key"]), key):
        what = f"text row {key}, of the empty prompt, is lost"
        yield Finding(store.root.at(INDEX_FOLDER), what)


def _identity_damage(store: Store) -> Iterator[Finding]:
    """Check that ids are those of the paths, and that equal keys mean equal captions."""
    where = store.root.at(INDEX_FOLDER)
    details = store.index.sample_details
    sources, paths = details["source"].to_pylist(), details["path"].to_pylist()
    for row, (source, path) in enumerate(zip(sources, paths, strict=True)):
        if sample_id(source, path) != store.sample_ids[row]:
            what = f"sample {store.sample_ids[row]} is not that of {path!r} of source {source!r}"
            yield Finding(where, one_line(what), 1, np.array([row]))
    if store.manifest.texts_inline:  # then the json of each row has the captions
        return
    captions = pc.list_flatten(details["captions"])
    of_texts = store.index.text_details["caption"].take(pa.array(text_rows_of_texts(store.index)))
    differs = pc.not_equal(captions, of_texts).to_numpy()
    starts = list_starts(store.index.samples["text_keys"])
    for position in np.flatnonzero(differs).tolist():
        row = int(np.searchsorted(starts, position, side="right")) - 1
        what = f"a caption of sample {store.sample_ids[row]} is not that of its text key"
        yield Finding(where, what, 1, np.array([row]))


def _shard_damage(
    contents: _Contents, shard: ShardEntry, sizes: dict[str, int], full: bool
) -> list[str]:
    """Return what is wrong with a shard. What follows from a damage is not looked for."""
    store = contents.store
    damage = list(_file_damage(store, shard, sizes, full))
    if not damage:
        rows = (contents.samples if shard.kind == "samples" else contents.texts)[shard.name]
        try:
            facts = shard_facts(store, shard, rows)
        except WrongStructureError as error:
            damage.append(str(error))
    if full and not damage:
        damage += _tensor_damage(contents, shard.name)
    if full and not damage:
        damage += (zarr_problems if store.manifest.layout == "zarr" else tar_problems)(facts)
    return damage


def _file_damage(
    store: Store, shard: ShardEntry, sizes: dict[str, int], full: bool
) -> Iterator[str]:
    for entry in shard.files:
        if entry.path not in sizes:
            yield f"{entry.path} is missing"
        elif sizes[entry.path] != entry.bytes:
            yield f"{entry.path} has {sizes[entry.path]} bytes, expected {entry.bytes}"
        elif full and (found := _sha256(store, entry)) != entry.sha256:
            yield (
                f"{entry.path}: sha256 differs from the index "
                f"(found {found[:8]}..., expected {entry.sha256[:8]}...)"
            )


def _sha256(store: Store, entry: FileEntry) -> str:
    """Return the hash of a file's bytes, or what is wrong with it where it cannot be read."""
    try:
        descriptor = store.root.open(entry.path, entry.bytes, entry.sha256)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, DamagedStoreError) as error:
        return str(error)


def _tensor_damage(contents: _Contents, shard: str) -> Iterator[str]:
    """Read the live tensors of a shard, up to the first that cannot be read."""
    store = contents.store
    try:
        for is_text, row in contents.rows_in(shard):
            for name in _not_finite(store, is_text, row):
                yield f"{name} of {_whose(store, is_text, row)} is not finite"
    except DamagedStoreError as error:
        yield str(error)


def _not_finite(store: Store, is_text: bool, row: int) -> Iterator[str]:
    """Read all tensors in a row of a shard; yield the names of those that are not finite."""
    dtypes = {spec.name: spec.dtype for spec in store.manifest.tensors}
    for tensors in _tensors(store, is_text, row):
        for name, array in tensors.items():
            if not is_finite(array, dtypes[name]):
                yield name


def _tensors(store: Store, is_text: bool, row: int) -> Iterator[dict[str, np.ndarray]]:
    if is_text:
        yield store.read_text(_whose_key(store, row))
        return
    yield store.read_variant(row)
    if store.manifest.texts_inline:
        yield from store.read_texts(row)


def _whose_key(store: Store, text_row: int) -> str:
    key: bytes = store.index.texts["text_key"][text_row].as_py()
    return key.hex()


def _whose(store: Store, is_text: bool, row: int) -> str:
    return f"text {_whose_key(store, row)}" if is_text else f"sample {store.sample_ids[row]}"


def _view_damage(store: Store) -> Iterator[Finding]:
    of_zarr = store.manifest.layout == "zarr"
    present = with_files(store.root, store.index) if of_zarr else set()
    sizes_by_shard = view_sizes(store.index) if of_zarr else {}
    expected = {name: files for name, files in sizes_by_shard.items() if name in present}
    sizes = store.root.sizes([path for files in expected.values() for path in files])
    wrong = {
        name: [path for path, size in files.items() if sizes.get(path) != size]
        for name, files in expected.items()
    }
    for name, paths in wrong.items():
        yield from (_view_finding(name, path) for path in paths)
    likely = {name for name, paths in wrong.items() if not paths}
    for where, files in view_files(store.manifest, store.index, likely):
        yield from (_view_finding(where, path) for path in outdated(store.root, files))
    if of_zarr:
        groups = {path for shard in present for path in group_files(shard)}
        for path in sorted(groups):
            try:
                check_metadata(store.root.read(path), group_json())
            except FileNotFoundError:
                yield Finding(path, f"{path} is missing, so plain readers find no group there")
            except (OSError, WrongStructureError) as error:
                yield Finding(path, one_line(f"{path}: {error}"))


def _view_finding(where: str, path: str) -> Finding:
    what = f"{path} is not what the index says, so plain readers do not see the last commit"
    return Finding(where, what, is_lag=True)


def is_finite(array: NDArray[Any], dtype: str) -> bool:
    """Return whether all numbers are finite; `bfloat16` comes as raw uint16.

    An exponent of all ones means infinity or NaN (IEEE 754). For float16, numpy's own test takes 20
    times as long.
    """
    if dtype in _EXPONENTS:
        exponent = _EXPONENTS[dtype]
        return bool(((array.view(np.uint16) & exponent) != exponent).all())
    return bool(np.isfinite(array).all())


def store_hash(store: Store) -> str:
    """Return the SHA-256, in hex, of ids and tensor bytes in id order (FORMAT.md, section 9)."""
    digest = hashlib.sha256()
    variants = store.index.column("variant")
    for row in range(len(store)):
        digest.update(bytes.fromhex(store.sample_ids[row]))
        digest.update(int(variants[row]).to_bytes(2, "little"))
        for array in store.read_variant(row).values():
            digest.update(array.data)
        for weight, text in zip(store.text_weights(row), store.read_texts(row), strict=True):
            digest.update(weight.astype("<f4").tobytes())
            for array in text.values():
                digest.update(array.data)
    for array in store.read_empty_text().values():
        digest.update(array.data)
    return digest.hexdigest()
