"""Durable file operations: everything that must survive a kill goes through here.

A file or folder is complete when it is renamed to its final name; a rename is durable once the
folder that holds the name has been flushed (POSIX: fsync of the directory).
"""

import contextlib
import hashlib
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HASH_BLOCK_BYTES = 1 << 20
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
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class HashedFile:
    """A new file, written once from front to back, that knows its size and its SHA-256."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size_bytes = 0
        self._file = path.open("wb")
        self._sha256 = ""  # of a file that was flushed and is complete

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; return the position at which it begins."""
        start = self.size_bytes
        self._file.write(data)
        self._sha256 = ""
        self.size_bytes += len(data)
        return start

    def flush(self) -> None:
        """Flush to disk what was written, and hash it: of a large file both take about as long."""
        self._file.flush()
        if self.size_bytes <= HASH_BLOCK_BYTES:
            os.fsync(self._file.fileno())
            self._sha256 = sha256_of(self.path)
            return
        with ThreadPoolExecutor(1) as thread:
            hashing = thread.submit(sha256_of, self.path)
            os.fsync(self._file.fileno())
        self._sha256 = hashing.result()

    def close(self) -> str:
        """Flush to disk, close, and return the SHA-256 in hex."""
        if not self._sha256:
            self.flush()
        self._file.close()
        return self._sha256

    def abandon(self) -> None:
        """Close without a promise of anything, on a full disk too."""
        with contextlib.suppress(OSError):
            self._file.close()


def flush_all(files: Collection[HashedFile]) -> None:
    """Flush several files at once, which takes the disk hardly longer than one."""
    with ThreadPoolExecutor(min(len(files), MAX_FLUSHED_AT_ONCE)) as threads:
        list(threads.map(HashedFile.flush, files))
