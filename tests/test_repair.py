"""`store repair`: only what cannot be read is encoded anew, and then nothing is wrong any more."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from bake_builders import LAYOUTS, assert_whole, draw, draw_set, hash_of, run_bake, tiny_model
from click.testing import CliRunner

from prebake import cli
from precompute.repair import Outcome, repair_store
from store_format import open_store
from store_format.errors import DamagedStoreError, OtherBakeError, PrebakeError
from store_format.folders import LocalFolder
from store_format.garbage import collect_garbage
from store_format.transfer import push as push_store
from store_format.verify import verify_store

NUM_IMAGES = 12


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair") / "pictures"
    draw_set(folder, {f"{i}.png": f"caption {i % 5}" for i in range(NUM_IMAGES - 4)})
    return draw_set(folder, {f"w{i}.png": "wide" for i in range(4)}, size=(80, 48), seed=60)


@pytest.fixture(scope="module")
def baked_stores(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of each layout, of several shards, to be copied."""
    folder = tmp_path_factory.mktemp("baked")
    for layout in LAYOUTS:
        run_bake(images, folder / layout, layout, batch_size=2, shard_max_seconds=1e-6)
    return folder


@pytest.fixture
def root(baked_stores: Path, layout: str, tmp_path: Path) -> Path:
    shutil.copytree(baked_stores / layout, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def expected(baked_stores: Path, layout: str) -> str:
    return hash_of(baked_stores / layout)


def repair(
    root: Path, images: Path | None, said: list[str] | None = None, **options: str
) -> Outcome:
    return repair_store(
        str(root),
        images,
        str(tiny_model()) if images else None,
        say=(said if said is not None else []).append,
        **options,
    )


def shards(root: Path, kind: str = "samples") -> list[str]:
    """Return the shards of a kind, the largest first."""
    found = [s for s in open_store(root).index.shards.values() if s.kind == kind]
    return [s.name for s in sorted(found, key=lambda s: (-s.rows, s.name))]


def tensor_file(root: Path, shard: str, tensor: str = "latents") -> Path:
    zarr = root / shard / tensor
    if zarr.exists():
        return next(path for path in (zarr / "c").rglob("*") if path.is_file())
    return root / f"{shard}.tar"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_whole_store_needs_neither_images_nor_model(root: Path, expected: str) -> None:
    outcome = repair(root, None)
    assert outcome == Outcome()
    assert hash_of(root) == expected


def test_a_flipped_byte_costs_one_image(root: Path, images: Path, expected: str) -> None:
    shard = shards(root)[0]
    store = open_store(root)
    row = int(store.index.rows_by_shard()[shard][0])
    place = store.sample(row).place
    assert place is not None
    flip(tensor_file(root, shard), place.offsets[0] + 7)
    others = store.index.shards[shard].rows - 1
    with pytest.raises(DamagedStoreError):
        store.read([row])
    del store
    outcome = repair(root, images)
    assert (outcome.num_images_encoded, outcome.num_captions_encoded) == (1, 0)
    assert outcome.num_rows_copied == others
    assert outcome.left == []
    assert hash_of(root) == expected
    assert_whole(root)


def test_a_lost_shard_costs_its_images(
    root: Path, images: Path, expected: str, layout: str
) -> None:
    shard = shards(root)[0]
    num_rows = open_store(root).index.shards[shard].rows
    if layout == "zarr":
        shutil.rmtree(root / shard)
    else:
        (root / f"{shard}.tar").unlink()
    outcome = repair(root, images)
    assert outcome.num_images_encoded == num_rows
    assert outcome.num_rows_copied == 0
    assert hash_of(root) == expected
    assert_whole(root)


def test_what_only_plain_readers_miss_costs_nothing(root: Path, expected: str, layout: str) -> None:
    shard = shards(root)[0]
    if layout == "zarr":
        (root / shard / "latents/zarr.json").unlink()
    else:
        flip(root / f"{shard}.tar", 0)
    outcome = repair(root, None)
    assert outcome.num_images_encoded == 0
    assert outcome.num_rows_copied == open_store(root).index.shards[shard].rows
    assert hash_of(root) == expected
    assert_whole(root)


def test_damaged_texts_cost_no_image(root: Path, images: Path, expected: str, layout: str) -> None:
    for shard in shards(root, "texts"):
        file = tensor_file(root, shard, "encoder_hidden_states")
        file.write_bytes(file.read_bytes()[:100])
    outcome = repair(root, images)
    assert outcome.num_images_encoded == 0
    assert outcome.num_captions_encoded == (7 if layout == "zarr" else 1)
    assert hash_of(root) == expected
    assert_whole(root)


@pytest.mark.parametrize("kind", ["samples", "texts"])
def test_a_damaged_segment_is_baked_again(
    root: Path, images: Path, expected: str, kind: str
) -> None:
    segment = sorted((root / "index").glob(f"*.{kind}.parquet"))[-1]
    segment.write_bytes(segment.read_bytes()[:-10])
    with pytest.raises(DamagedStoreError, match="repair"):
        open_store(root)
    said: list[str] = []
    outcome = repair(root, images, said)
    assert f"the index has lost index/{segment.name}" in said
    assert 0 <= outcome.num_images_encoded < NUM_IMAGES
    assert not (root / "lost.json").exists()
    assert hash_of(root) == expected
    assert_whole(root)
    collect_garbage(root)
    assert hash_of(root) == expected
    assert_whole(root)


@pytest.mark.parametrize("how", ["truncated", "deleted"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_commit_is_baked_again(
    root: Path, images: Path, expected: str, which: int, how: str
) -> None:
    commit = sorted((root / "index").glob("*.json"))[which]
    if how == "deleted":
        commit.unlink()
    else:
        commit.write_bytes(commit.read_bytes()[:-10])
    said: list[str] = []
    repair(root, images, said)
    assert f"the index has lost commit {commit.stem}" in said
    assert hash_of(root) == expected
    assert_whole(root)


def test_everything_at_once(root: Path, images: Path, expected: str, layout: str) -> None:
    first, second, third = shards(root)[:3]
    flip(tensor_file(root, first), 300 if layout == "zarr" else 2000)
    file = tensor_file(root, second)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tensor_file(root, third).unlink()
    for kind in ("samples", "texts"):
        segment = sorted((root / "index").glob(f"*.{kind}.parquet"))[0]
        segment.write_bytes(segment.read_bytes()[:-10])
    assert repair(root, images).left == []
    assert hash_of(root) == expected
    assert_whole(root)


def test_a_lost_image_stays_a_finding_and_the_rest_is_mended(
    root: Path, images: Path, tmp_path: Path
) -> None:
    fewer = tmp_path / "fewer" / images.name
    shutil.copytree(images, fewer)
    shard = shards(root)[0]
    store = open_store(root)
    lost = store.sample(int(store.index.rows_by_shard()[shard][0])).path
    del store
    (fewer / lost).unlink()
    tensor_file(root, shard).unlink()
    outcome = repair(root, fewer)
    assert len(outcome.left) >= 1
    assert len(open_store(root)) == NUM_IMAGES  # nothing is dropped
    damaged = [finding for finding in verify_store(root, full=True) if finding.num_samples]
    assert {finding.num_samples for finding in damaged} == {1}


def test_another_model_is_refused(root: Path, images: Path, tmp_path: Path) -> None:
    from tiny_models import make_tiny_sd

    tensor_file(root, shards(root)[0]).unlink()
    with pytest.raises(OtherBakeError, match="holds another bake"):
        repair_store(
            str(root), images, str(make_tiny_sd(tmp_path / "m", seed=9)), say=lambda line: None
        )


def test_what_must_be_encoded_needs_images_and_model(root: Path) -> None:
    tensor_file(root, shards(root)[0]).unlink()
    with pytest.raises(PrebakeError, match="Give --images and --model"):
        repair(root, None)


def test_the_command_says_what_it_did(root: Path, images: Path) -> None:
    tensor_file(root, shards(root)[0]).unlink()
    result = CliRunner().invoke(cli, ["store", "repair", str(root), "--images", str(images)])
    assert result.exit_code == 1
    arguments = ["store", "repair", str(root), "--images", str(images), "--model"]
    result = CliRunner().invoke(cli, [*arguments, str(tiny_model())])
    assert result.exit_code == 0, result.output
    assert f"nothing is wrong with {root} any more" in result.output
    assert "images and 0 captions, copied 0 healthy rows" in result.output


def test_files_that_were_never_in_the_store_are_none_of_its_business(
    root: Path, images: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more" / images.name
    shutil.copytree(images, more)
    draw(more / "too_small.png", 1, (8, 8))
    (more / "broken.png").write_bytes(b"no image")
    expected = hash_of(root)
    tensor_file(root, shards(root)[0]).unlink()
    outcome = repair(root, more)
    assert (outcome.problems, outcome.left) == ([], [])
    assert hash_of(root) == expected


def test_one_damaged_row_among_healthy_ones(tmp_path: Path, images: Path) -> None:
    root = tmp_path / "store"
    run_bake(images, root, "webdataset", shard_max_seconds=60)
    expected = hash_of(root)
    store = open_store(root)
    row = store.sample(0)
    assert row.place is not None
    (shard,) = (s for s in store.index.shards.values() if s.name == row.place.shard)
    num_beside = shard.rows - 1
    assert num_beside > 0
    path = root / shard.files[0].path
    data = bytearray(path.read_bytes())
    data[row.place.offsets[0]] ^= 1
    path.write_bytes(data)
    del store
    outcome = repair(root, images)
    assert (outcome.num_images_encoded, outcome.num_rows_copied) == (1, num_beside)
    assert hash_of(root) == expected


def test_views_that_lag_are_brought_up_to_date_and_no_damage(root: Path) -> None:
    zarr = open_store(root).manifest.layout == "zarr"
    views = sorted(root.glob("samples/*/*/live/c/0")) if zarr else [root / "shards.txt"]
    for view in views:
        view.write_bytes(bytes(view.stat().st_size))
    before = {shard.name for shard in open_store(root).index.shards.values()}
    result = CliRunner().invoke(cli, ["store", "repair", str(root)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"nothing is wrong with {root}"
    assert verify_store(root, full=True) == []
    assert {shard.name for shard in open_store(root).index.shards.values()} == before


@pytest.fixture
def two_sources(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two folders, and a store of both, a commit each; the commit of the second is the last."""
    first = draw_set(tmp_path / "A", {f"{i}.png": f"first {i}" for i in range(3)})
    second = draw_set(tmp_path / "B", {f"b{i}.png": f"second {i}" for i in range(3)}, seed=9)
    root = tmp_path / "both"
    for images in (first, second):
        run_bake(images, root)
    return first, second, root


def lose_last_samples(root: Path) -> None:
    max((root / "index").glob("*.samples.parquet")).write_bytes(b"")


def test_what_a_repair_from_one_source_did_not_bring_back_is_said(
    two_sources: tuple[Path, Path, Path],
) -> None:
    first, second, root = two_sources
    expected = hash_of(root)
    lose_last_samples(root)
    said: list[str] = []
    assert repair(root, first, said).left == []
    assert f"the index had lost 3 rows; 0 are back, of source 'A', from {first}." in "\n".join(said)
    run_bake(second, root)  # as it says
    assert hash_of(root) == expected


def test_a_source_that_the_index_has_lost_must_be_named(
    two_sources: tuple[Path, Path, Path],
) -> None:
    _, second, root = two_sources
    expected = hash_of(root)
    lose_last_samples(root)
    with pytest.raises(PrebakeError, match=r"lost rows and names of sources\. .*--source-name"):
        repair(root, second)
    said: list[str] = []
    assert repair(root, second, said, source_name="B").left == []
    assert hash_of(root) == expected
    assert not any("warning" in line for line in said)


def test_an_unfinished_repair_is_found_and_nothing_is_removed_or_sent(
    two_sources: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, second, root = two_sources
    lose_last_samples(root)
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.raises(PrebakeError, match="Give --images and --model"):
        repair(root, None)
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before
    with pytest.raises(PrebakeError, match="--source-name"):
        repair(root, second)  # which has begun
    (finding,) = (f for f in verify_store(root, full=True) if not f.is_lag)
    assert "the repair that was begun is not finished" in finding.what
    with pytest.raises(DamagedStoreError, match="Finish 'prebake store repair"):
        collect_garbage(root)
    with pytest.raises(DamagedStoreError, match="lost a part of its index"):
        push_store(root, str(tmp_path / "pushed"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("kind", [".json", ".samples.parquet"])
def test_an_index_that_cannot_be_read_just_now_is_not_given_up(
    two_sources: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    first, _, root = two_sources
    expected, before = hash_of(root), sorted((root / "index").iterdir())
    real_read = LocalFolder.read

    def read(self: LocalFolder, path: str) -> bytes:
        if path.startswith("index/") and path.endswith(kind):
            raise OSError(number, os.strerror(number), self.at(path))
        return real_read(self, path)

    monkeypatch.setattr(LocalFolder, "read", read)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        repair(root, first)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        verify_store(root, full=True)
    monkeypatch.undo()
    assert sorted((root / "index").iterdir()) == before
    assert hash_of(root) == expected
