"""Which package may import what (the table of design.md, section 2), read and run."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tiny_models import make_tiny_sd
from train_builders import train_store

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wall:
    """What the files of a package may import: patterns of `module` or `module.name`."""

    allowed: str  # beside the standard library and the package itself
    forbidden: str  # wins
    only_in: dict[str, str]  # what one module has for itself


FRONT_DOOR = {"click": "commands.py", "prebake": "commands.py"}
WALLS = {
    "store_format": Wall(
        allowed="numpy pydantic yaml fsspec pyarrow duckdb google_crc32c tqdm",
        forbidden="precompute train sampling torch diffusers transformers peft",
        only_in={
            "zarr": "zarr_layout.py",
            "tensorstore": "tensorstore_layout.py",
            "webdataset": "webdataset_layout.py",
            **FRONT_DOOR,
        },
    ),
    "precompute": Wall(  # xformers: to import it before diffusers does, without its banner
        allowed="store_format numpy pydantic torch pyvips PIL pillow_heif diffusers transformers "
        "huggingface_hub xformers",
        forbidden="train sampling peft bitsandbytes diffusers.*UNet* diffusers.*Pipeline* "
        "diffusers.pipelines*",
        only_in=FRONT_DOOR,
    ),
    "train": Wall(
        allowed="store_format numpy pydantic torch diffusers peft accelerate safetensors "
        "bitsandbytes xformers huggingface_hub matplotlib",
        forbidden="precompute sampling pyvips PIL *AutoencoderKL* diffusers.*Pipeline* "
        "diffusers.pipelines* diffusers.training_utils* diffusers.models.autoencoders* "
        "transformers.models.clip* transformers.models.t5* *.CLIP* *.T5*",
        only_in=FRONT_DOOR,
    ),
    "sampling": Wall(  # the only one that holds a whole pipeline
        allowed="store_format.errors store_format.progress train.xformers_import precompute.device "
        "precompute.model numpy torch diffusers transformers safetensors PIL matplotlib",
        forbidden="",
        only_in=FRONT_DOOR,
    ),
}


def imports(source, package):
    """Yield `module` or `module.name` for all that a source file imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = [package] if node.level == 1 else []  # the packages are flat
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            if function in ("importlib.import_module", "import_module", "__import__"):
                argument = node.args[0]
                assert isinstance(argument, ast.Constant), f"imports {ast.unparse(argument)}"
                yield argument.value


def matches(imported, patterns):
    return any(fnmatch(imported, p) or imported.startswith(f"{p}.") for p in patterns)


def breaches(package, file_name, source):
    """List what a file of a package imports through the wall."""
    wall = WALLS[package]
    mine = [top for top, owner in wall.only_in.items() if owner == file_name]
    allowed = [*wall.allowed.split(), *mine, package, *sys.stdlib_module_names]
    return [
        imported
        for imported in imports(source, package)
        if not matches(imported, allowed) or matches(imported, wall.forbidden.split())
    ]


@pytest.mark.parametrize("package", WALLS)
def test_no_file_imports_through_a_wall(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 4
    found = {
        str(file.relative_to(ROOT)): breach
        for file in files
        if (breach := breaches(package, file.name, file.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("store_format", "import torch.nn as nn"),
        ("store_format", "def f():\n    import train.loop"),
        ("store_format", "import zarr"),  # outside of its module
        ("store_format", "import click"),
        ("store_format", "if TYPE_CHECKING:\n    from precompute.bake import bake"),
        ("precompute", "from diffusers import UNet2DConditionModel"),
        ("precompute", "from train import draws"),
        ("precompute", "from ..train import draws"),
        ("precompute", "import importlib\nimportlib.import_module('peft')"),
        ("train", "from diffusers import AutoencoderKL"),
        ("train", "from diffusers.models import AutoencoderKL as A"),
        ("train", "from diffusers.models.autoencoders import autoencoder_kl"),
        ("train", "from diffusers.training_utils import EMAModel"),
        ("train", "import diffusers.pipelines.stable_diffusion"),
        ("train", "from diffusers import StableDiffusionPipeline"),
        ("train", "from transformers import CLIPTextModel"),
        ("train", "import transformers.models.t5.modeling_t5"),
        ("train", "from PIL import Image"),
        ("train", "import precompute"),
        ("train", "import some_new_dependency"),
        ("train", "__import__('pyvips')"),
        ("train", "from sampling import sampler"),
        ("sampling", "from train import loop"),
        ("sampling", "from precompute import encoders"),
    ],
)
def test_a_breach_is_seen(package, source):
    assert breaches(package, "some_file.py", source)


@pytest.mark.parametrize(
    ("package", "file_name", "source"),
    [
        ("store_format", "zarr_layout.py", "def f():\n    import zarr.codecs"),
        ("train", "commands.py", "from prebake import validated\nimport click"),
        ("train", "loop.py", "import json\nfrom torch import nn\nfrom train.order import Order"),
    ],
)
def test_what_is_allowed_is_no_breach(package, file_name, source):
    assert not breaches(package, file_name, source)


PROGRAM = """
import json, runpy, sys
sys.argv = ["prebake", *sys.argv[1:]]
try:
    runpy.run_module("prebake", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("\\nRESULT", json.dumps([end.code, sorted(sys.modules)]))
"""
NEVER_LOADED = (
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.training_utils",
    "pyvips",
)


def test_a_whole_training_run_loads_nothing_of_stage_1_nor_the_files_beside_it(tmp_path):
    model = make_tiny_sd(tmp_path / "model")
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.rmtree(model / part)
    store = train_store(tmp_path / "store", dtype="float16").root
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("train", "precompute", "sampling", "store_format", "prebake", "torch"):
        text = f"open({str(tmp_path / 'was-run')!r}, 'w').close()\nraise SystemExit('hostile')\n"
        (hostile / f"{name}.py").write_text(text)
    arguments = ["train", store, "--model", model, "--out", "run", "--max-steps", "3"]
    arguments += ["--save-every", "2", "--num-workers", "1", "--gradient-checkpointing"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)],
        cwd=hostile,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\nRESULT " in result.stdout, result.stderr
    code, modules = json.loads(result.stdout.split("\nRESULT ")[1])
    assert code == 0, result.stderr
    assert not (tmp_path / "was-run").exists()
    assert (hostile / "run" / "pytorch_lora_weights.safetensors").exists()
    assert "train.loop" in modules
    assert not set(NEVER_LOADED) & set(modules)
    assert not [name for name in modules if name.split(".")[0] == "precompute"]
