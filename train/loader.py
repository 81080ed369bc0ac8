"""Micro-batches from a store, read ahead by worker processes.

B samples of a micro-batch, C latent channels, h=H/8, w=W/8, L tokens, D text width.
The loader's only state is the step at which it starts.
"""

import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from store_format.errors import PrebakeError
from store_format.store import Store
from train.draws import draw_dropout, generator
from train.order import EMPTY, Order

EMPTY_PROMPT = -1
WORKER_GRACE_S = 60


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
        """Return the batch in page-locked memory (DataLoader calls this if it is to pin)."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return replace(self, tensors=pinned)

    def __getstate__(self) -> dict[str, Any]:
        """Travel from a worker as plain bytes.

        A tensor would take a file descriptor and shared memory, of which most systems allow 1024
        and containers 64 MiB: too few for long accumulation or large batches.
        """
        arrays = {name: _to_bytes(tensor) for name, tensor in self.tensors.items()}
        return self.__dict__ | {"tensors": arrays, "weights": _to_bytes(self.weights)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: _from_bytes(packed) for name, packed in state["tensors"].items()}
        weights = _from_bytes(state["weights"])
        self.__dict__.update(state | {"tensors": tensors, "weights": weights})


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
        self.first_row = starts
        self.num_variants = np.diff(np.append(starts, len(ids)))
        self.ids = ids[starts]
        self.buckets = store.bucket_px[starts]
        if (np.repeat(self.buckets, self.num_variants, axis=0) != store.bucket_px).any():
            raise PrebakeError(
                f"{store.root} holds variants of one sample in different buckets, which training "
                "does not support yet."
            )

    def __len__(self) -> int:
        return len(self.first_row)


class StepDataset(Dataset[list[MicroBatch] | PrebakeError]):
    """Maps a step number to the micro-batches of one rank.

    An error of the store is returned, not raised: DataLoader would wrap a worker's traceback
    around its one line.
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

    def __getitem__(self, step: int) -> list[MicroBatch] | PrebakeError:
        """Read a step's micro-batches."""
        try:
            return [self._read(step, slots) for slots in self._order.step(step)]
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
        dropped = draw_dropout(self._seed, step, ids, self._caption_dropout)
        texts = [
            EMPTY_PROMPT if drop else self._text(step, row, key)
            for row, key, drop in zip(rows, ids, dropped.tolist(), strict=True)
        ]
        arrays = self._store.read(rows, texts)
        weights = torch.from_numpy(self._weights[rows].astype(np.float32))  # [B]
        width_px, height_px = (int(n) for n in self._store.bucket_px[rows[0]])
        return MicroBatch(
            step=step,
            sample_ids=ids,
            bucket_px=(width_px, height_px),
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
        weights = self._store.text_weights(row)
        return 0 if len(weights) == 1 else _pick(self._seed, "text", step, key, weights.tolist())

    def _tensor(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        spec = next(spec for spec in self._store.manifest.tensors if spec.name == name)
        return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor


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
    loader: DataLoader[list[MicroBatch] | PrebakeError] = DataLoader(
        dataset,
        batch_size=None,
        sampler=range(start, stop),
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        worker_init_fn=_start_worker,
    )
    try:
        for micro_batches in loader:
            if isinstance(micro_batches, PrebakeError):
                raise micro_batches
            yield micro_batches
    finally:
        del loader  # ends the workers, also while an exception keeps this frame


def _start_worker(worker: int) -> None:
    """Leave signals to the training process, which ends its workers after its last step.

    Ctrl-C and job managers signal the workers too, and a run whose worker died cannot finish its
    step. SIGTERM ends a worker after a while, for it must end a worker that is left over.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(WORKER_GRACE_S))


def _to_bytes(tensor: torch.Tensor) -> tuple[NDArray[np.uint8], torch.dtype, torch.Size]:
    return tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _from_bytes(packed: tuple[NDArray[np.uint8], torch.dtype, torch.Size]) -> torch.Tensor:
    array, dtype, shape = packed
    return torch.from_numpy(array).view(dtype).reshape(shape)
