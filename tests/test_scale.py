"""What a store of many samples costs: time and memory to open it, and to train from it.

Times are processor times, so that they hold on a busy machine too. Memory is counted in whole
processes, imports included: about 105 MiB of them are Python, numpy and pyarrow.
"""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from benchmarks.disk_bytes import measure
from large_stores import build_large_store
from store_builders import LAYOUTS, Sample, build_store

from store_format import open_store
from train.loader import Samples, StepDataset
from train.order import BatchShape, Order
from train.setup import content_hash

CHECKOUT = Path(__file__).parent.parent
WORKER_MIB = 50  # that a loader's worker holds for itself


@dataclass(frozen=True)
class Size:
    num_samples: int
    open_s: float
    open_mib: int
    order_s: float


SIZES = [
    pytest.param(Size(100_000, open_s=1.5, open_mib=190, order_s=0.5), id="100k"),
    pytest.param(
        Size(1_000_000, open_s=5.0, open_mib=480, order_s=2.0), id="1M", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=SIZES)
def size(request):
    return request.param


@pytest.fixture(scope="module", params=LAYOUTS)
def root(request, size, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / request.param
    build_large_store(folder, request.param, size.num_samples)
    return folder


@pytest.fixture(scope="module")
def store(root):
    return open_store(root)


@pytest.fixture(scope="module")
def dataset(store):
    samples = Samples(store)
    order = Order(samples.ids, samples.buckets, BatchShape(4, accumulation=2), seed=0)
    return StepDataset(store, samples, order, rank=0, seed=0, caption_dropout=0.1)


OPEN = """
import json, sys, time
from store_format import open_store
start_s = time.process_time()
store = open_store(sys.argv[1])
seconds = time.process_time() - start_s
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
assert "torch" not in sys.modules
print(json.dumps({"rows": len(store), "s": seconds, "kib": int(status["VmHWM"].split()[0])}))
"""


def test_opening_is_quick_and_small(root, size):
    found = json.loads(run_python(OPEN, root))
    assert found["rows"] == size.num_samples
    assert found["s"] < size.open_s
    assert found["kib"] / 1024 < size.open_mib


def test_the_first_step_and_any_other_come_at_once(store, size):
    start_s = time.process_time()
    samples = Samples(store)
    order = Order(samples.ids, samples.buckets, BatchShape(4), seed=0)
    first = order.step(0)
    assert time.process_time() - start_s < size.order_s
    assert first.shape == (1, 1, 4)
    for step in np.linspace(0, order.steps_per_epoch - 1, 20, dtype=int).tolist():
        start_s = time.process_time()
        order.step(step)
        assert time.process_time() - start_s < 0.1


TRAIN = """
import gc, multiprocessing, sys
from contextlib import closing
from pathlib import Path
from store_format import open_store
from train.loader import Samples, StepDataset
from train.order import BatchShape, Order
from train.readers import iterate_steps

store = open_store(sys.argv[1])
samples = Samples(store)
order = Order(samples.ids, samples.buckets, BatchShape(4, accumulation=2), seed=0)
dataset = StepDataset(store, samples, order, rank=0, seed=0, caption_dropout=0.1)
objects = [[] for _ in range(2_000_000)]  # as many as a trainer's libraries make
start = order.steps_per_epoch - 20  # the next epoch begins meanwhile
with closing(iterate_steps(dataset, start, start + 200, num_workers=1, pin_memory=False)) as steps:
    read = [next(steps) for _ in range(50)]
    gc.collect()
    read += [next(steps) for _ in range(50)]
    (worker,) = multiprocessing.active_children()
    lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
assert [batch.step for (batch, *_) in read] == list(range(start, start + 100))
print(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")))
"""


def test_a_forked_worker_shares_what_there_was_before_it(root):
    assert int(run_python(TRAIN, root)) / 1024 < WORKER_MIB


def run_python(script, *arguments):
    """What a script prints, in a process that has done nothing else."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, check=True, stdout=-1).stdout


@pytest.mark.parametrize("size", SIZES[:1], indirect=True)
@pytest.mark.parametrize("root", LAYOUTS[:1], indirect=True)
def test_a_spawned_process_reads_the_same(dataset):
    requests = [dataset.request(step) for step in range(3)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.starmap(read_arrays, [(dataset, request) for request in requests])
        pool.close()
        pool.join()
    for request, (ids, arrays) in zip(requests, found, strict=True):
        expected_ids, expected = read_arrays(dataset, request)
        assert ids == expected_ids
        for name, array in expected.items():
            np.testing.assert_array_equal(arrays[name], array, strict=True)


def read_arrays(dataset, request):
    (batch, _) = dataset.read(request)
    return batch.sample_ids, {name: tensor.numpy() for name, tensor in batch.tensors.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_content_hash_is_that_of_keys_and_weights_one_by_one(tmp_path, layout):
    samples = [
        Sample(f"{n}.png", [f"{n} {t}" for t in range(1 + n % 3)], num_variants=1 + n % 2, weight=n)
        for n in range(10)
    ]
    store = build_store(tmp_path / "s", layout, samples)
    bake = store.manifest.model_dump(mode="json", exclude={"layout"})
    digest = hashlib.sha256(json.dumps(bake, sort_keys=True).encode())
    rows = list(store.index.iter_samples())
    for row in rows:
        digest.update(bytes.fromhex(row.sample_id))
    for row in rows:
        digest.update(bytes.fromhex(row.latent_key))
    for row in rows:
        digest.update(len(row.texts).to_bytes(4, "little"))
        for text in row.texts:
            digest.update(bytes.fromhex(text.text_key))
    digest.update(np.array([text.weight for row in rows for text in row.texts], "<f8").tobytes())
    digest.update(np.array([row.weight for row in rows], "<f8").tobytes())
    assert content_hash(store) == digest.hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_on_disk_are_those_that_the_format_works_out(tmp_path, layout):
    found = measure(tmp_path / "s", layout, num_samples=200, rows_per_shard=100)
    assert abs(found["times_worked_count"] - 1) < 0.02
    assert found["overhead"] < {"zarr": 0.002, "webdataset": 0.025}[layout]
