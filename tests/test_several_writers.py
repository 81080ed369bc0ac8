"""Several processes bake into one store at once: nothing lost, nothing twice, the same hash."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bake_builders import LAYOUTS, assert_whole, config, draw_set, hash_of, run_bake
from store_builders import Sample, bring_to, make_manifest
from warm_bakes import WarmBakes

from precompute.bake import bake
from store_format import open_store
from store_format.folders import LocalFolder
from store_format.index import LiveIndex
from store_format.manifest import MANIFEST_NAME
from store_format.writer import StoreWriter, check_target

NUM_IMAGES = 30


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "pictures"
    draw_set(folder, {f"{i:02}.png": f"caption {i % 7}" for i in range(NUM_IMAGES - 6)})
    draw_set(folder, {f"w{i}.png": "wide" for i in range(6)}, size=(80, 48), seed=50)
    (folder / "empty.png").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def expected_hash(images: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("alone") / "store"
    run_bake(images, out)
    return hash_of(out)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WarmBakes]]:
    folder = tmp_path_factory.mktemp("servers")
    started = [WarmBakes(folder / f"log{i}") for i in range(3)]
    yield started
    for server in started:
        server.__exit__(None, None, None)


def command(images: Path, out: Path, layout: str, model: Path, worker: str) -> list[str]:
    chosen = {
        "model": str(model), "out": str(out), "format": layout, "resolution": "64",
        "bucket-step": "16", "num-workers": "1", "shard-max-seconds": "0.000001",
    } | ({"worker": worker} if worker else {})  # fmt: skip
    return ["precompute", str(images), *(p for k, v in chosen.items() for p in (f"--{k}", v))]


SOME = [(["1/2", "2/2"], True), (["", ""], False)]
ALL = [(["1/3", "2/3", "3/3"], False), (["1/3", "2/3", "3/3"], True), (["", ""], True)]


@pytest.mark.parametrize(
    ("parts", "killed"), SOME + [pytest.param(*each, marks=pytest.mark.slow) for each in ALL]
)
def test_processes_at_once_make_the_store_of_one(
    servers: list[WarmBakes], images: Path, tmp_path: Path, layout: str, expected_hash: str,
    parts: list[str], killed: bool,
) -> None:  # fmt: skip
    out = tmp_path / "store"
    commands = [command(images, out, layout, s.model, p) for s, p in zip(servers, parts)]  # noqa: B905
    runs = [server.start(arguments) for server, arguments in zip(servers, commands)]  # noqa: B905
    if killed:
        while len(list(out.glob("index/*.json"))) < 3:
            pass
        runs[0].kill(signal.SIGKILL)
    codes = [run.wait() for run in runs]
    assert codes == [-signal.SIGKILL if killed else 0, *([0] * (len(parts) - 1))], [
        server.log.read_text() for server in servers
    ]
    if killed:
        if any(parts):
            assert len(open_store(out)) < NUM_IMAGES
        assert servers[0].run(commands[0]) == 0, servers[0].log.read_text()
    assert hash_of(out) == expected_hash
    assert_whole(out)
    index = LiveIndex(out)
    assert len({commit.writer for commit in index.commits}) >= len(parts)
    assert len(index) == NUM_IMAGES
    # a whole run after them finds nothing to do, and its scan drops nothing
    again = command(images, out, layout, servers[0].model, "")
    assert servers[0].run(again) == 0
    assert "0 samples written, 30 unchanged, 0 dropped, 1 file not stored" in (
        servers[0].log.read_text()
    )


def test_parts_are_disjoint_and_together_whole(images: Path, tmp_path: Path) -> None:
    paths: list[list[str]] = []
    for i in (1, 2, 3):
        run_bake(images, tmp_path / str(i), worker=f"{i}/3")
        store = open_store(tmp_path / str(i))
        paths.append(store.index.sample_details["path"].to_pylist())
        assert (tmp_path / str(i) / f"report.{i}-of-3.jsonl").exists()
    assert all(paths)
    everyone = [path for part in paths for path in part]
    assert len(everyone) == len(set(everyone)) == NUM_IMAGES


def test_a_worker_drops_nothing(images: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / "store"
    pictures = draw_set(tmp_path / "mine", {f"{i}.png": "a" for i in range(6)})
    run_bake(pictures, out, layout)
    for gone in ("0.png", "1.png", "2.png"):
        (pictures / gone).unlink()
    for i in (1, 2):
        assert run_bake(pictures, out, layout, worker=f"{i}/2").plan.dropped == []
    assert len(open_store(out)) == 6
    assert len(run_bake(pictures, out, layout).plan.dropped) == 3
    assert len(open_store(out)) == 3


def test_what_others_commit_meanwhile_is_not_encoded_again(
    images: Path, tmp_path: Path, layout: str, expected_hash: str
) -> None:
    """A second writer runs from start to end inside of the first one's first batch."""
    out = tmp_path / "store"
    done: list[int] = []

    def let_another_run() -> bool:
        if not done and len(list(out.glob("index/*.json"))) >= 1:
            done.append(1)
            summary = run_in_thread(
                lambda: bake(config(images, out, layout, num_workers=1), say=lambda line: None)
            )
            done.append(summary.num_images_encoded)  # type: ignore[attr-defined]
        return False

    summary = bake(
        config(images, out, layout, num_workers=1, batch_size=1, shard_max_seconds=1e-6),
        say=lambda line: None,
        should_stop=let_another_run,
    )
    assert done[1] > NUM_IMAGES // 2
    assert summary.num_images_encoded + done[1] < NUM_IMAGES * 1.5
    assert summary.num_by_others > 0
    assert hash_of(out) == expected_hash
    assert_whole(out)


def run_in_thread(call: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


class TestStagingFolders:
    def test_those_of_dead_writers_go_and_those_of_living_ones_stay(self, tmp_path: Path) -> None:
        root = tmp_path / "s"
        manifest = make_manifest("zarr")
        bring_to(root, manifest, [Sample("a.png")])
        dead = root / "staging" / "00c0ffee"
        dead.mkdir(parents=True)
        (dead / "half.part").write_bytes(b"x")
        with StoreWriter(root, manifest) as first:
            assert not dead.exists()
            (first.staging / "mine.part").write_bytes(b"x")
            with StoreWriter(root, manifest) as second:
                assert second.staging != first.staging
                assert (first.staging / "mine.part").exists()
            assert (first.staging / "mine.part").exists()
        assert not (root / "staging").exists()

    def test_one_that_finds_a_store_being_made_takes_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another makes the store right before each question in turn that the first asks."""
        names, sizes = LocalFolder.names, LocalFolder.sizes
        for wait in range(2):
            root, questions = tmp_path / str(wait), count()

            def others_first(answer: Callable[..., Any]) -> Callable[..., Any]:
                def ask(*arguments: Any) -> Any:
                    if next(questions) == wait:  # noqa: B023 - called within this round
                        with StoreWriter(root, make_manifest("zarr")):  # noqa: B023
                            pass
                    return answer(*arguments)

                return ask

            monkeypatch.setattr(LocalFolder, "names", others_first(names))
            monkeypatch.setattr(LocalFolder, "sizes", others_first(sizes))
            check_target(root, make_manifest("zarr"))
            assert next(questions) > wait
            assert (root / MANIFEST_NAME).exists()

    def test_two_that_create_a_store_at_once_agree(self, tmp_path: Path) -> None:
        """Each of many rounds lets two processes race for the manifest."""
        for number in range(20):
            root = tmp_path / str(number)
            children = []
            for _ in range(2):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        with StoreWriter(root, make_manifest("zarr")):
                            code = 0
                    finally:
                        os._exit(code)
                children.append(child)
            assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
            assert (root / "prebake.json").exists()
