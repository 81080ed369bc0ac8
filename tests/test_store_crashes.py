"""A writer killed at any instant leaves a store that verifies and can be completed.

A forked child does the work and ends itself with `os._exit` at the n-th call to any function of
`files.py`: halfway through what it writes, or else before it does anything.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from store_builders import LAYOUTS, SD1_TENSORS, Sample, assert_holds, bring_to, make_manifest

from store_format import files, open_store
from store_format.errors import NotAStoreError
from store_format.verify import store_hash, verify_store

GONE = Sample("gone.png", ["one"])
BEFORE = [GONE, Sample("a.png", ["one", "two"]), Sample("b.png", ["one"], num_variants=2)]
AFTER = [Sample("a.png", ["edited"]), Sample("b.png", ["one"], num_variants=2), Sample("d.png")]
OPTIONS = {"rows_per_shard": 2, "samples_per_commit": 1}
FUNCTIONS = ("write_file", "publish", "replace_file", "flush_folder", "make_folder")
KILLED = 99


def run_killed_at(number, work):
    """Run `work` in a forked child that dies at call `number`; return whether it did."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(number)
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def kill_at(number):
    """Replace the functions of `files.py`, wherever they were imported, by ones that may die."""
    calls = 0

    def wrap(function, data_at):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == number:
                if data_at is not None:
                    half = bytes(args[data_at])[: len(args[data_at]) // 2]
                    function(*args[:data_at], half, *args[data_at + 1 :])
                    if function is original_write:
                        args[0]._file.flush()
                os._exit(KILLED)
            return function(*args)

        return call

    original_write = files.HashedFile.write
    wrapped = {name: getattr(files, name) for name in FUNCTIONS}
    for name, function in wrapped.items():
        replacement = wrap(function, 1 if name == "write_file" else None)
        for module in [m for n, m in sys.modules.items() if n.startswith("store_format")]:
            if getattr(module, name, None) is function:
                setattr(module, name, replacement)
    files.HashedFile.write = wrap(original_write, 1)
    files.HashedFile.close = wrap(files.HashedFile.close, None)


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
SOME_CALLS = [("zarr", 29), ("webdataset", 8)]
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
