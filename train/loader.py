"""Micro-batches from a store, read ahead by worker processes.

B samples of a micro-batch, C latent channels, h=H/8, w=W/8, L tokens, D text width.
The loader's only state is the step at which it starts.
"""

import gc
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from store_format.errors import PrebakeError
from store_format.store import EMPTY_PROMPT, Store
from train.draws import draw_dropout, generator
from train.handover import ALIGNMENT_BYTES, SharedPlaces, Spans
from train.order import EMPTY, Order
from train.prefetch import Prefetch

WORKER_GRACE_S = 60
GROUPS_AHEAD = 4  # of each worker
# Small steps are read several at a time, for DataLoader takes half a millisecond for each item.
GROUP_BYTES = 4 << 20
MAX_GROUP_STEPS = 8
_WEIGHTS = "weights of samples"  # no name of a tensor
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class MicroBatch:
    """What one rank sees in one micro-batch.

    `tensors` holds the store's declared tensors as [B, ...] in their stored dtype. `weights`
    [B] f32 are the samples' weights, 0 for a sample that only fills an empty batch.
    `num_samples` counts the samples of all ranks.
    """

    step: int
    sample_ids: tuple[str, ...]
    bucket_px: tuple[int, int]
    tensors: dict[str, torch.Tensor]
    weights: torch.Tensor
    num_samples: int

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return replace(self, tensors=pinned)


class Samples:
    """The samples of a store as training counts them: one each, whatever its variants and texts."""

    def __init__(self, store: Store) -> None:
        """Group the rows of a store by sample.

        Raises:
            PrebakeError: the store is empty, or the variants of a sample are of several buckets.
        """
        if len(store) == 0:
            raise PrebakeError(f"{store.root} holds no samples. Bake some images into it first.")
        ids = store.index.sample_ids()
        starts = np.flatnonzero(np.append(True, (ids[1:] != ids[:-1]).any(axis=1)))
        self.first_row = starts.astype(np.int32)
        self.num_variants = np.diff(starts, append=len(ids)).astype(np.int32)
        self.ids = ids[starts]
        self.distinct_buckets, bucket_of_row = store.index.bucket_codes
        self.bucket_of = bucket_of_row[starts]
        if (np.repeat(self.bucket_of, self.num_variants) != bucket_of_row).any():
            raise PrebakeError(
                f"{store.root} holds variants of one sample in different buckets, which training "
                "does not support yet."
            )

    def __len__(self) -> int:
        return len(self.first_row)

    @property
    def buckets(self) -> NDArray[np.int32]:
        """The bucket of each sample: [N, 2], (width, height)."""
        return np.array(self.distinct_buckets, np.int32)[self.bucket_of]


Request = tuple[int, NDArray[np.int64]]
"""A step, and the samples that it sees: [A, R, S] (A micro-batches, R ranks, S samples)."""


class StepDataset:
    """The micro-batches of one rank, step by step.

    The order is asked by `request`, in the training process: workers that `read` need not hold it,
    nor work out each epoch once more.
    """

    def __init__(
        self,
        store: Store,
        samples: Samples,
        order: Order,
        *,
        rank: int,
        seed: int,
        caption_dropout: float,
    ) -> None:
        self._store = store
        self._samples = samples
        self._order = order
        self._rank = rank
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._weights = store.index.column("weight")
        self._bfloat16 = {s.name for s in store.manifest.tensors if s.dtype == "bfloat16"}

    @property
    def max_step_bytes(self) -> int:
        """How large the tensors of a step can be, each begun at a multiple of ALIGNMENT_BYTES."""
        manifest, shape = self._store.manifest, self._order._shape
        cells = [manifest.cells(bucket) for bucket in self._samples.distinct_buckets]
        row_bytes = max(sum(spec.row_bytes(size) for spec in manifest.tensors) for size in cells)
        weight_bytes = 4  # of a sample, f32
        padding = ALIGNMENT_BYTES * (len(manifest.tensors) + 1)
        return shape.accumulation * (shape.batch_size * (row_bytes + weight_bytes) + padding)

    def request(self, step: int) -> Request:
        """Return what to ask for to get a step."""
        return step, self._order.step(step)

    def files_of_step(self, step: int) -> Iterator[tuple[str, int]]:
        """Yield the files that hold what this rank may read in a step, and their bytes."""
        files = self._store.index.files
        for slots in self._order.step(step):
            mine = slots[self._rank]
            for sample in mine[mine != EMPTY].tolist():
                first = int(self._samples.first_row[sample])
                for row in range(first, first + int(self._samples.num_variants[sample])):
                    for path in sorted(self._store.files_of(row)):
                        yield path, files[path].bytes

    def prefetch(self, start: int, stop: int) -> Prefetch | None:
        """Return what fetches the shards of steps `start` to `stop` - 1, if they are elsewhere."""
        limit_bytes = self._store.root.cache_limit_bytes
        if limit_bytes is None:
            return None
        own = copy(self)  # with an order of its own: an order holds the epoch that was asked last
        own._order = copy(self._order)
        return Prefetch(own.files_of_step, self._store.fetch, start, stop, limit_bytes // 2)

    def read(self, request: Request) -> list[MicroBatch] | PrebakeError:
        """Read a step's micro-batches.

        An error of the store is returned, not raised: DataLoader would wrap a worker's traceback
        around its one line.
        """
        step, samples = request
        try:
            return [self._read(step, slots) for slots in samples]
        except PrebakeError as error:
            return error

    def _read(self, step: int, slots: NDArray[np.int64]) -> MicroBatch:
        """Read one micro-batch from its slots [R, S]."""
        mine = slots[self._rank]
        mine = mine[mine != EMPTY]
        is_filler = len(mine) == 0
        if is_filler:
            mine = slots[slots != EMPTY][:1]
        ids = tuple(self._samples.ids[sample].tobytes().hex() for sample in mine)
        rows = [self._row(step, int(s), key) for s, key in zip(mine, ids, strict=True)]
        texts = [self._text(step, row, key) for row, key in zip(rows, ids, strict=True)]
        if self._caption_dropout:
            dropped = draw_dropout(self._seed, step, ids, self._caption_dropout).tolist()
            texts = [EMPTY_PROMPT if d else text for text, d in zip(texts, dropped, strict=True)]
        arrays = self._store.read(rows, texts)
        weights = torch.from_numpy(self._weights[rows].astype(np.float32))  # [B]
        return MicroBatch(
            step=step,
            sample_ids=ids,
            bucket_px=self._store.bucket_of(rows[0]),
            tensors={name: self._tensor(name, array) for name, array in arrays.items()},
            weights=weights * (0.0 if is_filler else 1.0),
            num_samples=int((slots != EMPTY).sum()),
        )

    def _row(self, step: int, sample: int, key: str) -> int:
        first, count = int(self._samples.first_row[sample]), int(self._samples.num_variants[sample])
        return (
            first if count == 1 else first + _pick(self._seed, "variant", step, key, [1.0] * count)
        )

    def _text(self, step: int, row: int, key: str) -> int:
        if self._store.num_texts(row) == 1:
            return 0
        return _pick(self._seed, "text", step, key, self._store.text_weights(row).tolist())

    def _tensor(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if name in self._bfloat16 else tensor


def _pick(seed: int, purpose: str, step: int, key: str, weights: Sequence[float]) -> int:
    """Draw an index with probability proportional to its weight."""
    drawn = torch.rand((), generator=generator(seed, purpose, step, key), dtype=torch.float64)
    bounds = np.cumsum(np.asarray(weights, np.float64))
    return int(np.searchsorted(bounds, drawn.item() * bounds[-1], side="right"))


def iterate_steps(
    dataset: StepDataset, start: int, stop: int, *, num_workers: int, pin_memory: bool
) -> Generator[list[MicroBatch], None, None]:
    """Yield the micro-batches of steps `start` to `stop` - 1, read ahead by `num_workers`.

    Close the generator to end the workers.

    Raises:
        PrebakeError: the store cannot be read.
    """
    requests = map(dataset.request, range(start, stop))
    prefetch = dataset.prefetch(start, stop)
    steps: Iterator[list[MicroBatch] | PrebakeError]
    # Workers start here, before the threads that must not be forked.
    steps = _Workers(dataset, requests, num_workers) if num_workers else map(dataset.read, requests)
    try:
        if prefetch is not None:
            prefetch.start()
        for number, micro_batches in enumerate(steps):
            if isinstance(micro_batches, PrebakeError):
                raise micro_batches
            if prefetch is not None:
                prefetch.advance(start + number)
            yield [batch.pin_memory() for batch in micro_batches] if pin_memory else micro_batches
    finally:
        if prefetch is not None:
            prefetch.close()
        del steps  # ends the workers, also while an exception keeps this frame


LeftStep = list[tuple[MicroBatch, Spans]] | PrebakeError
"""A step whose tensors a worker has left in a place."""


class _Workers(Iterator[list[MicroBatch] | PrebakeError]):
    """Reads steps ahead in worker processes, which end with it."""

    def __init__(self, dataset: StepDataset, requests: Iterator[Request], num_workers: int) -> None:
        step_bytes = dataset.max_step_bytes
        num_steps = max(1, min(MAX_GROUP_STEPS, GROUP_BYTES // step_bytes))  # of a group
        # One place more than groups are under way: each is asked for before another is taken.
        num_places = num_workers * GROUPS_AHEAD + 1
        self._places = SharedPlaces(num_places, num_steps * step_bytes)
        groups = iter(lambda: list(islice(requests, num_steps)), [])
        loader = DataLoader(
            _InPlaces(dataset, self._places),
            batch_size=None,
            sampler=zip(cycle(range(num_places)), groups),
            num_workers=num_workers,
            prefetch_factor=GROUPS_AHEAD,
            persistent_workers=True,
            multiprocessing_context="fork",  # so that they share the index and the places
            worker_init_fn=_start_worker,
        )
        self._groups = zip(cycle(range(num_places)), loader)
        self._place, self._left = 0, deque[LeftStep]()

    def __next__(self) -> list[MicroBatch] | PrebakeError:
        if not self._left:
            self._place, left = next(self._groups)
            self._left.extend(left)
        step = self._left.popleft()
        if isinstance(step, PrebakeError):
            return step
        micro_batches = []
        for batch, spans in step:
            tensors = self._places.take(self._place, spans)
            weights = tensors.pop(_WEIGHTS)
            micro_batches.append(replace(batch, tensors=tensors, weights=weights))
        return micro_batches


class _InPlaces(Dataset[list[LeftStep]]):
    """Reads groups of steps in a worker, and leaves their tensors in places."""

    def __init__(self, dataset: StepDataset, places: SharedPlaces) -> None:
        self._dataset = dataset
        self._places = places

    def __getitem__(self, request: tuple[int, list[Request]]) -> list[LeftStep]:
        place, steps = request
        found: list[LeftStep] = []
        end = 0
        for micro_batches in map(self._dataset.read, steps):
            if isinstance(micro_batches, PrebakeError):
                return [*found, micro_batches]
            left = []
            for batch in micro_batches:
                tensors = batch.tensors | {_WEIGHTS: batch.weights}
                spans, end = self._places.leave(place, end, tensors)
                left.append((replace(batch, tensors={}, weights=_NOTHING), spans))
            found.append(left)
        return found


def _start_worker(worker: int) -> None:
    """Keep memory shared with the training process, and leave signals to it.

    Garbage collection would write to every object of before the fork, and so copy it. Ctrl-C and
    job managers signal the workers too, and a run whose worker died cannot finish its step; the
    training process ends its workers after its last step. SIGTERM ends a worker after a while, for
    it must end a worker that is left over.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(WORKER_GRACE_S))
