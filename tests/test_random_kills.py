"""`convert`, `merge`, `gc` and `repair` of many shards, killed by SIGKILL at random instants.

A kill counts only if it found work half done. (For `precompute` see test_bake_interrupted.)
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bake_builders import draw_set
from click.testing import CliRunner
from store_builders import LAYOUTS, Sample, bring_to, build_store, make_manifest
from warm_bakes import WarmBakes

from prebake import cli
from store_format import copying, open_store
from store_format.garbage import collect_garbage, find_garbage
from store_format.verify import store_hash, verify_store

FEW_AND_MANY = pytest.mark.parametrize(
    ("num_kills", "num_samples"),
    [(1, 18), pytest.param(50, 60, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
SAMPLES = [
    Sample(f"{i}.png", [f"text {i % 30}"], (64 + 8 * (i % 3), 64), num_variants=1 + i % 2)
    for i in range(60)
]


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def run_forked(work: Callable[[], object], kill_after_s: float | None = None) -> int:
    """Run `work` in a child; return its exit code, minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prebake(*arguments: object) -> None:
    """Be a `prebake store` command, and end with it."""
    result = CliRunner().invoke(cli, ["store", *map(str, arguments)])
    if result.exit_code:
        os.write(2, result.output.encode())
    os._exit(result.exit_code)


def kill_at_random(
    num_kills: int,
    *,
    prepare: Callable[[], object],
    run: Callable[[float | None], int],
    is_half_done: Callable[[], bool],
    check: Callable[[], object],
) -> None:
    """Kill `run` until `num_kills` found work half done; let each be completed, and checked."""
    prepare()
    start_s = time.monotonic()
    assert run(None) == 0
    duration_s = time.monotonic() - start_s
    check()
    draw_instant = random.Random(num_kills).random
    counted = attempts = 0
    while counted < num_kills:
        attempts += 1
        assert attempts < 10 * num_kills + 20, f"{counted} of {attempts} kills found half done work"
        prepare()
        code = run(draw_instant() * duration_s)
        assert code in (0, -signal.SIGKILL)
        counted += code != 0 and is_half_done()
        assert run(None) == 0
        check()


def assert_sound(root: Path) -> None:
    """A killed command leaves a whole store, of which only views may lag behind."""
    for finding in verify_store(root, full=True):
        assert "plain readers" in finding.what, finding


def assert_finished(root: Path, expected_hash: str) -> None:
    assert verify_store(root, full=True) == []
    assert store_hash(open_store(root)) == expected_hash
    assert not (root / "staging").exists()


@FEW_AND_MANY
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("command", ["convert", "merge"])
def test_a_copy_goes_on_where_it_was_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    layout: str,
    num_kills: int,
    num_samples: int,
) -> None:
    monkeypatch.setattr(copying, "MAX_ROWS", 3)
    (other,) = set(LAYOUTS) - {layout}
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    samples, third = SAMPLES[:num_samples], num_samples // 3
    build_store(a, other, samples if command == "convert" else samples[: 2 * third])
    build_store(b, layout, samples[third:])
    expected = store_hash(build_store(tmp_path / "expected", layout, samples))
    sources = [a] if command == "convert" else [a, b]

    def is_half_done() -> bool:
        if not (out / "prebake.json").exists():
            return out.exists()
        assert_sound(out)
        return (out / "staging").exists() or len(open_store(out)) < num_samples * 3 // 2

    kill_at_random(
        num_kills,
        prepare=lambda: shutil.rmtree(out, ignore_errors=True),
        run=lambda after_s: run_forked(
            lambda: prebake(command, *sources, "--to", layout, "--out", out), after_s
        ),
        is_half_done=is_half_done,
        check=lambda: assert_finished(out, expected),
    )


@FEW_AND_MANY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_collection_goes_on_where_it_was_killed(
    tmp_path: Path, layout: str, num_kills: int, num_samples: int
) -> None:
    start, root = tmp_path / "start", tmp_path / "s"
    manifest = make_manifest(layout)
    samples = SAMPLES[:num_samples]
    bring_to(start, manifest, samples, rows_per_shard=2, samples_per_commit=2)
    edited = [Sample(s.path, ["edited"], s.bucket_px) for s in samples[::2]]
    bring_to(start, manifest, edited, rows_per_shard=2, samples_per_commit=2)
    expected = store_hash(open_store(start))

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)

    def is_half_done() -> bool:
        assert_sound(root)
        assert store_hash(open_store(root)) == expected
        return files_of(root) != files_of(start) and bool(find_garbage(root))

    def check() -> None:
        assert_finished(root, expected)
        assert not find_garbage(root)

    kill_at_random(
        num_kills,
        prepare=prepare,
        run=lambda after_s: run_forked(lambda: prebake("gc", root), after_s),
        is_half_done=is_half_done,
        check=check,
    )
    collect_garbage(start)
    assert store_hash(open_store(start)) == expected


def files_of(root: Path) -> set[tuple[str, int]]:
    return {(str(p), p.stat().st_size) for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmBakes]:
    with WarmBakes(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@FEW_AND_MANY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repair_goes_on_where_it_was_killed(
    server: WarmBakes, tmp_path: Path, layout: str, num_kills: int, num_samples: int
) -> None:
    images = draw_set(
        tmp_path / "pictures", {f"{i}.png": f"caption {i % 4}" for i in range(2 * num_samples // 5)}
    )
    start, root = tmp_path / "start", tmp_path / "s"
    assert server.run(server.bake_command(images, start, layout)) == 0, server.log.read_text()
    store = open_store(start)
    expected = store_hash(store)
    shards = [s for s in store.index.shards.values() if s.kind == "samples"]
    for shard in shards[::2]:
        path = start / max(shard.files, key=lambda file: file.bytes).path
        data = bytearray(path.read_bytes())
        data[len(data) // 2 if layout == "zarr" else 2000] ^= 255
        path.write_bytes(data)
    num_damaged = len(verify_store(start, full=True))
    assert num_damaged >= len(shards) // 2
    repair = ["store", "repair", str(root), "--images", str(images), "--model", str(server.model)]

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)

    def run(after_s: float | None) -> int:
        repairing = server.start(repair)
        if after_s is not None:
            time.sleep(after_s)
            repairing.kill(signal.SIGKILL)
        return repairing.wait()

    def is_half_done() -> bool:
        findings = verify_store(root, full=True)
        for finding in findings:  # still damaged where it was, or mended
            assert "plain readers" in finding.what or finding.num_samples, finding
        return files_of(root) != files_of(start) and bool(findings or (root / "staging").exists())

    def check() -> None:
        assert verify_store(root, full=True) == []
        assert store_hash(open_store(root)) == expected
        assert not (root / "staging").exists()

    kill_at_random(num_kills, prepare=prepare, run=run, is_half_done=is_half_done, check=check)
