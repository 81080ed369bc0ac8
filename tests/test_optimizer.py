import json
import sys
import types

import pytest
import safetensors.torch
import torch
from diffusers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from hypothesis import given
from hypothesis import strategies as st

from store_format.errors import PrebakeError
from train.optimizer import (
    learning_rate_factor,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)

NAMES = ["adamw", "adamw8bit"]


def parameters(widths=(80, 8, 96)):
    """Three matrices; 64 x 80 and 64 x 96 are large enough for an 8-bit state."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(64, width, generator=generator)) for width in widths]


def take_steps(optimizer, params, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_adamw_takes_the_step_of_the_paper():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer("adamw", [parameter], lr=0.1, weight_decay=0.01)
    parameter.grad = torch.tensor([3.0])
    optimizer.step()
    # Decay 2 * (1 - 0.1 * 0.01); then 0.1 * m / sqrt(v), which is 0.1 in the first step.
    assert parameter.item() == pytest.approx(2 * 0.999 - 0.1, rel=1e-6)


def test_adamw8bit_follows_adamw_and_keeps_large_states_in_8_bits():
    ours, reference = parameters(), parameters()
    eight = make_optimizer("adamw8bit", ours, lr=1e-2)
    take_steps(eight, ours, range(5))
    take_steps(make_optimizer("adamw", reference, lr=1e-2), reference, range(5))
    for start, mine, theirs in zip(parameters(), ours, reference, strict=True):
        moved = (theirs - start).abs().mean()
        assert (mine - theirs).abs().mean() < 0.1 * moved
    tensors, _ = optimizer_tensors(eight)
    dtypes = {name.split("/")[0]: t.dtype for name, t in tensors.items() if "state1" in name}
    assert dtypes == {"0": torch.uint8, "1": torch.float32, "2": torch.uint8}


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_optimizer_continues_bit_for_bit(name, tmp_path):
    unbroken = parameters()
    optimizer = make_optimizer(name, unbroken, lr=1e-2)
    take_steps(optimizer, unbroken, range(3))
    tensors, meta = optimizer_tensors(optimizer)
    safetensors.torch.save_file(tensors, tmp_path / "optimizer.safetensors")
    text = json.dumps(meta)
    stopped = [torch.nn.Parameter(p.detach().clone()) for p in unbroken]
    take_steps(optimizer, unbroken, range(3, 8))

    resumed = make_optimizer(name, stopped, lr=9.0)  # the saved learning rate must win
    loaded = safetensors.torch.load_file(tmp_path / "optimizer.safetensors")
    load_optimizer_tensors(resumed, loaded, json.loads(text))
    take_steps(resumed, stopped, range(3, 8))
    for first, second in zip(unbroken, stopped, strict=True):
        assert torch.equal(first, second)
    end, end_meta = optimizer_tensors(optimizer)
    again, again_meta = optimizer_tensors(resumed)
    assert json.dumps(end_meta) == json.dumps(again_meta)
    assert end.keys() == again.keys()
    for key, tensor in end.items():
        assert tensor.dtype == again[key].dtype
        assert torch.equal(tensor, again[key])


@pytest.mark.parametrize("name", NAMES)
def test_taking_the_state_apart_does_not_change_what_follows(name):
    watched, alone = parameters(), parameters()
    optimizer = make_optimizer(name, watched, lr=1e-2)
    take_steps(optimizer, watched, range(2))
    tensors, meta = optimizer_tensors(optimizer)
    for tensor in tensors.values():
        tensor.zero_()
    meta["param_groups"].clear()
    take_steps(optimizer, watched, range(2, 4))
    take_steps(make_optimizer(name, alone, lr=1e-2), alone, range(4))
    for first, second in zip(watched, alone, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_optimizer_can_be_saved_and_loaded(name):
    params = parameters()
    tensors, meta = optimizer_tensors(make_optimizer(name, params, lr=1e-2))
    assert tensors == {}
    load_optimizer_tensors(make_optimizer(name, params, lr=1e-2), tensors, meta)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", [(80, 8), (80, 8, 95)])
def test_a_state_of_other_parameters_is_refused(name, widths):
    params = parameters()
    optimizer = make_optimizer(name, params, lr=1e-2)
    take_steps(optimizer, params, range(1))
    tensors, meta = optimizer_tensors(optimizer)
    with pytest.raises(PrebakeError, match="optimizer state is of 3 parameters, this run has"):
        load_optimizer_tensors(make_optimizer(name, parameters(widths), lr=1e-2), tensors, meta)


def test_a_bitsandbytes_that_fails_is_reported_with_interpreter_and_place(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("libbitsandbytes_cuda130.so: cannot open\nshared object file")

    broken = types.ModuleType("bitsandbytes.optim")
    broken.AdamW8bit = fails
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", broken)
    with pytest.raises(PrebakeError) as caught:
        make_optimizer("adamw8bit", parameters(), lr=1e-2)
    message = str(caught.value)
    assert "\n" not in message
    assert sys.executable in message
    assert "site-packages/bitsandbytes" in message
    assert f"torch {torch.__version__}" in message
    assert "libbitsandbytes_cuda130.so: cannot open shared object file" in message
    assert message.endswith("or set the optimizer to adamw.")


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(PrebakeError, match="optimizer 'lion' is not one of adamw, adamw8bit"):
        make_optimizer("lion", parameters(), lr=1e-2)


def reference_factors(schedule, warmup_steps, total_steps):
    """Learning rates of diffusers' schedule for a base rate of 1, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if schedule == "constant":
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup_steps)
    else:
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    factors = []
    for _ in range(total_steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 7), (3, 20), (20, 20), (30, 20)])
def test_the_schedule_is_that_of_the_usual_script(schedule, warmup_steps, total_steps):
    ours = [
        learning_rate_factor(
            step, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps
        )
        for step in range(total_steps)
    ]
    assert ours == pytest.approx(reference_factors(schedule, warmup_steps, total_steps), abs=1e-12)


def test_the_schedule_worked_by_hand():
    def cosine(step):
        return learning_rate_factor(step, schedule="cosine", warmup_steps=4, total_steps=12)

    assert [cosine(step) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert cosine(8) == pytest.approx(0.5)
    assert cosine(10) == pytest.approx(0.5 * (1 - 2**-0.5))
    assert cosine(12) == cosine(13) == cosine(1000) == 0.0


@given(st.sampled_from(["constant", "cosine"]), *[st.integers(0, 50)] * 3)
def test_a_factor_is_always_between_0_and_1(schedule, step, warmup_steps, total_steps):
    factor = learning_rate_factor(
        step, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps
    )
    assert 0.0 <= factor <= 1.0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(PrebakeError, match="schedule 'linear' is not one of constant, cosine"):
        learning_rate_factor(0, schedule="linear", warmup_steps=0, total_steps=1)
