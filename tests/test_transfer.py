"""`push` and `pull`: a store arrives whole or not at all, and only what is missing travels."""

import contextlib
import random
import secrets
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from s3_server import FlakyProxy, S3Server, s3
from store_builders import LAYOUTS, Sample, assert_holds, bring_to, build_store, make_manifest

from store_format import cache as cache_module
from store_format import connection, open_store
from store_format.cache import ShardCache
from store_format.errors import DamagedStoreError, NotAStoreError, OtherBakeError, PrebakeError
from store_format.folders import Folder, LocalFolder, folder_of
from store_format.remote import RemoteFolder
from store_format.transfer import COMING_NAME, pull, push
from store_format.verify import live_shards, store_hash, verify_store
from store_format.writer import StoreWriter

__all__ = ["s3"]  # a fixture
ONE_QUICK = ["webdataset", pytest.param("zarr", marks=pytest.mark.slow)]
SAMPLES = [Sample(f"{number}.png", [f"caption {number % 3}"]) for number in range(10)]
EDITED = [Sample(f"{number}.png", ["another caption"], image=1) for number in range(4)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_default", ShardCache(tmp_path / "cache", 10 << 20))


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/store"


@pytest.fixture
def s3_url(s3: S3Server) -> Iterator[str]:
    with s3.environment():
        yield f"s3://bucket/{secrets.token_hex(4)}/store"


def files_of(folder: Folder) -> dict[str, bytes]:
    """Return all files of a store but for those of its writers."""
    found, open_folders = {}, [""]
    while open_folders:
        at = open_folders.pop()
        for name in folder.names(at):
            path = f"{at}/{name}".lstrip("/")
            if folder.sizes([path]):
                found[path] = folder.read(path)
            else:
                open_folders.append(path)
    return {p: data for p, data in found.items() if p not in ("writer.lock", "index/.keep")}


def live_bytes(location: Path | str) -> int:
    return sum(file.bytes for shard in live_shards(open_store(location)) for file in shard.files)


def edited(root: Path, layout: str, samples_per_commit: int = 1000) -> None:
    """Change half of the samples and drop two; shards with dead rows are what remains."""
    bring_to(
        root, make_manifest(layout), [*EDITED, *SAMPLES[4:8]], samples_per_commit=samples_per_commit
    )


@pytest.mark.parametrize("through", ["memory", "s3", "local"])
def test_a_store_travels_there_and_back(through, layout, tmp_path, request, url):
    target = {"memory": url, "local": str(tmp_path / "target")}.get(through)
    target = target or request.getfixturevalue("s3_url")
    local = build_store(tmp_path / "a", layout, SAMPLES, samples_per_commit=4)
    sent = push(tmp_path / "a", target)
    assert sent.num_samples == 10
    assert files_of(folder_of(target)) == files_of(local.root)
    assert store_hash(open_store(target)) == store_hash(local)
    assert verify_store(target, full=True) == []
    pull(target, tmp_path / "b")
    assert files_of(LocalFolder(tmp_path / "b")) == files_of(local.root)
    assert verify_store(tmp_path / "b", full=True) == []
    assert_holds(open_store(tmp_path / "b"), SAMPLES)
    assert not list((tmp_path / "b").glob("staging/*"))


def test_a_pulled_store_can_be_added_to_and_pushed_again(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES[:6])
    push(tmp_path / "a", url)
    pull(url, tmp_path / "b")
    bring_to(tmp_path / "b", make_manifest(layout), SAMPLES)
    push(tmp_path / "b", url)
    pull(url, tmp_path / "a")
    assert_holds(open_store(tmp_path / "a"), SAMPLES)


def test_what_is_there_is_not_sent_again(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES[:6])
    first = push(tmp_path / "a", url)
    assert first.num_bytes > live_bytes(tmp_path / "a")
    assert first.num_bytes_there == 0
    again = push(tmp_path / "a", url)
    assert (again.num_files, again.num_bytes) == (0, 0)
    assert again.num_bytes_there == live_bytes(tmp_path / "a")
    before = live_bytes(tmp_path / "a")
    bring_to(tmp_path / "a", make_manifest(layout), SAMPLES)
    more = push(tmp_path / "a", url)
    assert more.num_samples == 10
    assert more.num_bytes_there == before
    assert 0 < more.num_bytes < first.num_bytes + 5000
    assert store_hash(open_store(url)) == store_hash(open_store(tmp_path / "a"))


def test_progress_adds_up_to_the_live_bytes(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES)
    for _ in ("sent", "there"):
        told: list[int] = []
        push(tmp_path / "a", url, told.append)
        assert sum(told) == live_bytes(tmp_path / "a")
        assert len(told) > 2


def test_dead_shards_stay_behind(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES[:4])  # one shard, all of whose samples change
    edited(tmp_path / "a", layout)
    store = open_store(tmp_path / "a")
    live = {shard.name for shard in live_shards(store) if shard.kind == "samples"}
    assert live < {name for name, shard in store.index.shards.items() if shard.kind == "samples"}
    push(tmp_path / "a", url)
    files = files_of(RemoteFolder(url))
    for name in store.index.shards.keys() - {shard.name for shard in live_shards(store)}:
        assert not [path for path in files if path.startswith((f"{name}/", f"{name}.tar"))]
    assert verify_store(url, full=False) == []
    assert store_hash(open_store(url)) == store_hash(store)


class Killed(BaseException):
    """As if the process had been killed there."""


@contextlib.contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """End the process, so to say, before one of the changes that follow; list all of them."""
    steps: list[str] = []
    call_all = connection.Connection.call_all

    def counting(self, method, calls):
        if method in ("pipe_file", "put_file", "rm_file"):
            if len(steps) >= step:
                raise Killed
            steps.append(method)
        return call_all(self, method, calls)

    with monkeypatch.context() as patch:
        patch.setattr(connection.Connection, "call_all", counting)
        patch.setattr("store_format.transfer.SHARDS_AHEAD", 0)
        with contextlib.suppress(Killed):
            yield steps


@pytest.mark.parametrize("layout", ONE_QUICK)
def test_killed_at_any_instant_a_new_store_is_none_or_whole(layout, tmp_path, monkeypatch):
    local = build_store(tmp_path / "a", layout, SAMPLES[:4], samples_per_commit=2)
    edited(tmp_path / "a", layout, samples_per_commit=4)
    expected = store_hash(open_store(local.root))
    seen = set()
    for step in range(1000):
        url = f"memory://{secrets.token_hex(4)}/store"
        with killed_at(step, monkeypatch) as steps:
            push(tmp_path / "a", url)
        try:
            store = open_store(url)
        except NotAStoreError:
            seen.add("none")
        else:
            seen.add("whole")
            assert store_hash(store) == expected
            assert verify_store(url, full=False) == []
        finished = len(steps) < step or step == 999
        push(tmp_path / "a", url)
        assert store_hash(open_store(url)) == expected
        assert COMING_NAME not in RemoteFolder(url).names()
        if finished:
            break
    assert seen == {"none", "whole"}
    assert 10 < step < 900


@pytest.mark.parametrize("layout", ONE_QUICK)
def test_killed_at_any_instant_a_store_that_grows_is_at_one_of_its_commits(
    layout, tmp_path, monkeypatch
):
    build_store(tmp_path / "a", layout, SAMPLES[:4], samples_per_commit=2)
    shutil.copytree(tmp_path / "a", tmp_path / "before")
    edited(tmp_path / "a", layout, samples_per_commit=3)  # of which much is dead soon:
    once_more = [Sample(f"{number}.png", ["the third caption"], image=2) for number in range(4)]
    bring_to(tmp_path / "a", make_manifest(layout), [*once_more, *SAMPLES[4:8]])
    expected = store_hash(open_store(tmp_path / "a"))
    hashes = set()
    for step in range(1000):
        url = f"memory://{secrets.token_hex(4)}/store"
        push(tmp_path / "before", url)
        with killed_at(step, monkeypatch) as steps:
            push(tmp_path / "a", url)
        assert verify_store(url, full=False) == []
        hashes.add(store_hash(open_store(url)))  # reads all, and checks it
        finished = len(steps) < step
        push(tmp_path / "a", url)
        assert store_hash(open_store(url)) == expected
        if finished:
            break
    assert store_hash(open_store(tmp_path / "before")) in hashes
    assert expected in hashes
    assert len(hashes) >= 3  # some commit between


def test_damage_at_the_origin_is_named_and_nothing_appears(layout, tmp_path, url):
    store = build_store(tmp_path / "a", layout, SAMPLES)
    file = max((f for s in live_shards(store) for f in s.files), key=lambda file: file.bytes)
    path = tmp_path / "a" / file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for target in (url, str(tmp_path / "b")):
        with pytest.raises(DamagedStoreError, match=rf"{path}: sha256 differs from the index"):
            push(tmp_path / "a", target)
        with pytest.raises(NotAStoreError):
            open_store(target)
        assert file.path not in files_of(folder_of(target))
    path.unlink()
    with pytest.raises(DamagedStoreError, match=rf"{path} is missing"):
        push(tmp_path / "a", url)


def test_damage_at_a_remote_origin_is_named_too(layout, tmp_path, url):
    store = build_store(tmp_path / "a", layout, SAMPLES)
    push(tmp_path / "a", url)
    file = max((f for s in live_shards(store) for f in s.files), key=lambda file: file.bytes)
    RemoteFolder(url).replace(file.path, bytes(file.bytes), tmp_path)
    with pytest.raises(DamagedStoreError, match=rf"{url}/{file.path}: sha256 differs"):
        pull(url, tmp_path / "b")
    RemoteFolder(url).remove([file.path], tmp_path)
    with pytest.raises(DamagedStoreError, match=rf"{url}/{file.path} is missing"):
        pull(url, tmp_path / "b")
    with pytest.raises(NotAStoreError):
        open_store(tmp_path / "b")


def test_a_file_of_another_size_is_replaced(layout, tmp_path, url):
    store = build_store(tmp_path / "a", layout, SAMPLES)
    push(tmp_path / "a", url)
    file = live_shards(store)[0].files[0]
    RemoteFolder(url).replace(file.path, b"half", tmp_path)
    sent = push(tmp_path / "a", url)
    assert (sent.num_files, sent.num_bytes) == (1, file.bytes)
    assert verify_store(url, full=True) == []


def test_pull_replaces_files_of_the_right_size_with_other_bytes(layout, tmp_path, url):
    store = build_store(tmp_path / "a", layout, SAMPLES)
    push(tmp_path / "a", url)
    pull(url, tmp_path / "b")
    for file in (live_shards(store)[0].files[0], live_shards(store)[-1].files[-1]):
        (tmp_path / "b" / file.path).write_bytes(bytes(file.bytes))
    assert pull(url, tmp_path / "b").num_files == 2
    assert verify_store(tmp_path / "b", full=True) == []


def test_a_lost_view_comes_back(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES)
    push(tmp_path / "a", url)
    folder = RemoteFolder(url)
    views = ["shards.txt"] if layout == "webdataset" else ["zarr.json", "samples/zarr.json"]
    views += [path for path in files_of(folder) if "/live/" in path]
    folder.remove(views, tmp_path)
    assert verify_store(url, full=True) != []
    push(tmp_path / "a", url)
    assert verify_store(url, full=True) == []


def test_another_bake_is_refused(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES)
    push(tmp_path / "a", url)
    bring_to(tmp_path / "other", make_manifest(layout, resolution=128), SAMPLES)
    before = files_of(RemoteFolder(url))
    with pytest.raises(OtherBakeError, match=rf"{url} holds another bake: config\.resolution"):
        push(tmp_path / "other", url)
    assert files_of(RemoteFolder(url)) == before


def test_of_two_bakes_sent_to_one_place_at_once_one_is_refused(layout, tmp_path, url):
    bring_to(tmp_path / "a", make_manifest(layout), SAMPLES)
    bring_to(tmp_path / "other", make_manifest(layout, resolution=128), SAMPLES)
    RemoteFolder(url).create(COMING_NAME, (tmp_path / "a/prebake.json").read_bytes(), tmp_path)
    with pytest.raises(OtherBakeError, match="holds another bake"):
        push(tmp_path / "other", url)
    with pytest.raises(PrebakeError, match="not empty"), StoreWriter(url, make_manifest(layout)):
        pass
    push(tmp_path / "a", url)
    assert verify_store(url, full=True) == []


@pytest.mark.parametrize("wait", range(4))
def test_one_that_finds_a_copy_being_made_takes_part(layout, tmp_path, monkeypatch, wait):
    """Another copies the store right before one of the questions about the target."""
    build_store(tmp_path / "a", layout, SAMPLES)
    target, questions = tmp_path / "b", count()

    def others_first(answer):
        def ask(folder, *arguments):
            if folder.path == target and next(questions) == wait:
                push(tmp_path / "a", target)
            return answer(folder, *arguments)

        return ask

    for name in ("names", "sizes"):
        monkeypatch.setattr(LocalFolder, name, others_first(getattr(LocalFolder, name)))
    push(tmp_path / "a", target)
    assert next(questions) > wait
    assert verify_store(target, full=True) == []


def test_a_place_with_other_things_is_refused(layout, tmp_path):
    build_store(tmp_path / "a", layout, SAMPLES)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "tom.jpg").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    for target in ("photos", "file"):
        with pytest.raises(NotAStoreError, match=rf"{target} is not empty and not a prebake store"):
            push(tmp_path / "a", tmp_path / target)
    with pytest.raises(NotAStoreError):
        push(tmp_path / "photos", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_commits_of_others_are_not_buried(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES[:4])
    push(tmp_path / "a", url)
    bring_to(url, make_manifest(layout), SAMPLES)  # somebody else adds there
    expected = store_hash(open_store(url))
    with pytest.raises(PrebakeError, match=rf"{url} holds commit \d+-\w+, which .*/a does not"):
        push(tmp_path / "a", url)
    assert store_hash(open_store(url)) == expected
    pull(url, tmp_path / "a")
    assert store_hash(open_store(tmp_path / "a")) == expected


def test_a_compacted_store_replaces_the_commits_of_before(layout, tmp_path, url):
    build_store(tmp_path / "a", layout, SAMPLES[:8], samples_per_commit=2)
    push(tmp_path / "a", url)
    with StoreWriter(tmp_path / "a", make_manifest(layout)) as writer:
        writer.become_exclusive()
        writer.compact()
    bring_to(tmp_path / "a", make_manifest(layout), SAMPLES)
    push(tmp_path / "a", url)
    assert store_hash(open_store(url)) == store_hash(open_store(tmp_path / "a"))
    assert verify_store(url, full=True) == []


def test_an_empty_store_travels(layout, tmp_path, url):
    with StoreWriter(tmp_path / "a", make_manifest(layout)):
        pass
    assert push(tmp_path / "a", url).num_samples == 0
    pull(url, tmp_path / "b")
    assert len(open_store(tmp_path / "b").index.commits) == 0
    assert (tmp_path / "b" / "index").is_dir()


def test_over_a_network_that_fails_half_of_the_time(s3, s3_url, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(connection, "MAX_DELAY_S", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    local = build_store(tmp_path / "a", "webdataset", SAMPLES)
    coin = random.Random(3)
    with (
        FlakyProxy(s3.port, lambda *_: coin.choice(["503", "lost", None, None])) as proxy,
        s3.environment(endpoint=proxy.endpoint),
    ):
        push(tmp_path / "a", s3_url)
        pull(s3_url, tmp_path / "b")
        assert proxy.num_faults > 0.3 * proxy.num_requests > 10
    assert files_of(LocalFolder(tmp_path / "b")) == files_of(local.root)


def test_a_copy_without_dead_shards_is_whole_and_stays_so(tmp_path):
    """Dead shards are not sent; neither verify nor the next writer misses them."""
    manifest = make_manifest("zarr")
    before = [Sample(f"{i}.png", [f"c{i}"]) for i in range(4)]
    bring_to(tmp_path / "s", manifest, before, rows_per_shard=4)
    after = [Sample(f"{i}.png", [f"c{i}"], image=1) for i in range(4)]
    bring_to(tmp_path / "s", manifest, after, rows_per_shard=4)
    push(tmp_path / "s", tmp_path / "copy")
    assert verify_store(tmp_path / "copy", full=True) == []
    dead = open_store(tmp_path / "s").index.shards.keys() - {
        shard.name for shard in live_shards(open_store(tmp_path / "copy"))
    }
    assert dead
    with StoreWriter(tmp_path / "copy", manifest) as writer:
        writer.tidy()
    assert verify_store(tmp_path / "copy", full=True) == []
    assert not any((tmp_path / "copy" / name).exists() for name in dead)


@pytest.mark.parametrize("inside", ["", "sub", "samples/x"])
def test_a_store_does_not_travel_into_itself(tmp_path, inside):
    root = tmp_path / "s"
    build_store(root, "zarr", [Sample("a.png")])
    before = sorted(root.rglob("*"))
    for origin, target in ((root, root / inside), (tmp_path / "s/../s", root / inside)):
        with pytest.raises(PrebakeError, match="one lies in the other"):
            push(str(origin), str(target))
        with pytest.raises(PrebakeError, match="one lies in the other"):
            pull(str(origin), str(target))
    assert sorted(root.rglob("*")) == before
