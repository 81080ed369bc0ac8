"""`prebake precompute` as a person meets it: its lines, its exit codes, its report."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bake_builders import LAYOUTS, copy_model, draw, draw_set, pixels, tiny_model, tree
from click.testing import CliRunner, Result
from PIL import Image

import prebake
from store_format import open_store, progress


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_set(tmp_path / "pictures", {"a.png": "a cat", "b.png": "a dog"})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


def precompute(images: Path, out: Path, *arguments: str, model: Path | None = None) -> Result:
    return CliRunner().invoke(
        prebake.cli,
        [
            "precompute", str(images), "--model", str(model or tiny_model()), "--out", str(out),
            "--resolution", "64", "--bucket-step", "16", *arguments,
        ],
        catch_exceptions=False,
    )  # fmt: skip


def assert_refused(result: Result, *parts: str) -> None:
    """The command ended with exit code 1 and one line that holds `parts`."""
    assert result.exit_code == 1, result.output
    errors = [line for line in result.output.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, result.output
    assert errors[0].startswith("Error: ")
    for part in parts:
        assert part in errors[0]


class TestBadInput:
    def test_a_missing_folder(self, tmp_path: Path, out: Path) -> None:
        result = precompute(tmp_path / "nowhere", out)
        assert_refused(result, f"{tmp_path / 'nowhere'}: expected a folder", "does not exist")
        assert not out.exists()

    def test_an_empty_folder(self, tmp_path: Path, out: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert_refused(precompute(tmp_path / "empty", out), "no images in it or below", "png")
        assert not out.exists()

    def test_a_file_for_a_folder(self, images: Path, out: Path) -> None:
        assert_refused(precompute(images / "a.png", out), "expected a folder", "is a file")

    def test_wrong_metadata_rows(self, images: Path, out: Path) -> None:
        (images / "metadata.jsonl").write_text('{"file_name": "a.png"}\n{')
        result = precompute(images, out)
        assert_refused(result, "metadata.jsonl line 1: neither a text", "metadata.jsonl line 2")
        assert not out.exists()

    @pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer", "scheduler"])
    def test_a_model_without_a_part(
        self, images: Path, out: Path, tmp_path: Path, part: str
    ) -> None:
        model = copy_model(tmp_path / "model")
        shutil.rmtree(model / part)
        result = precompute(images, out, model=model)
        assert_refused(result, f"{model} is not a complete diffusers model: {part}/")
        assert not out.exists()

    def test_a_single_file_checkpoint(self, images: Path, out: Path, tmp_path: Path) -> None:
        result = precompute(images, out, model=tmp_path / "anything.safetensors")
        assert_refused(
            result, "single-file checkpoint", "StableDiffusionPipeline", "save_pretrained"
        )

    def test_a_model_folder_that_does_not_exist(
        self, images: Path, out: Path, tmp_path: Path
    ) -> None:
        result = precompute(images, out, model=tmp_path / "models/sd15")
        assert_refused(result, "no such folder", "a hub id (owner/name)")

    def test_a_foreign_folder(self, images: Path, out: Path) -> None:
        out.mkdir()
        (out / "thesis.doc").write_text("mine")
        for arguments in ([], ["--dry-run"]):
            assert_refused(
                precompute(images, out, *arguments), "is not empty and not a prebake store"
            )
        assert tree(out).keys() == {"thesis.doc"}

    def test_a_file_for_a_store(self, images: Path, out: Path) -> None:
        out.write_text("a file")
        assert_refused(precompute(images, out), "not a prebake store")
        assert out.read_text() == "a file"

    def test_a_store_of_another_format_version(self, images: Path, out: Path) -> None:
        precompute(images, out)
        manifest = json.loads((out / "prebake.json").read_text())
        (out / "prebake.json").write_text(json.dumps(manifest | {"version": 2}))
        before = tree(out)
        assert_refused(
            precompute(images, out), "has format version 2; this prebake reads version 1"
        )
        assert tree(out) == before

    def test_a_damaged_store(self, images: Path, out: Path) -> None:
        precompute(images, out)
        commit = next((out / "index").glob("*.json"))
        commit.write_text(commit.read_text()[:-10])
        assert_refused(precompute(images, out), f"{commit} is damaged", "Put it back")

    def test_another_bake(self, images: Path, out: Path) -> None:
        precompute(images, out)
        result = precompute(images, out, "--posterior", "mode")
        assert_refused(result, "config.posterior = 'sample' (asked for: 'mode')", "another --out")

    def test_a_drop_of_more_than_half(self, images: Path, out: Path) -> None:
        precompute(images, out)
        (images / "a.png").unlink()
        (images / "b.png").rename(images / "c.png")
        result = precompute(images, out)
        assert result.exit_code == 1
        assert "Error: " in result.output
        assert "2 of the 2 samples of source 'pictures'" in result.output
        assert precompute(images, out, "--allow-drop").exit_code == 0
        assert len(open_store(out)) == 1

    def test_a_device_that_is_not_there(self, images: Path, out: Path) -> None:
        for device in ("cuda:77", "meta", "potato"):
            result = precompute(images, out, "--device", device)
            assert_refused(result, f"--device {device} cannot be used here")

    def test_a_background_that_is_no_colour(self, images: Path, out: Path) -> None:
        result = precompute(images, out, "--background", "#12345")
        assert result.exit_code in (1, 2)
        assert "expected white, black or #rrggbb, got '#12345'" in result.output
        assert not out.exists()

    @pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, who may not write")
    @pytest.mark.parametrize("what", ["parent", "store"])
    def test_a_folder_that_may_not_be_written(
        self, tmp_path: Path, images: Path, what: str
    ) -> None:
        parent = tmp_path / "parent"
        parent.mkdir()
        if what == "store":
            assert precompute(images, parent / "store").exit_code == 0
        for path in (*parent.rglob("*"), parent):
            path.chmod(path.stat().st_mode & ~0o222)
        for path in (tmp_path, *tmp_path.parents):  # pytest's own folders are private
            if path.is_relative_to("/tmp/pytest-of-root") or path.stat().st_uid == 0:
                path.chmod(path.stat().st_mode | 0o055)
        for path in (tiny_model().parent, *tiny_model().rglob("*"), tiny_model()):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        os.seteuid(65534)
        try:
            result = precompute(images, parent / "store")
        finally:
            os.seteuid(0)
        assert_refused(result, str(parent), "permission denied")


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--resolution", "0"], "--resolution: "),
            (["--resolution", "72"], "resolution must be a multiple of --bucket-step 16, got 72"),
            (["--bucket-step", "20"], "--bucket-step must be a multiple of 8, got 20"),
            (["--batch-size", "0"], "--batch-size: "),
            (["--num-workers", "0"], "--num-workers: "),
            (["--clip-skip", "13"], "--clip-skip: "),
            (["--shard-size-mib", "0"], "--shard-size-mib: "),
            (["--shard-max-seconds", "0"], "--shard-max-seconds: "),
            (["--shard-max-seconds", "nan"], "--shard-max-seconds: "),
            (["--source-name", "a/b"], "--source-name: must not contain a slash, got 'a/b'"),
            (["--dtype", "fp8"], "'fp8' is not one of"),
            (["--format", "npz"], "'npz' is not one of"),
            (["--posterior", "mean"], "'mean' is not one of"),
            (["--resolution", "large"], "'large' is not a valid integer"),
            (["--resolutions", "64"], "--resolutions"),
            (["another"], "unexpected extra argument"),
        ],
    )
    def test_a_bad_option_is_a_usage_error(
        self, images: Path, out: Path, arguments: list[str], message: str
    ) -> None:
        result = precompute(images, out, *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert not out.exists()

    @pytest.mark.parametrize("missing", ["--model", "--out"])
    def test_a_missing_option_is_a_usage_error(self, images: Path, missing: str) -> None:
        given = {"--model": "bundled", "--out": "x"}
        del given[missing]
        (pair,) = given.items()
        result = CliRunner().invoke(prebake.cli, ["precompute", str(images), *pair])
        assert result.exit_code == 2
        assert f"Missing option '{missing}'" in result.output

    def test_help_says_what_is_read_and_what_happens(self) -> None:
        result = CliRunner().invoke(prebake.cli, ["precompute", "--help"])
        assert result.exit_code == 0
        text = " ".join(result.output.split())
        for part in (
            "precompute [OPTIONS] IMAGES",
            "png, jpg, webp, bmp, tiff, avif",
            "NAME.txt or NAME.caption beside each image, or metadata.jsonl / metadata.csv",
            "Run the same command again",
            "STORE/report.jsonl",
            "[default: 512]",
            "--dry-run",
        ):
            assert part in text


class TestOutput:
    def test_a_plan_names_what_it_drops_and_changes_and_counts_what_it_encodes(
        self, images: Path, out: Path
    ) -> None:
        draw_set(images, {f"{i}.png": f"caption {i}" for i in range(5)})
        assert precompute(images, out).exit_code == 0
        (images / "0.png").unlink()
        (images / "1.txt").write_text("a new caption")
        draw(images / "2.png", 77)
        lines = precompute(images, out, "--dry-run").output.splitlines()
        assert any(line.endswith("image is gone from the source: 0.png") for line in lines)
        assert any(line.endswith("image changed: 2.png") for line in lines)
        assert any("1.png" in line and "caption" in line for line in lines)
        assert any(line.endswith("(100%); to encode: 1") for line in lines)

    def test_another_folder_for_the_same_store_is_pointed_out(
        self, images: Path, out: Path, tmp_path: Path
    ) -> None:
        assert precompute(images, out).exit_code == 0
        moved = images.rename(tmp_path / "elsewhere")
        note = "note: this adds a source to those that the store holds ('pictures': "
        assert note in precompute(moved, out, "--dry-run").output
        named = precompute(moved, out, "--source-name", "pictures", "--dry-run").output
        assert "note:" not in named

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_plan_and_summary_say_the_numbers(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {"c.png": "a cat", "wide.png": "cat " * 90}, size=(80, 54), seed=5)
        shutil.copy(images / "a.png", images / "again.png")
        (images / "none.png").write_bytes(b"")
        result = precompute(images, out, "--format", layout)
        assert result.exit_code == 0
        # 64x64 twice and its copy, 80x54 twice; cat, dog, "", and the long one
        text_bytes, latent_bytes = 77 * 32 * 2, 4 * (3 * 64 + 2 * 60) * 2
        written = latent_bytes + text_bytes * (4 if layout == "zarr" else 6)  # the empty prompt too
        lines = [
            re.sub(r"[0-9]+ MiB are free", "N MiB are free", x) for x in result.output.splitlines()
        ]
        lines = [
            re.sub(r"in [0-9.]+ s \([0-9.]+ images/s\)", "in S s (R images/s)", x) for x in lines
        ]
        assert lines == [
            "warning: images without a caption, which get the empty prompt if they are baked: 2 "
            "(again.png, none.png)",
            f"plan for {out} (source 'pictures'):",
            "  files  action      why",
            "      4  add         new",
            "      1  copy        equal image in this run: again.png",
            "      1  not stored  empty_file: none.png",
            "  files  bucket   to encode",
            "      3  64 x 64  2",
            "      2  80 x 48  2",
            "  4 different captions for 5 images (80%); to encode: 4",
            f"  writes about {written / 2**20:.1f} MiB; N MiB are free",
            "5 samples written, 0 unchanged, 0 dropped, 1 file not stored; "
            "4 images and 4 captions encoded in S s (R images/s)",
            "warning: 1 caption cut, longer than the text encoder takes, such as "
            f"{('cat ' * 90)[:60]!r}...",
            # 80x54 loses 6 of 54 rows: 2 of 5 images lose a ninth
            f"cropped away on average: {100 * 2 / 5 / 9:.1f} % of an image",
            f"{out} now holds 5 samples in buckets 64x64: 3, 80x48: 2",
            f"not stored, see {out / 'report.jsonl'}:",
            "          1 empty_file, such as none.png: the file has 0 bytes",
        ]
        report = (out / "report.jsonl").read_text()
        assert report == (
            '{"path": "none.png", "reason": "empty_file", "detail": "the file has 0 bytes"}\n'
        )

    def test_a_second_run_says_that_there_was_nothing_to_do(self, images: Path, out: Path) -> None:
        precompute(images, out)
        result = precompute(images, out)
        assert result.exit_code == 0
        lines = result.output.splitlines()
        assert lines[2] == "      2  reuse   unchanged"
        assert lines[3].startswith(
            "0 samples written, 2 unchanged, 0 dropped, 0 files not stored; 0 images and 0 captions"
        )
        assert (out / "report.jsonl").read_text() == ""

    def test_a_dry_run_prints_the_plan_only(self, images: Path, out: Path) -> None:
        result = precompute(images, out, "--dry-run")
        assert result.exit_code == 0
        assert "      2  add     new" in result.output
        assert "samples written" not in result.output
        assert not out.exists()

    def test_a_halved_batch_and_a_retry_are_in_the_summary(self, images: Path, out: Path) -> None:
        import torch

        from precompute import encoders

        real = encoders.ImageEncoder._moments

        def moments(self: Any, batch: torch.Tensor) -> torch.Tensor:
            if len(batch) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            found = real(self, batch)
            return found * torch.inf if batch.dtype == torch.bfloat16 else found

        with (
            mock.patch.object(encoders, "_at_once", lambda batch_size, device: batch_size),
            mock.patch.object(encoders.ImageEncoder, "_moments", moments),
        ):
            result = precompute(images, out, "--compute-dtype", "bf16", "--batch-size", "2")
        assert result.exit_code == 0
        lines = result.output.splitlines()
        assert "out of memory: images are now encoded 1 at once" in lines
        assert "2 images overflowed, encoded again in float32" in lines

    def test_progress_is_plain_lines_where_there_is_no_terminal(
        self, images: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
        result = precompute(images, out, "--batch-size", "1")
        lines = [line for line in result.stderr.splitlines() if line.startswith("baking: ")]
        assert re.fullmatch(r"baking: 1/2 images, [0-9.e+]+ images/s, 0:00:\d\d left", lines[0])
        assert lines[-1].startswith("baking: 2/2 images, ")
        assert any(line.startswith("planning: 2/2 files, ") for line in result.stderr.splitlines())
        assert "\r" not in result.output

    def test_unusual_names_do_not_break_the_lines(self, images: Path, out: Path) -> None:
        (images / "two\nlines.png").write_bytes(b"")
        result = precompute(images, out)
        assert "empty_file, such as two\\nlines.png: the file has 0 bytes" in result.output
        (line,) = (out / "report.jsonl").read_text().splitlines()
        assert json.loads(line)["path"] == "two\nlines.png"

    def test_the_source_is_named_by_its_folder_or_by_the_option(
        self, images: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(images)
        assert "(source 'pictures')" in precompute(Path(), out).output
        result = precompute(images, out, "--source-name", "cats")
        assert "(source 'cats')" in result.output
        assert {row.source for row in open_store(out).index.iter_samples()} == {"pictures", "cats"}


def test_the_bundled_model_is_found_by_its_name(images: Path, out: Path) -> None:
    assert precompute(images, out, model=Path("bundled")).exit_code == 0


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tiff", "avif"])
def test_each_image_format_of_the_help_is_baked(tmp_path: Path, out: Path, suffix: str) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    if suffix == "avif":
        import pyvips

        pyvips.Image.new_from_array(pixels(0)).heifsave(str(folder / "a.avif"), compression="av1")
    elif suffix == "jpg":
        draw(folder / "a.jpg", 0)
    else:
        Image.fromarray(pixels(0)).save(folder / f"a.{suffix}")
    result = precompute(folder, out)
    assert "1 sample written" in result.output, result.output
