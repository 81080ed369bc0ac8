"""`prebake sample`: the grid, the LoRA files and their weights."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_sd
from train_builders import config_for, train_store
from train_builders import run as run_training

from prebake import cli
from sampling.commands import _lines
from sampling.grid import GAP_PX, LABEL_PX, LINE_PX, MAX_WIDTH_PX, PAPER, draw_grid
from sampling.lora import WEIGHTS_NAME, Lora
from sampling.sampler import Sampler
from store_format.errors import PrebakeError

PROMPTS = ("a cat", "a dog", "")
SAME = 0.05  # of 255: where rounding differs
SETTINGS = {"negative": "", "size_px": (48, 64), "num_steps": 2, "guidance": 20.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd(tmp_path_factory.mktemp("model") / "sd")


@pytest.fixture(scope="module")
def lora(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose LoRA is far from nothing."""
    folder = tmp_path_factory.mktemp("lora")
    store = train_store(folder / "store")
    out = folder / "first"
    run_training(config_for(Path(str(store.root)), model, out, learning_rate=0.1))
    return out


def drawn(
    model: Path, *loras: Lora, strength: float = 1.0, seeds: tuple[int, ...] = (0, 1, 2)
) -> NDArray[np.float64]:
    """Return pictures [N, H, W, 3] of the first prompts, one for each seed."""
    sampler = Sampler(str(model), loras, "cpu")
    pictures = sampler.draw(
        PROMPTS[: len(seeds)], seeds, strength=strength, advance=lambda count: None, **SETTINGS
    )
    return np.stack([np.asarray(picture, np.float64) for picture in pictures])


def difference(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    return float(np.abs(first - second).mean())


class TestSampler:
    def test_pictures_have_the_size_and_depend_on_prompt_and_seed(self, model: Path) -> None:
        pictures = drawn(model, seeds=(5, 5, 6))
        assert pictures.shape == (3, 64, 48, 3)
        assert difference(pictures[0], pictures[1]) > 1  # the prompt
        assert difference(drawn(model, seeds=(4,))[0], pictures[0]) > 1  # the seed

    def test_a_picture_does_not_depend_on_those_beside_it(self, model: Path) -> None:
        assert difference(drawn(model)[:1], drawn(model, seeds=(0,))) < SAME  # of 255

    def test_a_weight_of_zero_is_the_model_alone(self, model: Path, lora: Path) -> None:
        alone = drawn(model)
        file = Lora(lora / WEIGHTS_NAME)
        np.testing.assert_array_equal(drawn(model, file, strength=0), alone)
        assert difference(drawn(model, file), alone) > 1

    def test_weights_multiply_and_several_files_add_up(self, model: Path, lora: Path) -> None:
        file = lora / WEIGHTS_NAME
        half = drawn(model, Lora(file, 0.5))
        assert difference(drawn(model, Lora(file, 0.25), strength=2), half) < SAME
        assert difference(drawn(model, Lora(file, 0.25), Lora(file, 0.25)), half) < SAME
        assert difference(drawn(model, Lora(file)), half) > 1

    def test_the_file_for_other_programs_draws_the_same(self, model: Path, lora: Path) -> None:
        (kohya,) = (p for p in lora.glob("*.safetensors") if p.name != WEIGHTS_NAME)
        assert difference(drawn(model, Lora(kohya)), drawn(model, Lora(lora / WEIGHTS_NAME))) < SAME

    def test_the_default_size_is_the_models_own(self, model: Path) -> None:
        assert Sampler(str(model), (), "cpu").default_size_px() == (64, 64)

    def test_a_lora_of_another_model_is_refused(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        other = make_tiny_sd(tmp_path / "wide", block_out_channels=(24, 32))
        with pytest.raises(PrebakeError, match=r"^--lora .* does not fit the model: [^\n]*$"):
            Sampler(str(other), [Lora(lora / WEIGHTS_NAME)], "cpu")

    def test_a_file_without_a_lora_is_refused(self, model: Path) -> None:
        file = model / "vae/diffusion_pytorch_model.safetensors"
        with pytest.raises(PrebakeError, match=r"^--lora [^\n]*$"):
            Sampler(str(model), [Lora(file)], "cpu")

    def test_a_device_that_is_not_there_is_refused(self, model: Path) -> None:
        with pytest.raises(PrebakeError, match=r"^--device gpu cannot be used here [^\n]*$"):
            Sampler(str(model), (), "gpu")

    def test_a_folder_that_is_no_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PrebakeError, match=r"is not a complete diffusers model: vae/config"):
            Sampler(str(tmp_path), (), "cpu")

    @pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
    def test_a_part_that_is_missing_is_named(self, model: Path, part: str, tmp_path: Path) -> None:
        shutil.copytree(model, tmp_path / "m")
        shutil.rmtree(tmp_path / "m" / part)
        with pytest.raises(PrebakeError, match=rf"^[^\n]*\b{part}\b[^\n]*$"):
            Sampler(str(tmp_path / "m"), (), "cpu")

    def test_a_model_of_one_variant_loads(self, model: Path, tmp_path: Path) -> None:
        shutil.copytree(model, tmp_path / "m")
        for path in (tmp_path / "m").glob("*/*.safetensors"):
            path.rename(path.with_suffix(".fp16.safetensors"))
        assert difference(drawn(tmp_path / "m"), drawn(model)) < SAME

    def test_a_damaged_file_is_called_so(self, model: Path, lora: Path, tmp_path: Path) -> None:
        file = tmp_path / "cut.safetensors"
        for size in (0, 1_000):
            file.write_bytes((lora / WEIGHTS_NAME).read_bytes()[:size])
            with pytest.raises(PrebakeError, match=r"^--lora [^\n]*cut\.safetensors is damaged"):
                Sampler(str(model), [Lora(file)], "cpu")

    def test_tensors_that_fit_nothing_are_counted(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        assert Sampler(str(model), [Lora(lora / WEIGHTS_NAME)], "cpu").warnings == []
        for other in lora.glob("*.safetensors"):
            assert Sampler(str(model), [Lora(other)], "cpu").warnings == []
        tensors = load_file(lora / WEIGHTS_NAME)
        astray = [key for key in tensors if "mid_block" in key]
        assert 0 < len(astray) < len(tensors)
        renamed = {key.replace("mid_block", "no_block"): value for key, value in tensors.items()}
        save_file(renamed, tmp_path / "partly.safetensors")
        (warning,) = Sampler(str(model), [Lora(tmp_path / "partly.safetensors")], "cpu").warnings
        assert f"{len(astray)} of its {len(tensors)} tensors" in warning

    @pytest.mark.filterwarnings("ignore:invalid value")
    def test_pictures_that_are_no_numbers_are_refused(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        tensors = load_file(lora / WEIGHTS_NAME)
        save_file({k: v * math.nan for k, v in tensors.items()}, tmp_path / "nan.safetensors")
        with pytest.raises(PrebakeError, match=r"^with weight 1 the model's pictures are not fin"):
            drawn(model, Lora(tmp_path / "nan.safetensors"))

    def test_prompts_that_are_cut_are_counted(self, model: Path) -> None:
        sampler = Sampler(str(model), (), "cpu")
        assert sampler.num_cut(["", "a cat", "a cat " * 37]) == 0  # 74 words, start and end
        assert sampler.num_cut(["a cat " * 40, "a cat", "a cat " * 50]) == 2


class TestLora:
    def test_a_file_a_run_and_a_weight(self, lora: Path) -> None:
        file = lora / WEIGHTS_NAME
        assert Lora.parse(str(file)) == Lora(file, 1.0)
        assert Lora.parse(f"{file}:0.5") == Lora(file, 0.5)
        assert Lora.parse(f"{lora}:-1") == Lora(file, -1.0)

    def test_a_colon_may_be_of_the_name(self, tmp_path: Path) -> None:
        file = tmp_path / "a:b.safetensors"
        file.touch()
        assert Lora.parse(str(file)) == Lora(file)
        assert Lora.parse(f"{file}:2") == Lora(file, 2.0)

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(PrebakeError, match=r"nothing\.safetensors: no such file"):
            Lora.parse("nothing.safetensors")
        (tmp_path / "a.bin").touch()
        with pytest.raises(PrebakeError, match=r"only \.safetensors files are read"):
            Lora.parse(str(tmp_path / "a.bin"))
        with pytest.raises(PrebakeError, match=f"no {WEIGHTS_NAME} in this folder"):
            Lora.parse(str(tmp_path))
        with pytest.raises(PrebakeError, match=r"^--lora '': no such file"):
            Lora.parse("")

    def test_a_weight_that_is_no_number_is_refused(self, lora: Path) -> None:
        for weight in ("abc", "", "nan", "inf"):
            with pytest.raises(PrebakeError, match=rf"first:{weight}: the weight after the colon"):
                Lora.parse(f"{lora}:{weight}")

    def test_a_name_that_ends_like_a_weight_is_a_name_if_it_is_there(self, tmp_path: Path) -> None:
        folder = tmp_path / "run:2"
        folder.mkdir()
        (folder / WEIGHTS_NAME).touch()
        assert Lora.parse(str(folder)) == Lora(folder / WEIGHTS_NAME)
        assert Lora.parse(f"{folder}:0.5") == Lora(folder / WEIGHTS_NAME, 0.5)


class TestGrid:
    @staticmethod
    def plain(value: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
        return Image.new("RGB", size, (value, 0, 0))

    def test_each_picture_is_in_its_place_enlarged_by_a_whole_number(self) -> None:
        rows = [[self.plain(10), self.plain(20)], [self.plain(30), self.plain(40)]]
        grid = np.asarray(draw_grid(rows, ["a", "b"], ["first", "second"]))
        step = 128 + GAP_PX
        assert grid.shape[1] == LABEL_PX + 2 * step
        for r in range(2):
            for c in range(2):
                top, left = GAP_PX + r * step, LABEL_PX + c * step
                cell = grid[top : top + 128, left : left + 128]
                assert (cell == (10 * (1 + 2 * r + c), 0, 0)).all()

    def test_labels_and_captions_are_drawn_outside_of_the_pictures(self) -> None:
        def ink(label: str, caption: str) -> tuple[bool, bool]:
            grid = np.asarray(draw_grid([[self.plain(0)]], [label], [caption]))
            left, foot = grid[: GAP_PX + 128, : -128 - GAP_PX], grid[GAP_PX + 128 :]
            return bool((left != PAPER).any()), bool((foot != PAPER).any())

        assert ink("", "") == (False, False)
        assert ink("before", "") == (True, False)
        assert ink("", "a caption") == (False, True)

    def test_long_captions_are_broken_into_lines(self) -> None:
        short = draw_grid([[self.plain(0)]], [""], ["a"]).size
        long = draw_grid([[self.plain(0)]], [""], ["a small red ring on a striped background"]).size
        assert long[0] == short[0]
        assert long[1] > short[1]

    def test_no_line_is_wider_than_its_column_and_notes_are_kept(self) -> None:
        for text in ("supercalifragilistic" * 20, "a picture of a cat " * 20, "日本の写真" * 30):
            grid = np.asarray(draw_grid([[self.plain(0)] * 2], [""], [text, ""], ["", "seed 3"]))
            foot = grid[2 * GAP_PX + 128 :]
            right = foot[:, 2 * GAP_PX + 128 :]
            assert (foot[:, GAP_PX : GAP_PX + 128] != PAPER).any()
            assert (right[LINE_PX:] == PAPER).all()  # nothing of the neighbour
            assert (right[:LINE_PX] != PAPER).any()
            several = draw_grid([[self.plain(0)]], [""], [text], ["seed 3"]).height
            assert several == grid.shape[0] + LINE_PX

    def test_accents_are_letters_and_not_boxes(self) -> None:
        def foot(caption: str) -> bytes:
            return draw_grid([[self.plain(0)]], [""], [caption]).tobytes()

        assert len({foot(letter) for letter in "éüßñжβ×"}) == 7

    def test_many_columns_go_on_beneath(self) -> None:
        row = [self.plain(number) for number in range(40)]
        grid = np.asarray(draw_grid([row, row], ["a", "b"], [""] * 40))
        assert grid.shape[1] <= MAX_WIDTH_PX
        num_columns = (MAX_WIDTH_PX - LABEL_PX) // (128 + GAP_PX)
        band = 3 * GAP_PX + 2 * 128 + LINE_PX + GAP_PX
        for number in (0, num_columns - 1, num_columns, 39):
            top = GAP_PX + number // num_columns * band
            left = LABEL_PX + number % num_columns * (128 + GAP_PX)
            assert (grid[top : top + 128, left : left + 128, 0] == number).all()

    def test_large_pictures_are_not_enlarged(self) -> None:
        grid = draw_grid([[self.plain(0, (512, 256))]], [""], [""])
        assert grid.size[0] == 512 + 2 * GAP_PX


class TestCommand:
    def invoke(self, *arguments: object) -> str:
        result = CliRunner().invoke(cli, ["sample", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    def test_draws_before_and_after_and_each_picture(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("a dog\n\na cat and a dog\n", encoding="utf-8")
        output = self.invoke(
            "--model", model, "--lora", lora, "--prompt", "a cat", "--prompts", prompts,
            "--out", tmp_path / "new/grid.png", "--pictures", tmp_path / "each",
            "--size", "48x64", "--steps", 2, "--guidance", 20, "--device", "cpu",
        )  # fmt: skip
        assert output.endswith(f"2 x 3 pictures of 48x64 px: {tmp_path / 'new/grid.png'}\n")
        names = [f"{n:05d}-weight-{w}.png" for n in range(3) for w in (0, 1)]
        assert sorted(p.name for p in (tmp_path / "each").iterdir()) == names
        with Image.open(tmp_path / "each/00000-weight-0.png") as picture:
            expected = drawn(model, seeds=(0,))[0]
            assert difference(np.asarray(picture, np.float64), expected) < SAME
        with Image.open(tmp_path / "new/grid.png") as grid:
            assert grid.width == LABEL_PX + 3 * (48 * 3 + GAP_PX)

    def test_a_sweep_has_a_row_for_each_weight_and_a_column_for_each_seed(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        output = self.invoke(
            "--model", model, "--lora", f"{lora}:2", "--weights", "0,0.5,1", "--prompt", "a cat",
            "--seed", 0, "--seed", 7, "--out", tmp_path / "g.png", "--steps", 1, "--device", "cpu",
        )  # fmt: skip
        assert "3 x 2 pictures of 64x64 px" in output

    def test_pictures_of_an_earlier_run_go_and_other_files_stay(
        self, model: Path, tmp_path: Path
    ) -> None:
        def draw(*prompts: str) -> None:
            asked = [part for prompt in prompts for part in ("--prompt", prompt)]
            where = ["--out", tmp_path / "g.png", "--pictures", tmp_path / "each"]
            self.invoke("--model", model, *asked, *where, "--steps", 1, "--device", "cpu")

        (tmp_path / "each").mkdir()
        for name in ("mine.png", "00001.png", "00001-weight-heavy.png"):
            (tmp_path / "each" / name).touch()
        draw("a", "b", "c")
        assert len(list((tmp_path / "each").iterdir())) == 6
        draw("a")
        assert sorted(path.name for path in (tmp_path / "each").iterdir()) == [
            "00000-weight-0.png", "00001-weight-heavy.png", "00001.png", "mine.png"
        ]  # fmt: skip

    def test_weights_that_are_nearly_equal_have_names_of_their_own(
        self, model: Path, lora: Path, tmp_path: Path
    ) -> None:
        self.invoke(
            "--model", model, "--lora", lora, "--weights", "0.33333333,0.333333333,-1,1e-7",
            "--prompt", "a", "--out", tmp_path / "g.png", "--pictures", tmp_path / "each",
            "--steps", 1, "--device", "cpu",
        )  # fmt: skip
        assert {path.name for path in (tmp_path / "each").iterdir()} == {
            f"00000-weight-{w}.png" for w in ("0.33333333", "0.333333333", "-1", "1e-07")
        }

    def test_a_byte_order_mark_is_not_of_the_first_prompt(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_bytes("\ufeffa cat\r\n\r\na dog\r\n".encode())
        assert _lines(tmp_path / "p.txt") == ["a cat", "a dog"]

    def test_warnings_are_said(self, model: Path, tmp_path: Path) -> None:
        output = self.invoke(
            "--model", model, "--prompt", "a cat " * 90, "--prompt", "a cat",
            "--out", tmp_path / "g.png", "--steps", 1, "--device", "cpu",
        )  # fmt: skip
        assert "warning: 1 of the prompts are longer than the text encoder reads" in output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "Nothing to draw"),
            (["--prompt", "x", "--weights", "0,1"], "--weights is for LoRA files"),
            (["--prompt", "x", "--lora", "L", "--weights", "0;1"], "expected numbers with commas"),
            (["--prompt", "x", "--lora", "L", "--weights", "0,nan"], "expected numbers"),
            (["--prompt", "x", "--out", "g.jpeg2"], "expected the name of a .png file"),
            (["--prompt", "x", "--size", "64"], "expected WIDTHxHEIGHT"),
            (["--prompt", "x", "--size", "60x64"], "each a multiple of 8"),
            (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: no such file"),
            (["--prompts", "/"], "'--prompts': File '/' is a directory"),
            (["--prompts", os.devnull], f"--prompts {os.devnull}: no prompt in it"),
            (["--prompt", "x", "--pictures", __file__], "is a file, not a folder"),
            (["--prompt", "x", "--out", f"{__file__}/g.png"], "is a file, not a folder"),
            (["--prompt", "x", "--out", "/proc/g.png"], "/proc: No such file or directory"),
            (["--prompt", "x", "--seed", str(2**64)], "0<=x<=18446744073709551615"),
            (["--prompt", "x", "--steps", "1000"], "1<=x<=999"),
            (["--prompt", "x", "--guidance", "nan"], "--guidance nan: expected a finite number"),
            (["--prompt", "x", "--lora", "nowhere"], "--lora nowhere: no such file"),
        ],
    )
    def test_mistakes_are_found_before_anything_is_loaded(
        self, arguments: list[str], message: str, tmp_path: Path
    ) -> None:
        command = ["--model", "bundled", "--out", str(tmp_path / "g.png"), *arguments]
        result = CliRunner().invoke(cli, ["sample", *command])
        assert result.exit_code != 0
        assert message in result.output
        assert not (tmp_path / "g.png").exists()
