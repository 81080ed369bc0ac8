"""The writing end of a bake: rows in, shards and commits out, on a thread of its own."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store_format.rows import SampleRow, TextRow
from store_format.store import Store
from store_format.writer import ShardDraft, StoreWriter

Tensors = Sequence[NDArray[np.generic]]
MAX_PENDING = 4


class ShardSink:
    """Collects rows into shards and commits each when it is full or old enough.

    All work on the store happens on one thread, in the order of the calls; a call waits only when
    MAX_PENDING earlier ones are unfinished. An error of the thread is raised by a later call, and
    nothing more is written or committed: a shard may hold half a row.
    """

    def __init__(self, writer: StoreWriter, *, shard_bytes: int, shard_max_seconds: float) -> None:
        self._writer = writer
        self._shard_bytes = shard_bytes
        self._shard_max_s = shard_max_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prebake-write")
        self._pending: deque[Future[None]] = deque()
        self._bucket_px: tuple[int, int] | None = None
        self._samples: ShardDraft | None = None
        self._texts: ShardDraft | None = None
        self._sample_rows: list[SampleRow] = []
        self._text_rows: list[TextRow] = []
        self._opened_s = 0.0
        self._failed = False

    def put(
        self,
        samples: Sequence[tuple[SampleRow, Tensors]] = (),
        texts: Sequence[tuple[TextRow, Tensors]] = (),
        relinked: Sequence[SampleRow] = (),
    ) -> None:
        """Store new rows.

        Args:
            samples: rows of one bucket with their tensors.
            texts: text rows with theirs.
            relinked: rows that keep the place of their latents and change only in the index.
        """
        self._submit(lambda: self._put(samples, texts, relinked))

    def flush(self) -> None:
        """Commit all that was put, and wait for it."""
        self._submit(self._commit)
        while self._pending:
            self._pending.popleft().result()

    def reopen(self) -> Store:
        """Commit all that was put and return the store as it is then."""
        self.flush()
        return self._writer.reload()

    def close(self) -> None:
        """End the thread; what was not flushed is left to the writer to abandon."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, call: Callable[[], None]) -> None:
        while len(self._pending) >= MAX_PENDING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._unless_failed, call))

    # Below: only on the thread.

    def _unless_failed(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except BaseException:
            self._failed = True
            raise

    def _put(
        self,
        samples: Sequence[tuple[SampleRow, Tensors]],
        texts: Sequence[tuple[TextRow, Tensors]],
        relinked: Sequence[SampleRow],
    ) -> None:
        if not (self._sample_rows or self._text_rows):
            self._opened_s = time.monotonic()
        for text_row, tensors in texts:
            if self._texts is None:
                self._texts = self._writer.new_text_shard()
            place = self._texts.append(text_row, tensors)
            self._text_rows.append(replace(text_row, place=place))
        self._sample_rows += relinked
        for row, tensors in samples:
            if row.bucket_px != self._bucket_px and self._samples is not None:
                self._commit()
            if self._samples is None:
                self._bucket_px = row.bucket_px
                self._samples = self._writer.new_sample_shard(row.bucket_px)
            self._sample_rows.append(row.placed(self._samples.append(row, tensors)))
        sizes = [draft.size_bytes for draft in (self._samples, self._texts) if draft is not None]
        is_full = any(size >= self._shard_bytes for size in sizes)
        if is_full or time.monotonic() - self._opened_s >= self._shard_max_s:
            self._commit()

    def _commit(self) -> None:
        """Commit samples together with the texts that they name."""
        if not (self._sample_rows or self._text_rows):
            return
        drafts: list[Any] = [draft for draft in (self._texts, self._samples) if draft is not None]
        self._writer.commit(drafts, self._sample_rows, self._text_rows)
        self._samples = self._texts = None
        self._sample_rows, self._text_rows = [], []
        self._opened_s = time.monotonic()
