"""Small pictures, a tiny model, and bakes of them, for the tests of stage 1.

images = draw_set(tmp_path / "images", {"a.png": "a cat", "d/b.png": None})
summary = run_bake(images, tmp_path / "store", layout="zarr")
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from tiny_models import make_tiny_sd

from precompute.bake import bake
from precompute.config import BakeConfig
from precompute.summary import Summary
from store_format import open_store
from store_format.rows import SampleRow
from store_format.store import Store
from store_format.verify import store_hash, verify_store

LAYOUTS = ("zarr", "webdataset")

_folder = Path(tempfile.mkdtemp(prefix="prebake-tests-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = str(_folder / "cache")  # not the user's


@cache
def tiny_model() -> Path:
    """Make the tiny SD 1.x model once a process; tests must not change it."""
    return make_tiny_sd(_folder / "model")


def copy_model(folder: Path) -> Path:
    """Copy the tiny model, to change the copy."""
    shutil.copytree(tiny_model(), folder)
    return folder


def pixels(seed: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """Return a smooth picture [H, W, 3] uint8 that depends on `seed`; `size` is (width, height)."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3), np.uint8)
    return np.array(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))


def draw(file: Path, seed: int, size: tuple[int, int] = (64, 64)) -> Path:
    """Write the picture of `seed`, in the format that the file's name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels(seed, size))
    picture.save(file, **({"quality": 95} if file.suffix in (".jpg", ".jpeg") else {}))
    return file


def draw_set(
    folder: Path,
    captions: dict[str, str | None],
    *,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
) -> Path:
    """Draw a different picture for each name, with its caption file where it has a caption."""
    for number, (name, caption) in enumerate(captions.items()):
        file = draw(folder / name, seed + number, size)
        if caption is not None:
            file.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return folder


def config(images: Path, out: Path, layout: str = "zarr", **options: Any) -> BakeConfig:
    """Return the configuration of a bake at 64 px with the tiny model."""
    chosen = {"resolution": 64, "bucket_step": 16, "num_workers": 2} | options
    chosen["model"] = str(options.get("model") or tiny_model())
    return BakeConfig(images=images, out=out, format=layout, **chosen)


def run_bake(
    images: Path,
    out: Path,
    layout: str = "zarr",
    *,
    say: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
    **options: Any,
) -> Summary:
    """Bake, then check that the store proves itself. Nothing is flushed to the disk, for speed."""
    with mock.patch("os.fsync"):
        summary = bake(
            config(images, out, layout, **options),
            say=say,
            should_stop=should_stop,
            dry_run=dry_run,
        )
    if not dry_run and not summary.interrupted:
        assert_whole(out)
    return summary


def assert_whole(root: Path) -> None:
    """Assert that the full check of a store finds nothing and that no staged work is left."""
    assert verify_store(root, full=True) == []
    assert not (root / "staging").exists()


def hash_of(root: Path) -> str:
    return store_hash(open_store(root))


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file and folder below `folder`."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@dataclass(frozen=True)
class Baked:
    """One live sample: what the index says, and its tensors by name."""

    row: SampleRow
    tensors: dict[str, np.ndarray]

    @property
    def caption(self) -> str:
        return self.row.texts[0].caption

    @property
    def latents(self) -> np.ndarray:
        return self.tensors["latents"]

    @property
    def states(self) -> np.ndarray:
        return self.tensors["encoder_hidden_states"]


def baked(root: Path, source: str | None = None) -> dict[str, Baked]:
    """Return every live sample (of one source) by its path."""
    store = open_store(root)
    found: dict[str, Baked] = {}
    for number in range(len(store)):
        row = store.sample(number)
        if source in (None, row.source):
            batch = store.read([number])
            found[row.path] = Baked(row, {name: array[0] for name, array in batch.items()})
    return found


def reasons(summary: Summary) -> dict[str, str]:
    return {problem.path: problem.reason.value for problem in summary.problems}


def num_text_rows(store: Store) -> int:
    return len(list(store.index.iter_texts()))


def captions_of(rows: Iterable[Baked]) -> list[str]:
    return sorted(row.caption for row in rows)
