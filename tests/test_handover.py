import os

import pytest
import torch

from train.handover import ALIGNMENT_BYTES, SharedPlaces

ODD = {
    "mask": torch.arange(7, dtype=torch.uint8).view(1, 7),
    "latents": torch.randn(1, 3, 5, dtype=torch.bfloat16),
    "weights": torch.tensor([0.5]),
}


def test_tensors_of_odd_sizes_come_back_as_they_were():
    places = SharedPlaces(1, 6 * ALIGNMENT_BYTES)
    first, end = places.leave(0, 0, ODD)
    assert end == 3 * ALIGNMENT_BYTES  # 7, 30 and 4 bytes
    second, end = places.leave(0, end, {name: tensor + 1 for name, tensor in ODD.items()})
    for number, spans in enumerate((first, second)):
        for name, tensor in places.take(0, spans).items():
            assert tensor.dtype == ODD[name].dtype
            assert torch.equal(tensor, ODD[name] + number)


def test_what_was_taken_stays_when_the_place_is_used_again():
    places = SharedPlaces(2, ALIGNMENT_BYTES)
    spans, _ = places.leave(1, 0, {"a": torch.ones(4)})
    taken = places.take(1, spans)
    for place in (0, 1):
        places.leave(place, 0, {"a": torch.zeros(4)})
    assert torch.equal(taken["a"], torch.ones(4))


def test_a_forked_process_leaves_what_its_parent_takes():
    places = SharedPlaces(1, ALIGNMENT_BYTES)
    spans, _ = places.leave(0, 0, {"a": torch.zeros(4)})
    child = os.fork()
    if child == 0:
        places.leave(0, 0, {"a": torch.ones(4)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(places.take(0, spans)["a"], torch.ones(4))


def test_a_step_larger_than_its_place_is_refused():
    places = SharedPlaces(2, 1)  # rounded up to a page
    with pytest.raises(AssertionError, match="larger than its place"):
        places.leave(0, 0, {"a": torch.zeros(1 << 20)})
