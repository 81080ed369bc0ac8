"""Commits: the atomic additions that make up a store's index (FORMAT.md, section 6)."""

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from store_format.errors import DamagedStoreError, NotAStoreError, PrebakeError, one_line
from store_format.files import write_file
from store_format.folders import Folder
from store_format.keys import canonical_json
from store_format.manifest import MANIFEST_NAME
from store_format.parquet_limits import check_expansion
from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA
from store_format.strict_json import parse_json

INDEX_FOLDER = "index"
COMMIT_VERSION = 1
ROW_GROUP_ROWS = 16384
_DIFFERENT = {
    *("sample_id", "path", "image_sha256", "image_bytes", "image_mtime_ns", "latent_key"),
    *("captions", "text_keys", "text_key", "caption", "crc32c"),
}
LAST_SEQUENCE = 99_999_999
MAX_NAME_BYTES = 255  # of a file or folder, as file systems have it
# With these a file is gone, or something else is in its place; with others it may be whole.
LOST_ERRNOS = {
    None,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENODEV,
    errno.ELOOP,
    errno.EFBIG,
}
COMMIT_FILE = re.compile(r"[0-9]{8}-[0-9a-f]{8}\.json")
_REMEDY = (
    "Put it back from a copy of the store, or let 'prebake store repair' encode anew what only it "
    "knew."
)


CommitName = Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9a-f]{8}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def check_relative(path: str) -> str:
    """Return `path` if it stays inside the store, else raise ValueError (FORMAT.md, section 1)."""
    if (
        "\\" in path
        or one_line(path) != path
        or any(
            part in ("", ".", "..") or len(part.encode()) > MAX_NAME_BYTES
            for part in path.split("/")
        )
    ):
        raise ValueError(f"path {path[:200]!r} is not a plain relative path")
    return path


class FileEntry(_Frozen):
    """One file of a shard."""

    path: str
    bytes: int = Field(strict=True, ge=0, lt=1 << 62)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    _inside = field_validator("path")(check_relative)


class Segment(FileEntry):
    """One Parquet file of index rows."""

    rows: int = Field(strict=True, ge=0, lt=1 << 40)


class Segments(_Frozen):
    """The index rows that a commit adds."""

    samples: Segment | None = None
    texts: Segment | None = None

    def all(self) -> list[Segment]:
        """Return those that are there."""
        return [segment for segment in (self.samples, self.texts) if segment is not None]


class ShardEntry(_Frozen):
    """One shard that a commit adds."""

    name: str
    kind: Literal["samples", "texts"]
    rows: int = Field(strict=True, ge=1, le=1 << 24)
    files: tuple[FileEntry, ...] = Field(min_length=1)

    _inside = field_validator("name")(check_relative)

    @model_validator(mode="after")
    def _files_are_its_own(self) -> Self:
        """So that to remove a shard removes nothing else."""
        if not self.name.startswith(f"{self.kind}/"):
            raise ValueError(f"shard {self.name!r} does not lie in {self.kind}/")
        for file in self.files:
            if file.path != f"{self.name}.tar" and not file.path.startswith(f"{self.name}/"):
                raise ValueError(f"file {file.path!r} is outside of shard {self.name!r}")
        if len({file.path for file in self.files}) < len(self.files):
            raise ValueError(f"shard {self.name!r} lists a file twice")
        return self


class Commit(_Frozen):
    """One commit. Commits are ordered by (sequence, writer)."""

    sequence: int = Field(strict=True, ge=1, le=LAST_SEQUENCE)
    writer: str = Field(pattern=r"^[0-9a-f]{8}$")
    segments: Segments
    shards: tuple[ShardEntry, ...]
    parents: tuple[CommitName, ...] = ()
    replaces: tuple[CommitName, ...] = ()
    manifest_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _refers_to_its_own_and_to_older_ones(self) -> Self:
        for kind, segment in (("samples", self.segments.samples), ("texts", self.segments.texts)):
            path = f"{INDEX_FOLDER}/{self.name}.{kind}.parquet"
            if segment is not None and segment.path != path:
                raise ValueError(f"its {kind} are in {segment.path!r}, expected {path}")
        for name in (*self.parents, *self.replaces):
            if name >= self.name:  # in a circle, commits would hide each other
                raise ValueError(f"it builds on {name} or replaces it, which is not before it")
        return self

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


def parse_commit(data: bytes, where: str) -> Commit:
    """Read and check the bytes of one commit file; `where` it lies is for messages.

    Raises:
        DamagedStoreError: it does not parse, or differs from its own hash.
        NotAStoreError: it has a later version.
    """
    try:
        body = parse_json(data)
        if not isinstance(body, dict):
            raise ValueError("not an object")
        version = body.get("version")
        stated = body.pop("sha256", None)
        found = hashlib.sha256(canonical_json(body)).hexdigest()
        if stated != found:
            raise ValueError(f"sha256 is {found[:12]}..., the file states {str(stated)[:12]}...")
        if body.pop("format", None) != "prebake-commit":
            raise ValueError("not a prebake commit")
        if type(version) is not int or body.pop("version") != COMMIT_VERSION:
            raise NotAStoreError(f"{where} has version {version!r}; this prebake reads version 1.")
        commit = Commit.model_validate(body)
        if f"{commit.name}.json" != where.rsplit("/", 1)[-1]:
            raise ValueError(f"its content is that of {commit.name}")
    except NotAStoreError:
        raise
    except (ValidationError, ValueError, RecursionError) as error:
        raise damaged_index(where, error) from None
    return commit


def damaged_index(where: str, error: Exception) -> DamagedStoreError:
    """Return the error for a file of the index that cannot be used.

    Raises:
        OSError: `error` itself, if the file may be whole: of rights, of a disk that fails.
    """
    if isinstance(error, OSError) and error.errno not in LOST_ERRNOS:
        raise error
    reason = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
    elif isinstance(error, MemoryError):
        reason = f"it asks for too much memory: {reason}"
    return DamagedStoreError(f"{where} is damaged ({' '.join(reason.split())}). {_REMEDY}")


def read_commits(root: Folder) -> list[Commit]:
    """Return the commits that count, in order: those that no other one replaces.

    A folder that is no store yet has none.

    Raises:
        DamagedStoreError: one is damaged, or is missing though a later one names it; or the
            manifest is not the one that they were written under.
    """
    names = root.names(INDEX_FOLDER)
    try:
        manifest_sha256 = hashlib.sha256(root.read(MANIFEST_NAME)).hexdigest()
    except FileNotFoundError:
        return []
    if not names and INDEX_FOLDER not in root.names():
        raise DamagedStoreError(f"{root.at(INDEX_FOLDER)} is missing: {root} has lost its index.")
    paths = [f"{INDEX_FOLDER}/{name}" for name in names if COMMIT_FILE.fullmatch(name)]
    commits, damaged = [], {}
    try:
        for data, path in zip(root.read_all(paths), paths, strict=True):
            try:
                commits.append(parse_commit(data, root.at(path)))
            except DamagedStoreError as error:
                damaged[path] = error
    except OSError as error:
        raise damaged_index(root.at(INDEX_FOLDER), error) from None
    replaced = {name for commit in commits for name in commit.replaces}
    for path, damage in damaged.items():
        if path.removeprefix(f"{INDEX_FOLDER}/").removesuffix(".json") not in replaced:
            raise damage
    for commit in commits:
        if commit.manifest_sha256 not in (None, manifest_sha256):
            raise DamagedStoreError(
                f"{root.at(MANIFEST_NAME)} is not the manifest that commit {commit.name} was "
                f"written under. Put it back from a copy of the store."
            )
    known = replaced | {commit.name for commit in commits}
    for commit in commits:
        for parent in commit.parents:
            if parent not in known:
                raise DamagedStoreError(
                    f"{root.at(INDEX_FOLDER)}/{parent}.json is missing, on which commit "
                    f"{commit.name} builds. {_REMEDY}"
                )
    commits = [commit for commit in commits if commit.name not in replaced]
    for name, problem in _clashes(commits):
        raise damaged_index(root.at(f"{INDEX_FOLDER}/{name}.json"), ValueError(problem))
    return commits


def _clashes(commits: Sequence[Commit]) -> Iterator[tuple[str, str]]:
    """Yield commits of whose shards another shard has the name, or lies inside of it."""
    shards: dict[str, tuple[ShardEntry, str]] = {}
    for commit in commits:
        for shard in commit.shards:
            other, first = shards.setdefault(shard.name, (shard, commit.name))
            if other != shard or (other is not shard and first == commit.name):
                yield commit.name, f"it states shard {shard.name}, as commit {first} does otherwise"
    for name, (_, commit_of_shard) in shards.items():
        folder = name
        while folder := folder.rpartition("/")[0]:
            if folder in shards:
                yield commit_of_shard, f"shard {name} lies inside of shard {folder}"


def heads(commits: Sequence[Commit]) -> tuple[str, ...]:
    """Return the names of the commits on which no other one builds: the next one's parents."""
    parents = {name for commit in commits for name in commit.parents}
    return tuple(commit.name for commit in commits if commit.name not in parents)


def parse_segment(
    data: bytes, segment: Segment, schema: pa.Schema, where: str, row_group: int | None = None
) -> pa.Table:
    """Read the rows of one segment, or of one of its row groups, in the columns of `schema`.

    Args:
        data: the bytes of its file.
        segment: what the commit states of it.
        schema: some of the columns that the format declares; dictionaries are made while reading.
        where: it lies, for messages.
        row_group: which one; None for all.

    Raises:
        DamagedStoreError: it differs in size, hash, row count or columns.
    """
    try:
        if len(data) != segment.bytes or hashlib.sha256(data).hexdigest() != segment.sha256:
            raise ValueError("size or sha256 differs from the commit")
        check_expansion(data, schema.names, None if row_group is None else [row_group])
        # From a buffer, on this thread: a Python file object is read by a thread of Arrow's, which
        # can abort a process that is just ending.
        encoded = [f.name for f in schema if pa.types.is_dictionary(f.type)]
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=encoded)
        if file.metadata.num_rows != segment.rows:
            raise ValueError(f"{file.metadata.num_rows} rows, the commit states {segment.rows}")
        groups = range(file.metadata.num_row_groups) if row_group is None else [row_group]
        table = file.read_row_groups(groups, schema.names, use_threads=False)
        stated = sum(file.metadata.row_group(group).num_rows for group in groups)
        wrong = table.num_rows != stated or (row_group is None and stated != segment.rows)
        if wrong and schema.names:  # of no column, Arrow counts no rows
            raise ValueError(f"{table.num_rows} rows, its row groups state {stated}")
        table = table.select(schema.names).cast(schema)
        table.validate(full=True)
    except (OSError, ValueError, KeyError, MemoryError, pa.ArrowException) as error:
        raise damaged_index(where, error) from None
    return table


def rows_of_groups(data: bytes) -> list[int]:
    """Return the number of rows of each row group of a segment's bytes, which were checked."""
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def write_commit(
    root: Folder,
    staging: Path,
    *,
    sequence: int,
    writer: str,
    samples: pa.Table | None,
    texts: pa.Table | None,
    shards: Sequence[ShardEntry],
    parents: Sequence[str],
    replaces: Sequence[str] = (),
) -> Commit:
    """Write the segments, then the commit itself: published last, it is what makes them count."""
    if sequence > LAST_SEQUENCE:
        raise PrebakeError(
            f"{root} has commit {LAST_SEQUENCE}, the last one possible. Choose another --out, with "
            f"--reuse {root} to take over what is equal."
        )
    name = commit_name(sequence, writer)
    tables = {"samples": (samples, SAMPLE_SCHEMA), "texts": (texts, TEXT_SCHEMA)}
    segments: dict[str, Segment] = {}
    for kind, (table, schema) in tables.items():
        if table is None or table.num_rows == 0:
            continue
        assert table.schema.equals(schema)
        sink = pa.BufferOutputStream()
        pq.write_table(
            table,
            sink,
            compression="zstd",
            row_group_size=ROW_GROUP_ROWS,
            use_dictionary=[path for field in schema for path in _repeating_leaves(field)],
        )
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
        replaces=tuple(replaces),
        manifest_sha256=hashlib.sha256(root.read(MANIFEST_NAME)).hexdigest(),
    )
    _publish_bytes(root, staging, f"{INDEX_FOLDER}/{name}.json", commit.to_json())
    return commit


def _repeating_leaves(field: pa.Field) -> list[str]:
    """Return the Parquet columns of a field whose values repeat, so that a dictionary pays.

    Of values that differ from row to row a dictionary makes files a tenth larger, and takes twice
    the time to read.
    """
    if field.name in _DIFFERENT:
        return []
    if pa.types.is_map(field.type):
        return [f"{field.name}.key_value.{part}" for part in ("key", "value")]
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name]


def _publish_bytes(root: Folder, staging: Path, path: str, data: bytes) -> dict[str, Any]:
    part = staging / f"{Path(path).name}.part"
    write_file(part, data)
    root.publish(part, path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
