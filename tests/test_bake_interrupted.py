"""A bake that is stopped, killed or out of room, and then run again by the same command."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bake_builders import LAYOUTS, assert_whole, draw, draw_set, hash_of
from warm_bakes import DIED_AT_CALL, WarmBakes

from store_format import open_store
from store_format.verify import verify_store

NUM_IMAGES = 48
NUM_CAPTIONS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmBakes]:
    with WarmBakes(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images of two buckets with 12 captions, and two files that are no images."""
    folder = tmp_path_factory.mktemp("interrupted") / "pictures"
    names = {f"{i:02}.png": f"caption {i % NUM_CAPTIONS}" for i in range(NUM_IMAGES - 8)}
    draw_set(folder, names)
    wide = {f"w{i}.png": f"caption {i}" for i in range(8)}
    draw_set(folder, wide, size=(80, 48), seed=100)
    (folder / "empty.png").write_bytes(b"")
    data = draw(folder / "cut.png", 200).read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    return folder


@pytest.fixture(scope="module")
def expected_hash(server: WarmBakes, images: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of a bake that nothing disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "store"
    assert server.run(server.bake_command(images, out, "zarr")) == 0
    assert_whole(out)
    return hash_of(out)


def num_live(root: Path) -> int:
    return len(open_store(root)) if (root / "prebake.json").exists() else 0


def encoded_images(server: WarmBakes) -> int:
    """Return how many images the last run encoded, as its summary says."""
    line = next(line for line in server.log.read_text().splitlines() if "images and" in line)
    return int(line.split(";")[1].split()[0])


def assert_valid_after_a_kill(root: Path) -> None:
    """The last commit is whole; only the views of plain readers may be behind it."""
    if (root / "prebake.json").exists():
        assert verify_store(root, full=False) == []
        for finding in verify_store(root, full=True):
            assert "plain readers" in finding.what, finding


def complete(server: WarmBakes, arguments: list[str], out: Path, expected_hash: str) -> None:
    """Run the command again; nothing that was committed is encoded once more."""
    before = num_live(out)
    code = server.run(arguments)
    assert code == 0, server.log.read_text()
    assert encoded_images(server) == NUM_IMAGES - before
    assert hash_of(out) == expected_hash
    assert_whole(out)
    assert len((out / "report.jsonl").read_text().splitlines()) == 2


def wait_for_commits(out: Path, number: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(list(out.glob("index/*.json"))) < number:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("number", "expected_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_polite_signal_ends_the_run_with_its_code_and_all_finished_work(
    server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str,
    number: signal.Signals, expected_code: int,
) -> None:  # fmt: skip
    out = tmp_path / "store"
    arguments = server.bake_command(images, out, layout)
    run = server.start(arguments)
    wait_for_commits(out, 3)
    run.kill(number)
    code = run.wait()
    text = server.log.read_text()
    assert code == expected_code, text
    assert "stopping after the step under way; once more to stop at once" in text
    assert "interrupted; what was finished is kept. Run the same command to go on." in text
    encoded = encoded_images(server)
    assert 0 < encoded < NUM_IMAGES
    assert num_live(out) == encoded  # not an image was encoded in vain
    assert_valid_after_a_kill(out)
    assert not (out / "staging").exists()
    complete(server, arguments, out, expected_hash)


def test_a_second_signal_ends_the_run_at_once(
    server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str
) -> None:
    out = tmp_path / "store"
    arguments = server.bake_command(images, out, layout)
    run = server.start(arguments)
    wait_for_commits(out, 2)
    run.kill(signal.SIGTERM)
    time.sleep(0.005)
    run.kill(signal.SIGTERM)
    assert run.wait() in (-signal.SIGTERM, 143)
    assert_valid_after_a_kill(out)
    complete(server, arguments, out, expected_hash)


def is_unfinished(out: Path) -> bool:
    """Say whether a killed run left work that nothing refers to: a staged or unlisted shard."""
    if any((out / "staging").glob("*")):
        return True
    listed = set(open_store(out).index.shards) if (out / "prebake.json").exists() else set()
    there = {str(p.relative_to(out)) for p in out.glob("samples/*/*-*") if p.is_dir()}
    there |= {str(p.relative_to(out)).removesuffix(".tar") for p in out.glob("samples/*.tar")}
    return bool(there - listed)


@pytest.mark.parametrize(
    "num_kills",
    [3, pytest.param(50, marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_sigkill_at_random_instants_loses_only_the_unfinished_shard(
    server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str, num_kills: int
) -> None:
    """A kill counts only if it found work half done; each of them is completed."""
    out = tmp_path / "store"
    arguments = server.bake_command(images, out, layout)
    draw_instant = random.Random(f"{layout}-{num_kills}").random
    start_s = time.monotonic()
    assert server.run(arguments) == 0
    duration_s = time.monotonic() - start_s
    counted = attempts = 0
    while counted < num_kills:
        attempts += 1
        assert attempts < 10 * num_kills + 20, f"{counted} kills in {attempts} found work half done"
        shutil.rmtree(out)
        run = server.start(arguments)
        time.sleep(draw_instant() * duration_s)
        run.kill(signal.SIGKILL)
        code = run.wait()
        assert code in (0, -signal.SIGKILL)
        assert_valid_after_a_kill(out)
        counted += code != 0 and is_unfinished(out)
        complete(server, arguments, out, expected_hash)


def test_a_bake_that_is_killed_again_and_again_ends_all_the_same(
    server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str
) -> None:
    out = tmp_path / "store"
    arguments = server.bake_command(images, out, layout)
    kills = 0
    while num_live(out) < NUM_IMAGES and kills < 40:
        before = len(list(out.glob("index/*.json")))
        run = server.start(arguments)
        deadline_s = time.monotonic() + 60
        while len(list(out.glob("index/*.json"))) < before + 3 and num_live(out) < NUM_IMAGES:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        run.kill(signal.SIGKILL)
        kills += run.wait() != 0
        assert_valid_after_a_kill(out)
    assert kills >= 4
    complete(server, arguments, out, expected_hash)


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "pictures"
    draw_set(folder, {"a.png": "cat", "b.png": "dog", "c.png": "cat"})
    return folder


def edited(folder: Path, images: Path) -> Path:
    """Return the images with one caption changed, one image gone, and one new."""
    shutil.copytree(images, folder)
    (folder / "a.txt").write_text("bird")
    (folder / "b.png").unlink()
    draw_set(folder, {"d.png": "cat"}, seed=300)
    return folder


# (layout, every how many calls): all calls take minutes, so `make test` tries some
SOME_CALLS = [("zarr", 37), ("webdataset", 11)]
ALL_CALLS = [pytest.param(layout, 1, marks=pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize(("layout", "every"), SOME_CALLS + ALL_CALLS)
@pytest.mark.parametrize("update", [False, True], ids=["first-bake", "update"])
def test_a_bake_that_dies_at_any_file_operation_can_be_completed(
    server: WarmBakes, few_images: Path, tmp_path: Path, layout: str, every: int, update: bool
) -> None:
    start = tmp_path / "start"
    options = {"source_name": "pictures", "batch_size": "1"}
    images = few_images
    if update:
        assert server.run(server.bake_command(few_images, start, layout, **options)) == 0
        images = edited(tmp_path / "edited", few_images)
    else:
        start.mkdir()
    whole = shutil.copytree(start, tmp_path / "whole")
    assert server.run(server.bake_command(images, whole, layout, **options)) == 0
    out = tmp_path / "store"
    number, code = 1, DIED_AT_CALL
    while code == DIED_AT_CALL:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(start, out)
        arguments = server.bake_command(images, out, layout, **options)
        code = server.run(arguments, die_at_call=number)
        assert code in (DIED_AT_CALL, 0), server.log.read_text()
        assert_valid_after_a_kill(out)
        assert server.run(arguments) == 0, server.log.read_text()
        assert hash_of(out) == hash_of(whole)
        assert_whole(out)
        number += every
    assert number > 50


class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=200k,nr_inodes=0", "tmpfs", str(disk)]
        if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("needs root to mount a small disk")
        yield disk
        subprocess.run(["umount", str(disk)], check=True)

    def grow(self, disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)

    def test_a_full_disk_is_one_line_and_a_valid_store_that_can_be_completed(
        self, server: WarmBakes, images: Path, small_disk: Path, layout: str, expected_hash: str
    ) -> None:
        out = small_disk / "store"
        arguments = server.bake_command(images, out, layout)
        code = server.run(arguments)
        text = server.log.read_text()
        assert code == 1, text
        assert text.splitlines()[-1].startswith("Error: ")
        assert "No space left on device. What was finished is kept; free some space" in text
        assert "Traceback" not in text
        assert_valid_after_a_kill(out)
        assert 0 < num_live(out) < NUM_IMAGES
        self.grow(small_disk)
        complete(server, arguments, out, expected_hash)

    @pytest.mark.parametrize("max_file_bytes", [3_000, 20_000])
    def test_a_file_that_cannot_grow_is_one_line_and_a_store_that_can_be_completed(
        self, server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str,
        max_file_bytes: int,
    ) -> None:  # fmt: skip
        out = tmp_path / "store"
        arguments = server.bake_command(images, out, layout, shard_max_seconds="60")
        code = server.run(arguments, max_file_bytes=max_file_bytes)
        text = server.log.read_text()
        assert code == 1, text
        assert "File too large. What was finished is kept; free some space" in text
        assert "Traceback" not in text
        assert_valid_after_a_kill(out)
        complete(server, arguments, out, expected_hash)


def test_a_bake_waits_while_another_process_has_the_store_alone_and_says_so(
    server: WarmBakes, images: Path, tmp_path: Path, layout: str, expected_hash: str
) -> None:
    import fcntl

    out = tmp_path / "store"
    arguments = server.bake_command(images, out, layout)
    assert server.run(arguments) == 0
    lock = os.open(out / "writer.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a process that tidies holds it
    run = server.start(arguments)
    said = f"waiting: another process is tidying {out}"
    deadline_s = time.monotonic() + 60
    while said not in server.log.read_text().splitlines():
        assert time.monotonic() < deadline_s, server.log.read_text()
        time.sleep(0.01)
    os.close(lock)
    assert run.wait() == 0, server.log.read_text()
    assert hash_of(out) == expected_hash
