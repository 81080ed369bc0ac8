import math

import pytest
import torch
from tiny_models import make_tiny_sd
from torch import nn

from store_format.errors import PrebakeError
from train.lora import (
    TARGET_SETS,
    add_lora,
    check_every_adapter_has_gradient,
    load_lora_weights_into,
    lora_warnings,
    lora_weights,
    matching_modules,
    trainable_parameters,
)
from train.lora_files import LoraPair
from train.unet import load_unet

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_sd(tmp_path_factory.mktemp("lora") / "model"))


def adapted(model, *, dtype=torch.float32, rank=4, alpha=2.0, target_modules="attn", seed=0):
    unet = load_unet(model, dtype, CPU)
    add_lora(unet, rank=rank, alpha=alpha, target_modules=target_modules, seed=seed)
    return unet


def forward(unet, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 8, 8, generator=generator).to(dtype)
    text = torch.randn(2, 77, 32, generator=generator).to(dtype)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return unet(latents, torch.tensor([3, 500]), text).sample


def test_attn_adapts_the_four_projections_of_every_attention(model):
    unet = load_unet(model, torch.float32, CPU)
    blocks = ["down_blocks.0.attentions.0", "mid_block.attentions.0"]
    blocks += ["up_blocks.1.attentions.0", "up_blocks.1.attentions.1"]
    expected = sorted(
        f"{block}.transformer_blocks.0.{attention}.{projection}"
        for block in blocks
        for attention in ("attn1", "attn2")
        for projection in ("to_q", "to_k", "to_v", "to_out.0")
    )
    assert list(add_lora(unet, rank=4, alpha=4, target_modules="attn", seed=0)) == expected


def test_the_conv_set_reaches_every_linear_and_conv_of_the_blocks_but_the_time_projections(model):
    unet = load_unet(model, torch.float32, CPU)
    found = matching_modules(unet, "attn+ff+proj+conv")
    everything = {
        path
        for path, module in unet.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and "blocks" in path.replace("mid_block", "blocks")
    }
    assert everything - set(found) == {path for path in everything if "time_emb_proj" in path}


def test_targets_match_whole_names_from_the_end(model):
    unet = load_unet(model, torch.float32, CPU)
    assert matching_modules(unet, "conv_in") == ("conv_in",)
    assert all(p.endswith(".attn2.to_k") for p in matching_modules(unet, "attn2.to_k"))
    # "proj" is ff.net.0.proj, not time_emb_proj, whose last name only ends in it
    assert {p.rsplit(".", 2)[-2] for p in matching_modules(unet, "proj")} == {"0"}
    both = matching_modules(unet, "to_q, to_k")
    assert len(both) == 16
    assert list(both) == sorted(both)


def test_a_target_that_matches_nothing_is_named_with_the_suffixes_that_do(model):
    unet = load_unet(model, torch.float32, CPU)
    message = (
        r"LoRA target 'to_qq' matches no module of the U-Net\. Suffixes that do: conv, conv1, "
        r"conv2, conv_in, conv_out, conv_shortcut, linear_1, linear_2, net\.2, proj, proj_in, "
        r"proj_out, time_emb_proj, to_k, to_out\.0, to_q, to_v\."
    )
    with pytest.raises(PrebakeError, match=message):
        add_lora(unet, rank=4, alpha=4, target_modules="to_k,to_qq", seed=0)
    with pytest.raises(PrebakeError, match="LoRA target '' matches no module"):
        add_lora(unet, rank=4, alpha=4, target_modules="", seed=0)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1), (-1, 1), (4, 0), (4, -1), (4, math.nan)])
def test_a_rank_or_alpha_not_above_0_is_refused(model, rank, alpha):
    unet = load_unet(model, torch.float32, CPU)
    with pytest.raises(PrebakeError, match=f"LoRA rank {rank} and alpha {alpha}: both must be"):
        add_lora(unet, rank=rank, alpha=alpha, target_modules="attn", seed=0)


def test_unusual_settings_are_warned_of():
    assert lora_warnings(rank=16, alpha=16) == lora_warnings(rank=16, alpha=32) == []
    assert "alpha 64 is 4 times the rank 16" in lora_warnings(rank=16, alpha=64)[0]
    assert "rank 257 is above 256" in lora_warnings(rank=257, alpha=1)[0]


@pytest.mark.parametrize("target_modules", list(TARGET_SETS))
def test_a_fresh_adapter_changes_nothing(model, target_modules):
    with torch.no_grad():
        before = forward(load_unet(model, torch.float32, CPU))
        after = forward(adapted(model, target_modules=target_modules))
    assert torch.equal(before, after)


def test_the_adapter_adds_alpha_over_rank_times_b_a(model):
    unet = adapted(model, rank=4, alpha=2.0, target_modules="conv_in")
    pair = lora_weights(unet)["conv_in"]
    load_lora_weights_into(unet, {"conv_in": LoraPair(pair.lora_A, torch.ones_like(pair.lora_B))})
    latents = torch.randn(1, 4, 8, 8)
    base = unet.conv_in.base_layer
    delta = 2.0 / 4 * torch.einsum("rcij->cij", pair.lora_A)[None].expand(16, -1, -1, -1)
    expected = nn.functional.conv2d(latents, base.weight + delta, base.bias, padding=1)
    torch.testing.assert_close(unet.conv_in(latents), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_adapter_trains_and_it_is_fp32_whatever_the_base(model, dtype):
    unet = adapted(model, dtype=dtype)
    trainable = trainable_parameters(unet)
    assert [name for name, _ in trainable] == sorted(name for name, _ in trainable)
    assert len(trainable) == 2 * 32
    assert {parameter.dtype for _, parameter in trainable} == {torch.float32}
    base = [p for name, p in unet.named_parameters() if "lora_" not in name]
    assert {p.dtype for p in base} == {dtype}
    assert not any(p.requires_grad for p in base)


def test_a_starts_as_peft_starts_it_and_b_at_zero(model):
    pairs = lora_weights(adapted(model, rank=16))
    for pair in pairs.values():
        # kaiming uniform with a = sqrt(5): uniform within 1 / sqrt(fan_in)
        bound = 1 / math.sqrt(pair.lora_A.shape[1])
        assert 0.9 * bound < pair.lora_A.abs().max() <= bound
        assert pair.lora_A.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
        assert not pair.lora_B.any()


def test_the_start_depends_on_seed_and_path_only(model):
    torch.manual_seed(1)
    first = lora_weights(adapted(model, seed=5))
    torch.manual_seed(2)
    # other modules beside them, another dtype of the base, another global state
    second = lora_weights(
        adapted(model, seed=5, target_modules="attn+ff+proj+conv", dtype=torch.bfloat16)
    )
    other_seed = lora_weights(adapted(model, seed=6))
    for path, pair in first.items():
        assert torch.equal(pair.lora_A, second[path].lora_A)
        assert not torch.equal(pair.lora_A, other_seed[path].lora_A)
    starts = [pair.lora_A for pair in first.values() if pair.lora_A.shape == (4, 16)]
    assert len({tuple(start.flatten().tolist()) for start in starts}) == len(starts)


def test_adding_the_adapter_leaves_the_global_random_state_alone(model):
    unet = load_unet(model, torch.float32, CPU)
    before = torch.get_rng_state()
    add_lora(unet, rank=4, alpha=4, target_modules="attn+ff+proj+conv", seed=0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_adapter_learns_on_a_half_precision_base(model, dtype, checkpointing):
    unet = adapted(model, dtype=dtype, target_modules="attn+ff+proj+conv")
    if checkpointing:
        unet.enable_gradient_checkpointing()
    forward(unet, dtype).float().square().mean().backward()
    check_every_adapter_has_gradient(unet)
    for name, parameter in trainable_parameters(unet):
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
        assert bool(parameter.grad.any()) == ("lora_B" in name)  # A's is 0 while B is 0


def test_an_adapter_without_gradient_is_named(model):
    unet = adapted(model)
    with pytest.raises(PrebakeError, match=r"^64 adapter parameters got no gradient: down_blocks"):
        check_every_adapter_has_gradient(unet)
    forward(unet).mean().backward()
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.lora_B.default.weight.grad = None
    message = (
        r"1 adapter .* gradient: mid_block\S+attn2\.to_k\.lora_B\.default\.weight\. Use non-re"
    )
    with pytest.raises(PrebakeError, match=message):
        check_every_adapter_has_gradient(unet)


def test_a_trainable_base_or_a_half_precision_adapter_is_refused(model):
    unet = adapted(model)
    unet.conv_in.weight.requires_grad_(True)
    with pytest.raises(PrebakeError, match=r"1 parameters of the base .* \['conv_in.weight'\]"):
        trainable_parameters(unet)
    with pytest.raises(PrebakeError, match="64 adapter parameters are not fp32"):
        trainable_parameters(adapted(model).to(torch.bfloat16))
    with pytest.raises(PrebakeError, match="and 0 of the adapter"):
        trainable_parameters(load_unet(model, torch.float32, CPU))


def test_weights_are_sorted_copies_that_restore_exactly(model):
    trained = adapted(model)
    with torch.no_grad():
        for _, parameter in trainable_parameters(trained):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    pairs = lora_weights(trained)
    assert list(pairs) == sorted(pairs)
    fresh = adapted(model, seed=9)
    load_lora_weights_into(fresh, pairs)
    with torch.no_grad():
        assert torch.equal(forward(trained), forward(fresh))
        for _, parameter in trainable_parameters(trained):
            parameter.zero_()
    assert all(pair.lora_B.any() for pair in pairs.values())


def test_weights_of_another_adapter_are_refused_and_nothing_changes(model):
    unet = adapted(model, rank=4)
    before = lora_weights(unet)
    with pytest.raises(PrebakeError, match="32 LoRA modules differ from the adapter"):
        load_lora_weights_into(unet, lora_weights(adapted(model, rank=8)))
    partial = dict(list(before.items())[1:])
    with pytest.raises(PrebakeError, match=r"1 LoRA modules differ .* found None, expected"):
        load_lora_weights_into(unet, partial)
    for path, pair in lora_weights(unet).items():
        assert torch.equal(pair.lora_A, before[path].lora_A)


def test_a_wrapped_unet_gives_the_same_module_paths(model):
    unet = adapted(model)
    wrapper = nn.Module()
    wrapper.module = unet  # as DistributedDataParallel names it
    compiled = nn.Module()
    compiled._orig_mod = wrapper  # as torch.compile does
    assert list(lora_weights(compiled)) == list(lora_weights(unet))
