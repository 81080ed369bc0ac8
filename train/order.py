"""Which samples a step sees: a pure function of ids, buckets, seed, epoch and batch shape.

N samples sorted by id; a micro-batch holds up to R x S samples of one bucket (R ranks, S = batch
size); an optimizer step takes A micro-batches (gradient accumulation). In each epoch

- every sample appears once;
- the micro-batches of a bucket are filled in a shuffled order of its samples, and all micro-batches
  are then shuffled together; a sample that is added or dropped does not change the order of the
  others of its bucket;
- what is left over in a bucket makes one smaller micro-batch, spread evenly over the ranks; a rank
  may find no sample in it and then contributes nothing;
- the last step takes the micro-batches that are left, possibly fewer than A; no step straddles
  epochs.

So each epoch has equally many steps, and any step can be found without replaying those before it.
Physical rows, format, caches and the number of writers play no part.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EMPTY = -1
"""A slot of a micro-batch without a sample."""

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class BatchShape:
    """How samples are grouped into micro-batches and steps."""

    batch_size: int
    world_size: int = 1
    accumulation: int = 1


class Order:
    """The order of one run over one set of samples."""

    def __init__(
        self,
        sample_ids: NDArray[np.uint8],
        buckets: NDArray[np.integer],
        shape: BatchShape,
        seed: int,
    ) -> None:
        """Prepare the order.

        Args:
            sample_ids: [N, 16] uint8, sorted, each once.
            buckets: [N, 2], (width, height) of each sample.
            shape: batch size, ranks, accumulation.
            seed: the run's seed.
        """
        if len(sample_ids) == 0:
            raise ValueError("an order needs at least one sample")
        self._ids = np.ascontiguousarray(sample_ids).view(">u8")[:, 0].astype(np.uint64)
        _, self._bucket_of = np.unique(buckets, axis=0, return_inverse=True)
        self._bucket_of = self._bucket_of.reshape(-1)
        self._shape = shape
        self._seed = seed
        per_batch = shape.batch_size * shape.world_size
        counts = np.bincount(self._bucket_of)
        self.num_micro_batches = int((-(-counts // per_batch)).sum())
        self.steps_per_epoch = -(-self.num_micro_batches // shape.accumulation)
        self._epoch: tuple[int, NDArray[np.int64]] | None = None  # the last one asked for

    def step(self, step: int) -> NDArray[np.int64]:
        """Return the samples of optimizer step `step` (from 0): [A or fewer, R, S], EMPTY = -1."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._make_epoch(epoch)
        start = position * self._shape.accumulation
        return self._epoch[1][start : start + self._shape.accumulation]

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return all micro-batches of an epoch: [M, R, S]."""
        ranks, size = self._shape.world_size, self._shape.batch_size
        keys = mix(self._ids ^ stream(self._seed, "samples", epoch))
        shuffled = np.lexsort((keys, self._bucket_of))  # by bucket, then by key
        bounds = np.searchsorted(self._bucket_of[shuffled], np.arange(self._bucket_of.max() + 2))
        slots = np.full((self.num_micro_batches, size * ranks), EMPTY, np.int64)
        first = 0
        for start, stop in pairwise(bounds):
            members = shuffled[start:stop]
            num = -(-len(members) // (size * ranks))
            slots[first : first + num].reshape(-1)[: len(members)] = members
            first += num
        batch_keys = mix(
            np.arange(len(slots), dtype=np.uint64) ^ stream(self._seed, "batches", epoch)
        )
        slots = slots[np.argsort(batch_keys, kind="stable")]
        # Slot j goes to rank j mod R, so that a short micro-batch is spread evenly.
        return slots.reshape(-1, size, ranks).transpose(0, 2, 1)


def stream(seed: int, purpose: str, epoch: int) -> np.uint64:
    """Return 64 bits that depend on all arguments."""
    digest = hashlib.sha256(f"prebake.order/1/{seed}/{purpose}/{epoch}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "big"))


def mix(words: Words) -> Words:
    """Return a bijective hash of each 64-bit word, in which equal bits decide nothing.

    numpy's own permutations may change between its versions (NEP 19); this does not.
    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, variant 13 of Stafford).
    """
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)
