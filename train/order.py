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

With `Blocks` (block shuffle, for a store larger than the local cache of shards) it also matters in
which shard a sample lies. In each epoch the shards are shuffled and cut into blocks, and

- the micro-batches of a block come before those of the next, shuffled together among themselves;
- what a bucket leaves over in a block, less than R x S samples, begins the bucket's first
  micro-batch in a later block: the next that has enough of it to fill one. So there are as many
  micro-batches and steps as without blocks;
- a block begins with its micro-batches that hold such leftovers, at most one a bucket; all its
  others are read from its own shards alone.

One block that holds all shards is the order without blocks.
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


@dataclass(frozen=True, eq=False)
class Blocks:
    """The shards that samples lie in, to be read block by block; K shards, N samples sorted by id.

    Shards go by their names; where in its shard a sample lies plays no part.
    """

    names: tuple[str, ...]
    """The names of the K shards, sorted, each once."""
    shard_bytes: NDArray[np.int64]
    """[K], the size of each."""
    shard_of: NDArray[np.int32]
    """[N], the shard of each sample: a position in `names`."""
    block_bytes: int
    """The shards of a block have at most so many bytes together, unless it is a single one."""

    def of_shards(self, seed: int, epoch: int) -> NDArray[np.int32]:
        """Return the block of each shard in an epoch: [K], from 0 in the order of reading."""
        words = np.array([_first_word(name) for name in self.names], np.uint64)
        keys = mix(words ^ stream(seed, "shards", epoch))
        block, held_bytes = 0, 0
        blocks = np.zeros(len(self.names), np.int32)
        for shard in np.argsort(keys, kind="stable").tolist():
            num_bytes = int(self.shard_bytes[shard])
            if held_bytes and held_bytes + num_bytes > self.block_bytes:
                block, held_bytes = block + 1, 0
            blocks[shard] = block
            held_bytes += num_bytes
        return blocks

    def of_samples(self, seed: int, epoch: int) -> NDArray[np.int32]:
        """Return the block of each sample in an epoch: [N]."""
        return self.of_shards(seed, epoch)[self.shard_of]


class Order:
    """The order of one run over one set of samples."""

    def __init__(
        self,
        sample_ids: NDArray[np.uint8],
        buckets: NDArray[np.integer],
        shape: BatchShape,
        seed: int,
        blocks: Blocks | None = None,
    ) -> None:
        """Prepare the order.

        Args:
            sample_ids: [N, 16] uint8, sorted, each once.
            buckets: [N, 2], (width, height) of each sample.
            shape: batch size, ranks, accumulation.
            seed: the run's seed.
            blocks: the shards of the samples, for the order by blocks; None for the global order.
        """
        if len(sample_ids) == 0:
            raise ValueError("an order needs at least one sample")
        self._ids = np.ascontiguousarray(sample_ids).view(">u8")[:, 0].astype(np.uint64)
        width, height = np.asarray(buckets, np.int64).T
        _, bucket_of = np.unique(width << 32 | height, return_inverse=True)  # rows take 10x as long
        self._bucket_of = bucket_of.astype(np.int32)  # [N]
        self.shape = shape
        self._seed = seed
        self.blocks = blocks
        per_batch = shape.batch_size * shape.world_size
        counts = np.bincount(self._bucket_of)
        self.num_micro_batches = int((-(-counts // per_batch)).sum())
        self.steps_per_epoch = -(-self.num_micro_batches // shape.accumulation)
        self._epoch: tuple[int, NDArray[np.int32]] | None = None  # the last one asked for

    def step(self, step: int) -> NDArray[np.int64]:
        """Return the samples of optimizer step `step` (from 0): [A or fewer, R, S], EMPTY = -1."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._make_epoch(epoch)
        start = position * self.shape.accumulation
        return self._epoch[1][start : start + self.shape.accumulation].astype(np.int64)

    def _make_epoch(self, epoch: int) -> NDArray[np.int32]:
        """Return all micro-batches of an epoch: [M, R, S]."""
        ranks, size = self.shape.world_size, self.shape.batch_size
        keys = mix(self._ids ^ stream(self._seed, "samples", epoch))
        block_of = self._block_of(epoch)  # [N]
        shuffled = np.lexsort((keys, block_of, self._bucket_of))  # by bucket, then block, then key
        bounds = np.searchsorted(self._bucket_of[shuffled], np.arange(self._bucket_of.max() + 2))
        slots = np.full((self.num_micro_batches, size * ranks), EMPTY, np.int32)
        first = 0
        for start, stop in pairwise(bounds):
            members = shuffled[start:stop]
            num = -(-len(members) // (size * ranks))
            slots[first : first + num].reshape(-1)[: len(members)] = members
            first += num
        batch_keys = mix(
            np.arange(len(slots), dtype=np.uint64) ^ stream(self._seed, "batches", epoch)
        )
        # A micro-batch is of the block of its last sample; EMPTY takes the -1 at the end.
        batch_blocks = np.append(block_of, np.int32(-1))[slots].max(axis=1)  # [M]
        no_leftovers = block_of[slots[:, 0]] == batch_blocks  # [M]
        slots = slots[np.lexsort((batch_keys, no_leftovers, batch_blocks))]
        # Slot j goes to rank j mod R, so that a short micro-batch is spread evenly.
        return slots.reshape(-1, size, ranks).transpose(0, 2, 1)

    def _block_of(self, epoch: int) -> NDArray[np.int32]:
        """Return the block of each sample in an epoch: [N], all 0 in the global order."""
        if self.blocks is None:
            return np.zeros(len(self._ids), np.int32)
        return self.blocks.of_samples(self._seed, epoch)


def stream(seed: int, purpose: str, epoch: int) -> np.uint64:
    """Return 64 bits that depend on all arguments."""
    return np.uint64(_first_word(f"prebake.order/1/{seed}/{purpose}/{epoch}"))


def _first_word(text: str) -> int:
    """Return the first 64 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def mix(words: Words) -> Words:
    """Return a bijective hash of each 64-bit word, in which equal bits decide nothing.

    numpy's own permutations may change between its versions (NEP 19); this does not.
    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, variant 13 of Stafford).
    """
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)
