"""Micro-batches from a store.

B samples of a micro-batch, C latent channels, h=H/8, w=W/8, L tokens, D text width.
Each is a pure function of the store, the run's options and its step.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from store_format.errors import PrebakeError
from store_format.store import EMPTY_PROMPT, Allocate, Store, new_memory
from train.draws import draw_dropout, generator
from train.handover import ALIGNMENT_BYTES
from train.order import EMPTY, Order
from train.prefetch import Prefetch


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
        """How large the tensors of a step can be, each begun at a multiple of ALIGNMENT_BYTES.

        Its request is not larger.
        """
        manifest, shape = self._store.manifest, self._order.shape
        cells = [manifest.cells(bucket) for bucket in self._samples.distinct_buckets]
        row_bytes = max(sum(spec.row_bytes(size) for spec in manifest.tensors) for size in cells)
        padding = ALIGNMENT_BYTES * len(manifest.tensors)
        tensor_bytes = shape.accumulation * (shape.batch_size * row_bytes + padding)
        request_bytes = shape.accumulation * shape.world_size * shape.batch_size * 8
        return max(tensor_bytes, request_bytes)

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

    def read(self, request: Request, allocate: Allocate = new_memory) -> list[MicroBatch]:
        """Read a step's micro-batches, into memory from `allocate`.

        Raises:
            PrebakeError: the store cannot be read.
        """
        step, samples = request
        return [self._read(step, slots, allocate) for slots in samples]

    def _read(self, step: int, slots: NDArray[np.int64], allocate: Allocate) -> MicroBatch:
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
        arrays = self._store.read(rows, texts, allocate)
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
