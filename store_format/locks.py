"""Who uses a local store: writers share it, tidying has it alone, readers keep files from `gc`.

All locks are flock(2) on open files: the system frees them when a process ends, however it ends.

`writer.lock`: shared by every process that adds; exclusive for one that tidies (`gc`, or the last
writer out). `prebake.json`: shared by every reader; exclusive for `gc`. `staging/WRITER`: the
folder of a writer's unfinished work, locked while the writer lives; others remove it after that.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from store_format.errors import StoreBusyError

LOCK_NAME = "writer.lock"
STAGING_FOLDER = "staging"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS}
_SAY_AFTER_S = 1.0


class WriterClaim:
    """A share in adding to the store at `root`, with a folder for unfinished work."""

    def __init__(self, root: Path, writer: str) -> None:
        """Wait for tidying to end, make the folders, and remove what dead writers left.

        Raises:
            OSError: the folder cannot be made or written.
        """
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._lock = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_shared(self._lock, root)
            _remove_dead(root / STAGING_FOLDER)
            self.staging, self._alive = _make_staging(root / STAGING_FOLDER, writer)
        except BaseException:
            os.close(self._lock)
            raise

    def make_exclusive(self) -> bool:
        """Give up the share, and have the store alone; False where others are at it."""
        try:  # flock gives up the share even where it does not get the whole
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Remove the unfinished work, then the share."""
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # another writer's is there
            self.staging.parent.rmdir()
        os.close(self._alive)
        os.close(self._lock)


class ReaderLock:
    """Keeps `gc` away from a store while the object lives, where the system can lock at all."""

    def __init__(self, root: Path, *, exclusive: bool = False) -> None:
        """Lock the manifest.

        Raises:
            StoreBusyError: exclusive, and another process reads.
        """
        self._descriptor = -1
        mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            self._descriptor = os.open(root / "prebake.json", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if exclusive:
                raise StoreBusyError(
                    f"{root} is being read by another process, perhaps a training run. "
                    f"Wait for it to end."
                ) from None
            raise StoreBusyError(
                f"{root} is being cleaned by 'prebake store gc'. Try again in a moment."
            ) from None
        except OSError as error:
            if exclusive or error.errno not in _NO_LOCKS:
                raise

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _lock_shared(descriptor: int, root: Path) -> None:
    """Take a share, waiting as long as another process has the store alone."""
    start_s, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not said and time.monotonic() - start_s > _SAY_AFTER_S:
                print(f"waiting: another process is tidying {root}", file=sys.stderr, flush=True)
                said = True
            time.sleep(0.02)


def _make_staging(folder: Path, writer: str) -> tuple[Path, int]:
    """Make and lock a writer's own folder; return it with the descriptor of its lock."""
    while True:
        mine = folder / writer
        try:
            mine.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(mine, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another writer removed it, for it was not locked yet
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if mine.exists() and os.fstat(descriptor).st_ino == mine.stat().st_ino:
            return mine, descriptor
        os.close(descriptor)


def dead_work(folder: Path) -> Iterator[Path]:
    """Yield what writers that live no more have left in `staging/`, each locked meanwhile.

    Nothing that lies behind a link.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for left in folder.iterdir():
        if left.is_symlink() or not left.is_dir():
            yield left
            continue
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield left
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)


def _remove_dead(folder: Path) -> None:
    """Remove the unfinished work of writers that live no more."""
    for left in dead_work(folder):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
