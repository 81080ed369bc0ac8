"""Durable file operations: everything that must survive a kill goes through here.

A file or folder is complete when it is renamed to its final name; a rename is durable once the
folder that holds the name has been flushed (POSIX: fsync of the directory).
"""

import contextlib
import hashlib
import os
from pathlib import Path

HASH_BLOCK_BYTES = 1 << 20


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
        self._digest = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; return the position at which it begins."""
        start = self.size_bytes
        self._file.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)
        return start

    def close(self) -> str:
        """Flush to disk, close, and return the SHA-256 in hex."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without a promise of anything, on a full disk too."""
        with contextlib.suppress(OSError):
            self._file.close()
