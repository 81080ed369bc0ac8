"""Which rows are live: the rules of FORMAT.md, section 6, against a model in plain Python."""

import hashlib
import json
from itertools import pairwise
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import Sample, build_store, make_manifest, text_key

from store_format.commits import (
    Commit,
    FileEntry,
    ShardEntry,
    check_relative,
    heads,
    parse_commit,
    write_commit,
)
from store_format.errors import DamagedStoreError, NotAStoreError
from store_format.files import write_file
from store_format.folders import LocalFolder
from store_format.index import LiveIndex, list_starts, list_values
from store_format.keys import canonical_json
from store_format.rows import (
    SAMPLE_SCHEMA,
    Place,
    TextRow,
    Tombstone,
    sample_table,
    text_table,
)
from store_format.verify import verify_store

SAMPLES = {f"{n}": Sample(f"{n}.png", ["a", "b"]) for n in range(5)}


@pytest.fixture(autouse=True, scope="module")
def _without_flushing():
    with mock.patch("os.fsync"):
        yield


@pytest.fixture
def root(tmp_path):
    """A folder that has a manifest and no commit yet."""
    (tmp_path / "s/index").mkdir(parents=True)
    write_file(tmp_path / "s/prebake.json", make_manifest("zarr").to_json())
    return tmp_path / "s"


def shard(name, kind="samples", rows=100):
    file = FileEntry(path=f"{name}.tar", bytes=0, sha256="00" * 32)
    return ShardEntry(name=name, kind=kind, rows=rows, files=(file,))


def add(
    root, sequence, rows=(), dropped=(), texts=(), *, writer="0000000a", parents=(), shards=None
):
    """Write one commit whose shards exist in the index only."""
    name = f"samples/64x64/{writer}-{sequence:06d}"
    return write_commit(
        LocalFolder(root),
        root,
        sequence=sequence,
        writer=writer,
        samples=sample_table(rows, [Tombstone(s.sample_id, s.source, s.path) for s in dropped]),
        texts=text_table(texts),
        shards=[shard(name), shard("texts/t", "texts")] if shards is None else shards,
        parents=parents,
    )


def placed(sample, sequence, at=0, writer="0000000a", variant=0):
    place = Place(f"samples/64x64/{writer}-{sequence:06d}", at, (0,), (0,))
    return sample.row(variant).placed(place)


def live(root):
    index = LiveIndex(root)
    return {(row.path, row.variant): row.place.shard[-6:] for row in index.iter_samples()}


STEPS = st.lists(  # of each commit: {sample: number of variants, 0 = dropped}, and its writer
    st.tuples(
        st.dictionaries(st.sampled_from(sorted(SAMPLES)), st.integers(0, 3), min_size=1),
        st.sampled_from(["0000000a", "0000000b", "ffffffff"]),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_the_last_commit_that_names_a_sample_decides(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("index")
    (root / "index").mkdir()
    write_file(root / "prebake.json", make_manifest("zarr").to_json())
    model, order, sequence, num_rows, num_tombstones = {}, [], 0, 0, 0
    for names, writer, same_sequence in steps:
        if sequence == 0 or not same_sequence or (sequence, writer) in [o[0] for o in order]:
            sequence += 1
        order.append(((sequence, writer), names))
        rows = [
            placed(SAMPLES[n], sequence, v, writer, v)
            for n, count in names.items()
            for v in range(count)
        ]
        dropped = [SAMPLES[n] for n, count in names.items() if count == 0]
        num_rows, num_tombstones = num_rows + len(rows), num_tombstones + len(dropped)
        add(root, sequence, rows, dropped, writer=writer)
    for (sequence, writer), names in sorted(order, key=lambda entry: entry[0]):
        model |= {n: (f"{sequence:06d}", writer, count) for n, count in names.items()}
    expected = {
        (f"{n}.png", v): (number, writer)
        for n, (number, writer, count) in model.items()
        for v in range(count)
    }
    index = LiveIndex(root)
    found = {
        (row.path, row.variant): (row.place.shard[-6:], row.place.shard.split("/")[2][:8])
        for row in index.iter_samples()
    }
    assert found == expected
    assert len(index) == len(expected)
    assert index.num_dead_rows == num_rows - len(expected)
    keys = [(row.sample_id, row.variant) for row in index.iter_samples()]
    assert keys == sorted(keys)


def test_a_tombstone_wins_over_rows_of_the_same_commit(root):
    add(root, 1, [placed(SAMPLES["0"], 1, 0, variant=1)], [SAMPLES["0"]])
    assert live(root) == {}


def test_a_replaced_commit_does_not_count(root):
    first = add(root, 1, [placed(SAMPLES["0"], 1)])
    second = add(root, 2, [placed(SAMPLES["1"], 2)], parents=[first.name])
    rows = [placed(SAMPLES["1"], 2, writer="0000000c")]
    restated = write_commit(
        LocalFolder(root),
        root,
        sequence=3,
        writer="0000000c",
        samples=sample_table(rows),
        texts=None,
        shards=[shard("samples/64x64/0000000c-000002")],
        parents=[second.name],
    )
    path = root / f"index/{restated.name}.json"
    path.write_bytes(restated.model_copy(update={"replaces": (first.name, second.name)}).to_json())
    for gone in (None, *(root / "index").glob("*0000000a.json")):
        if gone:  # what is replaced may be removed
            gone.unlink()
        assert live(root) == {("1.png", 0): "000002"}
        assert LiveIndex(root).heads == (restated.name,)
    last = add(root, 4, [placed(SAMPLES["2"], 4)], parents=[restated.name])
    assert LiveIndex(root).heads == (last.name,)


def test_a_lost_parent_is_named(root):
    first = add(root, 1, [placed(SAMPLES["0"], 1)])
    second = add(root, 2, [placed(SAMPLES["1"], 2)], parents=[first.name])
    add(root, 3, [placed(SAMPLES["2"], 3)], parents=[second.name])
    (root / f"index/{second.name}.json").unlink()
    with pytest.raises(DamagedStoreError, match=f"{second.name}.json is missing, on which commit"):
        LiveIndex(root)


def test_heads_are_the_commits_without_a_child():
    def commit(sequence, writer, parents):
        return Commit(sequence=sequence, writer=writer, segments={}, shards=(), parents=parents)

    a, b = commit(1, "0000000a", ()), commit(2, "0000000a", ("00000001-0000000a",))
    c = commit(2, "0000000b", ("00000001-0000000a",))
    d = commit(3, "0000000a", ("00000002-0000000a", "00000002-0000000b"))
    assert heads([]) == ()
    assert heads([a]) == ("00000001-0000000a",)
    assert heads([a, b, c]) == ("00000002-0000000a", "00000002-0000000b")
    assert heads([a, b, c, d]) == ("00000003-0000000a",)


def test_the_last_row_of_a_text_key_counts(root):
    def text(caption, at):
        return TextRow(text_key(caption), caption, 3, Place("texts/t", at, (at,), (0,)))

    add(root, 1, texts=[text("x", 0), text("y", 1), text("x", 2)])
    add(root, 2, texts=[text("y", 3)], shards=[])
    rows = {row.caption: row.place.row for row in LiveIndex(root).iter_texts()}
    assert rows == {"x": 2, "y": 3}


def test_a_commit_of_a_later_version_is_refused_by_name(root):
    commit = add(root, 1, [placed(SAMPLES["0"], 1)])
    path = root / f"index/{commit.name}.json"
    body = json.loads(path.read_bytes()) | {"version": 2, "something": "new"}
    del body["sha256"]
    body["sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
    path.write_text(json.dumps(body))
    with pytest.raises(NotAStoreError, match="has version 2; this prebake reads version 1"):
        parse_commit(path.read_bytes(), str(path))


BAD_ROWS = {
    "it names shard .*, which no commit lists": {"shard": "samples/64x64/other"},
    "it names a row that its shard does not have": {"row": 100},
    "it names a row that its shard does not": {"row": -1},
    "offsets and crc32c differ in number": {"crc32c": [1, 2]},
    "captions and text_keys differ in number": {"captions": ["a"]},
    "text_keys and text_weights differ": {"text_weights": [1.0]},
    "a sample has no text": {"captions": [], "text_keys": [], "text_weights": []},
    "a bucket has no width": {"bucket_width_px": 0},
    "a bucket has no height": {"bucket_height_px": -8},
    "image_sha256 of a live row is null": {"image_sha256": None},
    "captions of a live row is null": {"captions": ["a", None]},
}


@pytest.mark.parametrize(("message", "change"), list(BAD_ROWS.items()))
def test_a_live_row_that_cannot_be_is_refused(root, message, change):
    """As a broken or hostile writer would write it: every hash is right."""
    [record] = sample_table([placed(SAMPLES["0"], 1)]).to_pylist()
    table = pa.Table.from_pylist([record | change], schema=SAMPLE_SCHEMA)
    shards = [shard("samples/64x64/0000000a-000001")]
    options = {"sequence": 1, "writer": "0000000a", "texts": None, "shards": shards, "parents": ()}
    write_commit(LocalFolder(root), root, samples=table, **options)
    with pytest.raises(DamagedStoreError, match=f"index is wrong in itself: {message}"):
        _ = LiveIndex(root).sample_details
    [finding] = verify_store(root, full=True)
    assert str(root) in finding.what
    if "captions" in change:
        with pytest.raises(DamagedStoreError, match="index is wrong in itself"):
            LiveIndex(root).sample(0)


def test_a_variant_that_is_there_twice_is_refused(root):
    add(root, 1, [placed(SAMPLES["0"], 1, 0), placed(SAMPLES["0"], 1, 1)])
    with pytest.raises(DamagedStoreError, match="a variant of a sample is there twice"):
        LiveIndex(root)


def test_a_sample_in_a_shard_of_texts_is_refused(root):
    row = SAMPLES["0"].row().placed(Place("texts/a", 0, (0,), (0,)))
    add(root, 1, [row], shards=[shard("texts/a", "texts")])
    with pytest.raises(DamagedStoreError, match="no commit lists among the samples"):
        LiveIndex(root)


def test_rows_of_same_samples_are_all_their_variants(tmp_path):
    samples = [Sample(f"{n}.png", num_variants=n) for n in (1, 2, 3)]
    index = build_store(tmp_path / "s", "zarr", samples).index
    ids = [row.sample_id for row in index.iter_samples()]
    for row, wanted in enumerate(ids):
        expected = [n for n, each in enumerate(ids) if each == wanted]
        assert index.rows_of_same_samples(np.array([row])).tolist() == expected
    assert index.rows_of_same_samples(np.arange(6)).tolist() == list(range(6))


def test_rows_by_shard_are_every_row_once(tmp_path):
    samples = [Sample(f"{n}.png", [f"{n}"]) for n in range(7)]
    index = build_store(tmp_path / "s", "zarr", samples, rows_per_shard=3).index
    rows = index.rows_by_shard()
    assert sorted(len(r) for r in rows.values()) == [1, 3, 3]
    assert sorted(n for r in rows.values() for n in r.tolist()) == list(range(7))
    for name, of_shard in rows.items():
        assert {index.sample(int(row)).place.shard for row in of_shard} == {name}
    texts = index.text_rows_by_shard()
    assert sorted(n for r in texts.values() for n in r.tolist()) == list(range(8))


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a\\b", "a\0b"])
def test_a_path_out_of_the_store_is_refused(path):
    with pytest.raises(ValueError, match="not a plain relative path"):
        check_relative(path)


@given(st.lists(st.lists(st.integers(0, 100), max_size=4)))
def test_lists_are_flattened_between_their_starts(lists):
    column = pa.chunked_array([pa.array(lists, pa.list_(pa.int64()))])
    starts, values = list_starts(column), list_values(column)
    parts = [values[a:b].tolist() for a, b in pairwise(starts)]
    assert parts == lists
