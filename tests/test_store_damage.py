"""Damage is named, never read as data: in tensors, in the index, in the manifest."""

import json
import os
import re
import shutil

import pytest
from store_builders import (
    LAYOUTS,
    SDXL_TENSORS,
    Sample,
    bring_to,
    build_store,
    make_manifest,
    variant_tensors,
    write_samples,
)

from store_format import open_store
from store_format.errors import DamagedStoreError, NotAStoreError
from store_format.index import LiveIndex
from store_format.places import file_of
from store_format.verify import is_finite, verify_store
from store_format.writer import StoreWriter

SAMPLES = [Sample("a.png", ["x", "y"]), Sample("b.png", ["x"]), Sample("c.png", ["z"])]


@pytest.fixture(params=LAYOUTS)
def root(request, tmp_path):
    build_store(tmp_path / "s", request.param, SAMPLES)
    return tmp_path / "s"


def read_all(store):
    """Read every tensor of a store: whether it raised, and all that it gave."""
    raised, given = [], []
    for row in range(len(store)):
        for text in range(-1, store.num_texts(row)):
            try:
                given.append(
                    (row, text, {k: v.copy() for k, v in store.read([row], [text]).items()})
                )
            except DamagedStoreError as error:
                raised.append(str(error))
    return raised, given


def tensor_files(root):
    """Return the file of each tensor of each shard."""
    store = open_store(root)
    return sorted(
        {
            root / file_of(store.manifest, shard.name, spec)
            for shard in store.index.shards.values()
            for spec in store.manifest.tensors
            if (root / file_of(store.manifest, shard.name, spec)).exists()
        }
    )


def same(given, expected):
    return all(
        (given[name] == expected[name]).all() and given[name].dtype == expected[name].dtype
        for name in expected
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_flipped_byte_of_a_tensor_raises_and_is_never_read(tmp_path, layout):
    tensors = (("latents", "variant", (1, "h", "w")), ("encoder_hidden_states", "text", (2, 3)))
    store = build_store(tmp_path / "s", layout, [Sample("a.png", bucket_px=(24, 16))], tensors)
    truth = store.read([0]), store.read_empty_text()
    raised = []
    num_flipped = 0
    for path in tensor_files(tmp_path / "s"):
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(path.read_bytes()):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << (position % 8)]), position)
                num_flipped += 1
                try:
                    found = store.read([0]), store.read_empty_text()
                    # it was in padding, a header or the shard index, which a read does not use
                    assert same(found[0], truth[0])
                    assert same(found[1], truth[1])
                except DamagedStoreError as error:
                    raised.append((path, str(error)))
                os.pwrite(file.fileno(), bytes([byte]), position)
    row_bytes = (
        1 * 2 * 3 * 2 + 2 * 3 * 2 + 2 * 3 * 2
    )  # latents, the sample's text, the empty prompt
    assert len(raised) == row_bytes
    assert num_flipped > row_bytes
    for path, message in raised:
        assert re.match(rf"{path}: crc32c of the \w+ at byte \d+ differs", message)


def test_full_verify_names_the_shard_of_every_flipped_byte(root):
    store = open_store(root)
    for shard in store.index.shards.values():
        for entry in shard.files:
            path = root / entry.path
            whole = path.read_bytes()
            for position in {0, len(whole) // 2, len(whole) - 1}:
                path.write_bytes(
                    whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :]
                )
                [finding] = verify_store(root, full=True)
                assert finding.where == shard.name
                assert finding.what.startswith(f"{entry.path}: sha256 differs from the index")
                assert finding.num_samples == (3 if shard.kind == "samples" else 0)
            path.write_bytes(whole)
    assert verify_store(root, full=True) == []


def test_a_missing_file_raises_and_is_never_read_as_zeros(root):
    for path in tensor_files(root):
        aside = path.rename(path.with_suffix(".aside"))
        raised, _ = read_all(open_store(root))
        assert raised
        for message in raised:
            assert message.startswith(f"{path}: it cannot be read (No such file or directory).")
            assert f"run 'prebake store verify {root}'" in message
        for full in (False, True):
            [finding] = verify_store(root, full=full)
            assert finding.what == f"{path.relative_to(root)} is missing"
        aside.rename(path)


def test_a_truncated_file_raises_wherever_the_cut_is(root):
    for path in tensor_files(root):
        whole = path.read_bytes()
        truth = read_all(open_store(root))[1]
        for length in [0, 1, len(whole) // 2, len(whole) - 1]:
            path.write_bytes(whole[:length])
            raised, given = read_all(open_store(root))
            for row, text, tensors in given:
                assert same(tensors, next(t for r, x, t in truth if (r, x) == (row, text)))
            for message in raised:
                assert message.startswith(f"{path}: it ends before the end of the ")
            assert raised or length > 1
            [finding] = verify_store(root, full=False)
            assert finding.what.endswith(f"has {length} bytes, expected {len(whole)}")
        path.write_bytes(whole)


def test_a_file_that_is_cut_while_a_reader_has_it_open_raises(root):
    """A memory map would end the process here."""
    store = open_store(root)
    raised, _ = read_all(store)
    assert not raised
    for path in tensor_files(root):
        with path.open("r+b") as file:
            file.truncate(0)
    raised, given = read_all(store)
    assert len(raised) == 7
    assert not given


def test_a_folder_in_place_of_a_file_raises(root):
    path = tensor_files(root)[0]
    path.unlink()
    path.mkdir()
    raised, _ = read_all(open_store(root))
    assert raised[0].startswith(f"{path}: it cannot be read (Is a directory)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_not_finite_values_are_found(tmp_path, layout):
    manifest = make_manifest(layout)
    with StoreWriter(tmp_path / "s", manifest) as writer:
        write_samples(writer, SAMPLES)
        row = Sample("bad.png", ["x"]).row()
        latents = variant_tensors(manifest, row)[0].copy()
        latents[1, 2, 3] = float("inf")
        states = list(open_store(tmp_path / "s").read_empty_text().values())
        draft = writer.new_sample_shard((64, 64))
        place = draft.append(row, [latents, *(states if manifest.texts_inline else [])])
        writer.commit([draft], [row.placed(place)])
        writer.refresh_views()
    assert verify_store(tmp_path / "s", full=False) == []
    [finding] = verify_store(tmp_path / "s", full=True)
    assert finding.what == f"latents of sample {row.sample_id} is not finite"


def test_finite_is_told_by_the_exponent():
    import numpy as np

    assert is_finite(np.array([0x7F7F, 0xFF7F, 0x0001], np.uint16), "bfloat16")
    for not_finite in (0x7F80, 0xFF80, 0x7FC0, 0x7F81):
        assert not is_finite(np.array([0, not_finite], np.uint16), "bfloat16")
    assert not is_finite(np.array([1, np.nan], np.float16), "float16")
    assert is_finite(np.array([255], np.uint8), "uint8")


def test_a_crc_that_does_not_fit_the_bytes_is_found_by_full_verify(root):
    """As a broken writer would leave it: every file has its stated sha256."""
    store = open_store(root)
    row = store.sample(0)
    crcs = (row.place.crc32c[0] ^ 1, *row.place.crc32c[1:])
    place = type(row.place)(row.place.shard, row.place.row, row.place.offsets, crcs)
    with StoreWriter(root, store.manifest) as writer:
        writer.commit(samples=[row.placed(place)])
        writer.refresh_views()
    assert verify_store(root, full=False) == []
    [finding] = verify_store(root, full=True)
    assert "crc32c of the latents at byte" in finding.what


# The index


def index_files(root, suffix):
    return sorted(root.glob(f"index/*{suffix}"))


@pytest.mark.parametrize("suffix", [".json", ".samples.parquet", ".texts.parquet"])
def test_a_damaged_or_truncated_or_absent_index_file_is_named(root, suffix):
    bring_to(root, open_store(root).manifest, [*SAMPLES, Sample("d.png", ["new"])])
    path = index_files(root, suffix)[0]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (b"", whole[:-2], whole[: len(whole) // 2], whole + b"\0", bytes(flipped), None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(DamagedStoreError, match=re.escape(str(path))):
            open_store(root)
        for full in (False, True):
            [finding] = verify_store(root, full=full)
            assert finding.where == str(root / "index")
            assert str(path) in finding.what
        with pytest.raises(DamagedStoreError, match=re.escape(str(path))):
            StoreWriter(root, json_manifest(root))
    path.write_bytes(whole)
    assert verify_store(root, full=True) == []


def json_manifest(root):
    from store_format.manifest import read_manifest

    return read_manifest(root)


def test_every_flipped_byte_of_a_commit_is_found(root):
    [path] = index_files(root, ".json")
    whole = path.read_bytes()
    truth = LiveIndex(root)
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            found = LiveIndex(root)
        except (DamagedStoreError, NotAStoreError):
            continue
        # white space between tokens, or another spelling of the same characters, changes nothing
        assert found.commits == truth.commits, (position, whole[position - 9 : position + 9])


def test_a_lost_index_folder_is_no_empty_store(root):
    shutil.rmtree(root / "index")
    with pytest.raises(DamagedStoreError, match="has lost its index"):
        open_store(root)


def test_the_index_of_a_folder_that_is_no_store_is_empty(tmp_path):
    assert len(LiveIndex(tmp_path / "nothing")) == 0


def test_a_commit_under_another_name_is_refused(root):
    [path] = index_files(root, ".json")
    path.rename(root / "index/00000002-00000000.json")
    with pytest.raises(DamagedStoreError, match=f"its content is that of {path.stem}"):
        open_store(root)


def test_other_files_beside_the_index_are_ignored(root):
    [path] = index_files(root, ".json")
    for name in ("._" + path.name, path.name + "~", "notes.json", path.name + ".part"):
        (root / "index" / name).write_text("not a commit")
    assert verify_store(root, full=True) == []


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 2, "new_key": [1]}])
def test_a_later_version_is_refused_by_name(root, change):
    path = root / "prebake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    expected = re.escape(f"{root} has format version 2; this prebake reads version 1. Use the")
    with pytest.raises(NotAStoreError, match=expected):
        open_store(root)
    with pytest.raises(NotAStoreError, match=expected):
        StoreWriter(root, make_manifest("zarr"))
    with pytest.raises(NotAStoreError, match=expected):
        verify_store(root, full=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", 'does not say "format": "prebake-store"'),
        (b'{"format": "other", "version": 1}', 'does not say "format": "prebake-store"'),
        (b'{"format": "prebake-store", "version": 1}', "layout: Field required"),
        (b'{"format": "prebake-store"}', "format version None"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_manifest_is_refused(root, content, message):
    (root / "prebake.json").write_bytes(content)
    with pytest.raises(NotAStoreError, match=message):
        open_store(root)


def test_a_folder_without_a_manifest_is_no_store(tmp_path):
    with pytest.raises(NotAStoreError, match=r"is not a prebake store \(prebake.json is missing"):
        open_store(tmp_path)


def test_damage_of_one_shard_does_not_hide_that_of_another(tmp_path):
    samples = [Sample(f"{i}.png", [f"{i}"]) for i in range(6)]
    for layout in LAYOUTS:
        root = tmp_path / layout
        store = build_store(root, layout, samples, SDXL_TENSORS, rows_per_shard=2)
        names = sorted(name for name, shard in store.index.shards.items())
        for name in names:
            path = root / store.index.shards[name].files[0].path
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert sorted(finding.where for finding in verify_store(root, full=True)) == names


def test_progress_counts_the_bytes_of_all_live_shards(root):
    counted = []
    verify_store(root, full=True, progress=counted.append)
    shards = open_store(root).index.shards.values()
    assert sum(counted) == sum(file.bytes for shard in shards for file in shard.files)
    assert len(counted) == len(shards)
