"""A bake from folder to store: every file accounted for, and only what changed computed again."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zarr
from bake_builders import (
    LAYOUTS,
    baked,
    config,
    copy_model,
    draw,
    draw_set,
    hash_of,
    num_text_rows,
    pixels,
    reasons,
    run_bake,
    tiny_model,
    tree,
)
from diffusers import AutoencoderKL
from PIL import Image
from tiny_models import tiny_vae

import precompute.bake
import precompute.encoders
import precompute.run
import precompute.texts
from precompute.bake import prepare
from precompute.buckets import choose_geometry
from precompute.pixels import ImageSize
from precompute.plan import Plan, make_plan
from precompute.problems import ImageProblem, Reason
from precompute.source import Scan, SourceImage
from precompute.summary import Summary, describe_summary
from store_format import open_store
from store_format.errors import NotAStoreError, OtherBakeError, PrebakeError
from store_format.index import LiveIndex
from store_format.keys import sample_id

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "pictures"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


def encode_alone(picture: np.ndarray) -> np.ndarray:
    """Return the scaled mode of [H, W, 3] uint8 by diffusers itself: [C, h, w] f32."""
    vae = AutoencoderKL.from_pretrained(tiny_model() / "vae")
    values = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.no_grad():
        return np.asarray(vae.encode(values).latent_dist.mode()[0].numpy() * 0.18215)


EXACT: dict[str, Any] = {"posterior": "mode", "dtype": "fp32"}


def assert_latents(found: np.ndarray, picture: np.ndarray) -> None:
    np.testing.assert_allclose(found, encode_alone(picture), rtol=1e-3, atol=1e-5)


def counts(summary: Summary) -> tuple[int, int]:
    return summary.num_images_encoded, summary.num_captions_encoded


class TestEveryFile:
    def test_is_stored_or_reported_with_its_reason(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {"good.png": "a cat", "d/good.jpg": "a dog", "no_caption.png": None})
        whole = draw(images / "cut.jpg", 7).read_bytes()
        (images / "cut.jpg").write_bytes(whole[: len(whole) // 2])
        (images / "empty.png").write_bytes(b"")
        (images / "text.jpg").write_text("this is no picture, whatever it is called")
        draw(images / "small.png", 8, (31, 64))
        draw(images / "latin.png", 9)
        (images / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
        draw(images / "blank.png", 10)
        (images / "blank.txt").write_text(" \n\t\r\n  ")
        (images / "vector.svg").write_text("<svg/>")
        draw(images / "jpeg_named.jpg", 11).rename(images / "jpeg_named.png")
        Image.fromarray(pixels(12)).convert("LA").save(images / "grey_alpha.png")

        summary = run_bake(images, out, layout)
        assert reasons(summary) == {
            "cut.jpg": "truncated",
            "empty.png": "empty_file",
            "text.jpg": "not_an_image",
            "small.png": "too_small",
            "latin.png": "caption_undecodable",
            "vector.svg": "unsupported_format",
        }
        assert {path: sample.caption for path, sample in baked(out).items()} == {
            "good.png": "a cat",
            "d/good.jpg": "a dog",
            "no_caption.png": "",
            "blank.png": "",
            "jpeg_named.png": "",
            "grey_alpha.png": "",
        }
        lines = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
        assert {line["path"]: line["reason"] for line in lines} == reasons(summary)
        assert all(set(line) == {"path", "reason", "detail"} and line["detail"] for line in lines)
        assert summary.num_stored == 6

        again = run_bake(images, out, layout)
        assert reasons(again) == reasons(summary)
        assert counts(again) == (0, 0)
        assert again.plan.reused == 6

    @pytest.mark.parametrize("bad", ["a0.png", "a4.png", "a9.png"])
    def test_a_bad_image_in_a_batch_shifts_nobody(
        self, images: Path, out: Path, layout: str, bad: str
    ) -> None:
        """Field case P1: every later image was stored under its neighbour's name."""
        names = {f"a{i}.png": f"caption {i}" for i in range(10)}
        draw_set(images, names)
        data = (images / bad).read_bytes()
        (images / bad).write_bytes(data[:-400] + bytes(400))  # the header is sound
        summary = run_bake(images, out, layout, **EXACT)
        assert list(reasons(summary)) == [bad]
        found = baked(out)
        assert found.keys() == names.keys() - {bad}
        for number, name in enumerate(names):
            if name != bad:
                assert found[name].caption == f"caption {number}"
                assert_latents(found[name].latents, pixels(number))

    def test_all_bad_images_make_an_empty_store_and_a_report(
        self, images: Path, out: Path, layout: str
    ) -> None:
        images.mkdir()
        (images / "a.png").write_bytes(b"")
        summary = run_bake(images, out, layout)
        assert reasons(summary) == {"a.png": "empty_file"}
        assert len(open_store(out)) == 0
        assert open_store(out).read_empty_text()["encoder_hidden_states"].shape == (77, 32)

    def test_non_finite_latents_are_reported_and_never_stored(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {"a.png": "a", "b.png": "b", "copy_of_b.png": "c"})
        shutil.copy(images / "b.png", images / "copy_of_b.png")
        real = precompute.encoders.ImageEncoder._latents
        bad = encode_alone(pixels(1)) / 0.18215

        def latents(self: Any, moments: torch.Tensor, key: str) -> list[torch.Tensor]:
            found = real(self, moments, key)
            if np.allclose(moments[:4].numpy(), bad, atol=1e-4):
                found[0][0, 0, 0] = torch.nan
            return found

        with mock.patch.object(precompute.encoders.ImageEncoder, "_latents", latents):
            summary = run_bake(images, out, layout)
        assert reasons(summary) == {"b.png": "non_finite", "copy_of_b.png": "non_finite"}
        assert baked(out).keys() == {"a.png"}
        after = run_bake(images, out, layout)
        assert counts(after) == (1, 2)
        assert baked(out).keys() == {"a.png", "b.png", "copy_of_b.png"}

    def test_a_file_that_changes_between_plan_and_decode_is_reported_or_stored_as_it_is(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {"a.png": "a", "gone.png": "b", "grown.png": "c", "hashed.png": "d"})
        run_bake(images, out, layout, **EXACT)
        for number, name in enumerate(["a.png", "gone.png", "grown.png", "hashed.png"]):
            draw(images / name, 20 + number)
        real = precompute.run.decode

        def interfere(*args: Any) -> Any:
            if (images / "gone.png").exists():
                (images / "gone.png").unlink()
                draw(images / "grown.png", 30, (128, 128))
                draw(images / "hashed.png", 31)
            return real(*args)

        with mock.patch("precompute.run.decode", interfere):
            summary = run_bake(images, out, layout, num_workers=1, **EXACT)
        found = baked(out)
        assert reasons(summary) == {
            "gone.png": "unreadable",
            "grown.png": "changed_while_baking",
            "hashed.png": "changed_while_baking",
        }
        assert_latents(found["a.png"].latents, pixels(20))
        assert_latents(found["hashed.png"].latents, pixels(3))  # what was there stays
        run_bake(images, out, layout, **EXACT)
        assert_latents(baked(out)["hashed.png"].latents, pixels(31))

    def test_a_new_file_that_changes_size_before_it_is_decoded_is_reported(
        self, images: Path, out: Path
    ) -> None:
        draw_set(images, {"a.png": "a"})
        real = precompute.run.decode

        def interfere(data: bytes, *args: Any) -> Any:
            return real(draw(images / "a.png", 5, (80, 64)).read_bytes(), *args)

        with mock.patch("precompute.run.decode", interfere):
            summary = run_bake(images, out)
        assert reasons(summary) == {"a.png": "size_mismatch"}
        assert counts(run_bake(images, out)) == (1, 1)

    def test_names_with_line_breaks_and_other_scripts_are_stored(
        self, images: Path, out: Path, layout: str
    ) -> None:
        names = {
            "new\nline.png": "one",
            "猫/ﬁ ☕.png": "two",
            "a.b.c.png": "three",
            "'\"\\.png": "4",
        }
        draw_set(images, names)
        (images / "bad\nname.png").write_bytes(b"")
        summary = run_bake(images, out, layout)
        assert {path: sample.caption for path, sample in baked(out).items()} == names
        lines: list[str] = []
        describe_summary(summary, config(images, out), lines.append)
        assert not [line for line in lines if "\n" in line]
        assert plain_reader(out, layout).keys() == {sample_id("pictures", name) for name in names}

    def test_a_bug_in_a_decoding_thread_stops_the_bake_and_keeps_a_valid_store(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {f"{i}.png": "a" for i in range(9)})
        with (
            mock.patch("precompute.run.decode", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            run_bake(images, out, layout)
        run_bake(images, out, layout)
        assert len(baked(out)) == 9

    def test_an_error_of_the_writing_thread_commits_nothing_more(
        self, images: Path, out: Path, layout: str
    ) -> None:
        """A shard may hold half a row then: later rows must not be committed with it."""
        draw_set(images, {f"{i:02}.png": f"caption {i}" for i in range(40)})
        real = precompute.run.ShardSink._put
        calls = 0

        def put(self: Any, *args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                time.sleep(0.2)  # so that more calls are waiting by then
                self._samples._file.write(b"half a row") if layout == "webdataset" else None
                raise OSError(5, "Input/output error")
            real(self, *args)

        with (
            mock.patch.object(precompute.run.ShardSink, "_put", put),
            pytest.raises(OSError, match="Input/output"),
        ):
            run_bake(images, out, layout, batch_size=1)
        assert calls == 4
        assert open_store(out).index.commits == []
        run_bake(images, out, layout)
        assert len(baked(out)) == 40


class TestPairing:
    def test_equal_stems_and_numbers_are_different_samples(
        self, images: Path, out: Path, layout: str
    ) -> None:
        names = ["a.png", "a.jpg", "d1/x.png", "d2/x.png", "img1.png", "img10.png", "img2.png"]
        draw_set(images, {name: f"caption of {name}" for name in names if name != "a.jpg"})
        draw(images / "a.jpg", 50)
        run_bake(images, out, layout, **EXACT)
        found = baked(out)
        seeds = [n for n in names if n != "a.jpg"]
        for seed, name in enumerate(seeds):
            assert found[name].row.sample_id == sample_id("pictures", name)
            assert_latents(found[name].latents, pixels(seed))
            assert found[name].caption == f"caption of {name}"
        assert found["a.jpg"].caption == "caption of a.png"  # they share a.txt
        assert not np.allclose(found["a.jpg"].latents, found["a.png"].latents, atol=1e-2)
        states = {name: found[name].states.tobytes() for name in seeds}
        assert len(set(states.values())) == len(seeds)
        assert found["a.jpg"].states.tobytes() == states["a.png"]

    def test_an_added_file_moves_no_other(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {f"img{i}.png": f"caption {i}" for i in range(6)})
        run_bake(images, out, layout)
        before = baked(out)
        draw_set(images, {"aaa.png": "first of all"}, seed=90)
        (images / "img3.png").unlink()
        summary = run_bake(images, out, layout)
        assert counts(summary) == (1, 1)
        after = baked(out)
        assert after.keys() == (before.keys() | {"aaa.png"}) - {"img3.png"}
        for path in after.keys() & before.keys():
            np.testing.assert_array_equal(after[path].latents, before[path].latents)
            np.testing.assert_array_equal(after[path].states, before[path].states)

    def test_several_buckets_in_one_folder(self, images: Path, out: Path, layout: str) -> None:
        sizes = [(64, 64), (80, 48), (48, 80), (64, 64), (80, 48), (96, 32)]
        for number, size in enumerate(sizes):
            draw(images / f"{number}.png", number, size)
        summary = run_bake(images, out, layout, **EXACT)
        assert summary.buckets == {(64, 64): 2, (80, 48): 2, (48, 80): 1, (96, 32): 1}
        for number, size in enumerate(sizes):
            sample = baked(out)[f"{number}.png"]
            assert sample.row.bucket_px == sample.row.original_px == sample.row.resized_px == size
            assert sample.row.crop_px == (0, 0)
            assert_latents(sample.latents, pixels(number, size))


@pytest.fixture(scope="module")
def sets_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bake four images with three captions, once in each layout."""
    made = {}
    for layout in LAYOUTS:
        folder = made[layout] = tmp_path_factory.mktemp(f"four-{layout}")
        images = folder / "pictures"
        draw_set(images, {"a.png": "cat", "b.png": "dog", "c.png": "cat", "d/e.png": None})
        summary = run_bake(images, folder / "store", layout)
        assert counts(summary) == (4, 3)  # cat, dog, and the empty prompt
    return made


@pytest.fixture
def set_of_four(sets_of_four: dict[str, Path], tmp_path: Path, layout: str) -> dict[str, Any]:
    """Return a copy of that bake and its images, to be changed; times are kept."""
    shutil.copytree(sets_of_four[layout], tmp_path, dirs_exist_ok=True)
    return {"images": tmp_path / "pictures", "out": tmp_path / "store", "layout": layout}


def rebake(baked_set: dict[str, Any], **options: Any) -> Summary:
    images, out, layout = baked_set["images"], baked_set["out"], baked_set["layout"]
    summary = run_bake(images, out, layout, **options)
    live = {sample.row.sample_id: sample for sample in baked(out).values()}
    read = plain_reader(out, layout)
    assert read.keys() == live.keys()
    for key, (latents, states, caption) in read.items():
        sample = live[key]
        np.testing.assert_array_equal(latents, sample.latents)
        np.testing.assert_array_equal(states, sample.states)
        assert caption in (None, sample.caption)
    return summary


def plain_reader(root: Path, layout: str) -> dict[str, tuple[np.ndarray, np.ndarray, str | None]]:
    """Return (latents, states, caption) by sample id, read without prebake."""
    if layout == "zarr":
        return plain_zarr_reader(root)
    import webdataset

    tars = (root / "shards.txt").read_text().split()
    assert all((root / tar).exists() for tar in tars)
    found: dict[str, Any] = {}
    if not tars:
        return found
    urls = [str(root / tar) for tar in tars]
    for item in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode():
        about = item["json"]
        assert item["__key__"] not in found
        found[item["__key__"]] = (
            item["latents.npy"],
            item["encoder_hidden_states.npy"],
            about["captions"][0],
        )
    return found


def plain_zarr_reader(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray, str | None]]:
    group = zarr.open_group(root, mode="r")
    texts: dict[bytes, np.ndarray] = {}
    for _, shard in group["texts"].groups():
        keys, states = shard["text_key"][:], shard["encoder_hidden_states"][:]
        texts.update({key.tobytes(): row for key, row in zip(keys, states, strict=True)})
    found: dict[str, Any] = {}
    for _, bucket in group["samples"].groups() if "samples" in group else ():
        for _, shard in bucket.groups():
            live = shard["live"][:]
            for row in np.flatnonzero(live):
                key = shard["sample_id"][row].tobytes().hex()
                assert key not in found
                states = texts[shard["text_key"][row, 0].tobytes()]
                found[key] = (shard["latents"][row], states, None)
    return found


class TestSecondRun:
    def test_encodes_nothing_loads_no_model_and_writes_no_shard(
        self, set_of_four: dict[str, Any]
    ) -> None:
        before, commits = hash_of(set_of_four["out"]), open_store(set_of_four["out"]).index.commits
        with (
            mock.patch.object(AutoencoderKL, "from_pretrained", side_effect=AssertionError),
            mock.patch("precompute.encoders._load", side_effect=AssertionError),
            mock.patch("precompute.run.decode", side_effect=AssertionError),
            mock.patch("precompute.examine.read_size", side_effect=AssertionError),
        ):
            summary = rebake(set_of_four)
        assert summary.plan.counts() == {("reuse", "unchanged"): 4}
        assert hash_of(set_of_four["out"]) == before
        assert open_store(set_of_four["out"]).index.commits == commits

    def test_does_not_import_model_code(self, images: Path, out: Path) -> None:
        draw_set(images, {"a.png": "a"})
        run_bake(images, out)
        script = f"""
            import sys
            sys.path[:0] = [{str(ROOT)!r}]
            from precompute.bake import bake
            from precompute.config import BakeConfig
            config = BakeConfig.model_validate_json(sys.argv[1])
            assert bake(config, say=lambda line: None).plan.reused == 1
            for name in ("precompute.encoders", "diffusers", "transformers"):
                assert name not in sys.modules, name
        """
        chosen = config(images, out).model_dump_json()
        subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(script), chosen], check=True)

    def test_a_touched_file_changes_nothing(self, set_of_four: dict[str, Any]) -> None:
        before = hash_of(set_of_four["out"])
        for file in set_of_four["images"].rglob("*"):
            os.utime(file, ns=(0, 1_600_000_000_000_000_000))
        summary = rebake(set_of_four)
        assert summary.plan.counts() == {("reuse", "unchanged"): 4}
        assert counts(summary) == (0, 0)
        assert hash_of(set_of_four["out"]) == before


class TestEdits:
    def test_a_caption_edit_encodes_no_image(self, set_of_four: dict[str, Any]) -> None:
        before = baked(set_of_four["out"])
        (set_of_four["images"] / "a.txt").write_text("bird")
        summary = rebake(set_of_four)
        assert summary.plan.counts() == {
            ("reuse", "unchanged"): 3,
            ("text only", "caption changed"): 1,
        }
        assert counts(summary) == (0, 1)
        after = baked(set_of_four["out"])
        assert after["a.png"].caption == "bird"
        np.testing.assert_array_equal(after["a.png"].latents, before["a.png"].latents)
        assert not np.array_equal(after["a.png"].states, before["a.png"].states)
        assert after["c.png"].caption == "cat"
        np.testing.assert_array_equal(after["c.png"].states, before["a.png"].states)
        if set_of_four["layout"] == "zarr":  # and its latents stay where they are
            assert after["a.png"].row.place == before["a.png"].row.place

    def test_a_caption_that_is_known_already_encodes_nothing(
        self, set_of_four: dict[str, Any]
    ) -> None:
        (set_of_four["images"] / "a.txt").write_text("dog")
        (set_of_four["images"] / "c.txt").unlink()
        summary = rebake(set_of_four)
        assert counts(summary) == (0, 0)
        found = baked(set_of_four["out"])
        np.testing.assert_array_equal(found["a.png"].states, found["b.png"].states)
        np.testing.assert_array_equal(found["c.png"].states, found["d/e.png"].states)
        (set_of_four["images"] / "a.txt").write_text("cat")  # and back
        assert counts(rebake(set_of_four))[0] == 0
        assert baked(set_of_four["out"])["a.png"].caption == "cat"

    def test_an_image_edit_encodes_no_caption(self, set_of_four: dict[str, Any]) -> None:
        draw(set_of_four["images"] / "b.png", 77)
        summary = rebake(set_of_four)
        assert summary.plan.counts()["re-encode", "image changed"] == 1
        assert counts(summary) == (1, 0)
        assert baked(set_of_four["out"])["b.png"].caption == "dog"

    def test_an_edit_of_equal_size_and_another_time_is_seen(
        self, set_of_four: dict[str, Any]
    ) -> None:
        file = set_of_four["images"] / "b.png"
        Image.fromarray(pixels(1)).save(file.with_suffix(".bmp"))
        Image.fromarray(pixels(2)).save(file.with_name("c.bmp"))
        rebake(set_of_four)
        assert file.with_suffix(".bmp").stat().st_size == file.with_name("c.bmp").stat().st_size
        shutil.copyfile(file.with_name("c.bmp"), file.with_suffix(".bmp"))
        summary = rebake(set_of_four)
        # its latents are known: c.bmp has them
        assert summary.plan.counts()["copy", "equal latents are stored"] == 1
        found = baked(set_of_four["out"])
        np.testing.assert_array_equal(found["b.bmp"].latents, found["c.bmp"].latents)
        assert found["b.bmp"].caption == "dog"

    def test_an_edit_of_image_and_caption_at_once(self, set_of_four: dict[str, Any]) -> None:
        draw(set_of_four["images"] / "b.png", 78, (80, 48))  # another bucket, too
        (set_of_four["images"] / "b.txt").write_text("both")
        assert counts(rebake(set_of_four)) == (1, 1)
        sample = baked(set_of_four["out"])["b.png"]
        assert (sample.caption, sample.row.bucket_px) == ("both", (80, 48))

    def test_a_rename_encodes_nothing_and_gives_a_new_id(self, set_of_four: dict[str, Any]) -> None:
        before = baked(set_of_four["out"])
        for suffix in (".png", ".txt"):
            (set_of_four["images"] / f"b{suffix}").rename(set_of_four["images"] / f"z{suffix}")
        summary = rebake(set_of_four)
        assert counts(summary) == (0, 0)
        assert summary.plan.counts() == {
            ("reuse", "unchanged"): 3,
            ("copy", "equal latents are stored"): 1,
            ("drop", "image is gone from the source"): 1,
        }
        after = baked(set_of_four["out"])
        assert "b.png" not in after
        assert after["z.png"].row.sample_id != before["b.png"].row.sample_id
        np.testing.assert_array_equal(after["z.png"].latents, before["b.png"].latents)
        np.testing.assert_array_equal(after["z.png"].states, before["b.png"].states)

    def test_two_images_that_change_names_change_latents(self, set_of_four: dict[str, Any]) -> None:
        before = baked(set_of_four["out"])
        folder = set_of_four["images"]
        (folder / "a.png").rename(folder / "t.png")
        (folder / "b.png").rename(folder / "a.png")
        (folder / "t.png").rename(folder / "b.png")
        assert counts(rebake(set_of_four)) == (0, 0)
        after = baked(set_of_four["out"])
        for mine, theirs in (("a.png", "b.png"), ("b.png", "a.png")):
            np.testing.assert_array_equal(after[mine].latents, before[theirs].latents)
            np.testing.assert_array_equal(after[mine].states, before[mine].states)

    def test_a_deleted_image_is_dropped_in_a_commit_of_its_own(
        self, set_of_four: dict[str, Any]
    ) -> None:
        out = set_of_four["out"]
        before = {commit.name for commit in open_store(out).index.commits}
        (set_of_four["images"] / "d/e.png").unlink()
        draw_set(set_of_four["images"], {"new.png": "cat"}, seed=60)
        summary = rebake(set_of_four)
        assert [tombstone.path for tombstone in summary.plan.dropped] == ["d/e.png"]
        assert baked(out).keys() == {"a.png", "b.png", "c.png", "new.png"}
        new = [c for c in open_store(out).index.commits if c.name not in before]
        dropping = [c for c in new if not c.shards]
        assert len(dropping) == 1
        assert dropping[0].segments.samples is not None
        assert dropping[0].segments.samples.rows == 1
        assert counts(rebake(set_of_four)) == (0, 0)

    def test_an_image_whose_metadata_row_stays_is_dropped_and_reported(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {"a.png": None, "b.png": None, "c.png": None})
        rows = [{"file_name": f"{name}.png", "text": f"caption {name}"} for name in "abc"]
        (images / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        run_bake(images, out, layout)
        assert baked(out)["b.png"].caption == "caption b"
        (images / "b.png").unlink()
        summary = run_bake(images, out, layout)
        assert reasons(summary) == {"b.png": "missing_file"}
        assert baked(out).keys() == {"a.png", "c.png"}

    def test_an_image_that_went_bad_keeps_its_sample_and_is_reported(
        self, set_of_four: dict[str, Any]
    ) -> None:
        (set_of_four["images"] / "a.png").write_bytes(b"")
        summary = rebake(set_of_four)
        assert reasons(summary) == {"a.png": "empty_file"}
        assert not summary.plan.dropped
        assert "a.png" in baked(set_of_four["out"])

    def test_more_than_half_is_dropped_only_if_allowed(self, set_of_four: dict[str, Any]) -> None:
        images, out, layout = (set_of_four[k] for k in ("images", "out", "layout"))
        for name in ("a.png", "b.png"):  # half
            (images / name).unlink()
        before = tree(out)
        (images / "c.png").rename(images / "c.bak")  # more than half
        for dry_run in (True, False):
            with pytest.raises(PrebakeError, match=r"3 of the 4 samples of source 'pictures' .*"):
                run_bake(images, out, layout, dry_run=dry_run)
        after = tree(out)
        assert {k for k in before if before[k] != after.get(k)} <= {"staging", "writer.lock"}
        (images / "c.bak").rename(images / "c.png")
        assert len(rebake(set_of_four).plan.dropped) == 2
        (images / "c.png").unlink()
        (images / "d/e.png").unlink()
        draw_set(images, {"new.png": "cat"}, seed=61)
        with pytest.raises(PrebakeError, match="add --allow-drop"):
            rebake(set_of_four)
        rebake(set_of_four, allow_drop=True)
        assert baked(out).keys() == {"new.png"}

    def test_an_image_that_comes_back_is_a_sample_again(self, set_of_four: dict[str, Any]) -> None:
        before = hash_of(set_of_four["out"])
        file = set_of_four["images"] / "b.png"
        file.rename(file.with_suffix(".bak"))
        rebake(set_of_four)
        file.with_suffix(".bak").rename(file)
        rebake(set_of_four)
        assert hash_of(set_of_four["out"]) == before


class TestSharing:
    def test_an_image_in_two_folders_is_encoded_once_as_two_samples(
        self, images: Path, out: Path, layout: str
    ) -> None:
        draw_set(images, {"d1/a.png": "one", "d2/a.png": "two", "d2/b.png": "two"})
        shutil.copy(images / "d1/a.png", images / "d2/a.png")
        summary = run_bake(images, out, layout)
        assert counts(summary) == (2, 3)  # one, two, and the empty prompt
        assert summary.plan.counts()["copy", "equal image in this run"] == 1
        found = baked(out)
        assert found["d1/a.png"].row.sample_id != found["d2/a.png"].row.sample_id
        np.testing.assert_array_equal(found["d1/a.png"].latents, found["d2/a.png"].latents)
        assert [found[f"d{i}/a.png"].caption for i in (1, 2)] == ["one", "two"]

    def test_another_source_drops_nothing_and_shares_what_is_equal(
        self, tmp_path: Path, out: Path, layout: str
    ) -> None:
        first = draw_set(tmp_path / "first", {"a.png": "cat", "b.png": "dog"})
        second = draw_set(tmp_path / "second", {"a.png": "cat", "c.png": "cow"})
        draw(second / "c.png", 9)
        run_bake(first, out, layout)
        summary = run_bake(second, out, layout)
        assert counts(summary) == (1, 1)
        assert not summary.plan.dropped
        assert baked(out, "first").keys() == {"a.png", "b.png"}
        assert baked(out, "second").keys() == {"a.png", "c.png"}
        (second / "a.png").unlink()
        run_bake(second, out, layout)
        assert baked(out, "first").keys() == {"a.png", "b.png"}
        assert baked(out, "second").keys() == {"c.png"}
        renamed = run_bake(second, out, layout, source_name="third")
        assert counts(renamed) == (0, 0)
        assert baked(out, "third").keys() == {"c.png"}

    def test_equal_captions_are_encoded_once(self, images: Path, out: Path, layout: str) -> None:
        captions = ["cat", "dog", "cat ", "cat\n", "dog", ""]
        draw_set(images, {f"{i:02}.png": captions[i % 6] for i in range(18)})
        summary = run_bake(images, out, layout, batch_size=2)
        assert counts(summary) == (18, 3)
        assert num_text_rows(open_store(out)) == (3 if layout == "zarr" else 1)
        states = {sample.states.tobytes() for sample in baked(out).values()}
        assert len(states) == 3

    @pytest.mark.parametrize("remembered_bytes", [0, 3 * 77 * 32 * 2])
    def test_captions_beyond_the_memory_are_read_back_from_the_store(
        self, images: Path, out: Path, tmp_path: Path, remembered_bytes: int
    ) -> None:
        words = [f"caption {i}" for i in range(6)] + ["", "x"]
        draw_set(images, {f"{i:02}.png": words[i * 5 % 8] for i in range(32)})
        draw_set(images, {f"wide{i}.png": words[i] for i in range(8)}, size=(80, 48), seed=40)
        run_bake(images, tmp_path / "whole", "webdataset")
        with mock.patch("precompute.texts.REMEMBERED_BYTES", remembered_bytes):
            summary = run_bake(images, out, "webdataset", batch_size=3)
        assert counts(summary) == (40, 8)
        assert hash_of(out) == hash_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    images = folder / "pictures"
    draw_set(images, {f"{i:02}.png": f"caption {i % 7}" for i in range(30)})
    draw_set(images, {f"w{i}.png": "wide" for i in range(5)}, size=(80, 48), seed=50)
    run_bake(images, folder / "store", "zarr")
    return folder


class TestSameStore:
    @pytest.fixture
    def images(self, whole: Path) -> Path:
        return whole / "pictures"

    @pytest.fixture
    def reference(self, whole: Path) -> str:
        return hash_of(whole / "store")

    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 1},
            {"num_workers": 4},
            {"shard_max_seconds": 1e-9},
            {"batch_size": 7},
        ],
        ids=str,
    )
    def test_whatever_the_layout_the_workers_and_the_shards(
        self, images: Path, out: Path, layout: str, reference: str, options: dict[str, Any]
    ) -> None:
        run_bake(images, out, layout, **options)
        assert hash_of(out) == reference
        if "shard_max_seconds" in options:
            names = open_store(out).index.rows_by_shard()
            assert len(names) == 8 + 2  # a commit after each batch of 4: 30 / 4, 5 / 4

    def test_in_shards_of_the_asked_size(
        self, images: Path, out: Path, layout: str, reference: str
    ) -> None:
        small = {"shard_size_mib": 1}
        row_bytes = 4 * 8 * 8 * 2 + (77 * 32 * 2 if layout == "webdataset" else 0)
        rows = 12
        with mock.patch("precompute.sink.ShardSink.__init__", limited(rows * row_bytes)):
            run_bake(images, out, layout, **small)
        assert hash_of(out) == reference
        index = open_store(out).index
        sizes = {len(r) for r in index.rows_by_shard().values()}
        assert len(index.rows_by_shard()) >= 3
        assert max(sizes) <= rows + 3

    def test_added_bit_by_bit(
        self, images: Path, out: Path, layout: str, reference: str, tmp_path: Path
    ) -> None:
        part = tmp_path / "part/pictures"
        part.mkdir(parents=True)
        files = sorted(images.iterdir(), key=lambda file: file.stem[::-1])
        stems = sorted({file.stem for file in files}, key=lambda stem: stem[::-1])
        for start in range(0, len(stems), 12):
            for stem in stems[start : start + 12]:
                for file in images.glob(f"{stem}.*"):
                    shutil.copy2(file, part / file.name)
            run_bake(part, out, layout)
        assert hash_of(out) == reference


def limited(shard_bytes: int) -> Any:
    real = precompute.run.ShardSink.__init__

    def init(self: Any, writer: Any, **options: Any) -> None:
        real(self, writer, **(options | {"shard_bytes": shard_bytes}))

    return init


class TestDryRun:
    def test_changes_nothing_and_says_what_the_run_then_does(
        self, set_of_four: dict[str, Any]
    ) -> None:
        images, out, layout = (set_of_four[k] for k in ("images", "out", "layout"))
        draw(images / "a.png", 80)  # re-encode
        (images / "b.txt").write_text("new caption")  # text only
        shutil.copy(images / "c.png", images / "copy.png")  # copy
        draw_set(images, {"new.png": "new"}, seed=81)  # add
        (images / "d/e.png").unlink()  # drop
        (images / "bad.png").write_bytes(b"")  # not stored
        before = tree(out), tree(images)
        planned: list[str] = []
        plan = run_bake(images, out, layout, say=planned.append, dry_run=True).plan
        assert (tree(out), tree(images)) == before
        assert plan.counts() == {
            ("reuse", "unchanged"): 1,
            ("re-encode", "image changed"): 1,
            ("text only", "caption changed"): 1,
            ("copy", "equal latents are stored"): 1,
            ("add", "new"): 1,
            ("drop", "image is gone from the source"): 1,
            ("not stored", "empty_file"): 1,
        }
        done: list[str] = []
        summary = run_bake(images, out, layout, say=done.append)
        assert [line for line in done if "free" not in line] == [
            line for line in planned if "free" not in line
        ]
        assert summary.plan.counts() == plan.counts()
        assert counts(summary) == (plan.num_to_encode(), 2)
        assert summary.num_stored == 4

    def test_makes_no_folder(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {"a.png": "a"})
        run_bake(images, out / "deep", layout, dry_run=True)
        assert not out.exists()

    def test_refuses_what_the_run_would_refuse(self, images: Path, out: Path) -> None:
        draw_set(images, {"a.png": "a"})
        out.mkdir()
        (out / "mine.doc").write_text("mine")
        for dry_run in (True, False):
            with pytest.raises(NotAStoreError, match="is not empty and not a prebake store"):
                run_bake(images, out, dry_run=dry_run)
        assert tree(out).keys() == {"mine.doc"}


def other_vae(model: Path) -> Path:
    shutil.rmtree(model / "vae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        tiny_vae().save_pretrained(model / "vae")
    return model


class TestOneStoreIsOneBake:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"resolution": 96}, r"config\.resolution = 64 \(asked for: 96\)"),
            ({"bucket_step": 8}, r"config\.bucket_step = 16 \(asked for: 8\)"),
            ({"posterior": "mode"}, r"config\.posterior = 'sample' \(asked for: 'mode'\)"),
            ({"posterior": "moments"}, r"asked for: 'moments'"),
            ({"dtype": "bf16"}, r"config\.stored_dtype = 'float16' \(asked for: 'bfloat16'\)"),
            (
                {"compute_dtype": "bf16"},
                r"config\.compute_dtype = 'float32' \(asked for: 'bfloat16",
            ),
            ({"clip_skip": 2}, r"config\.clip_skip = 1 \(asked for: 2\)"),
            ({"background": "black"}, r"config\.background = \[255, 255, 255\]"),
            ({"upscale": True}, r"config\.upscale = False \(asked for: True\)"),
            ({"model": other_vae}, r"encoders\.vae\.identity = '[0-9a-f]{64}' \(asked for: '"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_another_configuration_is_refused_with_both_sides(
        self, images: Path, out: Path, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        """Field cases P4, P14, P15: another resolution or VAE was served what was there."""
        draw_set(images, {"a.png": "a"}, size=(96, 96))
        run_bake(images, out)
        if "model" in options:
            options = {"model": str(other_vae(copy_model(tmp_path / "other")))}
        before = tree(out)
        for dry_run in (True, False):
            with pytest.raises(OtherBakeError, match=message) as caught:
                run_bake(images, out, dry_run=dry_run, **options)
        assert "choose another --out" in str(caught.value)
        assert tree(out) == before
        run_bake(images, tmp_path / "beside", **options)
        assert run_bake(images, out).plan.reused == 1

    def test_another_layout_is_refused(self, set_of_four: dict[str, Any]) -> None:
        other = {"zarr": "webdataset", "webdataset": "zarr"}[set_of_four["layout"]]
        with pytest.raises(OtherBakeError, match=rf"layout = '.*' \(asked for: '{other}'\)"):
            run_bake(set_of_four["images"], set_of_four["out"], other)

    def test_a_model_folder_elsewhere_is_the_same_bake(
        self, set_of_four: dict[str, Any], tmp_path: Path
    ) -> None:
        summary = rebake(set_of_four, model=str(copy_model(tmp_path / "elsewhere")))
        assert summary.plan.reused == 4

    @pytest.mark.parametrize("part", ["vae", "text_encoder"])
    def test_a_model_that_does_not_load_leaves_no_store_behind(
        self, images: Path, out: Path, tmp_path: Path, part: str
    ) -> None:
        """Otherwise the mended model, which is another one, could not be baked there."""
        draw_set(images, {"a.png": "a"})
        model = copy_model(tmp_path / "model")
        file = model / part / "config.json"
        values = json.loads(file.read_text())
        values |= {"block_out_channels": [8, 8, 8, 16], "hidden_size": 64}
        file.write_text(json.dumps(values))
        with pytest.raises(PrebakeError, match="weights do not load as its config"):
            run_bake(images, out, model=str(model))
        assert not out.exists()

    def test_a_clip_skip_beyond_the_layers_is_refused(self, images: Path, out: Path) -> None:
        draw_set(images, {"a.png": "a"})
        with pytest.raises(PrebakeError, match=r"--clip-skip 4: the text encoder has 3 layers\."):
            run_bake(images, out, clip_skip=4)
        assert not out.exists()


class TestVariants:
    def test_moments_are_two_tensors(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {"a.png": "a"})
        run_bake(images, out, layout, posterior="moments", dtype="fp32")
        sample = baked(out)["a.png"]
        assert sample.tensors.keys() == {"latents_mean", "latents_std", "encoder_hidden_states"}
        assert_latents(sample.tensors["latents_mean"], pixels(0))
        assert (sample.tensors["latents_std"] > 0).all()

    @pytest.mark.parametrize(("dtype", "kind"), [("fp16", "f2"), ("bf16", "u2"), ("fp32", "f4")])
    def test_each_dtype_is_stored(
        self, images: Path, out: Path, layout: str, dtype: str, kind: str
    ) -> None:
        draw_set(images, {"a.png": "a"})
        run_bake(images, out, layout, dtype=dtype, posterior="mode")
        sample = baked(out)["a.png"]
        assert sample.latents.dtype == sample.states.dtype == np.dtype(kind)
        values = sample.latents
        if dtype == "bf16":
            values = (values.astype("<u4") << 16).view("<f4")
        np.testing.assert_allclose(values, encode_alone(pixels(0)), atol=0.01)

    def test_samples_differ_from_the_mode_and_are_the_same_in_every_bake(
        self, images: Path, tmp_path: Path
    ) -> None:
        draw_set(images, {"a.png": "a"})
        for name in ("first", "second"):
            run_bake(images, tmp_path / name, dtype="fp32")
        first, second = (baked(tmp_path / n)["a.png"].latents for n in ("first", "second"))
        np.testing.assert_array_equal(first, second)
        assert np.abs(first - encode_alone(pixels(0))).max() > 0.01

    def test_transparent_parts_show_the_background(self, images: Path, tmp_path: Path) -> None:
        images.mkdir()
        Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(images / "a.png")
        for colour, value in (("white", (255, 255, 255)), ("#102030", (16, 32, 48))):
            run_bake(images, tmp_path / colour.strip("#"), background=colour, **EXACT)
            latents = baked(tmp_path / colour.strip("#"))["a.png"].latents
            expected = encode_alone(np.full((64, 64, 3), value, np.uint8))
            np.testing.assert_allclose(latents, expected, atol=1e-3)  # flat, so badly conditioned

    def test_small_images_are_enlarged_if_asked(self, images: Path, tmp_path: Path) -> None:
        draw_set(images, {"a.png": "a"}, size=(20, 20))
        assert reasons(run_bake(images, tmp_path / "no")) == {"a.png": "too_small"}
        assert not run_bake(images, tmp_path / "yes", upscale=True).problems
        assert baked(tmp_path / "yes")["a.png"].row.resized_px == (64, 64)


class TestFolders:
    def test_a_store_inside_the_images_folder_is_not_baked(self, images: Path, layout: str) -> None:
        draw_set(images, {"a.png": "a", "b.png": "b"})
        for _ in range(2):
            summary = run_bake(images, images / "store", layout)
            assert not summary.problems
            assert baked(images / "store").keys() == {"a.png", "b.png"}
        assert summary.plan.reused == 2

    def test_images_inside_a_store_are_baked_and_left_alone(self, out: Path, layout: str) -> None:
        first = draw_set(out.parent / "first", {"a.png": "a"})
        run_bake(first, out, layout)
        inside = draw_set(out / "mine", {"b.png": "b"}, seed=9)
        run_bake(inside, out, layout)
        assert {p.name for p in inside.iterdir()} == {"b.png", "b.txt"}
        assert baked(out).keys() == {"a.png", "b.png"}

    def test_the_images_folder_itself_cannot_be_the_store(self, images: Path, layout: str) -> None:
        draw_set(images, {"a.png": "a"})
        with pytest.raises(NotAStoreError, match="is not empty and not a prebake store"):
            run_bake(images, images, layout)
        assert tree(images).keys() == {"a.png", "a.txt"}

    def test_a_folder_whose_name_is_not_utf8_needs_a_source_name(
        self, tmp_path: Path, out: Path
    ) -> None:
        folder = tmp_path / os.fsdecode(b"caf\xe9")
        draw_set(folder, {"a.png": "a"})
        with pytest.raises(PrebakeError, match=r"name 'caf\\\\xe9' .*Give --source-name"):
            run_bake(folder, out)
        run_bake(folder, out, source_name="cafe", dry_run=True)


def scanned(num_files: int) -> list[bool]:
    """Return the answers to a scan of so many files in one folder that asks whether to stop."""
    return [False] * (1 + num_files)


class TestStopping:
    def test_a_stop_keeps_what_is_finished_and_the_next_run_goes_on(
        self, images: Path, out: Path, layout: str, tmp_path: Path
    ) -> None:
        draw_set(images, {f"{i:02}.png": f"caption {i % 5}" for i in range(20)})
        (images / "bad.png").write_bytes(b"")
        run_bake(images, tmp_path / "whole", layout)
        total = [0, 0]
        for _ in range(3):
            stop = iter([*scanned(21), *[False] * 4, True]).__next__
            summary = run_bake(images, out, layout, batch_size=2, should_stop=stop)
            assert summary.interrupted
            total = [a + b for a, b in zip(total, counts(summary), strict=True)]
            assert len(baked(out)) == total[0]
        summary = run_bake(images, out, layout)
        total = [a + b for a, b in zip(total, counts(summary), strict=True)]
        assert total == [20, 6]
        assert hash_of(out) == hash_of(tmp_path / "whole")

    def test_a_stopped_run_drops_nothing(self, set_of_four: dict[str, Any]) -> None:
        images, out, layout = (set_of_four[k] for k in ("images", "out", "layout"))
        (images / "a.png").unlink()
        draw_set(images, {"new.png": "new"}, seed=70)
        answers = iter([*scanned(4), False, True])
        assert run_bake(images, out, layout, should_stop=lambda: next(answers)).interrupted
        assert "a.png" in baked(out)
        rebake(set_of_four)
        assert "a.png" not in baked(out)

    def test_a_scan_can_be_stopped(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {f"{i:02}.png": "a" for i in range(5)})
        answers = iter([False, False, True])
        assert run_bake(images, out, layout, should_stop=lambda: next(answers)).interrupted
        assert not out.exists()

    def test_planning_can_be_stopped(self, images: Path, out: Path, layout: str) -> None:
        draw_set(images, {f"{i:02}.png": "a" for i in range(5)})
        stop = iter([*scanned(5), True]).__next__
        summary = run_bake(images, out, layout, should_stop=stop)
        assert summary.interrupted
        assert counts(summary) == (0, 0)
        lines: list[str] = []
        describe_summary(summary, config(images, out), lines.append)
        assert lines[0] == "interrupted; what was finished is kept. Run the same command to go on."
        assert not [line for line in lines if "now holds" in line]
        assert not list((out / "index").glob("*.json"))
        run_bake(images, out, layout)


def synthetic(num_images: int, tmp_path: Path) -> tuple[Scan, Any, Any, LiveIndex]:
    """Return a scan of files that need no reading, and a store's index that holds them all."""
    images = draw_set(tmp_path / "pictures", {"a.png": "a"})
    out = tmp_path / "store"
    run_bake(images, out)
    chosen = config(images, out)
    _, _, keys = prepare(chosen)
    index = LiveIndex(out)
    scan = Scan(
        tuple(
            SourceImage(f"{i:07}.png", images / f"{i:07}.png", 1000 + i, i, f"caption {i}")
            for i in range(num_images)
        ),
        (),
        (),
    )
    geometry = choose_geometry(64, 64, 64, 16)
    base = index.whole_samples().to_pylist()[0]
    rows = []
    for image in scan.images:
        sha256 = f"{image.mtime_ns:064x}"
        text = keys.text(image.caption)
        rows.append(
            base
            | {
                "sample_id": bytes.fromhex(keys.sample_id(image.path)),
                "path": image.path,
                "image_sha256": bytes.fromhex(sha256),
                "image_bytes": image.size_bytes,
                "image_mtime_ns": image.mtime_ns,
                "latent_key": bytes.fromhex(keys.latent_key(sha256, geometry)),
                "original_width_px": 64,
                "original_height_px": 64,
                "captions": [text.caption],
                "text_keys": [bytes.fromhex(text.text_key)],
            }
        )
    whole = type(index.samples).from_pylist(rows, schema=index.whole_samples().schema)
    index.samples = whole.select(index.samples.column_names)
    index.sample_details = whole.select(index.sample_details.column_names)
    return scan, keys, chosen, index


class TestScale:
    def test_ten_thousand_unchanged_images_are_planned_in_two_seconds(self, tmp_path: Path) -> None:
        scan, keys, chosen, index = synthetic(10_000, tmp_path)
        start_s = time.process_time()
        plan = make_plan(scan, index, keys, chosen)
        assert time.process_time() - start_s < 2
        assert plan.counts() == {("reuse", "unchanged"): 10_000}

    def test_the_memory_of_a_plan_is_under_2_kib_an_image(self, tmp_path: Path) -> None:
        """One future for each image would be that much again, all at once."""
        scan, keys, chosen, index = synthetic(3_000, tmp_path)
        new = tuple(
            SourceImage(f"new/{i.path}", i.file, 10**6 + i.size_bytes, 1, i.caption)
            for i in scan.images
        )
        with mock.patch("precompute.examine.read_size", return_value=ImageSize(64, 64)):
            tracemalloc.start()
            plan = make_plan(Scan((*scan.images, *new), (), ()), index, keys, chosen)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert plan.num_to_encode() == 3_000
        assert peak_bytes / 6_000 < 2048


def test_a_problem_found_in_planning_is_counted_once(images: Path, out: Path) -> None:
    draw_set(images, {"a.png": "a", "b.png": "b"})
    problem = ImageProblem(Reason.UNDECODABLE, "no")
    with mock.patch("precompute.examine.read_size", side_effect=[ImageSize(64, 64), problem]):
        summary = run_bake(images, out, num_workers=1)
    assert reasons(summary) == {"b.png": "undecodable"}
    assert isinstance(summary.plan, Plan)


@pytest.fixture(autouse=True)
def no_bar_is_left_open() -> Iterator[None]:
    from tqdm import tqdm

    yield
    assert not list(getattr(tqdm, "_instances", ()))
