import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import PNDMScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_sd, tiny_unet

from store_format.errors import PrebakeError
from train.unet import ModelFacts, load_noise_scheduler, load_unet, read_model_facts

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[1]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tmp_path):
    return make_tiny_sd(tmp_path / "model")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run_python(code, *arguments, **env):
    """Run code in a fresh interpreter and return (stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_facts_come_from_the_configuration_files(model):
    facts = read_model_facts(str(model))
    assert facts == ModelFacts(4, 32, "epsilon", 1000, 0.18215)


def test_the_facts_of_a_v_prediction_model_without_a_vae(tmp_path):
    model = make_tiny_sd(tmp_path, prediction_type="v_prediction", cross_attention_dim=48)
    shutil.rmtree(model / "vae")
    assert read_model_facts(str(model)) == ModelFacts(4, 48, "v_prediction", 1000, None)


def test_a_scheduler_without_prediction_type_means_epsilon(model):
    path = model / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    del config["prediction_type"]
    path.write_text(json.dumps(config))
    assert read_model_facts(str(model)).prediction_type == "epsilon"


def test_the_noise_scheduler_has_the_betas_of_the_folders_sampler(model):
    ours = load_noise_scheduler(str(model))
    theirs = PNDMScheduler.from_pretrained(model / "scheduler")
    assert torch.equal(ours.alphas_cumprod, theirs.alphas_cumprod)
    assert ours.config.prediction_type == "epsilon"


def test_the_unet_computes_what_diffusers_own_loading_does(model):
    ours = load_unet(str(model), torch.float32, CPU)
    theirs = UNet2DConditionModel.from_pretrained(model / "unet")
    latents, text = torch.randn(2, 4, 6, 10), torch.randn(2, 77, 32)
    with torch.no_grad():
        assert torch.equal(ours(latents, 7, text).sample, theirs(latents, 7, text).sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_unet_is_frozen_and_entirely_in_the_dtype_asked_for(model, dtype):
    unet = load_unet(str(model), dtype, CPU)
    stored = load_file(model / "unet" / WEIGHTS)
    assert {name: tensor.shape for name, tensor in unet.state_dict().items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    for name, parameter in unet.named_parameters():
        assert not parameter.requires_grad
        assert torch.equal(parameter, stored[name].to(dtype))
    assert not any(buffer.is_meta for buffer in unet.buffers())


def test_loading_leaves_the_global_random_state_alone(model):
    before = torch.get_rng_state()
    load_unet(str(model), torch.float32, CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_the_file_may_be_overwritten_after_loading(model):
    path = model / "unet" / WEIGHTS
    unet = load_unet(str(model), torch.float32, CPU)
    before = unet.conv_in.weight.clone()
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(unet.conv_in.weight, before)


def test_only_the_unet_and_the_scheduler_are_needed(model):
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.rmtree(model / part)
    (model / "model_index.json").unlink()
    load_unet(str(model), torch.float32, CPU)
    load_noise_scheduler(str(model))


def test_weights_in_several_files_are_read_through_their_index(model):
    path = model / "unet" / WEIGHTS
    tensors = load_file(path)
    path.unlink()
    weight_map = {}
    for i, names in enumerate([sorted(tensors)[::2], sorted(tensors)[1::2]], start=1):
        shard = f"diffusion_pytorch_model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, model / "unet" / shard)
        weight_map |= dict.fromkeys(names, shard)
    (model / "unet" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    unet = load_unet(str(model), torch.float32, CPU)
    assert torch.equal(unet.conv_in.weight, tensors["conv_in.weight"])


def remove_unet(model):
    shutil.rmtree(model / "unet")


def remove_weights(model):
    (model / "unet" / WEIGHTS).unlink()


def leave_pickles(model):
    (model / "unet" / WEIGHTS).rename(model / "unet" / "diffusion_pytorch_model.bin")


def leave_a_variant(model):
    (model / "unet" / WEIGHTS).rename(model / "unet" / "diffusion_pytorch_model.fp16.safetensors")


def cut_the_weights_short(model):
    path = model / "unet" / WEIGHTS
    os.truncate(path, path.stat().st_size - 100)


def drop_a_tensor(model):
    path = model / "unet" / WEIGHTS
    tensors = load_file(path)
    del tensors["conv_in.bias"]
    save_file(tensors, path)


def make_it_sdxl(model):
    edit_json(model / "unet" / "config.json", addition_embed_type="text_time")


def make_it_wider(model):
    edit_json(model / "unet" / "config.json", cross_attention_dim=64)


def break_the_json(model):
    (model / "unet" / "config.json").write_text("{")


LOAD_ERRORS = {
    remove_unet: "has no unet/config.json. A diffusers folder with unet/ and scheduler/ is",
    remove_weights: f"unet/ has no {WEIGHTS}. Download the model again.",
    leave_pickles: "only pickled weights .diffusion_pytorch_model.bin.* Convert them: load with",
    leave_a_variant: f"only diffusion_pytorch_model.fp16.safetensors, expected {WEIGHTS}. Copy",
    cut_the_weights_short: "is damaged or cut short .* Download the model again.",
    drop_a_tensor: "1 U-Net tensors do not fit .* conv_in.bias .found none, expected .16..",
    make_it_sdxl: "its U-Net takes 'text_time' embeddings .SDXL., which are not supported yet",
    make_it_wider: r"tensors do not fit .*attn2.to_k.weight .found .16, 32., expected .16, 64.",
    break_the_json: "unet/config.json cannot be read .* Download the model again.",
}


@pytest.mark.parametrize("damage", LOAD_ERRORS, ids=lambda damage: damage.__name__)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(model, damage):
    damage(model)
    with pytest.raises(PrebakeError, match=LOAD_ERRORS[damage]) as caught:
        load_unet(str(model), torch.float32, CPU)
    assert "\n" not in str(caught.value)
    assert str(model) in str(caught.value)


def test_facts_refuse_what_cannot_be_trained(model):
    edit_json(model / "scheduler" / "scheduler_config.json", prediction_type="sample")
    with pytest.raises(PrebakeError, match="prediction_type 'sample' of base model"):
        read_model_facts(str(model))
    shutil.rmtree(model / "scheduler")
    with pytest.raises(PrebakeError, match=r"has no scheduler/scheduler_config\.json"):
        read_model_facts(str(model))


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(PrebakeError, match="nowhere: no such folder"):
        read_model_facts(str(tmp_path / "nowhere"))
    (tmp_path / "sd.safetensors").write_bytes(b"")
    with pytest.raises(PrebakeError, match=r"is a file; a diffusers folder .* is needed"):
        read_model_facts(str(tmp_path / "sd.safetensors"))


TRAIN_FROM_THE_HUB = """
import sys, torch
from store_format.errors import PrebakeError
from train import attention, draws, lora, lora_files, objective, optimizer, unet

try:
    unet.read_model_facts("owner/absent")
except PrebakeError as error:
    assert "base model owner/absent: no such folder here, and the Hub gave none" in str(error)
    assert "\\n" not in str(error)
print(unet.read_model_facts("owner/tiny").cross_attention_dim)
model = unet.load_unet("owner/tiny", torch.float32, torch.device("cpu"))
lora.add_lora(model, rank=2, alpha=2, target_modules="attn", seed=0)
attention.choose_attention(
    model, "auto", latent_shape=(1, 4, 8, 8), text_shape=(1, 77, 32), dtype=torch.float32,
    device=torch.device("cpu"),
)
latents, text = torch.zeros(1, 4, 8, 8), torch.zeros(1, 77, 32)
scheduler = unet.load_noise_scheduler("owner/tiny")
timesteps = draws.draw_timesteps(0, 0, ["aa"], 1000)
noise = draws.draw_noise(0, 0, ["aa"], (4, 8, 8))
noisy, target = objective.noisy_latents_and_target(scheduler, latents, noise, timesteps)
objective.mse_loss(model(noisy, timesteps, text).sample, target)[1].backward()
params = [parameter for _, parameter in lora.trainable_parameters(model)]
optimizer.make_optimizer("adamw8bit", params, lr=1e-3).step()
for name in (
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.pipeline_utils",
    "precompute",
):
    assert name not in sys.modules, name
"""


def test_a_hub_id_is_read_from_the_cache_and_training_loads_no_other_model_code(tmp_path):
    cache = tmp_path / "hub" / "models--owner--tiny"
    snapshot = make_tiny_sd(cache / "snapshots" / ("0" * 40))
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.rmtree(snapshot / part)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    stdout, stderr = run_python(TRAIN_FROM_THE_HUB, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert stdout == "32\n"
    assert stderr == ""  # and in particular not the six lines of xformers


def test_an_xformers_that_cannot_be_imported_does_not_stop_the_unet(model, tmp_path):
    package = tmp_path / "broken" / "xformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.0.35'\n")
    (package / "ops.py").write_text("raise OSError('libcudart.so.13: cannot open\\nfile')\n")
    code = (
        "from train.unet import load_unet; from train.xformers_import import XFORMERS_PROBLEM\n"
        f"import torch; load_unet({str(model)!r}, torch.float32, torch.device('cpu'))\n"
        "print(XFORMERS_PROBLEM)"
    )
    stdout, _ = run_python(code, PYTHONPATH=str(tmp_path / "broken"))
    assert stdout == "cannot be imported (OSError: libcudart.so.13: cannot open file)\n"


MEASURE_PEAK = """
import re, sys, torch
from pathlib import Path
from train.unet import load_unet
def peak_bytes():  # not ru_maxrss, which a child inherits from its parent
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
load_unet(sys.argv[1], torch.bfloat16, torch.device("cpu"))  # imports and caches
baseline = peak_bytes()
unet = load_unet(sys.argv[2], getattr(torch, sys.argv[3]), torch.device("cpu"))
weights = sum(p.nbytes for p in unet.parameters())
print(weights, peak_bytes() - baseline)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_at_less_than_1_2_times_the_weights(model, tmp_path, dtype):
    large = tmp_path / "large"
    shutil.copytree(model / "scheduler", large / "scheduler")
    with torch.random.fork_rng(devices=[]):
        tiny_unet(256, (256, 512), layers_per_block=2).save_pretrained(large / "unet")
    stdout, _ = run_python(MEASURE_PEAK, str(model), str(large), dtype)
    weights_bytes, peak_bytes = map(int, stdout.split())
    assert weights_bytes > 100e6
    assert 0.9 * weights_bytes < peak_bytes < 1.2 * weights_bytes
