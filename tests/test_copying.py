"""Copies of stores: convert, merge and subset, in every pair of layouts."""

import dataclasses
import itertools
import os
import resource
import shutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import (
    LAYOUTS,
    MOMENTS_TENSORS,
    SD1_TENSORS,
    SDXL_TENSORS,
    Sample,
    assert_holds,
    bring_to,
    build_store,
    make_manifest,
    text_key,
    text_tensors,
    variant_tensors,
)
from test_store_views import assert_zarr_shows, webdataset_samples

from store_format import copying, open_store
from store_format.clashes import find_clashes, select_once
from store_format.copying import Copied, copy_samples
from store_format.errors import (
    DamagedStoreError,
    NotAStoreError,
    OtherBakeError,
    PrebakeError,
    StoreBusyError,
)
from store_format.rows import TextRow
from store_format.selection import Part, Rows, parse_renames
from store_format.verify import store_hash, verify_store
from store_format.writer import StoreWriter

WIDE, TALL = (96, 48), (48, 96)
SAMPLES = [
    Sample("a.png", ["a cat"]),
    Sample("a.jpg", ["a cat"], WIDE, tags={"artist": "é", "year": "1999"}, weight=0.3),
    Sample("d1/x.png", ["a dog", "a brown dog", "one dog"], text_weights=[0.7, 0.2, 0.1]),
    Sample("d2/x.png", ["a dog"], TALL),
    Sample("img1.png", ["", "nothing"]),
    Sample("img10.png", ["a cat"], source="others"),
    Sample("ünï.png", ['„quoted“ "text"\nnext line \\ 🐈'], WIDE),
    Sample("v.png", ["seen thrice"], TALL, num_variants=3),
]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
MIXED = [("zarr", "webdataset"), ("webdataset", "zarr")]
TRIPLES = list(itertools.product(LAYOUTS, repeat=3))


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def copy(out, layout, *parts, shard_bytes=1 << 20):
    """Copy whole stores, or parts of some; return what was done."""
    parts = [part if isinstance(part, Part) else Part.whole(part) for part in parts]
    return copy_samples(parts, out, layout, shard_bytes=shard_bytes, what="copying")


def files_of(root):
    """Return {path: (bytes, time)} of all files but locks, to see that nothing was touched."""
    paths = [p for p in root.rglob("*") if p.is_file() and p.name != "writer.lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def assert_is_copy(root, samples, expected_hash, *, show=True):
    """Assert that a store is sound, holds just `samples`, and shows them to plain readers."""
    store = open_store(root)
    assert verify_store(root, full=True) == []
    assert store_hash(store) == expected_hash
    assert_holds(store, samples)
    assert store.index.num_dead_rows == 0
    if show and samples and store.manifest.layout == "zarr":
        assert_zarr_shows(root, samples, store.manifest)
    elif show:
        assert_tars_show(root, samples, store.manifest)


def assert_tars_show(root, samples, manifest):
    found = webdataset_samples(root) if (root / "shards.txt").exists() else {}
    rows = [row for sample in samples for row in sample.rows()]
    assert sorted(found) == sorted(row.key for row in rows)
    for row in rows:
        arrays = variant_tensors(manifest, row)
        for text in row.texts:
            arrays += text_tensors(manifest, text.text_key)
        members = [value for name, value in found[row.key].items() if name.endswith(".npy")]
        for array, member in zip(arrays, members, strict=True):
            np.testing.assert_array_equal(array, member, strict=True)
        assert found[row.key]["json"]["source"] == row.source


# One store into another layout


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize("tensors", [SD1_TENSORS, SDXL_TENSORS])
def test_a_copy_in_any_layout_is_bit_equal(tmp_path, before, after, tensors):
    source = build_store(tmp_path / "a", before, SAMPLES, tensors, rows_per_shard=2)
    untouched = files_of(tmp_path / "a")
    copied = copy(tmp_path / "b", after, source)
    assert copied == Copied(num_samples=8, num_held=0, num_repeated=0, num_other_states=0)
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(source))
    assert files_of(tmp_path / "a") == untouched


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_dtype_is_copied(tmp_path, after, dtype):
    source = build_store(tmp_path / "a", "zarr", SAMPLES, MOMENTS_TENSORS, dtype=dtype)
    copy(tmp_path / "b", after, source)
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(source))


SAMPLE = st.builds(
    Sample,
    st.sampled_from([f"{i}.png" for i in range(6)]),
    st.lists(st.sampled_from(["", "a cat", "a dog", "é"]), min_size=1, max_size=3),
    st.sampled_from([(64, 64), WIDE, TALL]),
    num_variants=st.integers(1, 3),
    weight=st.sampled_from([1.0, 0.25]),
    source=st.sampled_from(["pictures", "others"]),
    image=st.integers(0, 1),
)
UNIQUE_SAMPLES = st.lists(SAMPLE, max_size=6, unique_by=lambda sample: sample.sample_id)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    states=st.lists(UNIQUE_SAMPLES, min_size=1, max_size=3),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    shard_bytes=st.sampled_from([1, 2000, 1 << 20]),
)
def test_whatever_a_store_went_through_copies_keep_its_hash(
    tmp_path_factory, states, layouts, shard_bytes
):
    root = tmp_path_factory.mktemp("copies")
    for samples in states:
        source = bring_to(root / "0", make_manifest(layouts[0]), samples, rows_per_shard=2)
    for number, layout in enumerate(layouts[1:], 1):
        copy(
            root / f"{number}", layout, open_store(root / f"{number - 1}"), shard_bytes=shard_bytes
        )
        assert_is_copy(root / f"{number}", states[-1], store_hash(source), show=False)
    shutil.rmtree(root)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_shards_are_closed_at_their_size(tmp_path, before, after):
    samples = [Sample(f"{i}.png", [f"text {i % 7}"]) for i in range(40)]
    source = build_store(tmp_path / "a", before, samples)
    copy(tmp_path / "b", after, source, shard_bytes=4000)
    shards = open_store(tmp_path / "b").index.shards.values()
    row_bytes = {"zarr": 4 * 8 * 8 * 2 + 4, "webdataset": 3 * 512 + 512 + 2 * 512 + 1024}[after]
    for shard in shards:
        if shard.kind == "samples":
            tensors = max(file.bytes for file in shard.files)
            assert tensors <= 4000 + row_bytes + 16 * shard.rows + 1024
    per_shard = {"zarr": 8, "webdataset": 2}[after]
    assert len([s for s in shards if s.kind == "samples"]) == 40 // per_shard
    assert_is_copy(tmp_path / "b", samples, store_hash(source))


def test_rows_of_many_small_shards_come_together(tmp_path):
    samples = [Sample(f"{i}.png", [f"{i}"], (64, 64) if i % 2 else WIDE) for i in range(12)]
    build_store(tmp_path / "a", "zarr", samples, rows_per_shard=1, samples_per_commit=1)
    copy(tmp_path / "b", "zarr", open_store(tmp_path / "a"))
    kinds = [shard.kind for shard in open_store(tmp_path / "b").index.shards.values()]
    assert sorted(kinds) == ["samples", "samples", "texts"]


def test_more_buckets_than_open_shards_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "MAX_DRAFTS", 3)
    buckets = [(8 * i, 8 * (20 - i)) for i in range(1, 11)]
    samples = [Sample(f"{i}.png", bucket_px=bucket) for i, bucket in enumerate(buckets)]
    source = build_store(tmp_path / "a", "webdataset", samples)
    copy(tmp_path / "b", "zarr", source)
    assert len(open_store(tmp_path / "b").index.commits) == 4
    assert_is_copy(tmp_path / "b", samples, store_hash(source))


def test_few_rows_are_in_memory_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "MAX_ROWS", 3)
    samples = [Sample(f"{i}.png", num_variants=2) for i in range(4)]
    source = build_store(tmp_path / "a", "webdataset", samples)
    copy(tmp_path / "b", "webdataset", source)
    assert len(open_store(tmp_path / "b").index.commits) == 3  # with the empty prompt: 3, 4, 2 rows
    assert_is_copy(tmp_path / "b", samples, store_hash(source))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_variants_stay_together_wherever_they_lie(tmp_path, monkeypatch, before, after):
    """Each variant in a bucket of its own, far from the others of its sample."""
    monkeypatch.setattr(copying, "MAX_ROWS", 1)
    samples = [Sample(f"{i}.png", [f"{i}"], num_variants=3) for i in range(4)]
    build_store(tmp_path / "a", before, [Sample("x.png", [str(i) for i in range(4)])])
    rows = []
    with StoreWriter(tmp_path / "a", make_manifest(before)) as writer:
        drafts = []
        for variant, bucket in enumerate([TALL, (64, 64), WIDE]):
            drafts.append(writer.new_sample_shard(bucket))
            for sample in samples:
                row = dataclasses.replace(sample.row(variant), bucket_px=bucket)
                tensors = variant_tensors(writer.manifest, row)
                if writer.manifest.texts_inline:
                    tensors += text_tensors(writer.manifest, row.texts[0].text_key)
                rows.append(row.placed(drafts[-1].append(row, tensors)))
        writer.commit(drafts, rows)
        writer.tidy()
    source = open_store(tmp_path / "a")
    copy(tmp_path / "b", after, source)
    copied = open_store(tmp_path / "b")
    assert len(copied.index.commits) == 5  # a sample each
    assert store_hash(copied) == store_hash(source)
    found = [dataclasses.replace(row, place=None) for row in copied.index.iter_samples()]
    assert found == [dataclasses.replace(row, place=None) for row in source.index.iter_samples()]
    assert verify_store(tmp_path / "b", full=True) == []


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_what_is_dead_or_dropped_is_left_behind(tmp_path, before, after):
    manifest = build_store(
        tmp_path / "a", before, [*SAMPLES, Sample("gone.png", ["gone"])]
    ).manifest
    edited = [Sample("a.png", ["edited"], image=1), *SAMPLES[1:]]
    source = bring_to(tmp_path / "a", manifest, edited)
    copy(tmp_path / "b", after, source)
    assert_is_copy(tmp_path / "b", edited, store_hash(source))
    captions = {row.caption for row in open_store(tmp_path / "b").index.iter_texts()}
    assert "gone" not in captions
    assert captions >= {""}


@pytest.mark.parametrize(("before", "after"), MIXED)
def test_a_sample_that_two_writers_stated_is_copied_once(tmp_path, before, after):
    manifest = build_store(tmp_path / "a", before, SAMPLES[:1]).manifest
    shutil.copytree(tmp_path / "a", tmp_path / "twin")
    bring_to(tmp_path / "a", manifest, SAMPLES)
    bring_to(tmp_path / "twin", manifest, SAMPLES)
    shutil.copytree(tmp_path / "twin", tmp_path / "a", dirs_exist_ok=True)
    source = open_store(tmp_path / "a")
    assert source.index.num_dead_rows > 0
    copied = copy(tmp_path / "b", after, source)
    assert copied == Copied(8, 0, 0, 0)
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(source))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_store_of_nothing_is_copied(tmp_path, before, after):
    source = build_store(tmp_path / "a", before, [])
    assert copy(tmp_path / "b", after, source) == Copied(0, 0, 0, 0)
    assert_is_copy(tmp_path / "b", [], store_hash(source))


def test_a_store_without_the_empty_prompt_is_refused(tmp_path):
    with StoreWriter(tmp_path / "a", make_manifest("zarr")):
        pass
    with pytest.raises(PrebakeError, match=r"holds no text row \w+. .* complete the store"):
        copy(tmp_path / "b", "zarr", open_store(tmp_path / "a"))
    assert not (tmp_path / "b").exists()
    whole = build_store(tmp_path / "whole", "zarr", SAMPLES)
    copy(tmp_path / "b", "zarr", open_store(tmp_path / "a"), whole)
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(whole))


def test_the_number_of_tokens_is_kept_where_it_is_known(tmp_path):
    source = build_store(tmp_path / "a", "zarr", [Sample("a.png", ["a brown dog"])])
    copy(tmp_path / "b", "zarr", source)
    copy(tmp_path / "tars", "webdataset", source)
    copy(tmp_path / "c", "zarr", open_store(tmp_path / "tars"))
    for name, num_tokens in [("a", 5), ("b", 5), ("c", 0)]:
        store = open_store(tmp_path / name)
        assert store.text_row(text_key("a brown dog")).num_tokens == num_tokens
        assert store.text_row(text_key("")).num_tokens == 2


@pytest.mark.parametrize("after", LAYOUTS)
def test_stores_behind_urls_are_read_and_written(tmp_path, monkeypatch, after):
    monkeypatch.setenv("PREBAKE_CACHE", str(tmp_path / "cache"))
    source = build_store(tmp_path / "a", "zarr", SAMPLES)
    url = f"memory://copies/{tmp_path.name}"
    copy(url, after, source)
    assert copy(url, after, source).num_held == 8
    copy(tmp_path / "b", after, open_store(url))
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(source))
    for inside in (url, f"{url}/deeper"):
        with pytest.raises(PrebakeError, match="are the same, or one lies in the other"):
            copy(inside, after, open_store(url))


# Going on


class Killed(BaseException):
    pass


def die_at_commit(monkeypatch, number):
    """Let the n-th commit of a copy never happen."""
    original, calls = StoreWriter.commit, itertools.count(1)

    def commit(self, *args):
        if next(calls) == number:
            raise Killed
        return original(self, *args)

    monkeypatch.setattr(StoreWriter, "commit", commit)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_copy_that_ended_early_is_continued(tmp_path, monkeypatch, before, after):
    samples = [*SAMPLES, *(Sample(f"{i}.png", [f"text {i}"]) for i in range(20))]
    source = build_store(tmp_path / "a", before, samples)
    with monkeypatch.context() as patch:
        die_at_commit(patch, 4)
        with pytest.raises(Killed):
            copy(tmp_path / "b", after, source, shard_bytes=3000)
    begun = open_store(tmp_path / "b")
    assert 0 < len(begun) < len(source)
    copied = copy(tmp_path / "b", after, source, shard_bytes=3000)
    assert copied == Copied(28, len(set(begun.sample_ids)), 0, 0)
    assert begun.index.shards.items() <= open_store(tmp_path / "b").index.shards.items()
    assert_is_copy(tmp_path / "b", samples, store_hash(source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finished_copy_is_left_as_it_is(tmp_path, layout):
    source = build_store(tmp_path / "a", layout, SAMPLES)
    copy(tmp_path / "b", layout, source)
    before = files_of(tmp_path / "b")
    assert copy(tmp_path / "b", layout, source) == Copied(8, 8, 0, 0)
    assert files_of(tmp_path / "b") == before


@pytest.mark.parametrize(("before", "after"), MIXED)
def test_a_store_that_grew_is_copied_to_the_end(tmp_path, before, after):
    source = build_store(tmp_path / "a", before, SAMPLES[:5])
    copy(tmp_path / "b", after, source)
    source = bring_to(tmp_path / "a", source.manifest, SAMPLES)
    assert copy(tmp_path / "b", after, source).num_held == 5
    assert_is_copy(tmp_path / "b", SAMPLES, store_hash(source))


@pytest.mark.parametrize(("before", "after"), MIXED)
@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Sample("mine.png"), r"1 of its samples are not theirs: pictures/mine.png of \S+/b\."),
        (Sample("a.png", ["no cat"]), r"a.png of \S+/a and \S+/b \(captions: \['a cat'\], \['no c"),
        (Sample("a.png", ["a cat"], image=1), r"a.png of \S+/a and \S+/b \(image\)"),
        (Sample("a.png", ["a cat"], num_variants=2), r"\(number of variants: 1, 2\)"),
    ],
)
def test_a_target_that_holds_something_else_is_refused(tmp_path, before, after, held, message):
    source = build_store(tmp_path / "a", before, SAMPLES)
    build_store(tmp_path / "b", after, [held])
    (tmp_path / "b/writer.lock").unlink()
    untouched = files_of(tmp_path / "b")
    with pytest.raises(PrebakeError, match=message):
        copy(tmp_path / "b", after, source)
    assert files_of(tmp_path / "b") == untouched
    assert not (tmp_path / "b/writer.lock").exists()


@pytest.mark.parametrize("after", LAYOUTS)
def test_a_target_with_other_states_of_a_text_is_refused(tmp_path, after):
    source = build_store(tmp_path / "a", "zarr", SAMPLES)
    with StoreWriter(
        tmp_path / "b", source.manifest.model_copy(update={"layout": after})
    ) as writer:
        draft = writer.new_text_shard()
        row = TextRow(text_key(""), "", 2)
        place = draft.append(row, text_tensors(writer.manifest, text_key("other bytes")))
        writer.commit([draft], (), [TextRow(row.text_key, "", 2, place)])
    with pytest.raises(PrebakeError, match="1 states of its texts are not theirs"):
        copy(tmp_path / "b", after, source)


def test_a_target_of_another_bake_or_of_something_else_is_refused(tmp_path):
    source = build_store(tmp_path / "a", "zarr", SAMPLES)
    bring_to(tmp_path / "b", make_manifest("zarr", resolution=768), [])
    with pytest.raises(OtherBakeError, match=r"config.resolution = 768 \(asked for: 64\)"):
        copy(tmp_path / "b", "zarr", source)
    build_store(tmp_path / "c", "webdataset", [])
    with pytest.raises(OtherBakeError, match=r"layout = 'webdataset' \(asked for: 'zarr'\)"):
        copy(tmp_path / "c", "zarr", source)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious.txt").write_text("mine")
    with pytest.raises(NotAStoreError, match="not empty and not a prebake store"):
        copy(tmp_path / "mine", "zarr", source)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("out", ["a", "a/samples", "a/new/deep", "link", "link/x", ".", "b/../a"])
def test_a_target_that_is_or_lies_in_a_source_is_refused(tmp_path, out):
    source = build_store(tmp_path / "a", "zarr", SAMPLES)
    other = build_store(tmp_path / "b", "zarr", SAMPLES)
    (tmp_path / "link").symlink_to("a")
    before = files_of(tmp_path)
    with pytest.raises(PrebakeError, match="are the same, or one lies in the other"):
        copy(tmp_path / out, "zarr", other if out == "b/../a" else source, source)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_that_somebody_writes_is_busy(tmp_path, layout):
    source = build_store(tmp_path / "a", layout, SAMPLES)
    with (
        StoreWriter(tmp_path / "b", source.manifest),
        pytest.raises(StoreBusyError, match="being written by another process"),
    ):
        copy(tmp_path / "b", layout, source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_into_the_target_before_the_copy_has_it_alone_counts(
    tmp_path, monkeypatch, layout
):
    source = build_store(tmp_path / "a", layout, SAMPLES)
    copy(tmp_path / "b", layout, source)  # as another process may do it meanwhile

    def meanwhile(here):
        monkeypatch.setattr(copying, "_allow_open_files", lambda parts: shutil.copytree(*here))

    meanwhile((tmp_path / "b", tmp_path / "c"))
    assert copy(tmp_path / "c", layout, source) == Copied(8, 8, 0, 0)
    assert open_store(tmp_path / "c").index.num_dead_rows == 0
    build_store(tmp_path / "foreign", layout, [Sample("foreign.png")])
    meanwhile((tmp_path / "foreign", tmp_path / "d"))
    with pytest.raises(PrebakeError, match="1 of its samples are not theirs"):
        copy(tmp_path / "d", layout, source)
    assert len(open_store(tmp_path / "d")) == 1


# Damage


@pytest.mark.parametrize(("before", "after"), MIXED)
@pytest.mark.parametrize("tensor", ["latents", "encoder_hidden_states"])
def test_a_damaged_row_is_named_and_nothing_wrong_is_written(tmp_path, before, after, tensor):
    samples = [Sample(f"{i}.png", [f"text {i}"]) for i in range(12)]
    source = build_store(tmp_path / "a", before, samples, rows_per_shard=12)
    hurt = source.sample(source.row_of(samples[7].sample_id))
    place = hurt.place
    if tensor != "latents" and before == "zarr":
        place = source.text_row(hurt.texts[0].text_key).place
    file = f"{place.shard}/{tensor}/c/0/0/0" + ("/0" if tensor == "latents" else "")
    path = tmp_path / "a" / (f"{place.shard}.tar" if before == "webdataset" else file)
    data = bytearray(path.read_bytes())
    data[place.offsets[-1 if tensor != "latents" else 0] + 3] ^= 1
    path.write_bytes(data)
    message = rf"pictures/7.png \(sample {samples[7].sample_id}\) cannot be copied: {path}: crc32c"
    with pytest.raises(DamagedStoreError, match=message):
        copy(tmp_path / "b", after, source, shard_bytes=2000)
    assert verify_store(tmp_path / "b", full=False) == []
    begun = open_store(tmp_path / "b")
    assert 0 < len(begun) < 12
    assert_holds(begun, [s for s in samples if s.sample_id in begun.sample_ids])
    path.write_bytes(data[:20])
    with pytest.raises(DamagedStoreError, match="it ends before the end of"):
        copy(tmp_path / "b", after, source)


def test_a_full_disk_names_the_target(tmp_path, monkeypatch):
    source = build_store(tmp_path / "a", "zarr", SAMPLES)

    def write(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("store_format.files.HashedFile.write", write)
    with pytest.raises(OSError, match="No space left") as raised:
        copy(tmp_path / "b", "zarr", source)
    assert raised.value.filename == str(tmp_path / "b")


def test_reading_many_stores_needs_as_many_open_files(tmp_path, monkeypatch):
    source = build_store(tmp_path / "a", "zarr", SAMPLES)
    needed = copying.SPARE_OPEN_FILES + len(source.index.files)
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, needed))
    copy(tmp_path / "b", "zarr", source)
    assert limits == [(needed, needed)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (needed, resource.RLIM_INFINITY))
    copy(tmp_path / "c", "zarr", source)
    assert len(limits) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, needed - 1))
    with pytest.raises(PrebakeError, match=rf"takes {needed} open files, .* allows {needed - 1} "):
        copy(tmp_path / "d", "zarr", source)
    assert not (tmp_path / "d").exists()


# Several stores


@pytest.mark.parametrize("layouts", TRIPLES)
def test_merged_stores_hold_the_samples_of_all(tmp_path, layouts):
    first = build_store(tmp_path / "a", layouts[0], SAMPLES[:5])
    second = build_store(tmp_path / "b", layouts[1], SAMPLES[3:])
    expected = store_hash(build_store(tmp_path / "all", layouts[2], SAMPLES))
    for out, stores in [("ab", [first, second]), ("ba", [second, first])]:
        assert copy(tmp_path / out, layouts[2], *stores) == Copied(8, 0, 2, 0)
        assert_is_copy(tmp_path / out, SAMPLES, expected)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    samples=UNIQUE_SAMPLES,
    shares=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=4),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5),
)
def test_any_overlapping_stores_merge_into_their_union(tmp_path_factory, samples, shares, layouts):
    root = tmp_path_factory.mktemp("merge")
    stores, held = [], set()
    for number, share in enumerate(shares):
        part = [s for i, s in enumerate(samples) if i in share]
        held |= {sample.sample_id for sample in part}
        stores.append(build_store(root / f"{number}", layouts[number], part, rows_per_shard=2))
    union = [sample for sample in samples if sample.sample_id in held]
    copied = copy(root / "merged", layouts[4], *stores)
    total = sum(len(set(store.sample_ids)) for store in stores)
    assert copied == Copied(len(union), 0, total - len(union), 0)
    expected = store_hash(build_store(root / "all", layouts[4], union))
    assert_is_copy(root / "merged", union, expected, show=False)
    shutil.rmtree(root)


CLASHES = {
    r"\(image\)": Sample("a.png", ["a cat"], image=1),
    r"\(captions: \['a cat'\], \['no cat'\]\)": Sample("a.png", ["no cat"]),
    r"\(captions: \['a cat'\], \['a cat', 'two'\]; text weights: \[1.0\], \[1.0, 1.0\]\)": Sample(
        "a.png", ["a cat", "two"]
    ),
    r"\(text weights: \[1.0\], \[0.5\]\)": Sample("a.png", ["a cat"], text_weights=[0.5]),
    r"\(weight: 1.0, 2.0\)": Sample("a.png", ["a cat"], weight=2.0),
    r"\(tags: {}, {'k': 'v'}\)": Sample("a.png", ["a cat"], tags={"k": "v"}),
    r"\(bucket: \(64, 64\), \(96, 48\); geometry: .*; latents\)": Sample("a.png", ["a cat"], WIDE),
    r"\(number of variants: 1, 2\)": Sample("a.png", ["a cat"], num_variants=2),
}


@pytest.mark.parametrize("message", CLASHES)
@pytest.mark.parametrize(("before", "after"), MIXED)
def test_a_sample_with_two_contents_is_an_error_that_says_what_differs(
    tmp_path, before, after, message
):
    first = build_store(tmp_path / "a", before, SAMPLES)
    second = build_store(tmp_path / "b", after, [CLASHES[message], Sample("more.png")])
    where = rf"the stores differ in 1 sample: pictures/a.png of {tmp_path}/a and {tmp_path}/b "
    with pytest.raises(PrebakeError, match=where + message):
        copy(tmp_path / "new", after, first, second)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latents_of_equal_keys_and_other_bytes_are_a_clash(tmp_path, layout):
    first = build_store(tmp_path / "a", layout, SAMPLES[:1])
    with StoreWriter(tmp_path / "b", first.manifest) as writer:
        draft = writer.new_sample_shard((64, 64))
        row = SAMPLES[0].row()
        tensors = [array + 1 for array in variant_tensors(writer.manifest, row)]
        if writer.manifest.texts_inline:
            tensors += text_tensors(writer.manifest, row.texts[0].text_key)
        texts = []
        if not writer.manifest.texts_inline:
            text_draft = writer.new_text_shard()
            for key in (row.texts[0].text_key, text_key("")):
                text = TextRow(key, "", 2)
                place = text_draft.append(text, text_tensors(writer.manifest, key))
                texts.append(TextRow(key, "", 2, place))
            writer.commit([text_draft], (), texts)
        writer.commit([draft], [row.placed(draft.append(row, tensors))])
    with pytest.raises(PrebakeError, match=r"a.png of \S+ and \S+ \(latents\)"):
        copy(tmp_path / "c", layout, first, open_store(tmp_path / "b"))


def test_all_clashes_are_counted_and_the_first_shown(tmp_path):
    samples = [Sample(f"{i}.png") for i in range(30)]
    first = build_store(tmp_path / "a", "zarr", samples)
    changed = [Sample(f"{i}.png", weight=0.5) if i % 3 == 0 else s for i, s in enumerate(samples)]
    second = build_store(tmp_path / "b", "webdataset", changed)
    third = build_store(tmp_path / "c", "webdataset", [Sample("1.png", ["other"])])
    with pytest.raises(PrebakeError, match="the stores differ in 11 samples: ") as raised:
        copy(tmp_path / "new", "zarr", first, second, third)
    assert str(raised.value).count("pictures/") == 3
    assert "); ...." in str(raised.value)


def test_the_time_and_the_size_of_an_image_file_are_no_content(tmp_path):
    class Touched(Sample):
        def row(self, variant=0):
            row = super().row(variant)
            return dataclasses.replace(row, image_mtime_ns=5, image_bytes=6)

    first = build_store(tmp_path / "a", "zarr", SAMPLES[:1])
    second = build_store(tmp_path / "b", "zarr", [Touched("a.png", ["a cat"])])
    assert copy(tmp_path / "ab", "zarr", first, second).num_repeated == 1
    assert open_store(tmp_path / "ab").sample(0).image_mtime_ns == SAMPLES[0].row().image_mtime_ns


def test_clashes_are_found_across_the_blocks_in_which_rows_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("store_format.clashes.ROWS_COMPARED_AT_ONCE", 3)
    samples = [Sample(f"{i}.png", num_variants=2) for i in range(9)]
    odd = [Sample(f"{i}.png", num_variants=2, weight=2.0) for i in (1, 7)]
    changed = [s for s in samples if s.path not in ("1.png", "7.png")] + odd
    parts = [
        Part.whole(build_store(tmp_path / name, "zarr", some))
        for name, some in [("a", samples), ("b", changed)]
    ]
    rows = Rows(parts)
    at = np.arange(18)
    num, shown = find_clashes(rows, at, rows, at + 18)
    assert num == 2
    assert shown.count("weight: 1.0, 2.0") == 2
    assert find_clashes(rows, at, rows, at) == (0, "")
    assert select_once(Rows(parts[:1])).tolist() == at.tolist()


def test_stores_of_different_bakes_do_not_merge(tmp_path):
    first = build_store(tmp_path / "a", "zarr", SAMPLES)
    second = bring_to(tmp_path / "b", make_manifest("webdataset", resolution=96, more=1), SAMPLES)
    message = (
        rf"{tmp_path}/a and {tmp_path}/b are different bakes: config.more = None and 1; "
        r"config.resolution = 64 and 96\. Only stores"
    )
    with pytest.raises(OtherBakeError, match=message):
        copy(tmp_path / "new", "zarr", first, second)
    other_tensors = build_store(tmp_path / "c", "zarr", [], MOMENTS_TENSORS)
    with pytest.raises(OtherBakeError, match=r"tensors = .*'latents'.* and .*'latents_mean'"):
        copy(tmp_path / "new", "zarr", first, other_tensors)
    assert not (tmp_path / "new").exists()


def build_with_other_states(root, layout, samples):
    """Build a store whose text states of equal keys have other bytes, as from another device."""

    def other(manifest, key):
        return [array + 1 for array in text_tensors(manifest, key)]

    with mock.patch("store_builders.text_tensors", other):
        return build_store(root, layout, samples)


@pytest.mark.parametrize("layouts", TRIPLES)
def test_states_of_equal_keys_and_other_bytes_are_counted_where_one_is_kept(tmp_path, layouts):
    first = build_store(tmp_path / "a", layouts[0], [Sample("a.png", ["x", "y"])])
    second = build_with_other_states(tmp_path / "b", layouts[1], [Sample("b.png", ["y", "z"])])
    copied = copy(tmp_path / "new", layouts[2], first, second)
    assert copied.num_other_states == (1 if layouts[2] == "zarr" else 0)
    assert verify_store(tmp_path / "new", full=True) == []
    assert copy(tmp_path / "new", layouts[2], first, second).num_held == 2
    states = open_store(tmp_path / "new").read_texts
    rows = {
        sample.path: row
        for row, sample in enumerate(open_store(tmp_path / "new").index.iter_samples())
    }
    y_of_a, y_of_b = states(rows["a.png"])[1], states(rows["b.png"])[0]
    is_equal = np.array_equal(y_of_a["encoder_hidden_states"], y_of_b["encoder_hidden_states"])
    assert is_equal == (layouts[2] == "zarr")


# Other names


@pytest.mark.parametrize(("before", "after"), MIXED)
def test_a_renamed_source_gives_new_ids(tmp_path, before, after):
    here = [Sample("a.png", ["mine"], num_variants=2), Sample("b.png")]
    there = [Sample("a.png", ["theirs"], image=1), Sample("b.png")]
    first = build_store(tmp_path / "a", before, here)
    second = build_store(tmp_path / "b", after, there)
    parts = [first, Part.whole(second, {"pictures": "x"})]
    assert copy(tmp_path / "new", after, *parts) == Copied(4, 0, 0, 0)
    assert copy(tmp_path / "new", after, *parts) == Copied(4, 4, 0, 0)
    store = open_store(tmp_path / "new")
    expected = [*here, *(Sample(s.path, s.captions, source="x", image=s.image) for s in there)]
    assert sorted(set(store.sample_ids)) == sorted(sample.sample_id for sample in expected)
    found = {(row.source, row.path, row.variant): row for row in store.index.iter_samples()}
    assert found["x", "a.png", 0].image_sha256 == there[0].row().image_sha256
    assert found["pictures", "a.png", 1].texts[0].caption == "mine"
    assert verify_store(tmp_path / "new", full=True) == []
    row = store.row_of(Sample("a.png", source="x").sample_id)
    np.testing.assert_array_equal(
        store.read_variant(row)["latents"], variant_tensors(store.manifest, there[0].row())[0]
    )
    if after == "webdataset":
        shown = webdataset_samples(tmp_path / "new").values()
        assert sorted({sample["json"]["source"] for sample in shown}) == ["pictures", "x"]


def test_a_new_name_that_another_source_has_merges_or_clashes(tmp_path):
    samples = [Sample("a.png"), Sample("b.png"), Sample("a.png", source="old", weight=0.5)]
    store = build_store(tmp_path / "s", "zarr", samples)
    with pytest.raises(PrebakeError, match=rf"pictures/a.png of {store.root} and {store.root} \("):
        copy(tmp_path / "new", "zarr", Part.whole(store, {"old": "pictures"}))
    copy(tmp_path / "new", "zarr", Part.whole(store, {"pictures": "old", "old": "pictures"}))
    names = {(row.source, row.path) for row in open_store(tmp_path / "new").index.iter_samples()}
    assert names == {("old", "a.png"), ("old", "b.png"), ("pictures", "a.png")}


def test_new_names_are_understood(tmp_path):
    one = build_store(tmp_path / "one", "zarr", [Sample("a.png")])
    two = build_store(tmp_path / "two", "zarr", [Sample("a.png"), Sample("a.png", source="x=y")])
    stores = {"s": one, "s3://b/s": two, "s=s": two}
    for texts, expected in [
        ([], {}),
        (["s=x"], {"s": {"pictures": "x"}}),
        (["s=x=y"], {"s": {"pictures": "x=y"}}),
        (["s:pictures=x"], {"s": {"pictures": "x"}}),
        (["s3://b/s:x=y=z", "s3://b/s:pictures=q"], {"s3://b/s": {"x=y": "z", "pictures": "q"}}),
        (["s=s:pictures=q"], {"s=s": {"pictures": "q"}}),
    ]:
        assert parse_renames(stores, texts) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["t=x"], "'t=x': expected STORE=NAME or STORE:SOURCE=NAME with one of the stores s, t2"),
        (["s"], "'s': expected STORE=NAME"),
        (["t2=x"], "t2 has the sources others, pictures. Name one: --rename t2:SOURCE=NAME"),
        (["t2:q=x"], "t2 has the sources others, pictures"),
        (["s="], "is empty or has a slash"),
        (["s=a/b"], "is empty or has a slash"),
        (["s=x", "s:pictures=y"], "pictures of s has a new name already"),
    ],
)
def test_a_new_name_that_means_nothing_is_refused(tmp_path, texts, message):
    one = build_store(tmp_path / "one", "zarr", [Sample("a.png")])
    two = build_store(tmp_path / "two", "zarr", [Sample("a.png"), Sample("a.png", source="others")])
    with pytest.raises(PrebakeError, match=message):
        parse_renames({"s": one, "t2": two}, texts)
