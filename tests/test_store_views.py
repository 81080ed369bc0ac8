"""What plain readers of the ecosystem see: zarr-python, tensorstore, webdataset, tarfile, tar."""

import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import zarr
from store_builders import (
    LAYOUTS,
    SDXL_TENSORS,
    Sample,
    bring_to,
    build_store,
    make_manifest,
    numbers,
    text_key,
    text_tensors,
    variant_tensors,
    write_samples,
)

from store_format import open_store
from store_format.verify import verify_store
from store_format.writer import StoreWriter

WIDE = (96, 48)
SAMPLES = [
    Sample("a.png", ["one", "two"], text_weights=[0.75, 0.25], tags={"k": "ü"}, num_variants=2),
    Sample("b.png", ["one"], weight=0.5),
    Sample("c.png", ["three"]),
    Sample("d.png", ["three"], WIDE),
    Sample("e.png", [""], WIDE),
]


def live_rows_through_zarr(root):
    """Return {row key: (tensors, text keys)} of the live rows, as zarr-python reads them."""
    group = zarr.open_group(str(root), mode="r")
    texts = {}
    for _, shard in group["texts"].groups():
        for row, key in enumerate(shard["text_key"][:]):
            names = [n for n, _ in shard.arrays() if n != "text_key"]
            texts[key.tobytes().hex()] = {name: shard[name][row] for name in names}
    found = {}
    for _, bucket in group["samples"].groups():
        for _, shard in bucket.groups():
            for row in np.flatnonzero(shard["live"][:]):
                key = shard["sample_id"][row].tobytes().hex(), int(shard["variant"][row])
                keys = [k.tobytes().hex() for k in shard["text_key"][row] if k.any()]
                own = ("live", "text_key", "sample_id", "variant")
                names = [n for n, _ in shard.arrays() if n not in own]
                assert key not in found
                tensors = {name: shard[name][row] for name in names}
                found[key] = tensors, [(k, texts[k]) for k in keys]
    return found


def assert_zarr_shows(root, samples, manifest):
    found = live_rows_through_zarr(root)
    rows = [row for sample in samples for row in sample.rows()]
    assert sorted(found) == sorted((row.sample_id, row.variant) for row in rows)
    for row in rows:
        tensors, texts = found[row.sample_id, row.variant]
        expected = variant_tensors(manifest, row)
        for spec, array in zip(manifest.variant_tensors, expected, strict=True):
            np.testing.assert_array_equal(tensors[spec.name], array, strict=True)
        assert [key for key, _ in texts] == [text.text_key for text in row.texts]
        for key, states in texts:
            expected = text_tensors(manifest, key)
            for spec, array in zip(manifest.text_tensors, expected, strict=True):
                np.testing.assert_array_equal(states[spec.name], array, strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_zarr_python_sees_exactly_the_live_samples(tmp_path, dtype):
    store = build_store(tmp_path / "s", "zarr", SAMPLES, SDXL_TENSORS, dtype=dtype)
    assert_zarr_shows(tmp_path / "s", SAMPLES, store.manifest)


def test_zarr_python_sees_edits_and_drops_after_a_refresh(tmp_path):
    manifest = build_store(tmp_path / "s", "zarr", SAMPLES).manifest
    edited = [
        Sample("a.png", ["one", "five", "six"], num_variants=2),
        Sample("c.png", ["three"], WIDE, image=1),
        *SAMPLES[3:],
        Sample("new.png", ["a", "b"]),
    ]
    bring_to(tmp_path / "s", manifest, edited)
    assert_zarr_shows(tmp_path / "s", edited, manifest)
    fewer = [Sample("a.png", ["one"], num_variants=2)]  # the view becomes narrower again
    bring_to(tmp_path / "s", manifest, fewer)
    assert_zarr_shows(tmp_path / "s", fewer, manifest)
    assert verify_store(tmp_path / "s", full=True) == []


def test_a_zarr_shard_is_dead_until_its_commit_is_shown(tmp_path):
    with StoreWriter(tmp_path / "s", make_manifest("zarr")) as writer:
        write_samples(writer, SAMPLES)
        assert live_rows_through_zarr(tmp_path / "s") == {}
        writer.refresh_views()
        assert len(live_rows_through_zarr(tmp_path / "s")) == 6


def test_zarr_python_reports_a_flipped_byte(tmp_path):
    store = build_store(tmp_path / "s", "zarr", SAMPLES[:1])
    place = store.sample(0).place
    path = tmp_path / "s" / place.shard / "latents/c/0/0/0/0"
    data = bytearray(path.read_bytes())
    data[place.offsets[0] + 5] ^= 1
    path.write_bytes(data)
    array = zarr.open_array(str(tmp_path / "s" / place.shard / "latents"), mode="r")
    with pytest.raises(ValueError, match="checksum"):
        array[:]


def test_tensorstore_reads_every_tensor_in_a_process_of_its_own(tmp_path):
    """In its own process: tensorstore must not be opened where something forks later."""
    store = build_store(tmp_path / "s", "zarr", SAMPLES, SDXL_TENSORS)
    code = """
import sys, json, numpy as np, tensorstore as ts
for folder in json.loads(sys.stdin.read()):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": folder},
            "fill_missing_data_reads": False}
    array = ts.open(spec, open=True, read=True).result()
    data = np.ascontiguousarray(array.read().result())
    print(json.dumps([str(data.dtype), data.shape, data.tobytes().hex()]))
"""
    wanted = []
    for row in store.index.iter_samples():
        cells = store.manifest.cells(row.bucket_px)
        for spec in store.manifest.variant_tensors:
            key = row.latent_key
            wanted.append((row.place, spec, numbers(key, spec, cells)))
    for row in store.index.iter_texts():
        for spec in store.manifest.text_tensors:
            wanted.append((row.place, spec, numbers(row.text_key, spec)))
    folders = [str(tmp_path / "s" / place.shard / spec.name) for place, spec, _ in wanted]
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, input=json.dumps(folders), capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    for (place, _, expected), line in zip(wanted, output.stdout.splitlines(), strict=True):
        dtype, shape, data = json.loads(line)
        array = np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)
        np.testing.assert_array_equal(array[place.row], expected, strict=True)


def webdataset_samples(root):
    """Return {key: decoded sample} of what `shards.txt` lists."""
    import webdataset

    paths = [str(root / line) for line in (root / "shards.txt").read_text().split()]
    if not paths:
        return {}
    data = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode()
    samples = list(data)
    assert len({sample["__key__"] for sample in samples}) == len(samples)
    return {sample["__key__"]: sample for sample in samples}


def assert_webdataset_shows(root, samples, manifest):
    found = webdataset_samples(root)
    rows = [row for sample in samples for row in sample.rows()]
    assert sorted(found) == sorted(row.key for row in rows)
    for row in rows:
        sample = found[row.key]
        expected = variant_tensors(manifest, row)
        for spec, array in zip(manifest.variant_tensors, expected, strict=True):
            np.testing.assert_array_equal(sample[f"{spec.name}.npy"], array, strict=True)
        for t, text in enumerate(row.texts):
            suffix = f".{t}" if t else ""
            expected = text_tensors(manifest, text.text_key)
            for spec, array in zip(manifest.text_tensors, expected, strict=True):
                found_array = sample[f"{spec.name}{suffix}.npy"]
                np.testing.assert_array_equal(found_array, array, strict=True)
        width, height = row.bucket_px
        assert sample["json"] == {
            "sample_id": row.sample_id,
            "variant": row.variant,
            "source": "pictures",
            "path": row.path,
            "captions": [text.caption for text in row.texts],
            "text_weights": [text.weight for text in row.texts],
            "weight": row.weight,
            "tags": row.tags,
            "original_width_px": 2 * width + 10,
            "original_height_px": 2 * height,
            "resized_width_px": width + 5,
            "resized_height_px": height,
            "crop_left_px": row.variant,
            "crop_top_px": 0,
            "bucket_width_px": width,
            "bucket_height_px": height,
            "flipped": row.variant == 1,
        }


def test_webdataset_sees_exactly_the_live_samples(tmp_path):
    store = build_store(tmp_path / "s", "webdataset", SAMPLES, SDXL_TENSORS)
    assert_webdataset_shows(tmp_path / "s", SAMPLES, store.manifest)


def test_webdataset_sees_edits_and_drops_after_a_refresh(tmp_path):
    manifest = build_store(tmp_path / "s", "webdataset", SAMPLES).manifest
    edited = [Sample("a.png", ["other"], num_variants=2), *SAMPLES[2:4], Sample("new.png")]
    bring_to(tmp_path / "s", manifest, edited)
    assert_webdataset_shows(tmp_path / "s", edited, manifest)
    bring_to(tmp_path / "s", manifest, [])
    assert webdataset_samples(tmp_path / "s") == {}


def test_the_shard_list_stays_at_the_last_whole_state_during_an_update(tmp_path):
    manifest = build_store(tmp_path / "s", "webdataset", SAMPLES).manifest
    edited = [Sample("a.png", ["other"], num_variants=2), *SAMPLES[1:]]
    with StoreWriter(tmp_path / "s", manifest) as writer:
        write_samples(writer, edited[:1])
        writer.refresh_views()  # as an interrupted bake does, before tars are rewritten
        assert_webdataset_shows(tmp_path / "s", SAMPLES, manifest)
        [finding] = verify_store(tmp_path / "s", full=True)
        assert "plain readers do not see the last commit" in finding.what
        assert writer.rewrite_shards_with_dead_rows() == []
        assert_webdataset_shows(tmp_path / "s", SAMPLES, manifest)
        writer.refresh_views()
        assert_webdataset_shows(tmp_path / "s", edited, manifest)


def test_a_tar_is_plain_ustar_without_times_or_users(tmp_path):
    store = build_store(tmp_path / "s", "webdataset", SAMPLES, SDXL_TENSORS)
    for shard in store.index.shards.values():
        path = tmp_path / "s" / shard.files[0].path
        listing = subprocess.run(
            ["tar", "--numeric-owner", "-tvf", path], capture_output=True, text=True, check=True
        )
        assert listing.stderr == ""
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        assert len(listing.stdout.splitlines()) == len(members)
        for member in members:
            assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
            assert (member.uname, member.gname) == ("", "")
            assert member.name.split(".")[0].replace("-", "").isalnum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_or_altered_view_is_found_and_mended(tmp_path, layout):
    root = tmp_path / "s"
    manifest = build_store(root, layout, SAMPLES).manifest
    patterns = ["samples/*/*/live/**/*", "samples/*/*/text_key/**/*", "shards.txt"]
    views = [path for pattern in patterns for path in root.glob(pattern) if path.is_file()]
    assert len(views) == {"zarr": 4 * 2, "webdataset": 1}[layout]
    for path in views:
        for content in (None, b"", path.read_bytes() + b"\xff"):
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            [finding] = verify_store(root, full=True)
            assert finding.what.startswith(f"{path.relative_to(root)} is not what the index says")
            bring_to(root, manifest, SAMPLES)
            assert verify_store(root, full=True) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refresh_writes_only_what_differs(tmp_path, layout):
    manifest = build_store(tmp_path / "s", layout, SAMPLES).manifest
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*") if p.is_file()}
    bring_to(tmp_path / "s", manifest, SAMPLES)
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert before == after


def test_equal_samples_give_equal_bytes(tmp_path, monkeypatch):
    """But for the writer's random name."""
    monkeypatch.setattr("secrets.token_hex", lambda length: "0123abcd")
    for layout in LAYOUTS:
        trees = []
        for name in ("one", "two"):
            root = tmp_path / f"{layout}-{name}"
            build_store(root, layout, SAMPLES)
            files = [path for path in root.rglob("*") if path.is_file()]
            trees.append({path.relative_to(root): path.read_bytes() for path in files})
        assert trees[0] == trees[1]


def test_the_text_of_the_empty_prompt_lies_in_a_text_shard_of_either_layout(tmp_path):
    for layout in LAYOUTS:
        build_store(tmp_path / layout, layout, SAMPLES[:1])
        [row] = [r for r in open_store(tmp_path / layout).index.iter_texts() if r.caption == ""]
        assert row.text_key == text_key("")
        assert row.place.shard.startswith("texts/")
