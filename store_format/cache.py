"""Shards of remote stores on this machine: bounded, verified, shared by runs and processes.

A file is named by its SHA-256, so stores that hold an equal file share it. It is downloaded to
`SHA256.part`, which its downloader keeps locked (flock(2)): whoever else wants it waits for that
lock, and takes the part over where a downloader was killed. The part has its full size from the
beginning, so the files of the folder always tell how much room is taken. Room is made under a lock
of its own: the files unused for longest go first, by their mtime, which each use renews. A file
that is removed while it is open stays readable.

A file's SHA-256 is checked when it has been downloaded, and again at its first use after the
machine was started: a power cut may leave zeros in files that were not flushed, and flushing each
would take longer than downloading it.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.files import sha256_of

FOLDER_VARIABLE = "PREBAKE_CACHE"
LIMIT_VARIABLE = "PREBAKE_CACHE_SIZE"
DEFAULT_LIMIT_BYTES = 20 << 30
MAX_SHARE_OF_DISK = 0.8  # of what is free, and what the cache holds already
_LOCK_NAME = "lock"
_PART = ".part"
_ROOM_POLL_S = 0.05
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_NS = time.time_ns() - time.clock_gettime_ns(_BOOT_CLOCK)
_CACHED_FILE = re.compile(r"[0-9a-f]{64}(\.part)?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)

Write = Callable[[bytes], None]
Download = Callable[[Write], None]


class ShardCache:
    """A folder of downloaded files whose sizes together never exceed `limit_bytes`.

    May be used by several threads, after a fork, and be pickled to a spawned process.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Use `folder`, which is made when it is first needed; files that are not ours stay."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._prefix = f"{folder}{os.sep}"

    def open(self, size_bytes: int, sha256: str, download: Download, where: str) -> int:
        """Return a descriptor to read the file that has this size and SHA-256.

        Args:
            size_bytes: the file's size.
            sha256: in hex.
            download: passes the file's bytes, piece by piece and in order, to the function it gets.
            where: the URL, for messages.

        Raises:
            DamagedStoreError: what was downloaded, twice, has another size or SHA-256.
            PrebakeError: the file is larger than the cache may become.
            OSError: the cache cannot be written, or what `download` raises.
        """
        descriptor = self._open_cached(size_bytes, sha256)
        if descriptor >= 0:
            return descriptor
        if size_bytes > self.limit_bytes:
            raise PrebakeError(
                f"{where} has {size_bytes} bytes, more than the cache in {self.folder} may hold "
                f"({self.limit_bytes} bytes). Choose a larger --cache-size, or {LIMIT_VARIABLE}."
            )
        while (descriptor := self._obtain(size_bytes, sha256, download, where)) < 0:
            pass  # someone removed the part, or the whole folder: begin anew
        return descriptor

    def fetch(self, size_bytes: int, sha256: str, download: Download, where: str) -> None:
        """Make sure that a file is there, as `open` does, for one that will be read soon."""
        os.close(self.open(size_bytes, sha256, download, where))

    def held_bytes(self) -> int:
        """Return the bytes of all files, those being downloaded included."""
        return sum(size for _, _, size in self._files())

    def _open_cached(self, size_bytes: int, sha256: str) -> int:
        """Return a descriptor of a file that is there, and note that it was used; else -1."""
        path = self._prefix + sha256
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        stat = os.fstat(descriptor)
        if stat.st_size != size_bytes or (
            stat.st_mtime_ns < _BOOT_NS and sha256_of(Path(path)) != sha256
        ):
            os.close(descriptor)
            Path(path).unlink(missing_ok=True)
            return -1
        with contextlib.suppress(PermissionError):  # another user's file
            os.utime(descriptor)
        return descriptor

    def _obtain(self, size_bytes: int, sha256: str, download: Download, where: str) -> int:
        """Download a file unless another does; return a descriptor, -1 where the part was lost."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{sha256}{_PART}"
        with _locked(part) as lock:
            descriptor = self._open_cached(size_bytes, sha256)  # another may have been faster
            if descriptor >= 0:
                part.unlink(missing_ok=True)
                return descriptor
            try:
                while not self._reserve(part.name, lock, size_bytes):
                    time.sleep(_ROOM_POLL_S)  # others' downloads take all the room, for a while
                fill(lock, size_bytes, sha256, download, where)
                descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
                with _locked(self.folder / _LOCK_NAME):  # a scan may miss what changes its name
                    part.rename(self.folder / sha256)
            except BaseException as error:
                if descriptor >= 0:
                    os.close(descriptor)
                if not _is_at(lock, part):
                    if isinstance(error, FileNotFoundError):
                        return -1
                    raise
                part.unlink()
                raise
            return descriptor

    def _reserve(self, own: str, lock: int, size_bytes: int) -> bool:
        """Remove what was unused for longest, and give the part its size; False without room."""
        with _locked(self.folder / _LOCK_NAME):
            used_bytes = 0
            removable = []
            for used_ns, name, size in self._files():
                if name == own or (name.endswith(_PART) and _remove_dead(self.folder / name)):
                    continue
                used_bytes += size
                if not name.endswith(_PART):
                    removable.append((used_ns, name, size))
            for _, name, size in sorted(removable):
                if used_bytes + size_bytes <= self.limit_bytes:
                    break
                (self.folder / name).unlink(missing_ok=True)
                used_bytes -= size
            if used_bytes + size_bytes > self.limit_bytes:
                return False
            os.ftruncate(lock, size_bytes)
            return True

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """Yield (last use in ns, name, bytes) of the cache's own files; others are not ours."""
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not (_CACHED_FILE.fullmatch(entry.name) and entry.is_file()):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    yield stat.st_mtime_ns, entry.name, stat.st_size


def fill(descriptor: int, size_bytes: int, sha256: str, download: Download, where: str) -> None:
    """Download into an empty file, or one of the right size; check the bytes as they come.

    Raises:
        DamagedStoreError: what came, twice, has another size or SHA-256.
    """
    for _ in range(2):  # a mismatch may be damage on the way: once more
        with _Received(descriptor, size_bytes) as received:
            download(received.write)
        found = received.digest.hexdigest()
        if (received.num_bytes, found) == (size_bytes, sha256):
            return
    if received.num_bytes != size_bytes:
        what = f"has {received.num_bytes} bytes, the index states {size_bytes}"
    else:
        what = f"sha256 differs from the index (found {found[:8]}..., expected {sha256[:8]}...)"
    raise DamagedStoreError(
        f"{where}: {what}, in two downloads. The file is damaged where it is stored; "
        f"run 'prebake store verify' on its store."
    )


class _Received:
    """What has come of a file: it is written, counted and hashed."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        self._file = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - closed by __exit__
        self._size_bytes = size_bytes
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Take the next bytes; those beyond the size are counted alone."""
        self.num_bytes += len(data)
        self.digest.update(data)
        if self.num_bytes <= self._size_bytes:
            self._file.write(data)


_locks: set[int] = set()  # descriptors that hold locks of this process


def _close_copies_of_locks() -> None:
    """After a fork: the copies would keep locks for as long as the child lives."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_copies_of_locks)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Have a file, made where it is missing, to oneself; yields its descriptor.

    The lock is on the file that `path` names when it is taken: while one waits, the file may be
    renamed or removed.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _locks.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """Give up a lock and its descriptor, which a child forked meanwhile may have copied."""
    if descriptor in _locks:  # else this is such a child: the lock is its parent's
        _locks.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_dead(part: Path) -> bool:
    """Remove a part whose downloader lives no more; return whether it did."""
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    _locks.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, part):
            part.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        _unlock(descriptor)


def parse_size(text: str, name: str) -> int:
    """Return the bytes that a size such as `20GiB`, `500 MB` or `1000000` means.

    Raises:
        PrebakeError: it is none, or not above 0; the message begins with `name`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit, binary = match.groups()
        power = " KMGT".index(unit.upper()) if unit else 0
        num_bytes = int(float(number) * (1024 if binary else 1000) ** power)
        if num_bytes > 0:
            return num_bytes
    raise PrebakeError(f"{name}: expected a size such as 20GiB, got {text!r}.")


def default_folder() -> Path:
    """Return where shards are kept unless the user says otherwise."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "prebake" / "shards"


def default_limit_bytes(folder: Path) -> int:
    """Return how large the cache in `folder` may become unless the user says otherwise."""
    if text := os.environ.get(LIMIT_VARIABLE):
        return parse_size(text, LIMIT_VARIABLE)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(there).free + ShardCache(folder, 0).held_bytes()
    return min(DEFAULT_LIMIT_BYTES, int(MAX_SHARE_OF_DISK * room))


_default: ShardCache | None = None


def configure_cache(folder: Path | None = None, limit_bytes: int | None = None) -> None:
    """Choose the cache of this process and its children; None: as the environment says."""
    global _default
    folder = default_folder() if folder is None else folder.absolute()
    limit_bytes = default_limit_bytes(folder) if limit_bytes is None else limit_bytes
    _default = ShardCache(folder, limit_bytes)


def default_cache() -> ShardCache:
    """Return the cache that remote stores share in this process."""
    if _default is None:
        configure_cache()
    assert _default is not None
    return _default
