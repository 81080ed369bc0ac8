"""`store gc`: what no live row needs goes, and nothing else does."""

import shutil

import pytest
from click.testing import CliRunner
from store_builders import LAYOUTS, Sample, assert_holds, bring_to, build_store, make_manifest

from prebake import cli
from store_format import open_store
from store_format.errors import PrebakeError, StoreBusyError
from store_format.garbage import collect_garbage, find_garbage
from store_format.manifest import read_manifest
from store_format.verify import store_hash, verify_store
from store_format.writer import StoreWriter

BEFORE = [
    Sample("a.png", ["one", "two"]),
    Sample("b.png", ["one"], num_variants=2),
    Sample("gone.png", ["three"]),
    Sample("w.png", ["wide"], bucket_px=(96, 48)),
]
AFTER = [Sample("a.png", ["edited"]), Sample("b.png", ["one"], num_variants=2, image=1), BEFORE[3]]


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def root(tmp_path, layout):
    """A store with dead rows, dead shards, a tombstone and texts that nobody has."""
    build_store(tmp_path / "s", layout, BEFORE, rows_per_shard=2, samples_per_commit=2)
    bring_to(tmp_path / "s", make_manifest(layout), AFTER, rows_per_shard=2, samples_per_commit=1)
    return tmp_path / "s"


def files_of(root):
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in root.rglob("*")
        if path.is_file()
    }


def test_what_no_live_row_needs_goes_and_the_content_stays(root):
    before, size_before = store_hash(open_store(root)), sum(files_of(root).values())
    found = find_garbage(root)
    assert found
    assert found.bytes > 0
    collect_garbage(root)
    assert store_hash(open_store(root)) == before
    assert_holds(open_store(root), AFTER)
    assert verify_store(root, full=True) == []
    index = open_store(root).index
    assert index.num_dead_rows == 0
    rows, texts = index.rows_by_shard(), index.text_rows_by_shard()
    for name, shard in index.shards.items():
        assert len((rows if shard.kind == "samples" else texts)[name]) == shard.rows
    captions = {text.caption for text in index.iter_texts()}
    assert captions == ({"", "edited", "one", "wide"} if index.texts.num_rows > 1 else {""})
    assert not find_garbage(root)
    assert sum(files_of(root).values()) < size_before


def test_every_file_that_is_left_is_listed(root):
    collect_garbage(root)
    index = open_store(root).index
    listed = {"prebake.json", "writer.lock", "shards.txt", *index.files}
    for commit in index.commits:
        listed |= {f"index/{commit.name}.json", *(s.path for s in commit.segments.all())}
    left = {p for p in files_of(root) if p not in listed}
    assert all(p.endswith("zarr.json") or "/live/" in p or "/text_key/" in p for p in left), left


def test_a_second_time_changes_nothing(root):
    collect_garbage(root)
    before = files_of(root)
    collect_garbage(root)
    assert files_of(root) == before


def test_finding_changes_nothing(root):
    before = files_of(root)
    find_garbage(root)
    assert files_of(root) == before


def test_leftovers_of_a_killed_writer_go_and_other_files_stay(root, layout):
    collect_garbage(root)
    name = "64x64-00c0ffee-000001.tar" if layout == "webdataset" else "64x64/00c0ffee-000001"
    stray = root / "samples" / name
    stray.parent.mkdir(exist_ok=True)
    if layout == "webdataset":
        stray.write_bytes(b"x" * 1000)
    else:
        (stray / "latents").mkdir(parents=True)
        (stray / "latents/zarr.json").write_bytes(b"x" * 1000)
    (root / "index/00000009-00c0ffee.samples.parquet").write_bytes(b"y" * 500)
    mine = [root / "notes.txt", root / "index/notes.txt", root / "samples/.DS_Store"]
    for path in mine:
        path.write_text("mine")
    assert find_garbage(root).bytes == 1500
    assert len(collect_garbage(root).stray) == 2
    assert not stray.exists()
    assert all(path.read_text() == "mine" for path in mine)


def test_links_are_removed_and_not_followed(root, tmp_path, layout):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    link = root / "texts" / ("00c0ffee-000009" if layout == "zarr" else "00c0ffee-000009.tar")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious)
    collect_garbage(root)
    assert not link.is_symlink()
    assert (precious / "file").read_text() == "mine"


def test_it_waits_for_nobody_and_takes_nothing_from_readers(root):
    reader = open_store(root)
    with pytest.raises(StoreBusyError, match="is being read by another process"):
        collect_garbage(root)
    assert_holds(reader, AFTER)
    del reader
    with (
        StoreWriter(root, open_store(root).manifest),
        pytest.raises(StoreBusyError, match="is being written by another process"),
    ):
        collect_garbage(root)
    collect_garbage(root)


def test_an_object_store_is_left_alone():
    with pytest.raises(PrebakeError, match="nothing is removed from an object store"):
        find_garbage("memory://nothing")


def test_a_store_of_many_commits_is_restated_in_few(tmp_path, layout, monkeypatch):
    monkeypatch.setattr("store_format.writer.COMPACT_FROM_COMMITS", 5)
    monkeypatch.setattr("store_format.writer.ROWS_OF_A_RESTATEMENT", 3)
    samples = [Sample(f"{i}.png", [f"c{i % 4}"], num_variants=1 + i % 2) for i in range(12)]
    build_store(tmp_path / "s", layout, samples, samples_per_commit=1)
    before = store_hash(open_store(tmp_path / "s"))
    assert len(open_store(tmp_path / "s").index.commits) >= 12
    with StoreWriter(tmp_path / "s", make_manifest(layout)) as writer:
        writer.tidy()
    store = open_store(tmp_path / "s")
    assert store_hash(store) == before
    assert len(store.index.commits) == 5  # 18 rows: 3 or 4 in each, variants together
    assert verify_store(tmp_path / "s", full=True) == []
    assert store.index.num_dead_rows == 0
    bring_to(tmp_path / "s", store.manifest, [*samples, Sample("new.png")])
    del store
    collect_garbage(tmp_path / "s")
    assert_holds(open_store(tmp_path / "s"), [*samples, Sample("new.png")])
    assert len(list((tmp_path / "s/index").glob("*.json"))) <= 6
    shutil.rmtree(tmp_path / "s/staging", ignore_errors=True)


def test_the_unfinished_work_of_a_killed_writer_is_garbage(root):
    collect_garbage(root)
    left = root / "staging/deadbeef/x.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(5000))
    found = find_garbage(root)
    assert (found.stray, found.bytes) == (["staging/deadbeef"], 5000)
    result = CliRunner().invoke(cli, ["store", "gc", str(root)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "removed about 4.9 KiB, copied 0 rows"
    assert not (root / "staging").exists()
    with StoreWriter(root, read_manifest(root)):  # one that lives
        assert not find_garbage(root)
