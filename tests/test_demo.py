"""`prebake demo`: its scores by hand, its stages, and what it must reach."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from sampling import commands
from sampling.demo import CONCEPT, NOISE_SEEDS, Scores, make_pictures, make_prompts, write_results
from sampling.shapes import SHAPES, PictureSpec, draw

MAX_S = 180


def drawn(folder: Path, weight: int, specs: list[PictureSpec]) -> None:
    """Draw pictures as `prebake sample --pictures` names them."""
    folder.mkdir(exist_ok=True)
    for number, spec in enumerate(specs):
        draw(spec).save(folder / f"{number:05d}-weight-{weight}.png")


def other_than(shape: str) -> str:
    return next(other for other in SHAPES if other != shape)


def test_the_scores_are_those_counted_by_hand(tmp_path: Path) -> None:
    prompts = make_prompts(4)
    asked = [prompt.spec for prompt in prompts for _ in NOISE_SEEDS]
    assert len(asked) == 16
    known = [s if s.shape != CONCEPT else replace(s, shape="circle") for s in asked]
    known[0] = asked[0]  # 1 of 8 shows a wug
    known[8] = replace(asked[8], shape=other_than(asked[8].shape))  # 7 of 8 are right
    drawn(tmp_path / "drawn", 0, known)
    after = list(asked)
    for number in (1, 2):  # 6 of 8
        after[number] = replace(asked[number], shape="ring")
    for number in (9, 10, 11):  # 5 of 8: a wug for something else, another colour, a background
        spec = asked[number]
        free = next(c for c in ("red", "blue", "white") if c not in (spec.colour, spec.background))
        changes = {9: {"shape": CONCEPT}, 10: {"colour": free}, 11: {"background": free}}
        after[number] = replace(spec, **changes[number])
    drawn(tmp_path / "drawn", 1, after)
    assert write_results(tmp_path, prompts, tmp_path / "drawn") == Scores(
        1 / 8, 6 / 8, 7 / 8, 5 / 8
    )
    assert json.loads((tmp_path / "demo.json").read_text()) == {
        "concept_before": 0.125,
        "concept_after": 0.75,
        "old_concepts_before": 0.875,
        "old_concepts_after": 0.625,
    }
    with Image.open(tmp_path / "demo.png") as grid:
        assert grid.width > 7 * 128  # 4 prompts of one kind and 3 of the other
        assert grid.height > 2 * 128


def test_no_prompt_is_a_caption_and_half_of_them_have_the_new_word(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    of_each = [
        [path.read_text().strip() for path in (tmp_path / name).glob("*.txt")]
        for name in (CONCEPT, "known")
    ]
    assert [len(captions) for captions in of_each] == [24, 24]
    assert all(CONCEPT in caption.split() for caption in of_each[0])
    assert not any(CONCEPT in caption.split() for caption in of_each[1])
    captions = {caption for captions in of_each for caption in captions}
    prompts = make_prompts(20)
    assert not captions & {prompt.text for prompt in prompts}
    assert [CONCEPT in prompt.text.split() for prompt in prompts] == [True] * 20 + [False] * 20


def demo_in_this_process(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> str:
    """Run the demo without the imports of its stages' processes."""
    from prebake import cli

    def call(command: str, arguments: list[str], *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        result = CliRunner().invoke(cli, [command, *arguments])
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(commands, "call", call)
    before = torch.get_num_threads()
    try:
        result = CliRunner().invoke(cli, ["demo", "--out", str(out), *options])
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_small_demo_begins_to_teach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = demo_in_this_process(monkeypatch, tmp_path, "--prompts", "4", "--steps", "150")
    scores = json.loads((tmp_path / "demo.json").read_text())
    assert scores["concept_before"] == 0
    assert scores["concept_after"] >= 0.4
    assert scores["old_concepts_before"] >= 0.8
    assert scores["old_concepts_after"] >= 0.5
    assert f"{scores['concept_before']:.0%} before, {scores['concept_after']:.0%} after" in output
    for name in ("demo.png", "demo.json", "store", "run-150/pytorch_lora_weights.safetensors"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name) in output


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    from prebake import cli

    (tmp_path / "prompts.txt").write_text("mine")
    for out, message in (
        (tmp_path, "not empty, and no earlier"),
        (tmp_path / "prompts.txt", "a f"),
    ):
        result = CliRunner().invoke(cli, ["demo", "--out", str(out)])
        assert result.exit_code == 1
        assert message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]
    assert (tmp_path / "prompts.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_demo_teaches_a_new_shape_in_three_minutes(tmp_path: Path) -> None:
    start_s = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-P", "-m", "prebake", "demo", "--out", str(tmp_path / "demo")],
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    shown = [line.split() for line in process.stdout.splitlines() if line.startswith("$ ")]
    assert [words[2:4] for words in shown] == [
        ["prebake", command] for command in ("precompute", "train", "sample")
    ]
    assert time.monotonic() - start_s < MAX_S
    scores = json.loads((tmp_path / "demo/demo.json").read_text())
    assert scores["concept_before"] <= 0.05
    assert scores["concept_after"] >= 0.8
    assert scores["old_concepts_after"] >= 0.8
