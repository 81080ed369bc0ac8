"""Commits: the atomic additions that make up a store's index (FORMAT.md, section 6)."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from store_format.errors import DamagedStoreError, NotAStoreError
from store_format.files import publish, write_file
from store_format.keys import canonical_json
from store_format.manifest import MANIFEST_NAME
from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA

INDEX_FOLDER = "index"
COMMIT_VERSION = 1
_COMMIT_FILE = re.compile(r"[0-9]{8}-[0-9a-f]{8}\.json")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def check_relative(path: str) -> str:
    """Return `path` if it stays inside the store, else raise ValueError (FORMAT.md, section 1)."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"path {path!r} is not a plain relative path")
    return path


class FileEntry(_Frozen):
    """One file of a shard."""

    path: str
    bytes: int = Field(ge=0, lt=1 << 62)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    _inside = field_validator("path")(check_relative)


class Segment(FileEntry):
    """One Parquet file of index rows."""

    rows: int = Field(ge=0, lt=1 << 40)


class Segments(_Frozen):
    """The index rows that a commit adds."""

    samples: Segment | None = None
    texts: Segment | None = None


class ShardEntry(_Frozen):
    """One shard that a commit adds."""

    name: str
    kind: Literal["samples", "texts"]
    rows: int = Field(ge=1, le=1 << 24)
    files: tuple[FileEntry, ...]

    _inside = field_validator("name")(check_relative)


class Commit(_Frozen):
    """One commit. Commits are ordered by (sequence, writer)."""

    sequence: int = Field(ge=1, lt=100_000_000)
    writer: str = Field(pattern=r"^[0-9a-f]{8}$")
    segments: Segments
    shards: tuple[ShardEntry, ...]
    parents: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`SSSSSSSS-WWWWWWWW`, which sorts as the commits do."""
        return commit_name(self.sequence, self.writer)

    def to_json(self) -> bytes:
        """Return the bytes of the commit file, its own hash included."""
        body = {
            "format": "prebake-commit",
            "version": COMMIT_VERSION,
            **self.model_dump(mode="json"),
        }
        body["sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
        return (json.dumps(body, indent=1) + "\n").encode("utf-8")


def commit_name(sequence: int, writer: str) -> str:
    """Return the name under which the commit's files lie in `index/`."""
    return f"{sequence:08d}-{writer}"


def parse_commit(path: Path) -> Commit:
    """Read and check one commit file.

    Raises:
        DamagedStoreError: it does not parse, or differs from its own hash.
        NotAStoreError: it has a later version.
    """
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict):
            raise ValueError("not an object")
        version = body.get("version")
        stated = body.pop("sha256", None)
        found = hashlib.sha256(canonical_json(body)).hexdigest()
        if stated != found:
            raise ValueError(f"sha256 is {found[:12]}..., the file states {str(stated)[:12]}...")
        if body.pop("format", None) != "prebake-commit":
            raise ValueError("not a prebake commit")
        if body.pop("version", None) != COMMIT_VERSION:
            raise NotAStoreError(f"{path} has version {version!r}; this prebake reads version 1.")
        commit = Commit.model_validate(body)
        if commit.name != path.stem:
            raise ValueError(f"its content is that of {commit.name}")
    except NotAStoreError:
        raise
    except (ValidationError, ValueError, RecursionError, OSError) as error:
        reason = str(error).replace("\n", " ")
        raise DamagedStoreError(
            f"{path} is damaged ({reason}). Put it back from a copy of the store."
        ) from None
    return commit


def read_commits(root: Path) -> list[Commit]:
    """Return the commits that count, in order: those that no other one replaces.

    A folder that is no store yet has none.

    Raises:
        DamagedStoreError: one is damaged, or is missing though a later one names it.
    """
    folder = root / INDEX_FOLDER
    if not (root / MANIFEST_NAME).exists():
        return []
    if not folder.is_dir():
        raise DamagedStoreError(f"{folder} is missing: {root} has lost its index.")
    paths = sorted(path for path in folder.iterdir() if _COMMIT_FILE.fullmatch(path.name))
    commits = [parse_commit(path) for path in paths]
    replaced = {name for commit in commits for name in commit.replaces}
    known = replaced | {commit.name for commit in commits}
    for commit in commits:
        for parent in commit.parents:
            if parent not in known:
                raise DamagedStoreError(
                    f"{folder / parent}.json is missing, on which commit {commit.name} builds. "
                    f"Put it back from a copy of the store."
                )
    return [commit for commit in commits if commit.name not in replaced]


def heads(commits: Sequence[Commit]) -> tuple[str, ...]:
    """Return the names of the commits on which no other one builds: the next one's parents."""
    parents = {name for commit in commits for name in commit.parents}
    return tuple(commit.name for commit in commits if commit.name not in parents)


def read_segment(root: Path, segment: Segment, schema: pa.Schema) -> pa.Table:
    """Read the rows of one segment in the columns of `schema`.

    Raises:
        DamagedStoreError: it is missing, or differs in size, hash, row count or columns.
    """
    path = root / segment.path
    try:
        data = path.read_bytes()
        if len(data) != segment.bytes or hashlib.sha256(data).hexdigest() != segment.sha256:
            raise ValueError("size or sha256 differs from the commit")
        # From a buffer, on this thread: a Python file object is read by a thread of Arrow's, which
        # can abort a process that is just ending.
        file = pq.ParquetFile(pa.BufferReader(data))
        table = file.read(schema.names, use_threads=False).cast(schema)
        table.validate(full=True)
        if table.num_rows != segment.rows:
            raise ValueError(f"{table.num_rows} rows, the commit states {segment.rows}")
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        reason = str(error).replace("\n", " ")
        raise DamagedStoreError(
            f"{path} is damaged ({reason}). Put it back from a copy of the store."
        ) from None
    return table


def write_commit(
    root: Path,
    staging: Path,
    *,
    sequence: int,
    writer: str,
    samples: pa.Table | None,
    texts: pa.Table | None,
    shards: Sequence[ShardEntry],
    parents: Sequence[str],
) -> Commit:
    """Write the segments, then the commit itself: renamed last, it is what makes them count."""
    name = commit_name(sequence, writer)
    tables = {"samples": (samples, SAMPLE_SCHEMA), "texts": (texts, TEXT_SCHEMA)}
    segments: dict[str, Segment] = {}
    for kind, (table, schema) in tables.items():
        if table is None or table.num_rows == 0:
            continue
        assert table.schema.equals(schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        path = f"{INDEX_FOLDER}/{name}.{kind}.parquet"
        segments[kind] = Segment(
            path=path, rows=table.num_rows, **_publish_bytes(root, staging, path, data)
        )
    commit = Commit(
        sequence=sequence,
        writer=writer,
        segments=Segments(**segments),
        shards=tuple(shards),
        parents=tuple(parents),
    )
    _publish_bytes(root, staging, f"{INDEX_FOLDER}/{name}.json", commit.to_json())
    return commit


def _publish_bytes(root: Path, staging: Path, path: str, data: bytes) -> dict[str, Any]:
    part = staging / f"{Path(path).name}.part"
    write_file(part, data)
    publish(part, root / path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
