"""Every command and program of the README is run, in a folder that has what it speaks of."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bake_builders import hash_of
from PIL import Image
from s3_server import S3Server, s3  # noqa: F401 - a fixture
from train_builders import clean_process, run_cli

from store_format import open_store

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", README, flags=re.M | re.S)
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, block in BLOCKS
    for line in block.splitlines()
    if kind == "bash"
]
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples/bundled/model", folder / "path/to/sd15")
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", README, flags=re.M | re.S)
    (folder / "pipelines.yaml").write_text(yaml.replace("1000", "2"))
    captions = {"cat-on-sofa.jpg": "a photo of sks cat on a sofa", "garden/run.png": "sks cat"}
    for number, (name, caption) in enumerate(captions.items()):
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((320, 400 - 60 * number), 60).convert("RGB").save(path)
        path.with_suffix(".txt").write_text(caption)
    return folder


def test_the_readme_shows_commands_of_every_kind() -> None:
    shown = {" ".join(command[:2]) for command in COMMANDS if command[0] == "prebake"}
    assert shown >= {"prebake precompute", "prebake train", "prebake store", "prebake run"}
    assert len(PROGRAMS) == 2


def test_the_readme_names_the_make_targets_that_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = set(re.findall(r"\bmake ([\w-]+)", README))
    assert named <= set(targets)


def test_every_command_and_program_of_the_readme_works(
    place: Path,
    s3: S3Server,  # noqa: F811
) -> None:
    """In the order of the README, with short trainings: only the number of steps is changed."""
    with s3.environment(PREBAKE_CACHE=str(place / "cache"), PREBAKE_CACHE_SIZE="1GiB"):
        run_all(place)
    assert (place / "cat.png").exists()
    assert (place / "cat-grid.png").exists()
    assert (place / "runs/first/first.safetensors").exists()
    assert (place / "runs/second/loss.png").exists()
    assert (place / "runs/remote/loss.png").exists()
    assert (place / "runs/photos-r4/photos-r4.safetensors").exists()
    assert hash_of(place / "stores/pulled") == hash_of(place / "stores/photos")
    assert hash_of(place / "stores/garden-tars") == hash_of(place / "stores/garden")
    assert len(open_store(place / "stores/both")) == 3


def run_all(place: Path) -> None:
    for kind, block in BLOCKS:
        if kind == "python":
            program = block.replace('in the snow")', 'in the snow", num_inference_steps=2)')
            subprocess.run(
                [sys.executable, "-P", "-W", "ignore", "-c", program], cwd=place, check=True
            )
            continue
        for line in block.splitlines():
            command = shlex.split(line, comments=True)
            if command[0] != "prebake":
                assert command[0] == "make"
                continue
            changes = {"1000": "2", "100": "1"}
            arguments = [changes.get(word, word) for word in command[1:]]
            log = place / "log"
            run = clean_process().Process(
                target=run_cli, args=(arguments, log, place, dict(os.environ))
            )
            run.start()
            run.join()
            assert run.exitcode == 0, f"{line}\n{log.read_text()}"


def test_the_pipelines_file_of_the_checkout_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/bundled", tmp_path / "examples/bundled")
    text = (ROOT / "pipelines.yaml").read_text().replace("max_steps: 200", "max_steps: 3")
    (tmp_path / "pipelines.yaml").write_text(text)
    for name in ("demo-r8", "demo-r4-cosine"):
        command = [sys.executable, "-P", "-m", "prebake", "run", name]
        done = subprocess.run(command, cwd=tmp_path, check=True, text=True, stdout=subprocess.PIPE)
        assert (tmp_path / f"out/runs/{name}/{name}.safetensors").exists()
    assert "24 unchanged" in done.stdout  # the second run bakes nothing again


def test_the_command_table_names_every_command() -> None:
    from prebake import cli

    for name in cli.list_commands(None):  # type: ignore[arg-type]
        assert f"`prebake {name} " in README
