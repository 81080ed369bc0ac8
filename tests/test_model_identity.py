"""What identifies an encoder: its tensors and what its configuration makes of them, no more."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bake_builders import copy_model, tiny_model
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTokenizer

import precompute.model
from precompute.model import ModelParts, downscale_of, open_model
from store_format.errors import PrebakeError

VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(autouse=True)
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_model(tmp_path / "model")


def identities(model: Path) -> tuple[str, str, str]:
    """Return the identities of VAE, text encoder and tokenizer."""
    encoders = open_model(str(model)).encoders
    return encoders.vae.identity, encoders.text[0].identity, encoders.text[0].tokenizer_identity


def changed(model: Path) -> tuple[bool, bool, bool]:
    """Say which identities differ from those of the unchanged model."""
    before, after = identities(tiny_model()), identities(model)
    return tuple(mine != theirs for mine, theirs in zip(before, after, strict=True))  # type: ignore[return-value]


NOTHING, VAE_ONLY = (False, False, False), (True, False, False)
TEXT_ONLY, TOKENIZER_ONLY = (False, True, False), (False, False, True)


def edit_config(model: Path, part: str, **values: Any) -> None:
    file = model / part / "config.json"
    config = json.loads(file.read_text())
    config.update({k: v for k, v in values.items() if v is not ...})
    for key in [k for k, v in values.items() if v is ...]:
        del config[key]
    file.write_text(json.dumps(config))


def edit_tensors(
    file: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def renamed(rules: dict[str, str]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            for old, new in rules.items():
                name = name.replace(old, new)
            result[name] = tensor
        return result

    return change


class TestSameIdentity:
    def test_a_copy(self, model: Path) -> None:
        assert changed(model) == NOTHING

    def test_what_the_installed_libraries_save_again(self, model: Path) -> None:
        for part, kind in (
            ("vae", AutoencoderKL),
            ("text_encoder", CLIPTextModel),
            ("tokenizer", CLIPTokenizer),
        ):
            kind.from_pretrained(model / part).save_pretrained(model / "again")
            shutil.rmtree(model / part)
            (model / "again").rename(model / part)
        assert changed(model) == NOTHING

    def test_other_file_names_paths_and_versions(self, model: Path) -> None:
        for part in ("vae", "text_encoder"):
            edit_config(model, part, _name_or_path="/home/me/x", _diffusers_version="0.6.0")
            edit_config(model, part, transformers_version="4.30.0", torch_dtype="float16")
        (model / VAE).rename(model / "vae/diffusion_pytorch_model.fp16.safetensors")
        (model / TEXT).rename(model / "text_encoder/model.fp16.safetensors")
        assert changed(model) == NOTHING

    def test_defaults_that_an_older_version_did_not_write(self, model: Path) -> None:
        edit_config(
            model, "vae", force_upcast=..., use_quant_conv=..., use_post_quant_conv=...,
            mid_block_add_attention=..., latents_mean=..., latents_std=..., shift_factor=...,
        )  # fmt: skip
        edit_config(model, "text_encoder", hidden_act=..., layer_norm_eps=...)
        assert changed(model) == NOTHING

    def test_another_order_of_tensors_and_other_metadata(self, model: Path) -> None:
        for file in (VAE, TEXT):
            tensors = load_file(model / file)
            raw = {name: tensors[name] for name in sorted(tensors, reverse=True)}
            save_file(raw, model / file, metadata={"format": "pt", "note": "saved elsewhere"})
        assert changed(model) == NOTHING

    def test_attention_names_of_old_vaes(self, model: Path) -> None:
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        edit_tensors(model / VAE, renamed(old))
        assert any(".proj_attn." in name for name in load_file(model / VAE))
        assert changed(model) == NOTHING

    def test_a_text_model_nested_as_transformers_4_saved_it(self, model: Path) -> None:
        def nest(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            plain = {name.removeprefix("text_model."): t for name, t in tensors.items()}
            nested = {f"text_model.{name}": t for name, t in plain.items()}
            return nested | {"text_model.embeddings.position_ids": torch.arange(77)[None]}

        edit_tensors(model / TEXT, nest)
        assert changed(model) == NOTHING

    def test_a_changed_or_missing_decoder(self, model: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            tensors["decoder.conv_in.weight"] += 1
            del tensors["post_quant_conv.weight"]
            return tensors

        edit_tensors(model / VAE, change)
        edit_config(model, "vae", up_block_types=["UpDecoderBlock2D"], out_channels=4)
        assert changed(model) == NOTHING

    def test_a_tokenizer_in_one_file(self, model: Path) -> None:
        CLIPTokenizer.from_pretrained(model / "tokenizer").save_pretrained(model / "one")
        assert (model / "one/tokenizer.json").exists()
        for name in ("vocab.json", "merges.txt"):
            (model / "one" / name).unlink(missing_ok=True)
        shutil.rmtree(model / "tokenizer")
        (model / "one").rename(model / "tokenizer")
        assert changed(model) == NOTHING

    def test_a_changed_unet(self, model: Path) -> None:
        shutil.rmtree(model / "unet")
        assert changed(model) == NOTHING


class TestOtherIdentity:
    @pytest.mark.parametrize(
        "name",
        ["encoder.conv_in.bias", "quant_conv.weight", "encoder.mid_block.resnets.1.conv2.bias"],
    )
    def test_one_changed_number_of_the_vae(self, model: Path, name: str) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            flat = tensors[name].view(-1).view(torch.int32)
            flat[-1] ^= 1  # the last bit of the last number
            return tensors

        edit_tensors(model / VAE, change)
        assert changed(model) == VAE_ONLY

    def test_one_changed_number_of_the_text_encoder(self, model: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            name = next(n for n in tensors if n.endswith("token_embedding.weight"))
            tensors[name][3, 4] += 1e-3
            return tensors

        edit_tensors(model / TEXT, change)
        assert changed(model) == TEXT_ONLY

    def test_two_tensors_that_change_places(self, model: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            first = "encoder.down_blocks.0.resnets.0.conv1.weight"
            second = "encoder.down_blocks.0.resnets.0.conv2.weight"
            tensors[first], tensors[second] = tensors[second], tensors[first]
            return tensors

        edit_tensors(model / VAE, change)
        assert changed(model) == VAE_ONLY

    def test_another_name_for_a_tensor(self, model: Path) -> None:
        edit_tensors(model / VAE, renamed({"encoder.conv_in.bias": "encoder.conv_in.biaz"}))
        assert changed(model) == VAE_ONLY

    def test_the_same_bytes_as_another_dtype(self, model: Path, tmp_path: Path) -> None:
        other = copy_model(tmp_path / "other")
        edit_tensors(model / VAE, lambda tensors: {k: t.half() for k, t in tensors.items()})
        edit_tensors(
            other / VAE,
            lambda tensors: {k: t.half().view(torch.bfloat16) for k, t in tensors.items()},
        )
        assert identities(model)[0] != identities(other)[0]

    def test_another_dtype(self, model: Path) -> None:
        for file in (VAE, TEXT):
            edit_tensors(model / file, lambda tensors: {k: t.half() for k, t in tensors.items()})
        assert changed(model) == (True, True, False)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("act_fn", "relu"), ("norm_num_groups", 8), ("layers_per_block", 2),
            ("block_out_channels", [8, 8, 8, 16]), ("use_quant_conv", False),
            ("mid_block_add_attention", False), ("latent_channels", 8),
        ],
    )  # fmt: skip
    def test_an_output_changing_key_of_the_vae(self, model: Path, key: str, value: Any) -> None:
        edit_config(model, "vae", **{key: value})
        assert changed(model) == VAE_ONLY

    @pytest.mark.parametrize(
        ("key", "value"),
        [("hidden_act", "gelu"), ("num_attention_heads", 2), ("layer_norm_eps", 1e-6)],
    )
    def test_an_output_changing_key_of_the_text_encoder(
        self, model: Path, key: str, value: Any
    ) -> None:
        edit_config(model, "text_encoder", **{key: value})
        assert changed(model) == TEXT_ONLY

    def test_scaling_is_a_fact_beside_the_identity(self, model: Path) -> None:
        edit_config(model, "vae", scaling_factor=0.13025, shift_factor=0.5)
        assert changed(model) == NOTHING
        facts = open_model(str(model)).encoders.vae
        assert (facts.scaling_factor, facts.shift_factor) == (0.13025, 0.5)

    def test_another_vocabulary(self, model: Path) -> None:
        file = model / "tokenizer/vocab.json"
        vocab = json.loads(file.read_text())
        vocab["cat</w>"], vocab["dog</w>"] = vocab["dog</w>"], vocab["cat</w>"]
        file.write_text(json.dumps(vocab))
        assert changed(model) == TOKENIZER_ONLY

    def test_other_merges(self, model: Path) -> None:
        file = model / "tokenizer/merges.txt"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[:-1]) + "\n")
        assert changed(model) == TOKENIZER_ONLY


def test_facts_are_read_from_the_configurations(model: Path) -> None:
    edit_config(model, "vae", scaling_factor=..., shift_factor=...)
    scheduler = model / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps({"prediction_type": "v_prediction"}))
    parts = open_model(str(model))
    assert parts.encoders.vae.scaling_factor == 0.18215
    assert parts.encoders.vae.shift_factor == 0.0
    assert parts.encoders.vae.latent_channels == 4
    assert parts.encoders.text[0].width == 32
    assert (parts.max_token_length, parts.num_text_layers) == (77, 3)
    assert parts.base.prediction_type == "v_prediction"
    assert parts.base.num_train_timesteps == 1000
    assert downscale_of(model) == 8


class TestMemory:
    def count(self, model: Path) -> int:
        with (
            mock.patch.object(
                precompute.model, "_identity", wraps=precompute.model._identity
            ) as vae_or_text,
            mock.patch.object(
                precompute.model, "_tokenizer_identity", wraps=precompute.model._tokenizer_identity
            ) as tokenizer,
        ):
            open_model(str(model))
        return vae_or_text.call_count + tokenizer.call_count

    def test_nothing_is_hashed_twice(self, model: Path, empty_memory: Path) -> None:
        assert self.count(model) == 3
        assert self.count(model) == 0
        assert len(list((empty_memory / "prebake/identities").iterdir())) == 3

    @pytest.mark.parametrize("name", [VAE, TEXT, "vae/config.json", "tokenizer/vocab.json"])
    def test_a_file_of_another_time_or_size_is_hashed_again(self, model: Path, name: str) -> None:
        self.count(model)
        os.utime(model / name, ns=(0, 1_700_000_000_000_000_001))
        assert self.count(model) == 1
        file = model / name
        status = file.stat()
        file.write_bytes(file.read_bytes() + b" ")
        os.utime(file, ns=(0, status.st_mtime_ns))
        assert self.count(model) == 1

    def test_a_memory_that_cannot_be_written_only_costs_time(
        self, model: Path, empty_memory: Path
    ) -> None:
        empty_memory.write_text("a file where a folder should be")
        assert self.count(model) == 3
        assert self.count(model) == 3

    def test_a_damaged_memory_is_hashed_anew(self, model: Path, empty_memory: Path) -> None:
        before = identities(model)
        for file in (empty_memory / "prebake/identities").iterdir():
            file.write_bytes(b"\xff" + file.read_bytes()[:10])
        assert identities(model) == before
        assert self.count(model) == 0


def breaks(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            if (model / name).is_dir():
                shutil.rmtree(model / name)
            else:
                (model / name).unlink()

    return change


def writes(name: str, data: bytes | str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes((model / name).read_bytes()[:num_bytes])

    return change


def pickles_only(model: Path) -> None:
    (model / VAE).rename(model / "vae/diffusion_pytorch_model.bin")


def config_is_a_folder(model: Path) -> None:
    (model / "vae/config.json").unlink()
    (model / "vae/config.json").mkdir()


def two_variants(model: Path) -> None:
    for name in ("fp16", "non_ema"):
        shutil.copy(model / VAE, model / f"vae/diffusion_pytorch_model.{name}.safetensors")
    (model / VAE).unlink()


INCOMPLETE = r"is not a complete diffusers model: "
_HEADER = b'{"quant_conv.a": {"dtype": "F32", "data_offsets": [-9, 0]}}'
NEGATIVE = len(_HEADER).to_bytes(8, "little") + _HEADER
BAD_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no vae": (breaks("vae"), INCOMPLETE + r"vae/config\.json is missing"),
    "no vae config": (breaks("vae/config.json"), INCOMPLETE + r"vae/config\.json is missing"),
    "no text encoder": (breaks("text_encoder"), INCOMPLETE + r"text_encoder/config\.json"),
    "no scheduler": (breaks("scheduler"), INCOMPLETE + r"scheduler/scheduler_config\.json"),
    "no tokenizer": (breaks("tokenizer"), INCOMPLETE + r"tokenizer/ needs vocab\.json and"),
    "no merges": (breaks("tokenizer/merges.txt"), INCOMPLETE + "tokenizer/ needs"),
    "no vae weights": (breaks(VAE), r"vae holds no weights .* folder is incomplete\."),
    "no text weights": (breaks(TEXT), r"text_encoder holds no weights"),
    "pickles only": (pickles_only, r"pytorch_model\.bin is a pickle, which prebake never loads"),
    "two variants": (two_variants, r"several weight files .*fp16.*non_ema.* Keep one of them\."),
    "truncated weights": (cut(VAE, -8), r"is not a whole safetensors file .*Copy the model again"),
    "half a header": (cut(TEXT, 100), "is not a whole safetensors file"),
    "seven bytes": (cut(VAE, 7), "is not a whole safetensors file"),
    "empty weights": (writes(VAE, b""), "is not a whole safetensors file"),
    "header is a list": (writes(VAE, b"\x02\0\0\0\0\0\0\0[]"), "is not a whole safetensors file"),
    "tensor is a number": (
        writes(VAE, b"\x07\0\0\0\0\0\0\0" + b'{"a":1}'), "is not a whole safetensors file",
    ),
    "negative offsets": (writes(VAE, NEGATIVE), "is not a whole safetensors file"),
    "header of 16 EiB": (writes(VAE, b"\xff" * 8 + b"{}"), "is not a whole safetensors file"),
    "config is no json": (writes("vae/config.json", "{"), r"vae/config\.json is not valid JSON"),
    "config is a list": (writes("vae/config.json", "[]"), "expected a JSON object"),
    "config is a folder": (config_is_a_folder, r"config\.json cannot be read \(Is a directory\)"),
    "vocabulary is no json": (
        writes("tokenizer/vocab.json", "{"), "does not load as a CLIP tokenizer",
    ),
    "sdxl": (lambda model: (model / "text_encoder_2").mkdir(), r"two text encoders \(SDXL\)"),
    "other text encoder": (
        lambda model: edit_config(model, "text_encoder", architectures=["T5EncoderModel"]),
        r"text_encoder is a T5EncoderModel; prebake bakes CLIPTextModel so far\.",
    ),
    "other vae": (
        lambda model: edit_config(model, "vae", _class_name="AutoencoderTiny"),
        r"vae is a AutoencoderTiny; prebake bakes AutoencoderKL so far\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_a_model_that_cannot_be_used_is_an_error_of_one_line(
    model: Path, change: Callable[[Path], None], message: str
) -> None:
    change(model)
    with pytest.raises(PrebakeError, match=message) as caught:
        open_model(str(model))
    assert "\n" not in str(caught.value)
    assert str(model) in str(caught.value)


def test_a_plain_file_is_preferred_to_variants(model: Path) -> None:
    shutil.copy(model / VAE, model / "vae/diffusion_pytorch_model.fp16.safetensors")
    (model / "vae/notes.safetensors").write_bytes(b"not weights of this part")
    assert changed(model) == NOTHING


class TestHub:
    """Through a local hub cache, laid out as huggingface_hub lays it out; no network."""

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        cache = tmp_path / "hub"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return cache

    def store(self, hub: Path, owner: str, name: str) -> Path:
        revision = "0123456789abcdef0123456789abcdef01234567"
        folder = hub / f"models--{owner}--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text(revision)
        return copy_model(folder / "snapshots" / revision)

    def test_a_hub_id_finds_the_model_in_the_cache(self, hub: Path) -> None:
        self.store(hub, "someone", "tiny-sd")
        parts: ModelParts = open_model("someone/tiny-sd")
        assert parts.folder.is_relative_to(hub)
        assert parts.encoders == open_model(str(tiny_model())).encoders

    def test_a_model_that_the_cache_lacks_is_an_error_of_one_line(self, hub: Path) -> None:
        with pytest.raises(PrebakeError, match=r"model someone/other: no such folder, and the hub"):
            open_model("someone/other")

    def test_a_part_that_the_cache_lacks_is_an_error_of_one_line(self, hub: Path) -> None:
        snapshot = self.store(hub, "someone", "tiny-sd")
        shutil.rmtree(snapshot / "vae")
        with pytest.raises(PrebakeError, match=INCOMPLETE + r"vae/config\.json is missing"):
            open_model("someone/tiny-sd")

    @pytest.mark.parametrize("name", ["no//such", "a/b/c", "-bad-/name", "\0"])
    def test_a_name_that_cannot_be_a_hub_id_is_an_error_of_one_line(
        self, hub: Path, name: str
    ) -> None:
        with pytest.raises(PrebakeError, match="no such folder, and the hub"):
            open_model(name)

    def test_only_what_a_bake_needs_is_downloaded(self, hub: Path) -> None:
        with mock.patch("huggingface_hub.snapshot_download", return_value=tiny_model()) as download:
            open_model("someone/tiny-sd")
        patterns = download.call_args.kwargs["allow_patterns"]
        from huggingface_hub.utils import filter_repo_objects

        wanted = ["vae/config.json", VAE, "vae/diffusion_pytorch_model.fp16.safetensors", TEXT]
        wanted += ["text_encoder/config.json", "tokenizer/merges.txt", "tokenizer/vocab.json"]
        wanted += ["scheduler/scheduler_config.json", "text_encoder_2/config.json"]
        refused = ["unet/diffusion_pytorch_model.safetensors", "v1-5-pruned.safetensors"]
        refused += ["vae/diffusion_pytorch_model.bin", "text_encoder_2/model.safetensors"]
        refused += ["safety_checker/model.safetensors", "text_encoder/flax_model.msgpack"]
        found = list(filter_repo_objects(wanted + refused, allow_patterns=patterns))
        assert found == wanted
