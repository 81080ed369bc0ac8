"""Shards of the steps to come, fetched into the local cache while training goes on.

Only for stores behind a URL. It changes neither order nor content: a worker that needs a shard
which is not there yet waits for it, or fetches it itself.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from store_format.errors import PrebakeError

NUM_THREADS = 4
MAX_STEPS_AHEAD = 1000  # so that a store that fits is not walked through to the end at once

FilesOfStep = Callable[[int], Iterable[tuple[str, int]]]  # step -> (path, bytes) of each file
Fetch = Callable[[str], None]


class Prefetch:
    """Fetches ahead of the step that training is at, within a number of bytes.

    The window is the files of the steps from the current one on that were asked for; it never
    takes more than `limit_bytes`, so that a cache of twice as much removes none before its use.
    """

    def __init__(
        self, files_of_step: FilesOfStep, fetch: Fetch, start: int, stop: int, limit_bytes: int
    ) -> None:
        """Prepare to fetch for steps `start` to `stop` - 1; `fetch` takes a file's path."""
        self._files_of_step, self._fetch = files_of_step, fetch
        self._range = range(start, stop)
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._step = start
        self._last_needed: dict[str, tuple[int, int]] = {}  # path -> (last step, bytes)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prebake-prefetch", daemon=True)

    def start(self) -> None:
        """Begin; to be called after all forks, which do not take threads along."""
        self._thread.start()

    def advance(self, step: int) -> None:
        """Tell that training is at `step`: what only earlier steps needed makes room."""
        with self._changed:
            self._step = step
            self._last_needed = {
                path: (last, size)
                for path, (last, size) in self._last_needed.items()
                if last >= step
            }
            self._changed.notify_all()

    def close(self) -> None:
        """End, without waiting for a download that is under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def window_bytes(self) -> int:
        """Bytes of the files in the window."""
        return sum(size for _, size in self._last_needed.values())

    def _run(self) -> None:
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prebake-fetch")
        for step in self._range:
            self._wait_until_near(step)
            if self._stopped:
                break
            for path, size in self._files_of_step(step):
                if self._admit(step, path, size):
                    pool.submit(self._quietly, path)
        pool.shutdown(wait=False, cancel_futures=self._stopped)

    def _wait_until_near(self, step: int) -> None:
        with self._changed:
            while not self._stopped and step > self._step + MAX_STEPS_AHEAD:
                self._changed.wait()

    def _admit(self, step: int, path: str, size: int) -> bool:
        """Wait until a file fits into the window; False if it was there, or at the end."""
        with self._changed:
            while not self._stopped:
                is_new = path not in self._last_needed
                fits = self.window_bytes + size <= self._limit_bytes
                if not is_new or fits or step <= self._step:
                    self._last_needed[path] = (step, size)
                    return is_new
                self._changed.wait()
        return False

    def _quietly(self, path: str) -> None:
        """Fetch a file; what goes wrong is for the reader to meet, and to say."""
        if not self._stopped:
            with suppress(PrebakeError, OSError):
                self._fetch(path)
