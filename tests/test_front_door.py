"""The `prebake` command itself: quick, helpful, and plain about mistakes."""

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from PIL import Image
from train_builders import train_store

import prebake
from precompute.config import BakeConfig
from train.config import TrainConfig

STORE = "{images: pictures, model: bundled, resolution: 64, bucket_step: 16, out: out/store}"


@pytest.fixture
def pipelines(tmp_path: Path) -> Callable[..., Path]:
    def write(run: str, store: str = STORE) -> Path:
        path = tmp_path / "pipelines.yaml"
        path.write_text(f"stores:\n  cats: {store}\nruns:\n  style-a: {run}\n")
        return path

    return write


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(prebake.cli, list(arguments))


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help", "sample --help"])
def test_help_loads_neither_torch_nor_diffusers_and_is_quick(arguments: str) -> None:
    program = (
        "import sys, runpy; sys.argv = ['prebake', *sys.argv[1:]]\n"
        "try: runpy.run_module('prebake', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end\n"
        "assert not {'torch', 'diffusers', 'transformers', 'pyvips'} & sys.modules.keys()\n"
    )
    times_s = []
    for _ in range(3):
        start_s = cpu_s_of_children()
        subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments.split()], check=True, timeout=60
        )
        times_s.append(cpu_s_of_children() - start_s)
    assert min(times_s) < 0.5 * 2, "0.5 s on a quiet machine; twice that on a busy one"


# What bitsandbytes says while diffusers or peft imports it, on processors with AVX-512 BF16 only.
MISSING_KERNELS = "getLogger('bitsandbytes.backends.cpu.ops').warning('no gemm_4bit_forward')"


@pytest.mark.parametrize("module", ["precompute.encoders", "train.loop", "sampling.sampler"])
def test_libraries_say_nothing_while_they_are_imported(module: str) -> None:
    program = f"import {module}; from logging import getLogger; {MISSING_KERNELS}"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (found.stdout, found.stderr) == (b"", b"")


def cpu_s_of_children() -> float:
    """Processor time of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(["stor"], "store"), (["demmo"], "demo"), (["rnu"], "run"), (["store", "repiar"], "repair")],
)
def test_an_unknown_command_is_answered_with_the_nearest(arguments: list[str], near: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert f"No such command '{arguments[-1]}'. Did you mean '{near}'?" in found.output


def test_the_front_help_lists_every_command_with_a_sentence() -> None:
    text = invoke("--help").output
    for name in ("precompute", "train", "sample", "store", "run", "demo"):
        assert f"\n  {name} " in text


def test_every_config_field_is_an_option_with_a_help_text_and_its_default() -> None:
    for command, model in (("precompute", BakeConfig), ("train", TrainConfig)):
        text = invoke(command, "--help").output
        for name, field in model.model_fields.items():
            assert field.description, name
            extra = field.json_schema_extra
            shown = name.upper() if isinstance(extra, dict) else prebake.option_name(name)
            assert shown in text


def test_a_bad_value_is_a_usage_error_that_names_the_option(tmp_path: Path) -> None:
    result = invoke(
        "precompute", str(tmp_path), "--model", "bundled", "--out", "x", "--resolution", "7"
    )
    assert result.exit_code == 2
    assert "--resolution" in result.output
    assert "got 7" in result.output
    result = invoke("train", "s", "--model", "bundled", "--out", "x")
    assert result.exit_code == 2
    assert "max_steps" in result.output.replace("--max-steps", "max_steps")


def test_all_bad_values_are_named_together(tmp_path: Path) -> None:
    result = invoke("train", "s", "--model", "m", "--out", "x", "--max-steps", "0", "--rank", "-1")
    assert "--max-steps" in result.output
    assert "--rank" in result.output


def test_a_single_file_checkpoint_is_answered_with_the_way_to_convert_it(tmp_path: Path) -> None:
    result = invoke("train", "s", "--model", "a/sd15.safetensors", "--out", "x", "--max-steps", "1")
    assert result.exit_code == 1
    assert "from_single_file('a/sd15.safetensors').save_pretrained('sd15')" in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("model", ["./no/such", "no-such", "/no/such", "a/b/c"])
def test_a_model_that_does_not_exist_is_named(model: str) -> None:
    result = invoke("train", "s", "--model", model, "--out", "x", "--max-steps", "1")
    assert result.exit_code == 1
    assert f"--model {model}: no such folder" in result.output


def test_run_resolves_paths_against_the_file_and_defaults_from_the_models(pipelines: Any) -> None:
    file = pipelines("{store: cats, rank: 8, max_steps: 20, out: out/run}")
    result = invoke("run", "style-a", "-f", str(file), "--dry-run")
    assert result.exit_code == 0, result.output
    resolved = json.loads(result.output)
    assert resolved["store"]["images"] == str(file.parent / "pictures")
    assert resolved["store"]["bucket_step"] == 16
    assert resolved["run"]["store"] == str(file.parent / "out/store")
    assert resolved["run"]["model"] == "bundled"
    assert resolved["run"]["rank"] == 8
    assert resolved["run"]["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("run", "store", "message"),
    [
        (
            "{store: cats, ranc: 8, max_steps: 1, out: o}",
            STORE,
            "runs.style-a.ranc: unknown key. Did you mean 'rank'?",
        ),
        (
            "{store: cats, rank: 0, max_steps: 1, out: o}",
            STORE,
            "runs.style-a.rank: Input should be greater than or equal to 1",
        ),
        (
            "{store: cat, max_steps: 1, out: o}",
            STORE,
            "stores.cat does not exist. Did you mean 'cats'?",
        ),
        ("{max_steps: 1, out: o}", STORE, "runs.style-a.store"),
        ("{store: cats, out: o}", STORE, "runs.style-a: give one of max_steps and max_epochs"),
        ("{store: cats, max_steps: 1}", STORE, "runs.style-a.out: required"),
        (
            "{store: cats, max_steps: 1, out: o}",
            "{images: p, model: m, out: o, formt: x}",
            "formt: unknown key. Did you mean 'format'?",
        ),
        ("[]", STORE, "runs.style-a does not exist"),
        ("{store: cats, max_steps: 1, out: o", STORE, "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_dotted_path(
    pipelines: Any, run: str, store: str, message: str
) -> None:
    file = pipelines(run, store)
    result = invoke("run", "style-a", "-f", str(file))
    assert result.exit_code == 1
    assert message in result.output
    assert str(file) in result.output
    assert result.output.count("\n") == 1


def test_a_missing_file_and_an_unknown_run_are_named(pipelines: Any, tmp_path: Path) -> None:
    assert "no such file" in invoke("run", "a", "-f", str(tmp_path / "none.yaml")).output
    file = pipelines("{store: cats, max_steps: 1, out: o}")
    assert "Did you mean 'style-a'?" in invoke("run", "style-b", "-f", str(file)).output


def test_command_line_gives_back_the_same_config() -> None:
    bake = BakeConfig(
        images=Path("a b"),
        model="m",
        out=Path("o"),
        posterior="mode",
        allow_drop=True,
        upscale=False,
    )
    seen: dict[str, Any] = {}

    @click.command()
    @prebake.config_options(BakeConfig)
    def probe(**options: Any) -> None:
        seen.update(options)

    result = CliRunner().invoke(probe, shlex.split(shlex.join(prebake.command_line(bake))))
    assert result.exit_code == 0, result.output
    assert prebake.validated(BakeConfig, seen) == bake


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fill(*_: object) -> None:
        raise OSError(code, "full", "/data/x")

    monkeypatch.setattr(prebake, "resolve_run", fill)
    result = invoke("run", "a")
    assert result.exit_code == 1
    assert "/data/x" in result.output
    assert "run the same command again" in result.output
    assert result.output.count("\n") == 1


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(prebake, "resolve_run", fail)
    assert isinstance(invoke("run", "a").exception, RuntimeError)


def test_a_failing_stage_ends_the_run_with_its_exit_code(pipelines: Any, tmp_path: Path) -> None:
    file = pipelines("{store: cats, max_steps: 1, out: o}")  # its pictures folder does not exist
    result = invoke("run", "style-a", "-f", str(file))
    assert result.exit_code == 1
    assert "$ prebake precompute" in result.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_run_lets_the_training_write_its_checkpoint(
    pipelines: Callable[..., Path], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    pictures = prebake.bundled_folder() / "pictures"
    file = pipelines(
        "{store: cats, max_steps: 100000, num_workers: 0, out: out/run}",
        STORE.replace("images: pictures", f"images: {pictures}"),
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prebake", "run", "style-a", "-f", str(file)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = tmp_path / "out/run/metrics.jsonl"
    deadline_s = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
    try:
        assert process.wait(timeout=120) == code
    finally:
        process.terminate()  # where it did not end, and its stage with it
    assert list((tmp_path / "out/run/checkpoints").glob("step-*/state.json"))
    assert (tmp_path / "out/run/run.safetensors").exists()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_ends_the_stage_too_but_not_under_nohup(
    pipelines: Callable[..., Path], is_ignored: bool
) -> None:
    file = pipelines("{store: cats, max_steps: 1, out: o}")
    hangup = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prebake", "run", "style-a", "-f", str(file)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
    )
    caught = 1 << (signal.SIGTERM if is_ignored else signal.SIGHUP) - 1
    with process:
        status = Path(f"/proc/{process.pid}/status")
        while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) & caught:
            time.sleep(0.01)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid, signal.SIGHUP)
        expected = 1 if is_ignored else 129  # the stage's own failure: it has no pictures
        assert process.wait(timeout=120) == expected
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("out", "reason"),
    [("{file}/x", "Not a directory"), ("{folder}/" + "n" * 300, "File name too long")],
)
@pytest.mark.parametrize("command", ["convert", "push"])
def test_a_place_where_nothing_can_be_is_one_line(
    tmp_path: Path, command: str, out: str, reason: str
) -> None:
    store = train_store(tmp_path / "s").root
    (tmp_path / "file").touch()
    place = out.format(file=tmp_path / "file", folder=tmp_path)
    options = ["--to", "webdataset", "--out", place] if command == "convert" else [place]
    result = invoke("store", command, str(store), *options)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("Error: ")
    assert reason in result.output


def test_names_of_files_neither_break_a_line_nor_act_on_the_terminal(tmp_path: Path) -> None:
    images = tmp_path / "pic\ntures"
    images.mkdir()
    Image.effect_noise((96, 96), 60).convert("RGB").save(images / "a\nb\x1b[31m.png")
    options = ["--model", "bundled", "--resolution", "64", "--out", str(tmp_path / "s")]
    output = invoke("precompute", str(images), *options, "--dry-run").output
    assert "\x1b" not in output
    assert "(a\\nb\\x1b[31m.png)" in output
    assert all(line.startswith(("warning: ", "plan for ", "  ")) for line in output.splitlines())
