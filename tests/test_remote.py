"""Stores behind URLs: one contract for all folders, a real S3 server, and networks that fail."""

import asyncio
import contextlib
import functools
import hashlib
import http.server
import multiprocessing
import os
import pickle
import queue
import random
import secrets
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from s3_server import (
    READER_KEY,
    READER_SECRET,
    SECRETS,
    WRITER_KEY,
    FlakyProxy,
    S3Server,
    every_second,
    s3,
)
from store_builders import LAYOUTS, Sample, assert_holds, bring_to, build_store, make_manifest

from store_format import cache as cache_module
from store_format import connection, open_store, remote
from store_format.cache import ShardCache
from store_format.connection import AccessError, Connection, RefusedError, UnreachableError
from store_format.errors import DamagedStoreError, PrebakeError
from store_format.folders import Folder, LocalFolder, folder_of
from store_format.remote import RemoteFolder
from store_format.verify import store_hash, verify_store

__all__ = ["s3"]  # a fixture
ROOT = Path(__file__).parent.parent
ONE_QUICK = ["webdataset", pytest.param("zarr", marks=pytest.mark.slow)]
SAMPLES = [Sample(f"{number}.png", [f"caption {number % 3}"]) for number in range(10)]


@pytest.fixture(autouse=True)
def small_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardCache:
    cache = ShardCache(tmp_path / "cache", 10 << 20)
    monkeypatch.setattr(cache_module, "_default", cache)
    return cache


@pytest.fixture
def s3_url(s3: S3Server) -> Iterator[str]:
    """A URL below which there is nothing yet, with the writer's credentials at hand."""
    with s3.environment():
        yield f"s3://bucket/{secrets.token_hex(4)}/store"


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return LocalFolder(tmp_path / "store")
    if request.param == "memory":
        return RemoteFolder(f"memory://{secrets.token_hex(4)}/store")
    return RemoteFolder(request.getfixturevalue("s3_url"))


def again(folder: Folder) -> Folder:
    """Return the same folder as another process would open it."""
    return folder_of(str(folder))


@contextlib.contextmanager
def staging_of(folder: Folder) -> Iterator[Path]:
    """Claim a folder."""
    claim = folder.claim(secrets.token_hex(4))
    try:
        yield claim.staging
    finally:
        claim.release()


def put(folder: Folder, files: dict[str, bytes]) -> None:
    """Publish files, each by itself."""
    with staging_of(folder) as staging:
        for path, data in files.items():
            (staging / "staged").write_bytes(data)
            folder.publish(staging / "staged", path)


def put_folder(folder: Folder, path: str, files: dict[str, bytes]) -> None:
    with staging_of(folder) as staging:
        staged = staging / "staged-folder"
        for name, data in files.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_bytes(data)
        folder.publish(staged, path)
        assert not staged.exists()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def opened(folder: Folder, path: str, data: bytes) -> bytes:
    """Read a file as a store does, that ought to hold `data`."""
    descriptor = folder.open(path, len(data), sha256(data))
    try:
        return os.pread(descriptor, len(data) + 1, 0)
    finally:
        os.close(descriptor)


class TestEveryFolder:
    """What `folders.Folder` promises, whatever is behind it."""

    def test_names_are_sorted_and_none_where_there_is_nothing(self, folder):
        assert folder.names() == folder.names("index") == []
        put(folder, {"index/b.json": b"b", "index/a.json": b"a", "index/deep/c": b"c", "top": b"t"})
        assert folder.names("index") == ["a.json", "b.json", "deep"]
        assert set(folder.names()) - {"writer.lock"} == {"index", "top"}
        assert folder.names("top") == folder.names("index/none") == []

    def test_files_of_others_are_seen_at_once(self, folder):
        assert folder.names("index") == []
        put(again(folder), {"index/a": b"a"})
        assert folder.names("index") == ["a"]
        put(again(folder), {"index/b": b"b"})
        assert folder.names("index") == ["a", "b"]
        assert folder.sizes(["index/b"]) == {"index/b": 1}

    @pytest.mark.parametrize("num_more", [0, 30])  # by one question each, or by a listing
    def test_sizes_are_of_files_alone(self, folder, num_more):
        more = {f"samples/{number:03d}": bytes(number) for number in range(1, num_more + 1)}
        put(folder, {"samples/64x64/a/zarr.json": b"{}", "manifest": b"123", **more})
        asked = ["samples/64x64/a/zarr.json", "samples", "samples/64x64/a", "manifest", "none/at"]
        found = folder.sizes([*asked, *more])
        assert found == {
            "samples/64x64/a/zarr.json": 2, "manifest": 3, **{p: len(d) for p, d in more.items()}
        }  # fmt: skip

    def test_sizes_where_there_is_nothing(self, folder):
        assert folder.sizes([]) == folder.sizes(["a"]) == {}
        assert folder.sizes([f"a/{number}" for number in range(100)]) == {}

    def test_reads_whole_files(self, folder):
        files = {f"index/{number:03d}": f"{number}".encode() * 100 for number in range(40)}
        files["index/000"] = b""
        put(folder, files)
        assert folder.read("index/007") == b"7" * 100
        assert folder.read("index/000") == b""
        assert list(folder.read_all(list(files))) == list(files.values())
        assert list(folder.read_all([])) == []

    def test_a_missing_file_is_told_with_its_place(self, folder):
        put(folder, {"a": b"a", "c": b"c"})
        for path in ("b", "x/y/z"):
            with pytest.raises(FileNotFoundError, match=path) as caught:
                folder.read(path)
            assert caught.value.strerror
        found = folder.read_all(["a", "b", "c"])
        assert next(found) == b"a"
        with pytest.raises(FileNotFoundError):
            next(found)
        with pytest.raises(FileNotFoundError):
            folder.open("b", 1, sha256(b"b"))

    def test_opens_files_for_reading(self, folder):
        data = bytes(range(256)) * 1000
        put(folder, {"samples/a.tar": data})
        assert opened(folder, "samples/a.tar", data) == data
        assert opened(folder, "samples/a.tar", data) == data

    def test_publishing_a_file_moves_it(self, folder):
        with staging_of(folder) as staging:
            (staging / "x").write_bytes(b"first")
            folder.publish(staging / "x", "deep/er/x")
            assert not (staging / "x").exists()
        assert folder.read("deep/er/x") == b"first"

    def test_a_published_file_is_never_replaced(self, folder):
        put(folder, {"x": b"first"})
        with pytest.raises(FileExistsError, match="exists already"):
            put(folder, {"x": b"other"})
        with pytest.raises(FileExistsError):
            put(again(folder), {"x": b"longer"})
        assert folder.read("x") == b"first"

    def test_publishing_a_folder(self, folder):
        files = {"zarr.json": b"{}", "latents/zarr.json": b"[]", "latents/c/0/0": b"12"}
        put_folder(folder, "samples/64x64/a", files)
        assert folder.names("samples/64x64/a") == ["latents", "zarr.json"]
        assert folder.read("samples/64x64/a/latents/c/0/0") == b"12"
        with pytest.raises(FileExistsError, match="exists already"):
            put_folder(folder, "samples/64x64/a", {"other": b"1"})
        assert folder.names("samples/64x64/a") == ["latents", "zarr.json"]

    def test_one_of_several_writers_creates_a_file(self, folder):
        with staging_of(folder) as staging:
            folder.create("manifest", b"first", staging)
            with pytest.raises(FileExistsError):
                again(folder).create("manifest", b"other", staging)
        assert folder.read("manifest") == b"first"

    def test_replaces_a_file(self, folder):
        with staging_of(folder) as staging:
            for data in (b"first", b"second, longer", b"3"):
                folder.replace("views/shards.txt", data, staging)
                assert folder.read("views/shards.txt") == data
        assert folder.names("views") == ["shards.txt"]

    def test_removes_files_and_folders(self, folder):
        put(folder, {"a": b"a", "ab": b"ab", "s/x/1": b"1", "s/x/2": b"2", "s/xy/3": b"3"})
        with staging_of(folder) as staging:
            folder.remove(["a", "s/x", "none", "no/ne"], staging)
        assert "xy" in folder.names("s")  # SeaweedFS shows empty folders for a while
        assert folder.names("s/x") == []
        assert folder.sizes(["a", "ab", "s/x/1", "s/xy/3"]) == {"ab": 2, "s/xy/3": 1}

    def test_makes_a_folder(self, folder):
        with staging_of(folder):
            folder.make_folder("index")
            folder.make_folder("index")
        assert "index" in folder.names()

    def test_a_claim_has_a_staging_of_its_own(self, folder):
        first, second = folder.claim("0123abcd"), folder.claim("4567abcd")
        assert first.staging != second.staging
        for claim in (first, second):
            (claim.staging / "x").write_bytes(b"x")
        first.release()
        assert not first.staging.exists()
        assert (second.staging / "x").exists()
        second.release()
        assert not second.staging.exists()

    def test_says_where_files_are(self, folder):
        assert folder.at("index/a") == f"{folder}/index/a"

    def test_survives_pickling(self, folder):
        put(folder, {"a": b"1"})
        assert pickle.loads(pickle.dumps(folder)).read("a") == b"1"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_holds_a_store(self, folder, layout, tmp_path):
        """Written in several goes, with edits; equal to the same store in a local folder."""
        expected = store_hash(build_store(tmp_path / "expected", layout, SAMPLES))
        edited = [Sample("0.png", ["to be edited"]), *SAMPLES[1:], Sample("gone.png", ["a"])]
        bring_to(folder, make_manifest(layout), edited[:6], rows_per_shard=3)
        bring_to(folder, make_manifest(layout), edited, rows_per_shard=3)
        store = bring_to(folder, make_manifest(layout), SAMPLES, rows_per_shard=3)
        assert store_hash(store) == expected
        assert_holds(store, SAMPLES)
        assert verify_store(folder, full=True) == []
        assert store_hash(open_store(str(folder))) == expected


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "s3://AKIA1:hush-hush@bucket/store", "s3://hush-hush@bucket/store",
            "https://me:hush-hush@example.org/store", "https://hush-hush@example.org/store",
            "https://example.org/store?token=hush-hush", "hf://hush-hush@datasets/a/b",
            "sftp://me:hush-hush@host/store", "nonsense://me:hush-hush@host/store",
            "https://[hush-hush/store",
        ],
    )  # fmt: skip
    def test_credentials_in_a_url_are_refused_and_not_shown(self, url):
        with pytest.raises(PrebakeError) as caught:
            RemoteFolder(url)
        text = f"{caught.value} {caught.value!r} {caught.value.__cause__}"
        assert "hush" not in text
        assert "AKIA1" not in text
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "url", ["abfs://container@account.dfs.core.windows.net/store", "sftp://me@host/store",
                "hf://datasets/me/store@main/sub"],
    )  # fmt: skip
    def test_an_at_sign_that_is_no_password_is_accepted(self, url):
        assert str(RemoteFolder(url)) == url

    def test_an_unknown_kind_of_url_names_the_known(self):
        with pytest.raises(PrebakeError, match=r"s4:// is unknown\. Known are s3, gs,.* memory"):
            folder_of("s4://bucket/store")

    def test_chained_urls_and_bare_hosts_are_refused(self):
        with pytest.raises(PrebakeError, match="chained"):
            RemoteFolder("simplecache::s3://bucket/store")
        with pytest.raises(PrebakeError, match="URL of a folder is needed"):
            RemoteFolder("s3://")

    def test_a_missing_driver_names_the_remedy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
        loaded = sys.modules["fsspec.registry"]._registry
        monkeypatch.delitem(loaded, "s3", raising=False)
        with pytest.raises(PrebakeError, match=r"not installed.*pip install 'prebake\[remote\]'"):
            RemoteFolder("s3://bucket/store").read("prebake.json")

    def test_a_slash_at_the_end_changes_nothing(self):
        folder = RemoteFolder("memory://slash/store/")
        put(folder, {"a": b"1"})
        assert str(folder) == "memory://slash/store"
        assert RemoteFolder("memory://slash/store").names() == ["a"]


class TestCache:
    def test_shards_are_downloaded_once_for_all_stores_and_openings(self, small_cache):
        data = bytes(range(256)) * 100
        for name in ("one", "two"):
            put(RemoteFolder(f"memory://cached/{name}"), {"a.tar": data})
        one, two = RemoteFolder("memory://cached/one"), RemoteFolder("memory://cached/two")
        one.fetch("a.tar", len(data), sha256(data))
        one.remove(["a.tar"], Path())
        two.remove(["a.tar"], Path())
        assert opened(one, "a.tar", data) == opened(two, "a.tar", data) == data
        assert small_cache.held_bytes() == len(data)

    @pytest.mark.parametrize("size_bytes", [0, 1, 99, 100, 101, 400, 401, 1234])
    @pytest.mark.parametrize("num_streamed", [0, 1, 2, 13])
    def test_what_does_not_come_as_a_stream_comes_in_ranges(
        self, s3_url, monkeypatch, size_bytes, num_streamed
    ):
        data = (bytes(range(251)) * 5)[:size_bytes]

        def stream(self: Connection, where: str, name: str, size_bytes: int) -> Iterator[bytes]:
            yield from (data[start : start + 50] for start in range(0, 50 * num_streamed, 50))

        monkeypatch.setattr(remote, "RANGE_BYTES", 100)
        monkeypatch.setattr(Connection, "stream", stream)
        folder = RemoteFolder(s3_url)
        put(folder, {"a.tar": data})
        assert opened(folder, "a.tar", data) == data

    def test_large_files_come_as_streams(self, s3, s3_url, tmp_path):
        data = os.urandom(5 << 20)
        put(RemoteFolder(s3_url), {"a.tar": data})
        with flaky(s3, lambda number, method, path: None) as proxy:
            folder = RemoteFolder(s3_url, ShardCache(tmp_path / "large", 10 << 20))
            assert opened(folder, "a.tar", data) == data
            assert [request.split()[0] for request in proxy.requests] == ["GET"]

    def test_a_stream_that_nobody_takes_waits(self):
        """Whatever its size, only so much of it is in memory."""
        num_reads = [0]

        class Endless:
            async def open_async(self, *args: object) -> "Endless":
                return self

            async def read(self, size_bytes: int) -> bytes:
                num_reads[0] += 1
                return bytes(size_bytes)

            async def close(self) -> None:
                pass

        async def read_for_a_moment() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connection._stream(Endless(), "a", {}, taken), 0.2)

        taken: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        asyncio.run(read_for_a_moment())
        assert num_reads[0] == connection.MAX_PIECES + 1
        assert taken.qsize() == connection.MAX_PIECES + 2  # and the end

    @pytest.mark.parametrize("size_bytes", [50, 100, 150, 250, 1000])
    def test_a_shorter_file_is_damage(self, s3_url, monkeypatch, size_bytes, small_cache):
        monkeypatch.setattr(remote, "RANGE_BYTES", 100)
        folder = RemoteFolder(s3_url)
        put(folder, {"a.tar": bytes(size_bytes)})
        expected = rf"{s3_url}/a\.tar: has {size_bytes} bytes, the index states 1234"
        with pytest.raises(DamagedStoreError, match=expected):
            folder.open("a.tar", 1234, sha256(bytes(1234)))
        assert small_cache.held_bytes() == 0

    def test_other_bytes_are_damage(self, folder):
        if folder.is_local:
            pytest.skip("reads of local files check what they read")
        put(folder, {"a.tar": b"right?"})
        with pytest.raises(DamagedStoreError, match=r"a\.tar: sha256 differs from the index"):
            folder.open("a.tar", 6, sha256(b"right!"))

    def test_the_cache_travels_to_other_processes(self, small_cache):
        found = pickle.loads(pickle.dumps(RemoteFolder("memory://x/y")))
        assert (found.cache.folder, found.cache.limit_bytes) == (small_cache.folder, 10 << 20)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave retries to prebake, not to botocore, and do them quickly."""
    monkeypatch.setattr(connection, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(connection, "MAX_DELAY_S", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


class Clock:
    """Time that passes only while prebake waits for its next try."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connection, "time", clock)
    return clock


@contextlib.contextmanager
def flaky(server: S3Server, fault: Callable[[int, str, str], str | None]) -> Iterator[FlakyProxy]:
    with FlakyProxy(server.port, fault) as proxy, server.environment(endpoint=proxy.endpoint):
        yield proxy


class TestFaults:
    """Half of the requests fail; bodies are cut; answers are lost; the server goes and comes."""

    @pytest.mark.parametrize("layout", ONE_QUICK)
    def test_half_of_the_requests_answered_503(self, s3, s3_url, layout, quick_retries, tmp_path):
        expected = store_hash(build_store(tmp_path / "expected", layout, SAMPLES))
        coin = random.Random(5)
        with flaky(s3, lambda *_: coin.choice(["503", None])) as proxy:
            store = build_store(s3_url, layout, SAMPLES)
            assert store_hash(store) == expected
            assert verify_store(s3_url, full=True) == []
            assert proxy.num_faults > 0.4 * proxy.num_requests > 20

    def test_half_of_the_requests_answered_503_with_the_drivers_own_retries(self, s3, s3_url):
        with flaky(s3, every_second()) as proxy:
            put(RemoteFolder(s3_url), {"a": b"1"})
            assert RemoteFolder(s3_url).read("a") == b"1"
            assert proxy.num_faults >= 2

    def test_a_body_that_is_cut_is_read_again(self, s3, s3_url, quick_retries):
        data = os.urandom(100_000)
        put(RemoteFolder(s3_url), {"a.tar": data, "index": data})
        cut = lambda number, method, path: "cut" if number < 3 else None  # noqa: E731
        for read in (lambda f: f.read("index"), lambda f: opened(f, "a.tar", data)):
            with flaky(s3, cut) as proxy:
                assert read(RemoteFolder(s3_url)) == data
                assert proxy.num_faults == 3

    def test_a_file_whose_answer_was_lost_is_sent_once(self, s3, s3_url, quick_retries):
        """The server has it; the second attempt finds it, and that it is the same."""
        seen: set[str] = set()

        def fault(number: int, method: str, path: str) -> str | None:
            is_first = method == "PUT" and path not in seen
            seen.add(path)
            return "lost" if is_first else None

        with flaky(s3, fault) as proxy:
            put(RemoteFolder(s3_url), {"a": b"mine"})
            put_folder(RemoteFolder(s3_url), "b", {"x": b"1", "y": b"2"})
            assert proxy.num_faults == 3
        assert list(RemoteFolder(s3_url).read_all(["a", "b/x", "b/y"])) == [b"mine", b"1", b"2"]

    def test_a_server_without_conditional_requests_is_asked_first(self, s3, s3_url, quick_retries):
        seen: set[str] = set()

        def fault(number: int, method: str, path: str) -> str | None:
            is_first = method == "PUT" and path not in seen
            seen.add(path)
            return "501" if is_first else None

        with flaky(s3, fault):
            put(RemoteFolder(s3_url), {"a": b"first"})
            seen.clear()
            with pytest.raises(NotImplementedError):
                put(RemoteFolder(s3_url), {"a": b"other"})
        assert RemoteFolder(s3_url).read("a") == b"first"

    def test_a_large_file_is_sent_as_one(self, s3_url, monkeypatch):
        monkeypatch.setattr(remote, "MEMORY_BYTES", 1000)
        data = {name: os.urandom(size) for name, size in (("a", 500), ("b", 3000), ("c", 700))}
        put_folder(RemoteFolder(s3_url), "x", data)
        folder = RemoteFolder(s3_url)
        assert {name: folder.read(f"x/{name}") for name in folder.names("x")} == data
        with pytest.raises(FileExistsError):
            put(folder, {"x/b": os.urandom(3000)})

    @pytest.mark.parametrize(
        ("what", "layout"),
        [
            ("read", "webdataset"),
            ("write", "zarr"),
            pytest.param("read", "zarr", marks=pytest.mark.slow),
            pytest.param("write", "webdataset", marks=pytest.mark.slow),
        ],
    )
    def test_the_server_stops_and_starts_in_the_middle(
        self, s3, s3_url, layout, what, monkeypatch, capfd, tmp_path
    ):
        local = build_store(tmp_path / "expected", layout, SAMPLES)
        monkeypatch.setattr(remote, "RANGE_BYTES", 1000)  # many requests
        if what == "read":
            build_store(s3_url, layout, SAMPLES)
        monkeypatch.setattr(connection, "SAY_AFTER_S", 0.5)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with stopped_at_call(s3, 10, monkeypatch) as stopped:
            if what == "read":
                assert store_hash(open_store(s3_url)) == store_hash(local)
            else:
                build_store(s3_url, layout, SAMPLES)
        assert stopped.is_set()
        assert store_hash(open_store(s3_url)) == store_hash(local)
        assert verify_store(s3_url, full=True) == []
        said = [line for line in capfd.readouterr().err.splitlines() if "waiting" in line]
        assert len(said) == 1
        assert said[0].startswith(f"waiting: {s3_url}/")
        assert "cannot be reached" in said[0]

    def test_a_server_that_stays_away_ends_in_one_line(self, s3_url, clock, monkeypatch, capfd):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hush-hush@127.0.0.1:1")
        for action in (
            lambda folder: folder.read("prebake.json"),
            lambda folder: folder.open("a.tar", 10, "0" * 64),
            lambda folder: folder.create("x", b"x", Path()),
            open_store,
        ):
            with pytest.raises(
                UnreachableError, match=r"cannot be reached \(.*Check the"
            ) as caught:
                action(RemoteFolder(s3_url))
            text = str(caught.value)
            assert text.startswith(s3_url)
            assert "\n" not in text
            assert "hush" not in text
            [said] = capfd.readouterr().err.splitlines()  # however often it was tried
            assert said.startswith(f"waiting: {s3_url}/")
            assert "hush" not in said

    def test_a_server_that_answers_503_for_ever_ends_too(self, s3, s3_url, clock, monkeypatch):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with (
            flaky(s3, lambda number, method, path: "503") as proxy,
            pytest.raises(UnreachableError, match="HTTP 503"),
        ):
            RemoteFolder(s3_url).read("prebake.json")
        # Waits of 0.1, 0.2, ... 6.4, 8, 8, ... s, each half to one and a half of it, for 60 s.
        assert 11 <= proxy.num_requests <= 21
        assert 48 < clock.now_s <= 60  # another wait might have been 12 s

    def test_what_fails_for_good_is_not_tried_again(self, s3, s3_url):
        put(RemoteFolder(s3_url), {"a": b"a"})
        with flaky(s3, lambda number, method, path: None) as proxy:
            with pytest.raises(FileNotFoundError):
                RemoteFolder(s3_url).read("none")
            assert proxy.num_requests == 1
            with pytest.raises(FileExistsError):
                RemoteFolder(s3_url).create("a", b"other", Path())
            with s3.environment(endpoint=proxy.endpoint, key=READER_KEY, secret=READER_SECRET):
                before = proxy.num_requests
                with pytest.raises(AccessError):
                    RemoteFolder(s3_url).create("b", b"b", Path())
                assert proxy.num_requests == before + 1

    def test_a_bucket_that_does_not_exist(self, s3_url):
        folder = RemoteFolder("s3://no-such-bucket/store")
        assert folder.names() == []
        assert folder.sizes(["a"]) == {}
        with pytest.raises(FileNotFoundError, match="no such bucket"):
            folder.read("prebake.json")
        for write in (folder.create, folder.replace):
            with pytest.raises(
                RefusedError, match=r"no-such-bucket/store/a .*no such bucket.*Make"
            ):
                write("a", b"a", Path())

    def test_a_request_that_makes_no_sense_is_refused(self, s3_url):
        with pytest.raises(PrebakeError, match=r"s3://B/x/a.*refuses|s3://B/x/a.*"):
            RemoteFolder("s3://B/x").create("a", b"a", Path())


@contextlib.contextmanager
def stopped_at_call(
    server: S3Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """Stop the server before one of the calls that follow; start it again half a second later."""
    done, count = threading.Event(), [0]
    call_all, stream = Connection.call_all, Connection.stream
    threads: list[threading.Thread] = []

    def start_again() -> None:
        time.sleep(0.5)
        server.start()
        done.set()

    def tick() -> None:
        count[0] += 1
        if count[0] == number:
            server.stop()
            threads.append(threading.Thread(target=start_again))
            threads[0].start()

    def counting(self: Connection, method: str, calls: list[connection.Call]) -> list[object]:
        tick()
        return call_all(self, method, calls)

    def counting_pieces(self: Connection, *args: object) -> Iterator[bytes]:
        tick()
        for piece in stream(self, *args):
            yield piece
            tick()

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "call_all", counting)
        patch.setattr(Connection, "stream", counting_pieces)
        try:
            yield done
        finally:
            for thread in threads:
                thread.join()


class TestCredentials:
    def test_a_reader_reads_and_may_not_write(self, s3, s3_url):
        put(RemoteFolder(s3_url), {"a": b"a"})
        with s3.environment(key=READER_KEY, secret=READER_SECRET):
            folder = RemoteFolder(s3_url)
            assert folder.read("a") == b"a"
            with pytest.raises(AccessError, match=rf"{s3_url}/b: access denied.*~/\.aws/cred"):
                folder.create("b", b"b", Path())

    @pytest.mark.parametrize(
        ("key", "secret"),
        [(WRITER_KEY, "a-wrong-secret"), ("AKIANOBODY", "a-wrong-secret")],
    )
    def test_wrong_ones_are_told_in_one_line(self, s3, s3_url, key, secret):
        with s3.environment(key=key, secret=secret):
            for read in (lambda f: f.read("a"), lambda f: f.names(), open_store):
                with pytest.raises(AccessError, match="access denied") as caught:
                    read(RemoteFolder(s3_url))
                assert "\n" not in str(caught.value)
                assert secret not in str(caught.value)
                assert key not in str(caught.value)

    def test_none_are_told_in_one_line(self, s3, s3_url, monkeypatch, tmp_path):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(AccessError, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID"):
            RemoteFolder(s3_url).read("a")

    @pytest.mark.parametrize("layout", ONE_QUICK)
    def test_are_in_no_file_no_message_no_pickle(self, s3, s3_url, layout, tmp_path):
        """A whole life of a store, in a process that logs all that prebake logs."""
        script = f"""
            import logging, pickle, sys
            sys.path.insert(0, {str(ROOT / "tests")!r})
            logging.basicConfig(level=logging.DEBUG)
            for name in ("botocore", "aiobotocore"):  # the driver's debug log shows signatures
                logging.getLogger(name).setLevel(logging.INFO)
            from store_builders import Sample, build_store
            from store_format import connection
            from store_format.verify import store_hash
            connection.RETRY_FOR_S = 0.5
            store = build_store({s3_url!r}, {layout!r}, [Sample("a.png"), Sample("b.png")])
            print(store_hash(store), pickle.dumps(store), repr(store.root), vars(store.root))
            for action in (lambda f: f.read("none"), lambda f: f.create("prebake.json", b"", None)):
                try:
                    action(store.root)
                except OSError as error:
                    print(repr(error), error)
        """
        with flaky(s3, every_second("PUT")) as proxy:
            found = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script)],
                cwd=ROOT, capture_output=True, check=True,
                env={**os.environ, "PREBAKE_CACHE": str(tmp_path / "own-cache")},
            )  # fmt: skip
            assert proxy.num_faults > 5
        folder = RemoteFolder(s3_url)
        files = folder._files_in("")
        assert len(files) > 5
        texts = [folder._server.call("cat_file", "", name) for name in files]
        texts += [path.read_bytes() for path in (tmp_path / "own-cache").iterdir()]
        texts += [found.stdout, found.stderr, *(name.encode() for name in files)]
        assert b"RemoteFolder" in found.stdout
        for text in texts:
            for secret in (*SECRETS, WRITER_KEY, READER_KEY):
                assert secret.encode() not in text


def _read_in_child(folder: RemoteFolder, path: str, size_bytes: int, expected: str) -> None:
    descriptor = folder.open(path, size_bytes, expected)
    assert sha256(os.pread(descriptor, size_bytes, 0)) == expected
    os.close(descriptor)
    assert folder.names() == ["a.tar", "b.tar"]


class TestProcesses:
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_children_read_with_connections_of_their_own(self, s3_url, method, small_cache):
        """The parent is connected before, and reads on meanwhile and after."""
        a, b = os.urandom(1000), os.urandom(1000)
        folder = RemoteFolder(s3_url)
        put(folder, {"a.tar": a, "b.tar": b})
        assert opened(folder, "a.tar", a) == a
        context = multiprocessing.get_context(method)
        children = [
            context.Process(target=_read_in_child, args=(folder, "b.tar", 1000, sha256(b)))
            for _ in range(3)
        ]
        start_s = time.monotonic()
        for child in children:
            child.start()
        for _ in range(20):
            assert folder.read("a.tar") == a
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0, 0]
        assert folder.read("b.tar") == b
        assert time.monotonic() - start_s < 60
        assert small_cache.held_bytes() == 2000

    def test_threads_share_a_folder(self, s3_url):
        files = {f"{number:02d}": os.urandom(1000) for number in range(24)}
        folder = RemoteFolder(s3_url)
        put(folder, files)
        folder, found = RemoteFolder(s3_url), {}

        def read(path: str, data: bytes) -> None:
            found[path] = opened(folder, path, data)

        threads = [threading.Thread(target=read, args=item) for item in files.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == files


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Lists folders as most web servers do, and knows no ranges."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def website(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A plain web server, and the folder that it shows."""
    shown = tmp_path / "shown"
    shown.mkdir()
    handler = functools.partial(QuietHandler, directory=str(shown))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", shown
        server.shutdown()
        thread.join()


class TestWeb:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_store_on_a_plain_web_server_is_read(self, website, layout, monkeypatch):
        url, shown = website
        monkeypatch.setattr(remote, "RANGE_BYTES", 500)
        local = build_store(shown / "store", layout, SAMPLES)
        assert store_hash(open_store(f"{url}/store")) == store_hash(local)
        assert verify_store(f"{url}/store", full=True) == []

    def test_the_web_is_not_written(self, website):
        folder = RemoteFolder(f"{website[0]}/store")
        for write in (
            lambda: folder.claim("0123abcd"),
            lambda: folder.create("a", b"a", Path()),
            lambda: folder.replace("a", b"a", Path()),
            lambda: folder.remove(["a"], Path()),
            lambda: folder.make_folder("a"),
        ):
            with pytest.raises(PrebakeError, match="http:// can only be read"):
                write()

    def test_nothing_there_is_no_store(self, website):
        with pytest.raises(PrebakeError, match=r"127\.0\.0\.1.*prebake"):
            open_store(f"{website[0]}/nothing")


class TestHub:
    """`hf://`, by the Hub's own client against an imitation of the Hub."""

    @pytest.mark.parametrize("layout", ONE_QUICK)
    @pytest.mark.parametrize("revision", ["", "@main"])
    def test_a_store_in_a_dataset_repository_is_read(self, layout, revision, tmp_path):
        local = build_store(tmp_path / "hub" / "stores" / "cats", layout, SAMPLES)
        script = f"""
            from pathlib import Path
            from store_format import open_store
            from store_format.verify import store_hash, verify_store
            store = open_store("hf://datasets/me/store{revision}/stores/cats")
            print(store_hash(store), verify_store(store, full=True))
            assert store.root.sizes(["prebake.json", "none"]).keys() == {{"prebake.json"}}
            assert store.root.names("none") == []
            (Path({str(tmp_path)!r}) / "hub/stores/cats/index/new").write_bytes(b"new")
            assert "new" in store.root.names("index")
        """
        with HubServer(tmp_path / "hub") as hub:
            found = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script)],
                cwd=ROOT, capture_output=True, text=True, check=True, timeout=100,
                env={**os.environ, "PREBAKE_CACHE": str(tmp_path / "own-cache"),
                     "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")},
            )  # fmt: skip
        assert found.stdout.split() == [store_hash(local), "[]"]

    def test_offline_mode_is_told_at_once(self):
        script = """
            from store_format.errors import PrebakeError
            from store_format.remote import RemoteFolder
            try:
                RemoteFolder("hf://datasets/me/store").read("prebake.json")
            except PrebakeError as error:
                print(error)
        """
        found = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert "cannot be reached (HF_HUB_OFFLINE is set)" in found.stdout
        assert not found.stderr
