"""A writer killed at any instant leaves a store that verifies and can be completed."""

import os
import shutil
from pathlib import Path

import pytest
from crashes import run_killed_at
from store_builders import LAYOUTS, SD1_TENSORS, Sample, assert_holds, bring_to, make_manifest

from store_format import files, open_store
from store_format.errors import NotAStoreError
from store_format.verify import store_hash, verify_store

GONE = Sample("gone.png", ["one"])
BEFORE = [GONE, Sample("a.png", ["one", "two"]), Sample("b.png", ["one"], num_variants=2)]
AFTER = [Sample("a.png", ["edited"]), Sample("b.png", ["one"], num_variants=2), Sample("d.png")]
OPTIONS = {"rows_per_shard": 2, "samples_per_commit": 1}


def check_and_complete(root, manifest, states, expected_hash):
    """Check what a kill left, then complete it."""
    if (root / "prebake.json").exists():
        findings = verify_store(root, full=True)
        assert all("plain readers" in finding.what for finding in findings)
        assert verify_store(root, full=False) == []
        store = open_store(root)
        known = {row.key: row for state in states for s in state for row in s.rows()}
        for row in store.index.iter_samples():
            assert row.key in known  # every live row is one that was asked for, before or after
        listed = root / "shards.txt"
        if listed.exists():
            for line in listed.read_text().splitlines():
                assert (root / line).is_file()
    else:
        with pytest.raises(NotAStoreError):
            open_store(root)
    completed = bring_to(root, manifest, AFTER, **OPTIONS)
    assert store_hash(completed) == expected_hash
    assert verify_store(root, full=True) == []
    assert not (root / "staging").exists()
    return completed


# (layout, every how many calls): all calls take minutes, so `make test` tries some
SOME_CALLS = [("zarr", 43), ("webdataset", 10)]
ALL_CALLS = [pytest.param(layout, 1, marks=pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize(("layout", "every"), SOME_CALLS + ALL_CALLS)
@pytest.mark.parametrize("before", [[], BEFORE], ids=["first-bake", "update"])
def test_a_bake_killed_at_any_call_can_be_completed(tmp_path, layout, every, before):
    manifest = make_manifest(layout, SD1_TENSORS)
    start, root = tmp_path / "start", tmp_path / "s"
    start.mkdir()
    if before:
        bring_to(start, manifest, before, **OPTIONS)
    shutil.copytree(start, tmp_path / "whole")
    expected = store_hash(bring_to(tmp_path / "whole", manifest, AFTER, **OPTIONS))
    number = 1
    killed = True
    while killed:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        killed = run_killed_at(number, lambda: bring_to(root, manifest, AFTER, **OPTIONS))
        completed = check_and_complete(root, manifest, (before, AFTER), expected)
        number += every
    assert number > 40
    assert_holds(completed, AFTER)


def test_a_published_name_is_never_reused(tmp_path):
    (tmp_path / "part").write_bytes(b"new")
    (tmp_path / "final").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="exists already"):
        files.publish(tmp_path / "part", tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == b"old"


def test_everything_that_is_published_was_flushed_before(tmp_path, monkeypatch):
    """The order of system calls: a file's fsync, its rename, the fsync of the folder."""
    log = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        log.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        real_fsync(descriptor)

    def rename(old, new, **options):
        log.append(("rename", str(old), str(new)))
        real_rename(old, new, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    staging, final = tmp_path / "staging", tmp_path / "shards"
    staging.mkdir()
    files.make_folder(final)
    file = files.HashedFile(staging / "a.part")
    file.write(b"abc")
    file.close()
    files.publish(staging / "a.part", final / "a")
    assert log == [
        ("fsync", str(tmp_path)),
        ("fsync", str(staging / "a.part")),
        ("rename", str(staging / "a.part"), str(final / "a")),
        ("fsync", str(final)),
    ]
