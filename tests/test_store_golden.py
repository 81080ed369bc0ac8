"""Stores of every released version stay readable, by this reader and for ever.

What they hold is written out in `test_format_document.py` and in `golden/make_golden.py`. The files
are never made anew: if a test here fails, the reader is wrong, or the format needs a new version.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import store_builders

from store_format import open_store
from store_format.verify import store_hash, verify_store
from store_format.writer import StoreWriter

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

import make_golden  # noqa: E402

STORES = sorted(path.name for path in GOLDEN.glob("v*-*"))
HASHES = {
    "v1": "dcfd3e78011878414b04dcf5fbb58158bdddb75a099a72c913eef637669c1941",
    "v1-sdxl": "b8ad483b7c2d0cf6b87f55b761988056b5d421fe40b8b955b7a5d1550a909a35",
}


def samples_of(name):
    return make_golden.SDXL if name.endswith("-sdxl") else make_golden.LAST


def generation(name):
    return name.replace("-zarr", "").replace("-webdataset", "")


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_reads_as_it_was_written(name):
    store_builders.assert_holds(open_store(GOLDEN / name), samples_of(name))


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_verifies(name):
    assert verify_store(GOLDEN / name, full=True) == []


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_has_its_hash(name):
    assert store_hash(open_store(GOLDEN / name)) == HASHES[generation(name)]


def test_one_number_of_a_golden_store_worked_out_by_hand():
    """SHAKE-128("69d00f8bdcdd572333832acf85e1222c/latents") begins with the byte 0xC0."""
    store = open_store(GOLDEN / "v1-zarr-sdxl")
    row = next(
        n for n in range(len(store)) if store.sample(n).key == "c3f764b576916a59110a882ec4fee2b0"
    )
    raw = store.read([row])["latents"][0, 0, 0, 0]
    value = (np.uint32(raw) << 16).view(np.float32)
    assert value == (0xC0 - 128) / 256


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_can_be_extended(name, tmp_path):
    root = tmp_path / name
    shutil.copytree(GOLDEN / name, root)
    manifest = open_store(root).manifest
    edited = [store_builders.Sample("owl.png", ["other"]), *samples_of(name)[1:]]
    store_builders.assert_holds(store_builders.bring_to(root, manifest, edited), edited)
    assert verify_store(root, full=True) == []


@pytest.mark.parametrize("name", STORES)
def test_what_is_written_today_equals_the_golden_store(name, tmp_path):
    """The tensors and metadata byte for byte; Parquet, and what hashes it, but in content."""
    make_golden.main(tmp_path)
    golden, today = GOLDEN / name, tmp_path / name

    def files(root):
        return {p.relative_to(root) for p in root.rglob("*") if p.is_file()}

    assert files(golden) == files(today)
    for path in files(golden):
        if path.parts[0] != "index":
            assert (golden / path).read_bytes() == (today / path).read_bytes(), path
    assert open_store(golden).index.samples == open_store(today).index.samples
    assert open_store(golden).index.texts == open_store(today).index.texts


def test_a_writer_of_today_opens_a_golden_store_with_the_manifest_of_today(tmp_path):
    shutil.copytree(GOLDEN / "v1-zarr", tmp_path / "s")
    with StoreWriter(tmp_path / "s", store_builders.make_manifest("zarr")) as writer:
        assert len(writer.index) == 4
