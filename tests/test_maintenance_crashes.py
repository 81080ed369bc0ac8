"""`gc` and `repair`, killed at every file operation: the store is valid, and they finish later."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bake_builders import draw_set
from crashes import run_killed_at
from store_builders import (
    LAYOUTS,
    SD1_TENSORS,
    Sample,
    assert_holds,
    bring_to,
    make_manifest,
)
from warm_bakes import DIED_AT_CALL, WarmBakes

from store_format import open_store
from store_format.errors import DamagedStoreError
from store_format.garbage import collect_garbage, find_garbage
from store_format.verify import store_hash, verify_store

BEFORE = [Sample("gone.png"), Sample("a.png", ["one", "two"]), Sample("b.png", num_variants=2)]
AFTER = [Sample("a.png", ["edited"]), Sample("b.png", ["new"], num_variants=2)]
SOME = [("zarr", 19), ("webdataset", 11)]
ALL = [pytest.param(layout, 1, marks=pytest.mark.slow) for layout in LAYOUTS]


def only_views_lag(root: Path) -> None:
    for finding in verify_store(root, full=True):
        assert "plain readers" in finding.what, finding


@pytest.mark.parametrize(("layout", "every"), SOME + ALL)
def test_a_collection_killed_anywhere_loses_nothing(
    tmp_path: Path, layout: str, every: int
) -> None:
    manifest = make_manifest(layout, SD1_TENSORS)
    start, root = tmp_path / "start", tmp_path / "s"
    bring_to(start, manifest, BEFORE, rows_per_shard=2, samples_per_commit=2)
    bring_to(start, manifest, AFTER, rows_per_shard=2, samples_per_commit=1)
    expected = store_hash(open_store(start))
    number, killed, found_half_done = 1, True, 0
    while killed:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        killed = run_killed_at(number, lambda: collect_garbage(root))
        found_half_done += killed and bool(find_garbage(root))
        only_views_lag(root)
        assert store_hash(open_store(root)) == expected
        collect_garbage(root)
        assert verify_store(root, full=True) == []
        assert store_hash(open_store(root)) == expected
        assert not find_garbage(root)
        assert not (root / "staging").exists()
        number += every
    assert found_half_done > 10 / every
    assert_holds(open_store(root), AFTER)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmBakes]:
    with WarmBakes(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.mark.parametrize(("layout", "every"), [("zarr", 97), ("webdataset", 61), *ALL])
@pytest.mark.parametrize("damage", ["shard", "segment"])
def test_a_repair_killed_anywhere_can_be_finished(
    server: WarmBakes, tmp_path: Path, layout: str, every: int, damage: str
) -> None:
    images = draw_set(tmp_path / "pictures", {f"{i}.png": f"caption {i % 2}" for i in range(4)})
    start, root = tmp_path / "start", tmp_path / "s"
    assert server.run(server.bake_command(images, start, layout)) == 0, server.log.read_text()
    expected = store_hash(open_store(start))
    if damage == "shard":
        index = open_store(start).index
        shard = max(
            (s for s in index.shards.values() if s.kind == "samples"),
            key=lambda s: (s.rows, s.name),
        )
        latents = next(f for f in shard.files if f.path.endswith((".tar", "latents/c/0/0/0/0")))
        data = bytearray((start / latents.path).read_bytes())
        data[-2100 if layout == "webdataset" else 20] ^= 255
        (start / latents.path).write_bytes(data)
    else:
        segment = max((start / "index").glob("*.samples.parquet"))
        segment.write_bytes(segment.read_bytes()[:-10])
    repair = ["store", "repair", str(root), "--images", str(images), "--model", str(server.model)]
    number, code = 1, DIED_AT_CALL
    while code == DIED_AT_CALL:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        code = server.run(repair, die_at_call=number)
        assert code in (0, DIED_AT_CALL), server.log.read_text()
        if code == DIED_AT_CALL:
            for finding in verify_store(root, full=True):  # still damaged where it was, or mended
                assert "plain readers" in finding.what or finding.num_samples or damage == "segment"
            assert server.run(repair) == 0, server.log.read_text()
        assert store_hash(open_store(root)) == expected
        assert verify_store(root, full=True) == []
        number += every
    assert number > every


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("command", ["gc", "repair"])
@pytest.mark.parametrize("max_file_bytes", [2_000, 4_000])
def test_a_file_that_cannot_grow_is_one_line_and_the_command_finishes_later(
    server: WarmBakes, tmp_path: Path, layout: str, command: str, max_file_bytes: int
) -> None:
    images = draw_set(tmp_path / "pictures", {f"{i}.png": f"caption {i % 2}" for i in range(8)})
    root = tmp_path / "s"
    bake = server.bake_command(images, root, layout, batch_size="8", shard_max_seconds="60")
    assert server.run(bake) == 0, server.log.read_text()
    arguments = ["store", command, str(root)]
    if command == "gc":  # half of a shard is dead, so its other half is written anew
        for number in range(4):
            (images / f"{number}.png").unlink()
        assert server.run(bake) == 0, server.log.read_text()
        expected = store_hash(open_store(root))
        assert find_garbage(root)
    else:
        expected = store_hash(open_store(root))
        arguments += ["--images", str(images), "--model", str(server.model)]
        (shard,) = [s for s in open_store(root).index.shards.values() if s.kind == "samples"]
        file = root / max(shard.files, key=lambda file: file.bytes).path
        file.write_bytes(bytes(file.stat().st_size))
    code = server.run(arguments, max_file_bytes=max_file_bytes)
    text = server.log.read_text()
    assert code == 1, text
    assert "File too large. What was finished is kept; free some space" in text.splitlines()[-1]
    assert "Traceback" not in text
    if command == "gc":
        assert store_hash(open_store(root)) == expected
    assert server.run(arguments) == 0, server.log.read_text()
    assert store_hash(open_store(root)) == expected
    assert verify_store(root, full=True) == []
    assert command == "repair" or not find_garbage(root)


def test_a_damaged_row_stops_a_collection_before_anything_is_removed(tmp_path: Path) -> None:
    manifest = make_manifest("webdataset", SD1_TENSORS)
    root = tmp_path / "s"
    bring_to(root, manifest, [*BEFORE, Sample("c.png")], rows_per_shard=9)
    store = open_store(root)
    index = store.index
    from store_format.rows import Tombstone
    from store_format.writer import StoreWriter

    gone = BEFORE[0]
    with StoreWriter(root, manifest) as writer:
        writer.commit(tombstones=[Tombstone(gone.sample_id, gone.source, gone.path)])
    del store
    tar = next(root.glob("samples/*.tar"))
    data = bytearray(tar.read_bytes())
    row = index.sample(0)
    assert row.place is not None
    for position in (p + 3 for s in index.iter_samples() if s.place for p in s.place.offsets[:1]):
        data[position] ^= 255
    tar.write_bytes(data)
    before = sorted(path.name for path in root.rglob("*.tar"))
    with pytest.raises(DamagedStoreError, match="run 'prebake store verify"):
        collect_garbage(root)
    assert sorted(path.name for path in root.rglob("*.tar")) == before
