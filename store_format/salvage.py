"""Putting an index in order after files of it were damaged or lost: what is readable stays.

Rows that only a lost file knew are gone from the index; their shards stay on disk until `gc`. What
they held is for a bake to encode anew.
"""

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store_format.commits import (
    COMMIT_FILE,
    INDEX_FOLDER,
    LOST_ERRNOS,
    Commit,
    parse_commit,
    parse_segment,
    write_commit,
)
from store_format.errors import DamagedStoreError, StoreBusyError
from store_format.folders import NOTE_NAME, Folder
from store_format.index import SCHEMAS, Ints, LiveIndex
from store_format.manifest import Manifest
from store_format.rows import Text


@dataclass
class Losses:
    """What cannot be read of an index: whole commits by name, and segments by path.

    `rows` of samples were in the segments, some of them perhaps out of date; of a commit nobody
    knows.
    """

    commits: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    rows: int = 0

    def __bool__(self) -> bool:
        return bool(self.commits or self.segments)


def restore_index(root: Folder) -> Losses:
    """Replace every commit that is damaged, lost, or has a damaged segment, by what is left of it.

    What was lost is noted in a file until `forget_losses`, for afterwards the index looks whole.
    Killed at any instant, it can be run again.

    Raises:
        StoreBusyError: another process writes the store.
        NotAStoreError: a commit is of a later version.
        OSError: a file cannot be read just now, for want of rights, say.
    """
    claim = root.claim(secrets.token_hex(4))
    try:
        if not claim.make_exclusive():
            raise StoreBusyError(f"{root} is being written by another process. Wait for it to end.")
        return _restore(root, claim.staging)
    finally:
        claim.release()


def forget_losses(root: Folder, staging: Path) -> None:
    """Remove the note of what was lost, after a bake has made it anew."""
    root.remove([NOTE_NAME], staging)


def _noted_losses(root: Folder) -> Losses:
    try:
        found = json.loads(root.read(NOTE_NAME))
        commits, segments = (list(map(str, found[kind])) for kind in ("commits", "segments"))
        return Losses(commits, segments, int(found["rows"]))
    except FileNotFoundError:
        return Losses()
    except (ValueError, KeyError, TypeError):
        return Losses(segments=[f"what {NOTE_NAME} named"])


def lost_texts(manifest: Manifest, index: LiveIndex, unreadable: Ints) -> list[Text]:
    """Return the texts that live samples name (and the empty prompt) without a readable text row.

    Args:
        manifest: the store's.
        index: its live rows.
        unreadable: text rows that cannot be read.
    """
    readable = np.setdiff1d(np.arange(len(index.texts)), unreadable)
    there = index.texts["text_key"].take(pa.array(readable)).combine_chunks()
    lost: dict[str, str] = {}
    if not manifest.texts_inline:
        keys = pc.list_flatten(index.samples["text_keys"])
        captions = pc.list_flatten(index.sample_details["captions"])
        is_lost = pc.invert(pc.is_in(keys, value_set=there))
        pairs = zip(
            keys.filter(is_lost).to_pylist(), captions.filter(is_lost).to_pylist(), strict=True
        )
        lost = {key.hex(): caption for key, caption in pairs}
    if bytes.fromhex(manifest.empty_text_key) not in there.to_pylist():
        lost[manifest.empty_text_key] = ""
    return [Text(caption, key) for key, caption in sorted(lost.items())]


def _restore(root: Folder, staging: Path) -> Losses:
    losses = _noted_losses(root)
    good: list[Commit] = []
    bad = set()
    for name in root.names(INDEX_FOLDER):
        if COMMIT_FILE.fullmatch(name):
            path = f"{INDEX_FOLDER}/{name}"
            try:
                good.append(parse_commit(root.read(path), root.at(path)))
            except (DamagedStoreError, OSError) as error:
                _check_lost(error)
                bad.add(name.removesuffix(".json"))
    replaced = {name for commit in good for name in commit.replaces}
    bad |= {name for commit in good for name in commit.parents}
    bad -= replaced | {commit.name for commit in good}
    readable = [(c, *_readable_segments(root, c, losses)) for c in good if c.name not in replaced]
    damaged = [path for _, _, paths in readable for path in paths]
    if not bad and not damaged:
        return losses
    losses.commits += sorted(bad)
    losses.segments += damaged
    root.replace(NOTE_NAME, json.dumps(asdict(losses)).encode(), staging)
    for commit, tables, paths in readable:
        if paths:
            _write(root, staging, commit.sequence, commit.writer, [commit.name], commit, tables)
    if bad:
        last = max([commit.name for commit in good] + sorted(bad))
        _write(root, staging, int(last[:8]) + 1, "00000000", sorted(bad))
    return losses


def _check_lost(error: Exception) -> None:
    """Raise an error with which a file may be whole: nothing is given up that comes back."""
    if isinstance(error, OSError) and error.errno not in LOST_ERRNOS:
        raise error


def _readable_segments(
    root: Folder, commit: Commit, losses: Losses
) -> tuple[dict[str, pa.Table], list[str]]:
    """Return the rows of a commit's segments by kind, and the paths of those that are damaged."""
    tables: dict[str, pa.Table] = {}
    damaged = []
    for kind, schema in SCHEMAS.items():
        segment = getattr(commit.segments, kind)
        if segment is None:
            continue
        try:
            where = root.at(segment.path)
            tables[kind] = parse_segment(root.read(segment.path), segment, schema, where)
        except (DamagedStoreError, OSError) as error:
            _check_lost(error)
            damaged.append(segment.path)
            losses.rows += segment.rows if kind == "samples" else 0
    return tables, damaged


def _write(
    root: Folder,
    staging: Path,
    sequence: int,
    after: str,
    replaces: list[str],
    commit: Commit | None = None,
    tables: dict[str, pa.Table] | None = None,
) -> None:
    """Write a commit that stands at `sequence`, after the one of the writer `after` there."""
    tables = tables or {}
    earlier = int(after, 16) + 1
    writer = earlier + secrets.randbelow((1 << 32) - earlier)
    write_commit(
        root,
        staging,
        sequence=sequence,
        writer=f"{writer:08x}",
        samples=tables.get("samples"),
        texts=tables.get("texts"),
        shards=commit.shards if commit is not None else (),
        parents=commit.parents if commit is not None else (),
        replaces=replaces,
    )
