"""`store repair`: only what cannot be read is encoded anew, and then nothing is wrong any more."""

import shutil
from pathlib import Path

import pytest
from bake_builders import LAYOUTS, assert_whole, draw_set, hash_of, run_bake, tiny_model
from click.testing import CliRunner

from prebake import cli
from precompute.repair import Outcome, repair_store
from store_format import open_store
from store_format.errors import DamagedStoreError, OtherBakeError, PrebakeError
from store_format.garbage import collect_garbage
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
    # a tar with a dead row is rewritten by the bake itself, which copies the others
    assert outcome.num_rows_copied == (others if open_store(root).manifest.layout == "zarr" else 0)
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
