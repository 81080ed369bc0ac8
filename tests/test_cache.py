"""The local cache of remote shards: bounded, verified, shared by threads and processes."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from store_format import cache as cache_module
from store_format.cache import (
    ShardCache,
    Write,
    configure_cache,
    default_cache,
    parse_size,
)
from store_format.errors import DamagedStoreError, PrebakeError

ROOT = Path(__file__).parent.parent


def content(number: int, size_bytes: int = 100) -> bytes:
    return (f"{number} ".encode() * size_bytes)[:size_bytes]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Origin:
    """Where files come from; counts the downloads."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.num_downloads = 0

    def __call__(self, write: Write) -> None:
        answer = self.answers[min(self.num_downloads, len(self.answers) - 1)]
        self.num_downloads += 1
        for start in range(0, len(answer), 70):
            write(answer[start : start + 70])


def no_download(write: Write) -> None:
    raise AssertionError("downloaded what the cache holds")


def read(cache: ShardCache, data: bytes, download: cache_module.Download) -> bytes:
    descriptor = cache.open(len(data), sha256(data), download, "s3://b/x.tar")
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def names(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()} - {"lock"}


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", 1000)


def test_a_file_is_downloaded_once_and_then_read_from_the_cache(cache):
    data = content(1)
    origin = Origin(data)
    assert read(cache, data, origin) == data
    assert read(cache, data, no_download) == data
    cache.fetch(len(data), sha256(data), no_download, "s3://b/x.tar")
    assert origin.num_downloads == 1
    assert names(cache) == {sha256(data)}


def test_equal_files_of_several_stores_are_held_once(cache, tmp_path):
    data = content(1)
    read(cache, data, Origin(data))
    assert read(ShardCache(tmp_path / "cache", 500), data, no_download) == data


def test_the_descriptor_can_only_read(cache):
    data = content(1)
    for _ in ("downloaded", "cached"):
        descriptor = cache.open(len(data), sha256(data), Origin(data), "s3://b/x.tar")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        os.close(descriptor)


def test_the_file_unused_for_longest_makes_room(cache):
    files = [content(number, 300) for number in range(4)]
    for data in files[:3]:
        read(cache, data, Origin(data))
    for age_s, data in ((30, files[1]), (20, files[0]), (10, files[2])):
        stamp_s = time.time() - age_s
        os.utime(cache.folder / sha256(data), (stamp_s, stamp_s))
    read(cache, files[1], no_download)  # now 0 is the oldest
    read(cache, files[3], Origin(files[3]))
    assert names(cache) == {sha256(files[number]) for number in (1, 2, 3)}
    assert cache.held_bytes() == 900


def test_a_removed_file_stays_readable_where_it_is_open(cache):
    first, second = content(1, 600), content(2, 600)
    descriptor = cache.open(600, sha256(first), Origin(first), "s3://b/1.tar")
    read(cache, second, Origin(second))
    assert names(cache) == {sha256(second)}
    assert os.pread(descriptor, 600, 0) == first
    os.close(descriptor)


def test_a_file_larger_than_the_cache_is_refused_with_the_remedy(cache):
    with pytest.raises(PrebakeError, match=r"s3://b/x has 1001 bytes.*1000 bytes.*--cache-size"):
        cache.open(1001, "0" * 64, no_download, "s3://b/x")


def test_files_that_are_not_the_caches_own_stay(cache):
    cache.folder.mkdir()
    mine = cache.folder / "holiday.jpg"
    mine.write_bytes(bytes(5000))
    (cache.folder / ("ab" * 32)).mkdir()  # named as a cached file is, by whoever
    for number in range(5):
        data = content(number, 400)
        read(cache, data, Origin(data))
    assert mine.stat().st_size == 5000


def test_damage_on_the_way_is_downloaded_again(cache):
    data = content(1)
    origin = Origin(data[:-1] + b"?", data)
    assert read(cache, data, origin) == data
    assert origin.num_downloads == 2


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (content(1)[:-1] + b"?", rf"found {sha256(content(1)[:-1] + b'?')[:8]}\.\.\."),
        (content(1)[:-1], "has 99 bytes, the index states 100"),
        (content(1) + b"?", "has 101 bytes, the index states 100"),
    ],
)
def test_damage_at_the_origin_names_the_url_and_keeps_nothing(cache, stored, found):
    origin = Origin(stored)
    with pytest.raises(DamagedStoreError, match=rf"s3://b/x\.tar.*{found}"):
        read(cache, content(1), origin)
    assert origin.num_downloads == 2
    assert names(cache) == set()


def test_a_failed_download_leaves_nothing(cache):
    def fail(write: Write) -> None:
        write(b"half")
        raise FileNotFoundError("no such key")

    with pytest.raises(FileNotFoundError, match="no such key"):
        read(cache, content(1), fail)
    assert names(cache) == set()


def test_a_full_disk_leaves_nothing():
    """In a process of its own, whose files may have 64 KiB: as on a full disk, the write fails."""
    script = """
        import resource, signal, sys, tempfile
        from pathlib import Path
        from store_format.cache import ShardCache
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with tempfile.TemporaryDirectory() as folder:
            cache = ShardCache(Path(folder), 1 << 20)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            try:
                cache.open(1 << 17, "0" * 64, lambda write: write(bytes(1 << 17)), "x")
            except OSError as error:
                print(error.strerror, sorted(path.name for path in Path(folder).iterdir()))
        """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "File too large ['lock']"


def test_a_cached_file_that_was_cut_short_is_downloaded_again(cache):
    data = content(1)
    read(cache, data, Origin(data))
    os.truncate(cache.folder / sha256(data), 50)
    assert read(cache, data, Origin(data)) == data


def test_files_of_before_the_last_start_of_the_machine_are_verified_once(cache):
    """A power cut may leave zeros in them."""
    lost, kept = content(1), content(2)
    for data in (lost, kept):
        read(cache, data, Origin(data))
    (cache.folder / sha256(lost)).write_bytes(bytes(100))
    assert read(cache, lost, no_download) == bytes(100)  # readers have checksums of their own
    for data in (lost, kept):
        os.utime(cache.folder / sha256(data), (1, 1))
    assert read(cache, lost, Origin(lost)) == lost
    assert read(cache, kept, no_download) == kept
    assert (cache.folder / sha256(kept)).stat().st_mtime > 1


def test_a_cache_that_is_deleted_during_a_download_is_made_anew(cache):
    data = content(1)
    origin = Origin(data)

    def download(write: Write) -> None:
        origin(write)
        if origin.num_downloads == 1:
            for path in cache.folder.iterdir():
                path.unlink()
            cache.folder.rmdir()

    assert read(cache, data, download) == data
    assert names(cache) == {sha256(data)}


def test_threads_that_want_one_file_download_it_once(cache):
    data = content(1)
    origin = Origin(data)
    may_go_on = threading.Event()

    def download(write: Write) -> None:
        assert may_go_on.wait(10)
        origin(write)

    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(read(cache, data, download))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert found == [data] * 8
    assert origin.num_downloads == 1
    assert names(cache) == {sha256(data)}


def test_the_next_one_downloads_where_the_first_fails(cache):
    data = content(1)
    origin = Origin(data)
    waits, failed = threading.Event(), threading.Event()

    def fail(write: Write) -> None:
        waits.wait(10)
        time.sleep(0.1)
        raise OSError("connection lost")

    def first() -> None:
        with pytest.raises(OSError, match="connection lost"):
            read(cache, data, fail)
        failed.set()

    thread = threading.Thread(target=first)
    thread.start()
    while not (cache.folder / f"{sha256(data)}.part").exists():
        time.sleep(0.001)
    waits.set()
    assert read(cache, data, origin) == data
    thread.join()
    assert failed.is_set()


def test_downloads_under_way_count_and_are_waited_for(cache):
    """Of two files of 600 bytes, a cache of 1000 takes one after the other."""
    first, second = content(1, 600), content(2, 600)
    started, may_go_on = threading.Event(), threading.Event()
    held: list[int] = []

    def slow(write: Write) -> None:
        started.set()
        assert may_go_on.wait(10)
        Origin(first)(write)

    def note(write: Write) -> None:
        held.append(cache.held_bytes())
        Origin(second)(write)

    thread = threading.Thread(target=read, args=(cache, first, slow))
    thread.start()
    assert started.wait(10)
    other = threading.Thread(target=read, args=(cache, second, note))
    other.start()
    time.sleep(0.2)
    assert cache.held_bytes() == 600
    assert not held
    may_go_on.set()
    thread.join()
    other.join()
    assert held == [600]
    assert names(cache) == {sha256(second)}


def test_a_killed_downloaders_part_is_taken_over_or_removed(cache, tmp_path):
    first, second = content(1, 600), content(2, 600)
    process = _start_hanging_download(cache, first)
    part = cache.folder / f"{sha256(first)}.part"
    assert part.stat().st_size == 600
    process.kill()
    process.wait()
    assert names(cache) == {part.name}
    read(cache, second, Origin(second))  # needs its room
    assert names(cache) == {sha256(second)}

    process = _start_hanging_download(cache, first)
    process.kill()
    process.wait()
    assert read(cache, first, Origin(first)) == first
    assert names(cache) == {sha256(first)}


def test_who_waits_goes_on_when_the_downloader_is_killed(cache):
    data = content(1, 600)
    process = _start_hanging_download(cache, data)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read(cache, data, Origin(data))))
    thread.start()
    time.sleep(0.2)
    assert not found
    process.kill()
    process.wait()
    thread.join(10)
    assert found == [data]


def _start_hanging_download(cache: ShardCache, data: bytes) -> subprocess.Popen[str]:
    script = f"""
        import time
        from pathlib import Path
        from store_format.cache import ShardCache
        def hang(write):
            print("started", flush=True)
            time.sleep(100)
        ShardCache(Path({str(cache.folder)!r}), {cache.limit_bytes}).open(
            {len(data)}, {sha256(data)!r}, hang, "x")
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.stdout.close()
    return process


def test_a_child_forked_during_a_download_does_not_keep_its_lock(cache):
    """As a loader worker that is forked while another thread fetches ahead."""
    data = content(1)
    started, may_fail = threading.Event(), threading.Event()

    def fail(write: Write) -> None:
        started.set()
        may_fail.wait(10)
        raise OSError("connection lost")

    def first() -> None:
        with pytest.raises(OSError, match="connection lost"):
            read(cache, data, fail)

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(10)
    child = os.fork()
    if child == 0:  # lives on with copies of all descriptors, and then wants the file itself
        signal.alarm(10)
        os._exit(0 if read(cache, data, Origin(data)) == data else 1)
    may_fail.set()
    thread.join()
    assert read(cache, data, Origin(data)) == data
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_outlives_a_killed_downloader_downloads_itself(cache):
    """It has copies of the descriptors that held the lock."""
    data = content(1)
    script = f"""
        import os, signal, threading, time
        from pathlib import Path
        from store_format.cache import ShardCache
        cache = ShardCache(Path({str(cache.folder)!r}), 1000)
        started = threading.Event()
        def hang(write):
            started.set()
            time.sleep(100)
        get = lambda download: cache.open(100, {sha256(data)!r}, download, "x")
        threading.Thread(target=get, args=(hang,), daemon=True).start()
        assert started.wait(10)
        parent = os.getpid()
        if os.fork() == 0:
            signal.alarm(10)
            while os.getppid() == parent:
                time.sleep(0.01)
            print(os.pread(get(lambda write: write({data!r})), 100, 0), flush=True)
        else:
            os.kill(parent, signal.SIGKILL)
        """
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout.strip()) == (-signal.SIGKILL, str(data))


def _use_small_cache(folder: Path, limit_bytes: int, seed: int, seconds: float) -> None:
    """Read random files of 30 over and over, and check all bytes and the limit."""
    import random

    cache = ShardCache(folder, limit_bytes)
    rng = random.Random(seed)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        data = content(rng.randrange(30), 20_000)

        def download(write: Write, data: bytes = data) -> None:
            for start in range(0, len(data), 5000):
                write(data[start : start + 5000])
                time.sleep(0.0005)

        descriptor = cache.open(len(data), sha256(data), download, "x")
        assert os.pread(descriptor, 1 << 20, 0) == data
        os.close(descriptor)


def _bytes_in(folder: Path) -> int:
    """Sum sizes as they were at one moment, more or less: the cache's lock keeps others from it."""
    total = 0
    with cache_module._locked(folder / "lock"):
        for path in folder.iterdir():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20, marks=pytest.mark.slow)])
def test_processes_on_one_small_cache_read_right_bytes_within_the_limit(tmp_path, seconds):
    """Five processes, room for 8 of 30 files; two of them are killed at any moment."""
    context = multiprocessing.get_context("spawn")
    folder, limit_bytes = tmp_path / "cache", 160_000
    processes = [
        context.Process(target=_use_small_cache, args=(folder, limit_bytes, seed, seconds))
        for seed in range(5)
    ]
    for process in processes:
        process.start()
    while not folder.exists():
        time.sleep(0.01)
    most_bytes = 0
    end_s = time.monotonic() + seconds / 2
    while time.monotonic() < end_s:
        most_bytes = max(most_bytes, _bytes_in(folder))
        time.sleep(0.002)
    for process in processes[:2]:
        process.kill()
    while any(process.is_alive() for process in processes):
        most_bytes = max(most_bytes, _bytes_in(folder))
        time.sleep(0.002)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-9, -9, 0, 0, 0]
    assert limit_bytes / 2 < most_bytes <= limit_bytes
    last = content(99, 20_000)
    read(ShardCache(folder, limit_bytes), last, Origin(last))  # removes what the killed ones left
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]
    for path in folder.iterdir():
        assert path.name == "lock" or sha256(path.read_bytes()) == path.name


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 2**30), ("500MB", 500_000_000), ("1.5 TiB", 3 * 2**39), ("64k", 64_000),
        ("1000000", 1_000_000), ("2gib", 2**31), ("10 B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert parse_size(text, "--cache-size") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-5GB", "0", "0.1B", "1 2", "5 GiBs", "1e9", "20iB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(PrebakeError, match=r"--cache-size: expected a size such as 20GiB, got"):
        parse_size(text, "--cache-size")


def test_the_default_cache_is_as_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_default", None)
    monkeypatch.setenv("PREBAKE_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("PREBAKE_CACHE_SIZE", "3MiB")
    assert default_cache().folder == tmp_path / "mine"
    assert default_cache().limit_bytes == 3 << 20
    configure_cache(tmp_path / "other", 5000)
    assert (default_cache().folder, default_cache().limit_bytes) == (tmp_path / "other", 5000)
    configure_cache(limit_bytes=6000)
    assert (default_cache().folder, default_cache().limit_bytes) == (tmp_path / "mine", 6000)


def test_the_default_cache_leaves_room_on_the_disk(tmp_path, monkeypatch):
    """80 % of the 1000 bytes that are free and of the 200 that the cache holds."""
    monkeypatch.delenv("PREBAKE_CACHE_SIZE", raising=False)
    data = content(1, 200)
    read(ShardCache(tmp_path / "cache", 1000), data, Origin(data))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage)
    assert cache_module.default_limit_bytes(tmp_path / "cache") == 960
    usage.free = 1 << 50
    assert cache_module.default_limit_bytes(tmp_path / "not" / "there" / "yet") == 20 << 30


def test_the_default_folder_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("PREBAKE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.default_folder() == tmp_path / "prebake" / "shards"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_module.default_folder() == Path("/home/someone/.cache/prebake/shards")
