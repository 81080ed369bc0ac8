import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_sd

from store_format.errors import PrebakeError
from train.lora import TARGET_SETS, add_lora, load_lora_weights_into, lora_weights
from train.lora_files import (
    LoraPair,
    module_path,
    read_lora,
    save_diffusers_lora,
    save_kohya_lora,
)
from train.unet import load_unet

CPU = torch.device("cpu")
SAVE = {"diffusers": save_diffusers_lora, "kohya": save_kohya_lora}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_sd(tmp_path_factory.mktemp("lora_files") / "model")


def trained_unet(model, *, rank, alpha, target_modules):
    """An adapted U-Net whose adapter has moved: both factors are random."""
    unet = load_unet(str(model), torch.float32, CPU)
    add_lora(unet, rank=rank, alpha=alpha, target_modules=target_modules, seed=0)
    generator = torch.Generator().manual_seed(0)
    moved = {
        path: LoraPair(pair.lora_A, 0.3 * torch.randn(pair.lora_B.shape, generator=generator))
        for path, pair in lora_weights(unet).items()
    }
    load_lora_weights_into(unet, moved)
    return unet


def forward(unet):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 77, 32, generator=generator)
    with torch.no_grad():
        return unet(latents, torch.tensor([3, 500]), text).sample


def one_pair(value=1.0, rank=2):
    return {"mid_block.proj_in": LoraPair(torch.ones(rank, 3), torch.full((5, rank), value))}


def header(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("target_modules", list(TARGET_SETS))
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (4, 1), (3, 7)])
def test_diffusers_applies_the_file_as_the_training_did(
    model, tmp_path, layout, target_modules, rank, alpha
):
    trained = trained_unet(model, rank=rank, alpha=alpha, target_modules=target_modules)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    SAVE[layout](
        path, lora_weights(trained), rank=rank, alpha=alpha, dtype=torch.float32, metadata={}
    )
    pipeline = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    base = forward(pipeline.unet)
    pipeline.load_lora_weights(tmp_path)
    expected, found = forward(trained), forward(pipeline.unet)
    assert (expected - base).abs().max() > 0.05  # the LoRA does something
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def accepted_keys(unet):
    """List the keys ComfyUI and Forge take for a U-Net, and the weight each one changes.

    Source: lora-files.md, 3c: names `lora_unet_<path>`, `lycoris_<path>` (underscores) and
    `unet.<path>`; suffix families lora_up/lora_down (+ alpha) and lora_B/lora_A.
    """
    accepted = {}
    for path, module in unet.named_modules():
        if getattr(module, "weight", None) is None:
            continue
        flat = path.replace(".", "_")
        for name in (f"lora_unet_{flat}", f"lycoris_{flat}", f"unet.{path}"):
            for suffix in ("lora_up.weight", "lora_down.weight", "alpha"):
                accepted[f"{name}.{suffix}"] = path
            for suffix in ("lora_A.weight", "lora_B.weight"):
                accepted[f"{name}.{suffix}"] = path
    return accepted


@pytest.mark.parametrize("layout", SAVE)
def test_every_key_is_one_that_comfyui_and_forge_take_and_none_is_without_effect(
    model, tmp_path, layout
):
    unet = trained_unet(model, rank=4, alpha=2, target_modules="attn+ff+proj+conv")
    pairs = lora_weights(unet)
    path = tmp_path / "style.safetensors"
    SAVE[layout](path, pairs, rank=4, alpha=2, dtype=torch.float16, metadata={})
    accepted = accepted_keys(load_unet(str(model), torch.float32, CPU))
    tensors = load_file(path)
    assert [key for key in tensors if key not in accepted] == []
    assert {accepted[key] for key in tensors} == set(pairs)
    assert any("attn2" in key for key in tensors)  # InvokeAI tells the base model by it
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float16
        assert tensor.any(), key


def test_the_diffusers_layout_holds_the_scale_in_lora_b_and_says_alpha_is_the_rank(tmp_path):
    path = tmp_path / "cats.safetensors"
    save_diffusers_lora(
        path, one_pair(3.0), rank=2, alpha=1, dtype=torch.float32, metadata={"prebake.seed": "7"}
    )
    tensors = load_file(path)
    assert set(tensors) == {
        "unet.mid_block.proj_in.lora_A.weight",
        "unet.mid_block.proj_in.lora_B.weight",
    }
    assert torch.equal(tensors["unet.mid_block.proj_in.lora_A.weight"], torch.ones(2, 3))
    assert torch.equal(tensors["unet.mid_block.proj_in.lora_B.weight"], torch.full((5, 2), 1.5))
    metadata = header(path)[0]["__metadata__"]
    assert json.loads(metadata.pop("lora_adapter_metadata")) == {
        "unet.r": 2,
        "unet.lora_alpha": 2,
        "unet.target_modules": ["mid_block.proj_in"],
        "unet.rank_pattern": {},
    }
    assert metadata == {
        "format": "pt",
        "prebake.seed": "7",
        "ss_base_model_version": "sd_v1",
        "ss_v2": "False",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "cats",
        "modelspec.prediction_type": "epsilon",
    }


def test_the_kohya_layout_holds_alpha_and_the_metadata_programs_read(tmp_path):
    path = tmp_path / "cats.safetensors"
    save_kohya_lora(
        path, one_pair(3.0), rank=2, alpha=1.0, dtype=torch.float16, metadata={"ss_seed": "7"}
    )
    tensors = load_file(path)
    assert {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == {
        "lora_unet_mid_block_proj_in.alpha": ((), torch.float16),
        "lora_unet_mid_block_proj_in.lora_down.weight": ((2, 3), torch.float16),
        "lora_unet_mid_block_proj_in.lora_up.weight": ((5, 2), torch.float16),
    }
    assert tensors["lora_unet_mid_block_proj_in.alpha"] == 1
    assert (tensors["lora_unet_mid_block_proj_in.lora_up.weight"] == 3).all()
    metadata, data = header(path)[0]["__metadata__"], header(path)[1]
    # kohya's definitions: all bytes after the header; 64 KiB from 1 MiB on, here none.
    assert metadata.pop("sshs_model_hash") == hashlib.sha256(data).hexdigest()
    assert metadata.pop("sshs_legacy_hash") == "e3b0c442"
    assert metadata == {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "2",
        "ss_network_alpha": "1.0",
        "ss_network_args": "{}",
        "ss_output_name": "cats",
        "ss_seed": "7",
        "ss_base_model_version": "sd_v1",
        "ss_v2": "False",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "cats",
        "modelspec.prediction_type": "epsilon",
    }


def test_the_model_hash_does_not_change_with_metadata_a_user_edits(tmp_path):
    hashes = set()
    for title in ("one", "another"):
        path = tmp_path / "cats.safetensors"
        metadata = {"modelspec.title": title}
        save_kohya_lora(path, one_pair(), rank=2, alpha=1, dtype=torch.float32, metadata=metadata)
        found = header(path)[0]["__metadata__"]
        assert found["modelspec.title"] == title
        hashes.add((found["sshs_model_hash"], found["sshs_legacy_hash"]))
    assert len(hashes) == 1


def test_the_legacy_hash_is_of_64_kib_from_1_mib_on_with_training_metadata_only(tmp_path):
    pairs = {"conv_in": LoraPair(torch.rand(64, 3000), torch.rand(3000, 64))}
    path = tmp_path / "big.safetensors"
    save_kohya_lora(path, pairs, rank=64, alpha=1, dtype=torch.float32, metadata={})
    tensors, metadata = load_file(path), header(path)[0]["__metadata__"]
    training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    save_file(tensors, tmp_path / "kohya.safetensors", metadata=training)
    content = (tmp_path / "kohya.safetensors").read_bytes()
    assert len(content) > 0x110000
    expected = hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert metadata["sshs_legacy_hash"] == expected


def test_a_3x3_convolution_is_told_in_the_network_args(tmp_path):
    path = tmp_path / "conv.safetensors"
    pairs = {"conv_in": LoraPair(torch.ones(2, 4, 3, 3), torch.ones(8, 2, 1, 1))}
    save_kohya_lora(path, pairs, rank=2, alpha=1.5, dtype=torch.float32, metadata={})
    arguments = header(path)[0]["__metadata__"]["ss_network_args"]
    assert json.loads(arguments) == {"conv_dim": 2, "conv_alpha": 1.5}


@pytest.mark.parametrize(
    ("text_width", "prediction_type", "version", "v2", "architecture"),
    [
        (768, "epsilon", "sd_v1", "False", "stable-diffusion-v1/lora"),
        (768, "v_prediction", "sd_v1_v", "False", "stable-diffusion-v1/lora"),
        (1024, "epsilon", "sd_v2", "True", "stable-diffusion-v2-512/lora"),
        (1024, "v_prediction", "sd_v2_v", "True", "stable-diffusion-v2-768-v/lora"),
    ],
)
@pytest.mark.parametrize("layout", SAVE)
def test_the_type_markers_name_the_base_model(
    tmp_path, layout, text_width, prediction_type, version, v2, architecture
):
    path = tmp_path / "a.safetensors"
    pairs = {"mid_block.attn2.to_k": LoraPair(torch.ones(2, text_width), torch.ones(4, 2))}
    SAVE[layout](
        path,
        pairs,
        rank=2,
        alpha=2,
        dtype=torch.float32,
        metadata={},
        prediction_type=prediction_type,
    )
    metadata = header(path)[0]["__metadata__"]
    assert metadata["ss_base_model_version"] == version
    assert metadata["ss_v2"] == v2
    assert metadata["modelspec.architecture"] == architecture
    assert metadata["modelspec.prediction_type"] == ("v" if "v_" in prediction_type else "epsilon")


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize(
    "target_modules", [*TARGET_SETS, "conv_in,conv_out,linear_1,time_emb_proj"]
)
def test_what_was_written_is_read_back(model, tmp_path, layout, target_modules):
    pairs = lora_weights(trained_unet(model, rank=3, alpha=2, target_modules=target_modules))
    path = tmp_path / "a.safetensors"
    SAVE[layout](path, pairs, rank=3, alpha=2, dtype=torch.float32, metadata={"note": "é"})
    found = read_lora(path)
    assert found.layout == layout
    assert found.metadata["note"] == "é"
    assert list(found.pairs) == list(pairs)
    for module, pair in pairs.items():
        scaled = found.scales[module] * found.pairs[module].lora_B
        assert torch.equal(found.pairs[module].lora_A, pair.lora_A)
        torch.testing.assert_close(scaled, 2 / 3 * pair.lora_B)
    assert set(found.scales.values()) == ({1.0} if layout == "diffusers" else {2 / 3})


def test_a_kohya_file_without_alpha_and_a_peft_file_with_its_own_alpha_are_read_right(tmp_path):
    path = tmp_path / "a.safetensors"
    down, up = torch.ones(2, 3), torch.ones(4, 2)
    name = "lora_unet_mid_block_attentions_0_proj_in"
    save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, path)
    assert read_lora(path).scales == {"mid_block.attentions.0.proj_in": 1.0}
    tensors = {"unet.conv_in.lora_A.weight": down, "unet.conv_in.lora_B.weight": up}
    config = {"unet.r": 2, "unet.lora_alpha": 16}
    save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(config)})
    assert read_lora(path).scales == {"conv_in": 8.0}
    config["unet.use_rslora"] = True
    save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(PrebakeError, match=r"made with use_rslora, which is not supported"):
        read_lora(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["te.q.lora_A.weight"], r"1 keys are of neither layout \(first: \['te\.q\.lora_A\.weight"),
        (["unet.conv_in.lora_A.weight"], r"1 modules lack a factor \(first: \['conv_in'\]\)"),
        (["lora_unet_input_blocks_1_1_Q.alpha"], "is not named like a module of an SD 1.x U-Net"),
        ([], r"layouts found: \[\]\. Give a U-Net LoRA in the diffusers or kohya layout"),
    ],
)
def test_a_file_of_neither_layout_is_refused(tmp_path, keys, message):
    path = tmp_path / "a.safetensors"
    save_file({key: torch.ones(2, 2) for key in keys}, path)
    with pytest.raises(PrebakeError, match=message):
        read_lora(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(PrebakeError, match=r"LoRA file .* cannot be read .* Save it again\."):
        read_lora(path)


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (65504.0, torch.float16),
        (-70000.0, torch.float16),
        (float("nan"), torch.float32),
        (float("inf"), torch.float32),
        (float("-inf"), torch.bfloat16),
        (3.4e38, torch.bfloat16),
    ],
)
def test_a_value_the_dtype_cannot_hold_is_an_error_and_the_old_file_stays(
    tmp_path, layout, value, dtype
):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"the last good file")
    with pytest.raises(PrebakeError, match=r"mid_block.*\.lora_(B|up)\.weight has max \|w\| = "):
        SAVE[layout](path, one_pair(value), rank=2, alpha=2, dtype=dtype, metadata={})
    assert path.read_bytes() == b"the last good file"
    assert list(tmp_path.iterdir()) == [path]


def test_the_scale_counts_for_what_fits(tmp_path):
    path = tmp_path / "a.safetensors"
    pairs = one_pair(60000.0)
    save_kohya_lora(path, pairs, rank=2, alpha=4, dtype=torch.float16, metadata={})
    with pytest.raises(
        PrebakeError, match=r"has max \|w\| = 120000\.0, which torch\.float16 cannot"
    ):
        save_diffusers_lora(path, pairs, rank=2, alpha=4, dtype=torch.float16, metadata={})


def test_values_that_vanish_in_fp16_are_counted(tmp_path):
    path = tmp_path / "a.safetensors"
    pairs = {"conv_in": LoraPair(torch.ones(2, 3), torch.tensor([[1e-9, 0.0], [1.0, -1e-9]]))}
    saved = {"rank": 2, "alpha": 2, "metadata": {}}
    assert save_diffusers_lora(path, pairs, dtype=torch.float16, **saved) == 2
    assert save_diffusers_lora(path, pairs, dtype=torch.bfloat16, **saved) == 0


def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_kohya_lora(path, one_pair(1), rank=2, alpha=2, dtype=torch.float32, metadata={})
    before = path.read_bytes()

    def fails(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        save_kohya_lora(path, one_pair(2), rank=2, alpha=2, dtype=torch.float32, metadata={})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


SAVE_ONCE = """
import sys, torch
from pathlib import Path
from train.lora_files import LoraPair, save_kohya_lora
pairs = {name: LoraPair(torch.ones(2, 3), torch.ones(4, 2)) for name in ("b.x", "a.y")}
save_kohya_lora(
    Path(sys.argv[1]), pairs, rank=2, alpha=2, dtype=torch.float16,
    metadata={"ss_seed": "1", "note": "x"},
)
"""


def test_equal_weights_are_equal_files_in_every_process(tmp_path):
    contents = set()
    for hash_seed in ("1", "2"):
        path = tmp_path / hash_seed / "a.safetensors"
        path.parent.mkdir()
        subprocess.run(
            [sys.executable, "-c", SAVE_ONCE, str(path)],
            cwd=Path(__file__).parents[1],
            env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        contents.add(path.read_bytes())
    assert len(contents) == 1
    with safe_open(path, framework="pt") as file:  # and safetensors itself reads it
        assert file.metadata()["note"] == "x"


@pytest.mark.parametrize(
    "name",
    [
        "mid_block.attn.to_q",
        "base_model.model.mid_block.attn.to_q",
        "_orig_mod.mid_block.attn.to_q",
        "module._orig_mod.mid_block.attn.to_q",
        "module.base_model.model.mid_block.attn._orig_mod.to_q",
        "mid_block.attn.to_q.default",
        "mid_block.default.attn.to_q",
    ],
)
def test_names_are_stripped_of_wrappers(tmp_path, name):
    assert module_path(name) == "mid_block.attn.to_q"
    path = tmp_path / "a.safetensors"
    pairs = {name: LoraPair(torch.ones(2, 3), torch.ones(4, 2))}
    save_diffusers_lora(path, pairs, rank=2, alpha=2, dtype=torch.float32, metadata={})
    assert all(re.match(r"unet\.mid_block\.attn\.to_q\.lora_[AB]", key) for key in load_file(path))


def test_names_that_only_look_like_wrappers_are_kept():
    assert module_path("my_module.default_net.submodule.x") == "my_module.default_net.submodule.x"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({}, "0 pairs under 0 module paths"),
        (one_pair(rank=3), r"1 are not of rank 2 \(first: \['mid_block\.proj_in'\]\)"),
        (one_pair() | {f"module.{k}": v for k, v in one_pair().items()}, "2 pairs under 1 module"),
    ],
)
def test_pairs_that_are_not_one_adapter_are_refused(tmp_path, pairs, message):
    with pytest.raises(PrebakeError, match=message):
        save_kohya_lora(tmp_path / "a", pairs, rank=2, alpha=2, dtype=torch.float32, metadata={})
