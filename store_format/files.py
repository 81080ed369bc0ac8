"""Durable file operations: everything that must survive a kill goes through here.

A file or folder is complete when it is renamed to its final name; a rename is durable once the
folder that holds the name has been flushed (POSIX: fsync of the directory).
"""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 1 << 20
MAX_UNHASHED_BLOCKS = 16  # of a file, before writing waits for hashing
MAX_FLUSHED_AT_ONCE = 16


def flush_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, durably, where it is missing; its parent exists."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk; the name itself is not yet durable."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, staging: Path) -> None:
    """Put `data` at `path` in one atomic step, by way of a file in `staging` (same file system)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = staging / f"{path.name}.part"
    write_file(part, data)
    part.replace(path)
    flush_folder(path.parent)


def is_file_with(path: Path, data: bytes) -> bool:
    """Return whether `path` is a file that holds exactly `data`."""
    return path.is_file() and path.read_bytes() == data


def publish(staged: Path, final: Path) -> None:
    """Rename a finished, flushed file or folder to its final name, durably.

    Raises:
        FileExistsError: `final` exists; published names are never reused.
    """
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    staged.rename(final)
    flush_folder(final.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class HashedFile:
    """A new file, written once from front to back, that knows its size and its SHA-256.

    It is written in blocks. A thread of its own hashes those of a large file meanwhile: one core
    hashes hardly faster than a disk writes. (Flushing them in parts beside measured slower.)
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size_bytes = 0
        self._file = path.open("wb")
        self._is_flushed = False
        self._digest = hashlib.sha256()
        self._block = bytearray()
        self._thread: ThreadPoolExecutor | None = None
        self._hashing: deque[Future[None]] = deque()

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; return the position at which it begins."""
        start = self.size_bytes
        self._block += data
        self._is_flushed = False
        self.size_bytes += len(data)
        if len(self._block) >= BLOCK_BYTES:
            self._write_block()
        return start

    def flush(self) -> None:
        """Flush to disk what was written."""
        self._write_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._is_flushed = True

    def close(self) -> str:
        """Flush to disk, close, and return the SHA-256 in hex."""
        if not self._is_flushed:
            self.flush()
        self._file.close()
        self._end_hashing()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without a promise of anything, on a full disk too."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._end_hashing()

    def _write_block(self) -> None:
        block, self._block = self._block, bytearray()
        self._file.write(block)
        if self._thread is None and len(block) < BLOCK_BYTES:  # a small file
            self._digest.update(block)
            return
        self._thread = self._thread or ThreadPoolExecutor(1)
        self._hashing.append(self._thread.submit(self._digest.update, block))
        if len(self._hashing) > MAX_UNHASHED_BLOCKS:
            self._hashing.popleft().result()

    def _end_hashing(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def flush_all(files: Collection[HashedFile]) -> None:
    """Flush several files at once, which takes the disk hardly longer than one."""
    with ThreadPoolExecutor(min(len(files), MAX_FLUSHED_AT_ONCE)) as threads:
        list(threads.map(HashedFile.flush, files))
