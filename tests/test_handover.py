import gc
import os

import numpy as np
import pytest
import torch

from train.handover import ALIGNMENT_BYTES, Places

ODD = {
    "mask": torch.arange(7, dtype=torch.uint8).view(1, 7),
    "latents": torch.randn(1, 3, 5, dtype=torch.bfloat16),
    "states": torch.tensor([0.5]),
}


def leave(places, place, tensors):
    """Leave tensors in a place, as a process does that reads; return their spans."""
    allocate, spans = places.allocator(place), []
    for tensor in tensors:
        copy = torch.from_numpy(allocate(tensor.nbytes)).view(tensor.dtype).view(tensor.shape)
        spans.append(places.span(place, copy.copy_(tensor)))
    return spans


def test_tensors_of_odd_sizes_come_back_as_they_were():
    places = Places(2, 3 * ALIGNMENT_BYTES)  # 7, 30 and 4 bytes
    spans = leave(places, places.free.pop(), ODD.values())
    assert [start for start, *_ in spans] == [0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]
    for found, tensor in zip(places.take(1, spans), ODD.values(), strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_a_place_is_free_again_when_nobody_holds_a_tensor_of_it():
    places = Places(2, 2 * ALIGNMENT_BYTES)
    spans = leave(places, places.free.pop(), [torch.ones(4), torch.zeros(4)])
    first, second = places.take(1, spans)
    assert list(places.free) == [0]
    view, array = first[1:], second.numpy()
    del first, second
    gc.collect()
    assert list(places.free) == [0]
    del view
    assert list(places.free) == [0]
    assert not array.any()
    del array
    assert list(places.free) == [0, 1]


def test_the_last_place_is_handed_over_as_a_copy():
    places = Places(2, ALIGNMENT_BYTES)
    held = [places.take(places.free.pop(), leave(places, 1 - n, [torch.ones(4)])) for n in range(2)]
    assert list(places.free) == [0]
    leave(places, 0, [torch.zeros(4)])
    assert all(torch.equal(tensor, torch.ones(4)) for (tensor,) in held)


def test_a_forked_process_leaves_what_its_parent_takes():
    places = Places(2, ALIGNMENT_BYTES)
    spans = leave(places, places.free.pop(), [torch.zeros(4)])
    places.view(0, (2, 1, 3))[:] = -5
    child = os.fork()
    if child == 0:
        asked = (places.view(0, (2, 1, 3)) == -5).all()
        leave(places, 1, [torch.ones(4)])
        os._exit(0 if asked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(places.take(1, spans)[0], torch.ones(4))


def test_what_does_not_fit_is_refused():
    places = Places(2, 1)  # rounded up to a page
    allocate = places.allocator(0)
    allocate(1)
    with pytest.raises(AssertionError, match="larger than its place"):
        allocate(1 << 20)
    with pytest.raises(AssertionError, match="outside of its place"):
        places.span(0, torch.from_numpy(np.zeros(4)))
    with pytest.raises(AssertionError, match="outside of its place"):
        places.span(0, torch.from_numpy(places.allocator(1)(4)))
