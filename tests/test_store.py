"""What every layout must do: one class that both subclass."""

import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
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
    numbers,
    text_key,
    text_tensors,
    variant_tensors,
    write_samples,
)

from store_format import open_store, store
from store_format.errors import NotAStoreError, OtherBakeError, PrebakeError, StoreBusyError
from store_format.keys import sample_id
from store_format.verify import store_hash, verify_store
from store_format.views import shards_with_dead_rows
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


class StoreConformance:
    layout = ""

    def build(self, root, samples=SAMPLES, tensors=SD1_TENSORS, **options):
        return build_store(root, self.layout, samples, tensors, **options)

    def test_every_sample_reads_back_bit_equal(self, tmp_path):
        assert_holds(self.build(tmp_path / "s"), SAMPLES)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("tensors", [SD1_TENSORS, MOMENTS_TENSORS, SDXL_TENSORS])
    def test_every_dtype_and_set_of_tensors_reads_back_bit_equal(self, tmp_path, tensors, dtype):
        opened = self.build(tmp_path / "s", tensors=tensors, dtype=dtype)
        assert_holds(opened, SAMPLES)
        assert verify_store(tmp_path / "s", full=True) == []

    def test_bfloat16_is_the_upper_half_of_the_float32_pattern(self, tmp_path):
        opened = self.build(tmp_path / "s", SAMPLES[:1], dtype="bfloat16")
        raw = opened.read([0])["latents"][0]
        as_float = (raw.astype("<u4") << 16).view("<f4")
        spec16 = make_manifest(self.layout).variant_tensors[0]
        expected = numbers(SAMPLES[0].row().latent_key, spec16, (8, 8))
        assert raw.dtype == np.uint16
        np.testing.assert_array_equal(as_float, expected.astype(np.float32))

    def test_rows_and_texts_may_be_numpy_arrays(self, tmp_path):
        opened = self.build(tmp_path / "s", [Sample(f"{i}.png", ["a", "b"]) for i in range(3)])
        from_lists = opened.read([2, 0], [1, -1])
        from_arrays = opened.read(np.array([2, 0], np.int32), np.array([1, -1], np.int8))
        for name, array in from_lists.items():
            np.testing.assert_array_equal(array, from_arrays[name], strict=True)

    def test_a_batch_is_fresh_memory_that_a_caller_may_change(self, tmp_path):
        opened = self.build(tmp_path / "s")
        first = opened.read([0])["latents"]
        before = first.copy()
        first[:] = 0
        np.testing.assert_array_equal(opened.read([0])["latents"], before)

    def test_a_request_for_what_is_not_there_is_refused(self, tmp_path):
        opened = self.build(tmp_path / "s", [Sample("a.png", ["x", "y"]), Sample("b.png")])
        one, two = (
            opened.row_of(sample_id("pictures", "b.png")),
            opened.row_of(sample_id("pictures", "a.png")),
        )
        for rows, texts in [([2], None), ([-1], None), ([one], [1]), ([two], [2]), ([two], [-2])]:
            with pytest.raises(IndexError, match="asked for"):
                opened.read(rows, texts)
        for rows, texts in [([], None), ([0, 1], [0]), ([[0]], None)]:
            with pytest.raises(ValueError, match="expected B > 0 rows"):
                opened.read(rows, texts)

    def test_rows_of_two_buckets_are_no_batch(self, tmp_path):
        opened = self.build(tmp_path / "s", [Sample("a.png"), Sample("b.png", bucket_px=WIDE)])
        assert sorted(opened.bucket_px.tolist()) == [[64, 64], [96, 48]]
        with pytest.raises(ValueError, match="not of one bucket"):
            opened.read([0, 1])

    def test_a_wide_bucket_has_more_columns_than_rows(self, tmp_path):
        opened = self.build(tmp_path / "s", [Sample("a.png", bucket_px=WIDE)])
        assert opened.read([0])["latents"].shape == (1, 4, 48 // 8, 96 // 8)

    def test_a_sample_is_found_by_id_and_variant(self, tmp_path):
        opened = self.build(tmp_path / "s")
        for sample in SAMPLES:
            for variant in range(sample.num_variants):
                row = opened.row_of(sample.sample_id, variant)
                assert opened.sample(row).path == sample.path
                assert opened.sample(row).variant == variant
                assert opened.sample_ids[row] == sample.sample_id
        with pytest.raises(KeyError, match="no live sample"):
            opened.row_of("00" * 16)
        with pytest.raises(KeyError, match="no live sample zz"):
            opened.row_of("zz")
        with pytest.raises(KeyError, match="variant 3"):
            opened.row_of(SAMPLES[-1].sample_id, 3)

    def test_weights_come_back_as_they_were_given(self, tmp_path):
        opened = self.build(tmp_path / "s")
        row = opened.row_of(SAMPLES[2].sample_id)
        np.testing.assert_array_equal(opened.text_weights(row), np.float32([0.7, 0.2, 0.1]))
        assert [text.weight for text in opened.sample(row).texts] == [0.7, 0.2, 0.1]
        assert opened.sample(opened.row_of(SAMPLES[1].sample_id)).weight == 0.3

    def test_a_text_is_read_by_its_key(self, tmp_path):
        opened = self.build(tmp_path / "s")
        expected = text_tensors(opened.manifest, text_key(""))[0]
        found = opened.read_text(text_key(""))["encoder_hidden_states"]
        np.testing.assert_array_equal(found, expected, strict=True)
        with pytest.raises(PrebakeError, match="holds no text row"):
            opened.read_text("00" * 16)

    def test_an_edited_caption_replaces_the_sample(self, tmp_path):
        before = self.build(tmp_path / "s")
        edited = [Sample("a.png", ["no cat", "two"]), *SAMPLES[1:]]
        after = bring_to(tmp_path / "s", before.manifest, edited)
        assert_holds(after, edited)
        assert verify_store(tmp_path / "s", full=True) == []
        assert_holds(before, SAMPLES)  # a reader keeps the commit that it opened

    def test_new_latents_replace_the_sample(self, tmp_path):
        opened = self.build(tmp_path / "s")
        edited = [*SAMPLES[:3], Sample("d2/x.png", ["a dog"], WIDE, image=1), *SAMPLES[4:]]
        assert_holds(bring_to(tmp_path / "s", opened.manifest, edited), edited)

    def test_fewer_variants_replace_more(self, tmp_path):
        opened = self.build(tmp_path / "s")
        fewer = [*SAMPLES[:-1], Sample("v.png", ["seen thrice"], TALL, num_variants=2)]
        assert_holds(bring_to(tmp_path / "s", opened.manifest, fewer), fewer)

    def test_a_tombstone_drops_a_sample_until_it_comes_back(self, tmp_path):
        manifest = self.build(tmp_path / "s").manifest
        assert_holds(bring_to(tmp_path / "s", manifest, SAMPLES[2:]), SAMPLES[2:])
        assert_holds(bring_to(tmp_path / "s", manifest, SAMPLES[1:]), SAMPLES[1:])

    def test_a_store_of_nothing_is_a_store(self, tmp_path):
        opened = self.build(tmp_path / "s", [])
        assert len(opened) == 0
        assert opened.sample_ids == []
        assert verify_store(tmp_path / "s", full=True) == []
        assert_holds(opened, [])

    def test_all_dropped_leaves_a_store_of_nothing(self, tmp_path):
        manifest = self.build(tmp_path / "s").manifest
        assert_holds(bring_to(tmp_path / "s", manifest, []), [])
        assert verify_store(tmp_path / "s", full=True) == []

    def test_a_manifest_without_a_commit_is_an_empty_store(self, tmp_path):
        with StoreWriter(tmp_path / "s", make_manifest(self.layout)):
            pass
        opened = open_store(tmp_path / "s")
        assert len(opened) == 0
        with pytest.raises(PrebakeError, match="complete the store"):
            opened.read_empty_text()

    def test_the_hash_depends_on_neither_shards_nor_commits_nor_writers(self, tmp_path):
        reference = store_hash(self.build(tmp_path / "reference"))
        for rows, commits in [(1, 1), (2, 3), (100, 2)]:
            root = tmp_path / f"{rows}-{commits}"
            opened = self.build(root, rows_per_shard=rows, samples_per_commit=commits)
            assert store_hash(opened) == reference
        manifest = make_manifest(self.layout)
        shuffled = random.Random(0).sample(SAMPLES, len(SAMPLES))
        for start in range(0, len(shuffled), 3):  # each turn is another writer
            opened = bring_to(tmp_path / "writers", manifest, shuffled[: start + 3])
        assert len({shard.name[-15:-7] for shard in opened.index.shards.values()}) > 1
        assert store_hash(opened) == reference

    def test_the_hash_depends_on_every_live_byte(self, tmp_path):
        hashes = [store_hash(self.build(tmp_path / "reference"))]
        changes = [
            SAMPLES[1:],
            [Sample("a.png", ["a cat"], image=1), *SAMPLES[1:]],
            [Sample("a.png", ["another cat"]), *SAMPLES[1:]],
            [*SAMPLES[:2], Sample("d1/x.png", SAMPLES[2].captions), *SAMPLES[3:]],
            [*SAMPLES[:-1], Sample("v.png", ["seen thrice"], TALL, num_variants=2)],
        ]
        for i, samples in enumerate(changes):
            hashes.append(store_hash(self.build(tmp_path / str(i), samples)))
        assert len(set(hashes)) == 1 + len(changes)

    def test_the_hash_after_edits_is_that_of_a_fresh_store(self, tmp_path):
        self.build(
            tmp_path / "edited", [Sample("a.png", ["old"]), *SAMPLES[2:], Sample("gone.png")]
        )
        edited = bring_to(tmp_path / "edited", make_manifest(self.layout), SAMPLES)
        assert store_hash(edited) == store_hash(self.build(tmp_path / "fresh"))

    def test_tars_with_dead_rows_are_rewritten_without_losing_a_variant(self, tmp_path):
        many = [Sample(f"{i}.png", ["a", "b"], num_variants=3) for i in range(4)]
        manifest = self.build(tmp_path / "s", many, rows_per_shard=2).manifest
        edited = [Sample("0.png", ["c"], num_variants=3), *many[1:3]]
        with StoreWriter(tmp_path / "s", manifest) as writer:
            write_samples(writer, edited[:1], dropped=many[3:])
            writer.reload()
            assert shards_with_dead_rows(writer.index)
            assert writer.rewrite_shards_with_dead_rows() == []
            is_zarr = self.layout == "zarr"  # where they are marked instead
            assert bool(shards_with_dead_rows(writer.index)) == is_zarr
            writer.refresh_views()
        assert_holds(open_store(tmp_path / "s"), edited)
        assert verify_store(tmp_path / "s", full=True) == []

    def test_a_commit_that_names_a_variant_twice_is_refused(self, tmp_path):
        with StoreWriter(tmp_path / "s", make_manifest(self.layout)) as writer:
            draft = writer.new_sample_shard((64, 64))
            row = SAMPLES[0].row()
            tensors = variant_tensors(writer.manifest, row)
            if writer.manifest.texts_inline:
                tensors += text_tensors(writer.manifest, row.texts[0].text_key)
            rows = [row.placed(draft.append(row, tensors)) for _ in range(2)]
            with pytest.raises(AssertionError, match="twice"):
                writer.commit([draft], rows)

    def test_a_row_of_another_shape_or_dtype_is_refused(self, tmp_path):
        with StoreWriter(tmp_path / "s", make_manifest(self.layout)) as writer:
            row = SAMPLES[0].row()
            texts = text_tensors(writer.manifest, row.texts[0].text_key)
            texts = texts if writer.manifest.texts_inline else []
            draft = writer.new_sample_shard((64, 64))
            with pytest.raises(AssertionError, match="declared"):
                draft.append(row, [np.zeros((4, 8, 9), np.float16), *texts])
            with pytest.raises(AssertionError, match="dtype"):
                draft.append(row, [np.zeros((4, 8, 8), np.float32), *texts])

    def test_each_commit_builds_on_the_one_before(self, tmp_path):
        manifest = self.build(tmp_path / "s", SAMPLES[:4], samples_per_commit=2).manifest
        commits = bring_to(tmp_path / "s", manifest, SAMPLES[:5]).index.commits
        names = [commit.name for commit in commits]
        assert [commit.sequence for commit in commits] == list(range(1, len(commits) + 1))
        assert len(commits) >= 3
        assert [commit.parents for commit in commits] == [(), *((name,) for name in names[:-1])]

    def test_concurrent_writers_of_one_sequence_number_both_count(self, tmp_path):
        """Two machines begin from one state; their files are put together."""
        manifest = self.build(tmp_path / "a", SAMPLES[:2]).manifest
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        bring_to(tmp_path / "a", manifest, SAMPLES[:4])
        bring_to(tmp_path / "b", manifest, [*SAMPLES[:2], *SAMPLES[4:]])
        shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
        names = sorted(path.name for path in (tmp_path / "b/index").glob("*.json"))
        assert [int(name[:8]) for name in names] == [1, 2, 2]
        merged = open_store(tmp_path / "b")
        assert_holds(merged, SAMPLES)
        bring_to(tmp_path / "b", manifest, [*SAMPLES, Sample("new.png")])
        last = open_store(tmp_path / "b").index.commits[-1]
        assert last.sequence == 3
        assert last.parents == tuple(name.removesuffix(".json") for name in names[1:])

    def test_two_writers_share_a_store_and_one_that_tidies_has_it_alone(self, tmp_path):
        manifest = make_manifest(self.layout)
        with StoreWriter(tmp_path / "s", manifest) as first:
            with (
                StoreWriter(tmp_path / "s", manifest) as second,
                pytest.raises(StoreBusyError, match="is being written by another process"),
            ):
                second.become_exclusive()
            first.become_exclusive()
            code = (
                "import sys; sys.path.insert(0, 'tests'); from store_builders import *\n"
                f"StoreWriter({str(tmp_path / 's')!r}, make_manifest({self.layout!r}))"
            )
            command = [sys.executable, "-c", code]
            here = Path(__file__).parent.parent
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=here)
            assert (
                process.stderr.readline() == f"waiting: another process is tidying {tmp_path}/s\n"
            )
        assert process.wait(60) == 0
        process.stderr.close()

    def test_another_bake_is_refused_naming_both_sides(self, tmp_path):
        self.build(tmp_path / "s")
        asked = make_manifest(self.layout, resolution=768)
        with pytest.raises(OtherBakeError, match=r"config.resolution = 64 \(asked for: 768\)"):
            StoreWriter(tmp_path / "s", asked)
        other = {"zarr": "webdataset", "webdataset": "zarr"}[self.layout]
        with pytest.raises(OtherBakeError, match=f"layout = '{self.layout}'.*'{other}'"):
            StoreWriter(tmp_path / "s", make_manifest(other))
        assert_holds(open_store(tmp_path / "s"), SAMPLES)

    @pytest.mark.parametrize("name", ["holiday.jpg", "staging", "index", "samples"])
    def test_a_folder_of_something_else_is_refused_and_left_alone(self, tmp_path, name):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "precious.txt").write_text("mine")
        with pytest.raises(NotAStoreError, match="not empty and not a prebake store"):
            StoreWriter(tmp_path / "mine", make_manifest(self.layout))
        files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
        assert [path.name for path in files] == ["precious.txt"]

    def test_a_file_in_place_of_the_folder_is_refused(self, tmp_path):
        (tmp_path / "s").write_text("mine")
        with pytest.raises(NotAStoreError, match="not a prebake store"):
            StoreWriter(tmp_path / "s", make_manifest(self.layout))
        with pytest.raises(NotAStoreError, match="cannot be read"):
            open_store(tmp_path / "s")

    def test_a_writer_leaves_nothing_in_staging(self, tmp_path):
        with StoreWriter(tmp_path / "s", make_manifest(self.layout)) as writer:
            writer.new_text_shard()  # still open when the writer ends
        assert not (tmp_path / "s/staging").exists()

    def test_a_store_can_be_moved(self, tmp_path):
        self.build(tmp_path / "s")
        (tmp_path / "s").rename(tmp_path / "elsewhere")
        assert_holds(open_store(str(tmp_path / "elsewhere")), SAMPLES)
        assert verify_store(tmp_path / "elsewhere", full=True) == []

    def test_no_file_holds_an_absolute_path_or_the_name_of_the_machine(self, tmp_path):
        self.build(tmp_path / "s")
        for path in (tmp_path / "s").rglob("*"):
            if path.is_file():
                assert str(tmp_path).encode() not in path.read_bytes()
                assert os.uname().nodename.encode() not in path.read_bytes()

    def test_a_store_reads_in_forked_spawned_and_threaded_workers(self, tmp_path):
        opened = self.build(tmp_path / "s", [Sample(f"{i}.png", [f"{i}"]) for i in range(8)])
        expected = [opened.read([row])["encoder_hidden_states"].tobytes() for row in range(8)]
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                assert (
                    pool.starmap(_read_text_bytes, [(opened, row) for row in range(8)]) == expected
                )
                pool.close()
                pool.join()
        with ThreadPoolExecutor(4) as threads:
            many = list(range(8)) * 20
            found = list(threads.map(lambda row: _read_text_bytes(opened, row), many))
        assert found == expected * 20

    def test_a_pickled_store_stays_at_its_commit(self, tmp_path):
        opened = self.build(tmp_path / "s")
        copied = pickle.dumps(opened)
        bring_to(tmp_path / "s", opened.manifest, SAMPLES[:1])
        assert_holds(pickle.loads(copied), SAMPLES)

    def test_more_shards_than_open_files_are_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store, "MAX_OPEN_FILES", 2)
        samples = [Sample(f"{i}.png", [f"{i}"]) for i in range(12)]
        opened = self.build(tmp_path / "s", samples, rows_per_shard=1)
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert_holds(opened, samples)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def _read_text_bytes(opened, row):
    return opened.read([row])["encoder_hidden_states"].tobytes()


class TestZarrStore(StoreConformance):
    layout = "zarr"

    def test_equal_captions_are_stored_once(self, tmp_path):
        captions = [["a"], ["b"], ["a", "b"], ["a"]]
        opened = self.build(tmp_path / "s", [Sample(f"{i}", c) for i, c in enumerate(captions)])
        assert sorted(row.caption for row in opened.index.iter_texts()) == ["", "a", "b"]

    def test_a_caption_edit_may_keep_the_place_of_the_latents(self, tmp_path):
        opened = self.build(tmp_path / "s", SAMPLES)
        row = opened.row_of(SAMPLES[0].sample_id)
        edited = Sample("a.png", ["a dog"])  # whose text is stored already
        with StoreWriter(tmp_path / "s", opened.manifest) as writer:
            writer.commit(samples=[edited.row().placed(opened.sample(row).place)])
            writer.refresh_views()
        after = open_store(tmp_path / "s")
        assert_holds(after, [edited, *SAMPLES[1:]])
        assert after.index.shards.keys() == opened.index.shards.keys()
        assert verify_store(tmp_path / "s", full=True) == []

    def test_a_text_row_that_is_missing_is_named(self, tmp_path):
        opened = self.build(tmp_path / "s", SAMPLES)
        row = opened.sample(0)
        lost = Sample("lost.png", ["never stored"]).row().placed(row.place)
        with StoreWriter(tmp_path / "s", opened.manifest) as writer:
            writer.commit(samples=[lost])
        key = text_key("never stored")
        with pytest.raises(PrebakeError, match=f"names text {key}, which no text row holds"):
            open_store(tmp_path / "s").read([0])
        assert [key in finding.what for finding in verify_store(tmp_path / "s", full=False)] == [
            True
        ]


class TestWebdatasetStore(StoreConformance):
    layout = "webdataset"


CAPTIONS = ["one"], ["two", "three"], ["four", "five", "six"]
TWELVE = [Sample(f"{i}.png", CAPTIONS[i % 3]) for i in range(12)]


@pytest.fixture(scope="module")
def stores_of_twelve(tmp_path_factory):
    root = tmp_path_factory.mktemp("twelve")
    return [build_store(root / layout, layout, TWELVE) for layout in LAYOUTS]


@settings(max_examples=50, deadline=None)
@given(draws=st.lists(st.tuples(st.integers(0, 11), st.integers(-1, 2)), min_size=1))
def test_a_batch_is_its_rows_in_any_order_with_any_text(stores_of_twelve, draws):
    rows = sorted((s.row() for s in TWELVE), key=lambda row: row.sample_id)
    at = [row for row, _ in draws]
    texts = [min(text, len(rows[row].texts) - 1) for row, text in draws]
    for opened in stores_of_twelve:
        batch = opened.read(at, texts)
        for i, (row, text) in enumerate(zip(at, texts, strict=True)):
            key = text_key("") if text < 0 else rows[row].texts[text].text_key
            expected = variant_tensors(opened.manifest, rows[row])
            expected += text_tensors(opened.manifest, key)
            for spec, array in zip(opened.manifest.tensors, expected, strict=True):
                np.testing.assert_array_equal(batch[spec.name][i], array, strict=True)


def test_both_layouts_of_equal_samples_have_equal_hashes(tmp_path):
    for tensors in (SD1_TENSORS, SDXL_TENSORS):
        hashes = {
            store_hash(build_store(tmp_path / f"{len(tensors)}-{layout}", layout, SAMPLES, tensors))
            for layout in LAYOUTS
        }
        assert len(hashes) == 1
