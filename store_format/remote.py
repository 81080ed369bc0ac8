"""Stores behind a URL (`s3://`, `gs://`, `hf://`, `https://`, `memory://`, ...), through fsspec.

Shards are read by way of the local cache (`cache.ShardCache`); the index, which is small, straight.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from store_format.cache import ShardCache, Write, default_cache, fill
from store_format.connection import (
    MAX_AT_ONCE,
    WEB,
    Call,
    Connection,
    RefusedError,
    ahead,
    unless_error,
    unless_missing,
)
from store_format.errors import PrebakeError

RANGE_BYTES = 8 << 20  # of a file that does not come as a stream,
RANGES_AT_ONCE = 2  # so many of them at once
MEMORY_BYTES = 64 << 20  # files up to this size are sent from memory
KEEP_NAME = ".keep"  # in folders that exist before their first file
LIST_ABOVE = 16  # one listing takes the place of more questions for a size than this

Source = Path | bytes


class RemoteFolder:
    """A folder behind a URL: a `folders.Folder`.

    May be used by several threads, after a fork, and be pickled to a spawned process: each process
    makes its own connections.
    """

    is_local = False

    def __init__(self, url: str, cache: ShardCache | None = None) -> None:
        """Nothing is connected before the first use.

        Args:
            url: where the store is.
            cache: for shards; default: the one that all remote stores of the process share.

        Raises:
            PrebakeError: no URL that fsspec opens, or one that carries credentials.
        """
        self._server = Connection(url)
        self._cache = cache

    def __str__(self) -> str:
        return self._server.url

    def __repr__(self) -> str:
        return f"RemoteFolder({self._server.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._server.url, "cache": self.cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def cache(self) -> ShardCache:
        """Where shards are kept on this machine."""
        if self._cache is None:
            self._cache = default_cache()
        return self._cache

    @property
    def cache_limit_bytes(self) -> int:
        """How much of it this machine keeps."""
        return self.cache.limit_bytes

    def at(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self._server.url}/{path}" if path else self._server.url

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a sub-folder, as they are now; none if it does not exist."""
        try:
            entries = self._call("ls", path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        start = f"{self._full(path)}/"
        found = (entry["name"] for entry in entries if entry["name"].startswith(start))
        names = {name.removeprefix(start).strip("/") for name in found}
        return sorted(name for name in names if name and not set(name) & set("/?#"))

    def sizes(self, paths: Collection[str]) -> dict[str, int]:
        """Return the bytes of those of `paths` that are files."""
        if len(paths) > LIST_ABOVE and self._server.protocol not in WEB:
            common = os.path.commonpath([PurePosixPath(path).parent for path in paths])
            listed = self._files_in("" if common == "." else common)
            found = {path: listed.get(self._full(path)) for path in paths}
        else:
            infos = self._server.call_all("info", self._calls(paths))
            found = {path: unless_missing(info) for path, info in zip(paths, infos, strict=True)}
        return {
            path: int(info["size"])
            for path, info in found.items()
            if info is not None and info["type"] == "file" and info["size"] is not None
        }

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        data: bytes = self._call("cat_file", path)
        return data

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes]:
        """Yield the bytes of several files; some are read at once."""
        for start in range(0, len(paths), MAX_AT_ONCE):
            calls = self._calls(paths[start : start + MAX_AT_ONCE])
            yield from map(unless_error, self._server.call_all("cat_file", calls))

    def open(self, path: str, size_bytes: int, sha256: str) -> int:
        """Return a descriptor of the file in the local cache, downloading it where it is not."""
        download = partial(self._download, path, size_bytes)
        return self.cache.open(size_bytes, sha256, download, self.at(path))

    def fetch(self, path: str, size_bytes: int, sha256: str) -> None:
        """Bring a file that will be read soon into the local cache; raises as `open` does."""
        download = partial(self._download, path, size_bytes)
        self.cache.fetch(size_bytes, sha256, download, self.at(path))

    def download(self, path: str, size_bytes: int, sha256: str, to: Path) -> None:
        """Write a file to a new local one, past the cache; raises as `open` does."""
        with to.open("wb") as file:
            download = partial(self._download, path, size_bytes)
            fill(file.fileno(), size_bytes, sha256, download, self.at(path))

    def publish(self, staged: Path, path: str) -> None:
        """Send a finished file, or the files of a folder, and remove it from the staging.

        A file that is there with equal bytes counts as sent: a server may carry out a request
        whose answer is lost.

        Raises:
            FileExistsError: there is such a name.
        """
        if staged.is_dir():
            if self.names(path):
                raise FileExistsError(errno.EEXIST, "exists already", self.at(path))
            files = sorted(file for file in staged.rglob("*") if file.is_file())
            self._create([(f"{path}/{f.relative_to(staged).as_posix()}", f) for f in files])
            shutil.rmtree(staged)
        else:
            self._create([(path, staged)])
            staged.unlink()

    def create(self, path: str, data: bytes, staging: Path) -> None:
        """Make a file; of several writers that try at once, one succeeds, or all with equal bytes.

        Raises:
            FileExistsError: there is one, another writer's perhaps.
        """
        self._create([(path, data)])

    def replace(self, path: str, data: bytes, staging: Path) -> None:
        """Put `data` at `path` in one request."""
        self._check_writable()
        self._put(path, data)

    def free_bytes(self) -> int | None:
        """Return nothing: object stores do not tell."""
        return None

    def make_folder(self, path: str) -> None:
        """Put an empty file there: object stores have no folders, only names with `/` in them."""
        self._check_writable()
        self._put(f"{path}/{KEEP_NAME}", b"")

    def remove(self, paths: Iterable[str], staging: Path) -> None:
        """Remove files, or all files of folders, as far as they exist."""
        self._check_writable()
        for path in paths:
            calls = [Call(self.at(path), (full,)) for full in sorted(self._files_in(path))]
            for result in self._server.call_all("rm_file", calls):
                unless_missing(result)

    def claim(self, writer: str) -> "RemoteClaim":
        """Return a claim, which keeps nobody else away: object stores have no locks.

        Raises:
            PrebakeError: the URL is of a kind that can only be read.
        """
        self._check_writable()
        return RemoteClaim(writer)

    def hold(self) -> object:
        """Return nothing: object stores have no locks."""
        return None

    def _full(self, path: str) -> str:
        """Return the name of a file as the file system wants it."""
        return f"{self._server.root}/{path}" if path else self._server.root

    def _call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        return self._server.call(method, self.at(path), self._full(path), *args, **options)

    def _calls(self, paths: Iterable[str]) -> list[Call]:
        return [Call(self.at(path), (self._full(path),)) for path in paths]

    def _files_in(self, path: str) -> dict[str, dict[str, Any]]:
        """Return what the file system says of all files in a folder, by their full names."""
        try:
            found: dict[str, dict[str, Any]] = self._call("find", path, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _download(self, path: str, size_bytes: int, write: Write) -> None:
        """Pass the bytes of a file to `write`: as they come, and what does not come by ranges."""
        num_bytes = 0
        for piece in self._server.stream(self.at(path), self._full(path), size_bytes):
            write(piece)
            num_bytes += len(piece)
            if num_bytes > size_bytes:
                return
        starts = list(range(num_bytes, size_bytes, RANGE_BYTES))
        groups = [starts[i : i + RANGES_AT_ONCE] for i in range(0, len(starts), RANGES_AT_ONCE)]
        get = partial(self._ranges, path, size_bytes)
        for parts in ahead(get, groups, 1):
            for data in parts:
                write(data)

    def _ranges(self, path: str, size_bytes: int, starts: Sequence[int]) -> list[bytes]:
        """Return the parts of a file that begin at `starts`; empty beyond its end."""
        spans = [(start, min(start + RANGE_BYTES, size_bytes)) for start in starts]
        where, args = self.at(path), (self._full(path),)
        calls = [Call(where, args, {"start": start, "end": end}) for start, end in spans]
        parts = []
        results = self._server.call_all("cat_file", calls)
        for (start, end), result in zip(spans, results, strict=True):
            data: bytes = b"" if isinstance(result, EOFError) else unless_error(result)
            is_whole = len(data) == size_bytes > end - start  # from a server that knows no ranges
            parts.append(data[start:end] if is_whole else data)
        return parts

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._call("pipe_file", path, data)
        except FileNotFoundError as error:
            raise self._no_bucket(path, error) from None

    def _create(self, files: Sequence[tuple[str, Source]]) -> None:
        """Make new files, from bytes or local files, several at once while they are small."""
        self._check_writable()
        batch: list[tuple[str, Source]] = []
        batch_bytes = 0
        for path, source in files:
            size_bytes = _size_of(source)
            if len(batch) == MAX_AT_ONCE or batch_bytes + size_bytes > MEMORY_BYTES:
                self._create_at_once(batch)
                batch, batch_bytes = [], 0
            batch.append((path, source))
            batch_bytes += size_bytes
        self._create_at_once(batch)

    def _create_at_once(self, files: Sequence[tuple[str, Source]]) -> None:
        """Make new files, each in one request; one that is too large for that stands alone."""
        method, calls = "pipe_file", []
        for path, source in files:
            args: tuple[Any, ...]
            if isinstance(source, bytes):
                args = (self._full(path), source)
            elif _size_of(source) <= MEMORY_BYTES:
                args = (self._full(path), source.read_bytes())
            else:
                method, args = "put_file", (str(source), self._full(path))
            calls.append(Call(self.at(path), args, {"mode": "create"}))
        results = self._server.call_all(method, calls)
        for (path, source), call, result in zip(files, calls, results, strict=True):
            if isinstance(result, FileNotFoundError):
                raise self._no_bucket(path, result)
            if isinstance(result, NotImplementedError) and not self.sizes([path]):
                # The server cannot make a request depend on that; names are a writer's own mostly.
                self._server.call(method, call.where, *call.args)
                continue
            if not (isinstance(result, FileExistsError) and self._holds(path, source)):
                unless_error(result)

    def _holds(self, path: str, source: Source) -> bool:
        """Whether there is a file with just these bytes: sent before, and the answer lost."""
        size_bytes = _size_of(source)
        if self.sizes([path]) != {path: size_bytes}:
            return False
        for start in range(0, size_bytes, RANGE_BYTES):
            if isinstance(source, bytes):
                here = source[start : start + RANGE_BYTES]
            else:
                with source.open("rb") as file:
                    file.seek(start)
                    here = file.read(RANGE_BYTES)
            if self._ranges(path, size_bytes, [start]) != [here]:
                return False
        return True

    def _no_bucket(self, path: str, error: FileNotFoundError) -> RefusedError:
        return RefusedError(f"{self.at(path)} cannot be written: {error.strerror}. Make it first.")

    def _check_writable(self) -> None:
        if self._server.protocol in WEB:
            raise PrebakeError(
                f"{self}: {self._server.protocol}:// can only be read. Write to s3:// or to a "
                f"local folder, and copy that to the server."
            )


class RemoteClaim:
    """A writer's unfinished work, in a temporary folder of this machine."""

    def __init__(self, writer: str) -> None:
        self.staging = Path(tempfile.mkdtemp(prefix=f"prebake-{writer}-"))

    def make_exclusive(self) -> bool:
        """Return False: nothing tells whether other processes use the store."""
        return False

    def release(self) -> None:
        """Remove the unfinished work."""
        shutil.rmtree(self.staging, ignore_errors=True)


def _size_of(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size
