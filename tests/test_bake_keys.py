"""What is computed again, and what is not: `--reuse`, `--rehash`, touched files, limits."""

import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from bake_builders import (
    LAYOUTS,
    baked,
    config,
    copy_model,
    draw,
    draw_set,
    hash_of,
    reasons,
    run_bake,
    tree,
)

from precompute.bake import bake
from store_format import open_store
from store_format.errors import OtherBakeError

PICTURES = {"a.png": "one", "b.png": "two", "d/c.png": "one"}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_set(tmp_path / "pictures", PICTURES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


def encoded(images: Path, out: Path, layout: str = "zarr", **options: object) -> tuple[int, int]:
    """Bake; return how many images and how many captions were encoded."""
    summary = run_bake(images, out, layout, **options)
    return summary.num_images_encoded, summary.num_captions_encoded


class TestTouched:
    def test_a_new_time_is_noted_once_and_nothing_moves(
        self, images: Path, out: Path, layout: str
    ) -> None:
        run_bake(images, out, layout)
        before = {path: row.row for path, row in baked(out).items()}
        os.utime(images / "a.png", ns=(5, 5))
        with (
            mock.patch("precompute.examine._sha256", side_effect=AssertionError),
            pytest.raises(AssertionError),
        ):
            run_bake(images, out, layout)  # it must be hashed, this once
        assert encoded(images, out, layout) == (0, 0)
        after = {path: row.row for path, row in baked(out).items()}
        assert after["a.png"].image_mtime_ns == 5
        assert after["a.png"].place == before["a.png"].place
        assert {p: r for p, r in after.items() if p != "a.png"} == {
            p: r for p, r in before.items() if p != "a.png"
        }
        files = tree(out)
        with mock.patch("precompute.examine._sha256", side_effect=AssertionError):
            assert encoded(images, out, layout) == (0, 0)
        changed = {name for name, state in tree(out).items() if files.get(name) != state}
        assert changed <= {"report.jsonl", "staging"}

    def test_a_file_that_hides_its_change_is_found_by_rehash(
        self, images: Path, out: Path, layout: str
    ) -> None:
        """Same size, same time, other content: only `--rehash` can know."""
        run_bake(images, out, layout)
        file = images / "a.png"
        status = file.stat()
        data = bytearray((images / "b.png").read_bytes()[: status.st_size])
        data += bytes(status.st_size - len(data))  # trailing zeros after IEND harm no PNG
        if len((images / "b.png").read_bytes()) > status.st_size:
            pytest.skip("the other picture is larger")
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert encoded(images, out, layout) == (0, 0)
        summary = run_bake(images, out, layout, rehash=True)
        assert summary.plan.counts()["re-encode", "image changed"] == 1
        assert (baked(out)["a.png"].latents == baked(out)["b.png"].latents).mean() < 1


class TestReuse:
    def test_every_row_of_equal_key_is_taken_over(
        self, images: Path, out: Path, tmp_path: Path, layout: str
    ) -> None:
        """Another maximal resolution: small pictures keep bucket and key, large ones do not."""
        draw(images / "large.png", 9, (192, 192))
        (images / "large.txt").write_text("three")
        run_bake(images, out, layout)
        for new_layout in LAYOUTS:
            new = tmp_path / f"new-{new_layout}"
            options = {"resolution": 128, "bucket_step": 16}
            counts = encoded(images, new, new_layout, reuse=str(out), **options)
            assert counts == (1, 0)
            alone = tmp_path / f"alone-{new_layout}"
            assert encoded(images, alone, new_layout, **options) == (4, 4)
            assert hash_of(new) == hash_of(alone)

    def test_it_says_so_in_the_plan(self, images: Path, out: Path, tmp_path: Path) -> None:
        run_bake(images, out)
        said: list[str] = []
        run_bake(images, tmp_path / "new", reuse=str(out), say=said.append)
        copied = "      3  copy    equal latents are in the store to --reuse: "
        assert any(line.startswith(copied) for line in said)

    def test_unchanged_files_are_not_read(self, images: Path, out: Path, tmp_path: Path) -> None:
        run_bake(images, out)
        with (
            mock.patch("precompute.run.decode", side_effect=AssertionError),
            mock.patch("precompute.examine._sha256", side_effect=AssertionError),
            mock.patch("precompute.examine.read_size", side_effect=AssertionError),
        ):
            assert encoded(images, tmp_path / "new", reuse=str(out)) == (0, 0)
        assert hash_of(tmp_path / "new") == hash_of(out)

    def test_another_encoder_takes_over_what_it_does_not_change(
        self, images: Path, out: Path, tmp_path: Path, layout: str
    ) -> None:
        """Another VAE: all texts are taken over, no latents."""
        run_bake(images, out, layout)
        model = copy_model(tmp_path / "model")
        shutil.rmtree(model / "vae")
        from tiny_models import make_tiny_sd

        shutil.copytree(make_tiny_sd(tmp_path / "other", seed=7) / "vae", model / "vae")
        assert encoded(images, tmp_path / "new", layout, model=str(model), reuse=str(out)) == (3, 0)

    def test_a_refusal_names_both_sides_and_the_way_out(self, images: Path, out: Path) -> None:
        run_bake(images, out)
        with pytest.raises(OtherBakeError, match=r"resolution = 64 \(asked for: 128\).*--reuse"):
            bake(config(images, out, resolution=128), say=lambda line: None)
        assert len(open_store(out)) == 3


class TestLimits:
    def test_a_picture_of_too_many_pixels_is_reported_until_the_limit_is_raised(
        self, images: Path, out: Path
    ) -> None:
        from PIL import Image

        Image.fromarray(np.zeros((1200, 1000), np.uint8)).save(images / "bomb.png")
        summary = run_bake(images, out, max_megapixels=1)
        assert reasons(summary) == {"bomb.png": "too_many_pixels"}
        assert "raise --max-megapixels" in summary.problems[0].detail
        assert reasons(run_bake(images, out, max_megapixels=2)) == {}
