import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from tiny_models import make_tiny_sd

from store_format.errors import PrebakeError
from train import attention
from train.attention import choose_attention
from train.lora import add_lora, check_every_adapter_has_gradient, trainable_parameters
from train.unet import load_unet

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_sd(tmp_path_factory.mktemp("attention") / "model"))


@pytest.fixture
def unet(model):
    unet = load_unet(model, torch.float32, CPU)
    add_lora(unet, rank=4, alpha=4, target_modules="attn", seed=0)
    return unet


def choose(unet, mode, dtype=torch.float32):
    return choose_attention(
        unet, mode, latent_shape=(3, 4, 8, 12), text_shape=(3, 77, 32), dtype=dtype, device=CPU
    )


def processors(unet):
    return {type(processor) for processor in unet.attn_processors.values()}


def replace_xformers(monkeypatch, processor):
    """Put a processor of the test's in the place of xformers."""
    monkeypatch.setitem(attention.CANDIDATES, "xformers", processor)
    monkeypatch.setattr(attention, "XFORMERS_PROBLEM", None)


class ExactAttention(AttnProcessor):
    """Stands for an xformers that works."""


class SignFlippedAttention(AttnProcessor):
    """Stands for a kernel with wrong results."""

    def __call__(self, *args, **kwargs):
        return -super().__call__(*args, **kwargs)


class WrongBackwardAttention(AttnProcessor):
    """Stands for a kernel that is right forward and wrong backward."""

    def __call__(self, *args, **kwargs):
        output = super().__call__(*args, **kwargs)
        return output.detach() + 0.5 * (output - output.detach())


class NanAttention(AttnProcessor):
    """Stands for a kernel that gives nan for one head size."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        output = super().__call__(attn, hidden_states, *args, **kwargs)
        return output * float("nan") if hidden_states.shape[-1] == 24 else output


class UnsupportedAttention(AttnProcessor):
    """Stands for a kernel that is missing."""

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("No operator found for this input:\n     query  shape=(3, 96, 8)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_works_on_the_cpu_in_every_dtype(model, dtype):
    unet = load_unet(model, dtype, CPU)
    add_lora(unet, rank=4, alpha=4, target_modules="attn", seed=0)
    unet.set_attn_processor(AttnProcessor())
    choice = choose(unet, "sdpa", dtype)
    assert choice.name == "sdpa"
    assert "agrees with the math kernel on 4 shapes" in choice.reason
    assert processors(unet) == {AttnProcessor2_0}


def test_auto_falls_back_to_sdpa_and_says_why_in_one_line(unet):
    choice = choose(unet, "auto")
    assert choice.name == "sdpa"
    assert choice.reason.startswith("xformers failed (")
    assert "; sdpa agrees with the math kernel" in choice.reason
    assert "\n" not in choice.reason
    assert processors(unet) == {AttnProcessor2_0}


def test_a_required_xformers_that_fails_is_an_error_with_the_reason(unet):
    before = processors(unet)
    with pytest.raises(
        PrebakeError, match=r"attention 'xformers' does not work .* on cpu"
    ) as caught:
        choose(unet, "xformers")
    assert "\n" not in str(caught.value)
    assert processors(unet) == before


def test_a_working_xformers_is_preferred(unet, monkeypatch):
    replace_xformers(monkeypatch, ExactAttention)
    assert choose(unet, "auto").name == "xformers"
    assert processors(unet) == {ExactAttention}


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (SignFlippedAttention, "xformers is wrong here .differs from the math kernel by 2.0e"),
        (WrongBackwardAttention, "xformers is wrong here .differs from the math kernel by 5.0e-01"),
        (NanAttention, r"xformers is wrong here .nan or inf at input \[3, 24, 24\]"),
        (UnsupportedAttention, "xformers failed .NotImplementedError: No operator found for this "),
    ],
)
def test_a_kernel_that_fails_or_lies_is_not_used(unet, monkeypatch, processor, reason):
    replace_xformers(monkeypatch, processor)
    with pytest.raises(PrebakeError, match=reason):
        choose(unet, "xformers")
    choice = choose(unet, "auto")
    assert choice.name == "sdpa"
    assert processors(unet) == {AttnProcessor2_0}


def test_the_trial_runs_the_whole_batch_of_each_real_shape(unet, monkeypatch):
    seen = set()

    class Recording(AttnProcessor):
        def __call__(self, attn, hidden, text=None, **kwargs):
            seen.add((attn.heads, tuple(hidden.shape), None if text is None else tuple(text.shape)))
            return super().__call__(attn, hidden, text, **kwargs)

    replace_xformers(monkeypatch, Recording)
    choose(unet, "xformers")
    # 8x12 latents: 96 positions of 16 channels, and 24 of 24 after one halving
    text = (3, 77, 32)
    assert seen == {
        (2, (3, 96, 16), None),
        (2, (3, 96, 16), text),
        (2, (3, 24, 24), None),
        (2, (3, 24, 24), text),
    }


def test_the_adapter_stays_active_under_the_chosen_attention(unet):
    choose(unet, "auto")
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)
    with torch.no_grad():
        before = unet(latents, 5, text).sample
    unet(latents, 5, text).sample.mean().backward()
    check_every_adapter_has_gradient(unet)
    with torch.no_grad():
        for name, parameter in trainable_parameters(unet):
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert not torch.allclose(before, unet(latents, 5, text).sample)


def test_the_trial_leaves_no_trace(unet):
    weights = {name: parameter.clone() for name, parameter in unet.named_parameters()}
    before = torch.get_rng_state()
    choose(unet, "auto")
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in unet.parameters())
    assert all(torch.equal(weights[name], p) for name, p in unet.named_parameters())
    assert not any(module._forward_pre_hooks for module in unet.modules())
