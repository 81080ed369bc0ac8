"""Tensors on their way from processes that read to the training process, in memory they share.

A pipe would copy a batch several times, in pieces of 64 KiB. Tensors in shared memory of torch's
take a file descriptor each, of which most systems allow 1024, or room in /dev/shm, of which
containers allow 64 MiB. Anonymous memory that forked processes inherit has no such limits.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from store_format.store import Allocate

ALIGNMENT_BYTES = 64

Span = tuple[int, torch.dtype, tuple[int, ...]]
"""Where a tensor lies in a place: its first byte, its dtype and its shape."""


class Places:
    """Memory for the tensors of one step in each of several places of equal size."""

    def __init__(self, num_places: int, place_bytes: int) -> None:
        """Reserve the memory; the system provides it as it is used."""
        self._place_bytes = -(-place_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, num_places * self._place_bytes)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data  # in forks too
        self.free = deque(range(num_places))

    def allocator(self, place: int) -> Allocate:
        """Return what hands out a place part by part, from its begin."""
        whole, used = self._whole(place), 0

        def allocate(num_bytes: int) -> NDArray[np.uint8]:
            nonlocal used
            assert used + num_bytes <= len(whole), "a step is larger than its place"
            part = whole[used : used + num_bytes]
            used += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return part

        return allocate

    def view(self, place: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return a place's begin as an array."""
        num_bytes = math.prod(shape) * 8
        return self._whole(place)[:num_bytes].view(np.int64).reshape(shape)

    def span(self, place: int, tensor: torch.Tensor) -> Span:
        """Return where a tensor lies that was made of a place's memory."""
        start = tensor.data_ptr() - self._address - place * self._place_bytes
        assert 0 <= start <= self._place_bytes - tensor.nbytes, "a tensor outside of its place"
        return start, tensor.dtype, tuple(tensor.shape)

    def take(self, place: int, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Return the tensors of a place. It is free again as soon as nobody holds one of them.

        They are copies if no other place is free, for the consumer holds all.
        """
        whole = self._whole(place)
        weakref.finalize(whole, self.free.append, place).atexit = False
        tensors = [  # each keeps `whole` alive
            torch.frombuffer(whole, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
            for start, dtype, shape in spans
        ]
        return tensors if self.free else [tensor.clone() for tensor in tensors]

    def _whole(self, place: int) -> NDArray[np.uint8]:
        return np.frombuffer(
            self._memory, np.uint8, count=self._place_bytes, offset=place * self._place_bytes
        )
