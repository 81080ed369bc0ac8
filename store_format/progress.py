"""Progress that suits its reader: a bar on a terminal, a plain line now and then elsewhere."""

import os
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

PLAIN_LINE_EVERY_S = 15.0


def is_terminal() -> bool:
    """Whether standard error is a terminal that can show a bar: some have no width."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return True


class Progress:
    """Counts finished units with their rate and the time that is left; a context manager."""

    def __init__(self, total: int, unit: str, what: str, initial: int = 0) -> None:
        """Show `total` units named `unit` (plural, as in 'images') of the work `what`."""
        self._what, self._unit, self._total = what, unit, total
        self._done = self._initial = initial
        self._start_s = self._last_line_s = time.monotonic()
        self._bar = None
        if is_terminal():
            self._bar = tqdm(
                total=total, initial=initial, unit=f" {unit}", desc=what, dynamic_ncols=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count finished units; `note` is shown beside them."""
        self._done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return
        now_s = time.monotonic()
        if now_s - self._last_line_s >= PLAIN_LINE_EVERY_S:
            self._last_line_s = now_s
            rate = (self._done - self._initial) / (now_s - self._start_s)
            left_s = (self._total - self._done) / rate if rate else float("inf")
            line = (
                f"{self._what}: {self._done}/{self._total} {self._unit}, "
                f"{rate:.3g} {self._unit}/s, {_clock(left_s)} left"
            )
            print(f"{line}, {note}" if note else line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line without tearing the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}"
