"""Tensors on their way from worker processes to the training process, through memory they share.

A pipe, as DataLoader uses it, copies a batch four times, in pieces of 64 KiB. Tensors in shared
memory of torch's take a file descriptor each, of which most systems allow 1024, or room in
/dev/shm, of which containers allow 64 MiB. Anonymous memory that forked workers inherit has no such
limit.
"""

import math
import mmap
from collections.abc import Mapping

import torch

ALIGNMENT_BYTES = 64

Spans = dict[str, tuple[int, torch.dtype, torch.Size]]
"""Where tensors were left: for each its first byte, its dtype and its shape."""


class SharedPlaces:
    """Places of equal size, each for the tensors of one step at a time."""

    def __init__(self, num_places: int, place_bytes: int) -> None:
        """Reserve the memory; the system provides it as it is used."""
        self.num_places = num_places
        self._place_bytes = -(-place_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, num_places * self._place_bytes)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def leave(
        self, place: int, start: int, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Spans, int]:
        """Copy tensors into a place, from byte `start` on; return their spans, and the end."""
        spans: Spans = {}
        for name, tensor in tensors.items():
            spans[name] = start, tensor.dtype, tensor.shape
            self._view(place, *spans[name]).copy_(tensor)
            start += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return spans, start

    def take(self, place: int, spans: Spans) -> dict[str, torch.Tensor]:
        """Return copies of tensors that were left; the place may then be used again."""
        return {name: self._view(place, *span).clone() for name, span in spans.items()}

    def _view(self, place: int, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        first, num_bytes = place * self._place_bytes + start, math.prod(shape) * dtype.itemsize
        assert start + num_bytes <= self._place_bytes, "a step is larger than its place"
        return self._bytes[first : first + num_bytes].view(dtype).view(shape)
