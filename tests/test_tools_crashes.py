"""`store convert` and `store merge`, killed at any file operation or on a full disk, go on."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from crashes import run_killed_at
from store_builders import LAYOUTS, Sample, assert_holds, build_store

from prebake import cli
from store_format import copying, open_store
from store_format.errors import NotAStoreError
from store_format.verify import store_hash, verify_store

WIDE = (96, 48)
SAMPLES = [
    Sample("a.png", ["one", "two"], num_variants=2, tags={"k": "v"}),
    Sample("b.png", ["one"], WIDE),
    Sample("c.png", [""], source="others", weight=0.5),
]
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def prebake(*arguments):
    result = CliRunner().invoke(cli, ["store", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def state_of(root, expected_hash):
    """Check what a kill left; return `nothing`, `half` or `all`."""
    if not (root / "prebake.json").exists():
        with pytest.raises(NotAStoreError):
            open_store(root)
        return "half" if root.exists() else "nothing"
    findings = verify_store(root, full=True)
    assert all("plain readers" in finding.what for finding in findings)
    assert verify_store(root, full=False) == []
    store = open_store(root)
    if findings or (root / "staging").exists() or len(store) < 4:
        return "half"
    return "all" if store_hash(store) == expected_hash else "half"


# (from, to, first operation, every how many): a fourth takes a minute, so `make test` tries some
SOME = [("webdataset", "zarr", 1, 53), ("zarr", "webdataset", 1, 17)]
ALL = [
    pytest.param(before, after, first, 4, marks=pytest.mark.slow)
    for before in LAYOUTS
    for after in LAYOUTS
    for first in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("before", "after", "first", "every"), SOME + ALL)
@pytest.mark.parametrize("command", ["convert", "merge"])
def test_a_command_killed_at_any_operation_is_finished_by_the_same_command(
    tmp_path, monkeypatch, command, before, after, first, every
):
    monkeypatch.setattr(copying, "MAX_ROWS", 1)  # a commit a sample
    build_store(tmp_path / "a", before, SAMPLES if command == "convert" else SAMPLES[:2])
    build_store(tmp_path / "b", after, SAMPLES[1:])
    sources = [tmp_path / name for name in ("a" if command == "convert" else "ab")]

    def work(out="new"):
        prebake(command, *sources, "--to", after, "--out", tmp_path / out)

    work("whole")
    expected = store_hash(open_store(tmp_path / "whole"))
    number, found = first, {"nothing": 0, "half": 0, "all": 0}
    while run_killed_at(number, work):
        found[state_of(tmp_path / "new", expected)] += 1
        work()
        store = open_store(tmp_path / "new")
        assert store_hash(store) == expected
        assert verify_store(tmp_path / "new", full=True) == []
        assert not (tmp_path / "new/staging").exists()
        assert store.index.num_dead_rows == 0
        shutil.rmtree(tmp_path / "new")
        number += every
    assert_holds(open_store(tmp_path / "new"), SAMPLES)
    assert found["half"] > 100 / every
    assert found["nothing"] + found["all"] <= 3  # at the very beginning and end


# A full disk: some samples of many buckets are committed before a large one does not fit


MANY = [Sample(f"{i}.png", [f"text {i}"], (64, 64 + 8 * i)) for i in range(20)]
LARGE = [Sample(f"large-{i}.png", [f"large {i}"], (512, 512)) for i in range(12)]


def convert_in_a_process(root, out, layout, *, within=(), **options):
    command = [*within, sys.executable, "-P", "-m", "prebake", "store", "convert", root]
    command = [str(word) for word in [*command, "--to", layout, "--out", out]]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


def check_and_finish(root, out, layout, expected_hash):
    """Check that a store is sound and begun, then let the same command finish it."""
    findings = verify_store(out, full=True)
    assert all("plain readers" in finding.what for finding in findings)
    begun = open_store(out)
    assert 0 < len(begun) < 32
    assert_holds(begun, [s for s in MANY + LARGE if s.sample_id in begun.sample_ids])
    assert not (out / "staging").exists()
    done = convert_in_a_process(root, out, layout)
    assert (done.returncode, done.stderr) == (0, "")
    assert f", {len(begun)} of them since before" in done.stdout
    assert store_hash(open_store(out)) == expected_hash
    assert verify_store(out, full=True) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_becomes_too_large_is_one_clear_error(tmp_path, layout):
    source = build_store(tmp_path / "a", "zarr", MANY + LARGE)
    out = tmp_path / "new"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = convert_in_a_process(tmp_path / "a", out, layout, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: {out}: File too large. What was finished is kept; free some space and run the "
        f"same command again.\n"
    )
    check_and_finish(tmp_path / "a", out, layout, store_hash(source))


# In a mount namespace of its own, so that no mount outlives the command: $1 a folder, $2 bytes to
# take from its 4 MiB, $3 where the store goes in the end.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=4m prebake-test "$1" || exit 77
head -c "$2" /dev/zero > "$1/ballast"
disk=$1 kept=$3
shift 3
"$@"
code=$?
cp -a "$disk/new" "$kept"
exit $code
"""
FREE_KIB = [("zarr", 1000), ("zarr", 1500), ("webdataset", 250), ("webdataset", 600)]


@pytest.mark.parametrize(("layout", "free_kib"), FREE_KIB)
def test_a_full_disk_is_one_clear_error(tmp_path, layout, free_kib):
    source = build_store(tmp_path / "a", "webdataset", MANY + LARGE)
    (tmp_path / "disk").mkdir()
    out, kept = tmp_path / "disk/new", tmp_path / "kept"
    unshare = ["unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    within = [*unshare, tmp_path / "disk", (4096 - free_kib) << 10, kept]
    done = convert_in_a_process(tmp_path / "a", out, layout, within=within)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no permission to mount a tmpfs")
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: {out}: No space left on device. What was finished is kept; free some space and "
        f"run the same command again.\n"
    )
    check_and_finish(tmp_path / "a", kept, layout, store_hash(source))
