"""Where the files of a store are: a local folder, or any URL that fsspec opens.

Paths inside a store are relative and use `/` (FORMAT.md, section 1). A folder only moves bytes: it
knows nothing of commits or shards. `LocalFolder` is here; `remote.RemoteFolder` is for URLs.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Protocol

from store_format import locks
from store_format.files import flush_folder, make_folder, publish, replace_file, write_file

Location = str | PathLike[str]
NOTE_NAME = "lost.json"  # of what an index has lost, until a repair has made it anew
MAX_READ_BYTES = 1 << 30  # of a file that is read whole: manifest, commit, segment


class Claim(Protocol):
    """A writer's right to add to a store. `staging` is a local folder for its unfinished work."""

    staging: Path

    def make_exclusive(self) -> bool:
        """Give up the shared claim for an exclusive one; False where another process has one."""

    def release(self) -> None:
        """End the claim and remove the unfinished work."""


class Folder(Protocol):
    """The files of one store. `str(folder)` is its location as the user gave it."""

    is_local: bool

    def at(self, path: str) -> str:
        """Return where a file is, for messages."""

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a sub-folder; none where there is no such folder."""

    def sizes(self, paths: Collection[str]) -> dict[str, int]:
        """Return the bytes of those of `paths` that are files."""

    def read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
        """

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes]:
        """Yield the bytes of each of several files, as `read` does; some ahead over a network."""

    def open(self, path: str, size_bytes: int, sha256: str) -> int:
        """Return a file descriptor to read from a file that the index states so.

        The caller closes it.

        Raises:
            OSError: there is no such file, or it cannot be read.
            DamagedStoreError: what came over the network differs from what is stated.
        """

    def fetch(self, path: str, size_bytes: int, sha256: str) -> None:
        """Bring a file to where `open` finds it at once; raises as `open` does."""

    @property
    def cache_limit_bytes(self) -> int | None:
        """How much of it this machine keeps, where it is not here itself."""

    def publish(self, staged: Path, path: str) -> None:
        """Give a finished, flushed file or folder of a claim's staging its final name, for good.

        Raises:
            FileExistsError: there is such a name; published names are never reused.
        """

    def replace(self, path: str, data: bytes, staging: Path) -> None:
        """Put `data` at `path` in one atomic step."""

    def free_bytes(self) -> int | None:
        """Return how much more it can hold, where that is known."""

    def create(self, path: str, data: bytes, staging: Path) -> None:
        """Make a file; of several writers that try at once, one succeeds.

        Raises:
            FileExistsError: there is one, another writer's perhaps.
        """

    def make_folder(self, path: str) -> None:
        """Make a sub-folder, where folders exist by themselves."""

    def remove(self, paths: Iterable[str], staging: Path) -> None:
        """Remove files or folders, each at once, as far as they exist."""

    def claim(self, writer: str) -> Claim:
        """Return the right to add to the store; other writers may have it too.

        Raises:
            StoreBusyError: another process has an exclusive claim.
        """

    def hold(self) -> object:
        """Return what keeps files from being removed by other processes as long as it lives."""


class LocalFolder:
    """A folder on a file system of this machine."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def at(self, path: str) -> str:
        """Return where a file is, for messages."""
        return str(self.path / path)

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a sub-folder; none where there is no such folder."""
        try:
            return sorted(os.listdir(self.path / path))  # noqa: PTH208 - names are all it takes
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, paths: Collection[str]) -> dict[str, int]:
        """Return the bytes of those of `paths` that are files."""
        found = {}
        for path in paths:
            file = self.path / path
            if file.is_file():
                found[path] = file.stat().st_size
        return found

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        descriptor = _open_regular(self.path / path)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
            if os.fstat(descriptor).st_size > MAX_READ_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path / path))
            return file.read()

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes]:
        """Yield the bytes of each of several files."""
        return (self.read(path) for path in paths)

    def open(self, path: str, size_bytes: int, sha256: str) -> int:
        """Return a file descriptor; reads check what they get."""
        return _open_regular(self.path / path)

    def fetch(self, path: str, size_bytes: int, sha256: str) -> None:
        """Do nothing: the file is here."""

    @property
    def cache_limit_bytes(self) -> None:
        """Nothing is cached."""
        return None

    def publish(self, staged: Path, path: str) -> None:
        """Rename a finished, flushed file or folder to its final name, durably."""
        final = self.path / path
        for parent in reversed(Path(path).parents):
            make_folder(self.path / parent)
        if staged.is_dir():
            for folder in (staged, *staged.rglob("*/")):
                flush_folder(folder)
        publish(staged, final)

    def replace(self, path: str, data: bytes, staging: Path) -> None:
        """Put `data` at `path` in one atomic step."""
        for parent in reversed(Path(path).parents):
            make_folder(self.path / parent)
        replace_file(self.path / path, data, staging)

    def free_bytes(self) -> int:
        """Return the bytes free on its file system."""
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        return shutil.disk_usage(existing).free

    def create(self, path: str, data: bytes, staging: Path) -> None:
        """Make a file, durably; of several writers that try at once, one succeeds."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of the folder itself; held for a moment
            part = staging / f"{Path(path).name}.part"
            write_file(part, data)
            publish(part, self.path / path)
        finally:
            os.close(descriptor)

    def make_folder(self, path: str) -> None:
        """Make a sub-folder, durably."""
        make_folder(self.path / path)

    def remove(self, paths: Iterable[str], staging: Path) -> None:
        """Remove files or folders: moved away at once, then deleted."""
        touched = set()
        for number, path in enumerate(paths):
            doomed = staging / f"removed-{number}"
            try:
                (self.path / path).rename(doomed)
            except FileNotFoundError:
                continue
            touched.add((self.path / path).parent)
            if doomed.is_dir() and not doomed.is_symlink():
                shutil.rmtree(doomed)
            else:
                doomed.unlink()
        for folder in touched:
            flush_folder(folder)

    def claim(self, writer: str) -> locks.WriterClaim:
        """Return a shared claim on the folder, which is made where it is missing."""
        return locks.WriterClaim(self.path, writer)

    def hold(self) -> object:
        """Return a lock that `store gc` respects."""
        return locks.ReaderLock(self.path)


def _open_regular(path: Path) -> int:
    """Open a regular file for reading. Links to files are followed: they are the user's own.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device, which would be read without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENODEV
        raise OSError(number, os.strerror(number), str(path))
    return descriptor


def folder_of(location: Location | Folder) -> Folder:
    """Return the folder that a path or URL means.

    Raises:
        PrebakeError: the URL is of no kind that fsspec knows, or carries credentials.
    """
    if not isinstance(location, str | PathLike):
        return location
    text = os.fspath(location)
    if "://" not in text:
        return LocalFolder(Path(text))
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    from store_format.remote import RemoteFolder

    return RemoteFolder(text)


def lie_apart(first: Folder, second: Folder) -> bool:
    """Return whether two folders differ, and neither lies in the other."""
    if isinstance(first, LocalFolder) and isinstance(second, LocalFolder):
        a, b = first.path.resolve(), second.path.resolve()
        return not (a.is_relative_to(b) or b.is_relative_to(a))
    a_url, b_url = f"{first}/", f"{second}/"
    return not (a_url.startswith(b_url) or b_url.startswith(a_url))
