import contextlib
import os
import pickle
import resource
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from store_builders import Sample, numbers, text_key
from train_builders import TALL, TRAIN_MOMENTS, WIDE, some_samples, train_store

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.store import open_store
from train.draws import draw_dropout
from train.loader import MicroBatch, Samples, StepDataset
from train.order import BatchShape, Order
from train.readers import iterate_steps


def dataset_of(store, shape=BatchShape(2), *, rank=0, seed=0, caption_dropout=0.0):  # noqa: B008
    samples = Samples(store)
    order = Order(samples.ids, samples.buckets, shape, seed)
    return StepDataset(store, samples, order, rank=rank, seed=seed, caption_dropout=caption_dropout)


def steps_of(dataset, start, stop, num_workers=0):
    steps = iterate_steps(dataset, start, stop, num_workers=num_workers, pin_memory=False)
    with closing(steps):
        return list(steps)


def expected_latents(store, sample):
    (spec,) = store.manifest.variant_tensors
    return numbers(sample.row().latent_key, spec, store.manifest.cells(sample.bucket_px))


def expected_states(store, caption):
    (spec,) = store.manifest.text_tensors
    return numbers(text_key(caption), spec)


def assert_equal_steps(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            assert (a.step, a.sample_ids, a.bucket_px, a.num_samples) == (
                b.step,
                b.sample_ids,
                b.bucket_px,
                b.num_samples,
            )
            assert torch.equal(a.weights, b.weights)
            assert a.tensors.keys() == b.tensors.keys()
            for name, tensor in a.tensors.items():
                assert tensor.dtype == b.tensors[name].dtype
                assert torch.equal(tensor, b.tensors[name])


@pytest.mark.parametrize("layout", ["zarr", "webdataset"])
def test_each_sample_comes_with_its_own_latents_and_caption(tmp_path, layout):
    held = {s.sample_id: s for s in some_samples()}
    store = train_store(tmp_path / "s", list(held.values()), layout=layout)
    dataset = dataset_of(store)
    seen = []
    for (batch,) in steps_of(dataset, 0, 4):
        seen += batch.sample_ids
        assert batch.num_samples == len(batch.sample_ids) == len(batch.weights)
        for row, sample_id in enumerate(batch.sample_ids):
            sample = held[sample_id]
            assert batch.bucket_px == sample.bucket_px
            np.testing.assert_array_equal(
                batch.tensors["latents"][row], expected_latents(store, sample), strict=True
            )
            np.testing.assert_array_equal(
                batch.tensors["encoder_hidden_states"][row],
                expected_states(store, sample.captions[0]),
                strict=True,
            )
    assert sorted(seen) == sorted(held)  # 5 wide and 2 tall, by twos: 4 steps are one epoch


@pytest.fixture(scope="module")
def rich_store(tmp_path_factory):
    """Variants, several texts, weights: all that a draw or a lookup may get wrong."""
    samples = [
        Sample(f"{n}.png", [f"a {n}", f"b {n}"], WIDE if n % 3 else TALL, weight=1.0 + n)
        for n in range(8)
    ] + [Sample("v.png", ["v"], WIDE, num_variants=3)]
    return train_store(tmp_path_factory.mktemp("rich") / "s", samples)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(rich_store, num_workers):
    dataset = dataset_of(rich_store, BatchShape(2, 1, 2), caption_dropout=0.3)
    expected = steps_of(dataset, 0, 7)
    assert_equal_steps(steps_of(dataset, 0, 7, num_workers), expected)


@pytest.mark.parametrize("start", [1, 5, 6])
def test_it_starts_at_any_step_and_the_rest_is_the_same(rich_store, start):
    dataset = dataset_of(rich_store, BatchShape(2, 1, 2), caption_dropout=0.3)
    expected = steps_of(dataset, 0, 8)
    fresh = dataset_of(rich_store, BatchShape(2, 1, 2), caption_dropout=0.3)
    assert_equal_steps(steps_of(fresh, start, 8), expected[start:])


def test_step_a_million_comes_at_once(rich_store):
    dataset = dataset_of(rich_store)
    start_s = time.process_time()
    steps = steps_of(dataset, 1_000_000, 1_000_001)
    assert time.process_time() - start_s < 1
    assert steps[0][0].step == 1_000_000


def test_a_dropped_caption_is_the_empty_prompt_and_only_where_drawn(tmp_path):
    store = train_store(tmp_path / "s")
    captions = {s.sample_id: s.captions[0] for s in some_samples()}
    dataset = dataset_of(store, seed=3, caption_dropout=0.5)
    num_dropped = 0
    for (batch,) in steps_of(dataset, 0, 8):
        dropped = draw_dropout(3, batch.step, batch.sample_ids, 0.5).tolist()
        num_dropped += sum(dropped)
        for row, sample_id in enumerate(batch.sample_ids):
            caption = "" if dropped[row] else captions[sample_id]
            np.testing.assert_array_equal(
                batch.tensors["encoder_hidden_states"][row], expected_states(store, caption)
            )
    assert 0 < num_dropped < 14


def test_all_captions_can_be_dropped(tmp_path):
    store = train_store(tmp_path / "s")
    for (batch,) in steps_of(dataset_of(store, caption_dropout=1.0), 0, 4):
        for states in batch.tensors["encoder_hidden_states"]:
            np.testing.assert_array_equal(states, expected_states(store, ""))


def test_the_texts_of_a_sample_are_drawn_by_their_weights(tmp_path):
    # Text 1 must never come, text 2 three times as often as text 0.
    sample = Sample("a.png", ["one", "never", "three"], text_weights=[1.0, 0.0, 3.0])
    store = train_store(tmp_path / "s", [sample])
    states = [expected_states(store, caption) for caption in sample.captions]
    counts = [0, 0, 0]
    for (batch,) in steps_of(dataset_of(store), 0, 400):
        found = batch.tensors["encoder_hidden_states"][0].numpy()
        counts[next(n for n in range(3) if np.array_equal(states[n], found))] += 1
    assert counts[1] == 0
    assert abs(counts[2] - 300) < 45  # 5 deviations of sqrt(400 * 3/4 * 1/4) = 8.7


def test_the_variants_of_a_sample_take_turns_and_count_as_one_sample(tmp_path):
    sample, other = Sample("a.png", num_variants=3), Sample("b.png")
    store = train_store(tmp_path / "s", [sample, other])
    dataset = dataset_of(store, BatchShape(1))
    (spec,) = store.manifest.variant_tensors
    cells = store.manifest.cells(sample.bucket_px)
    latents = [numbers(row.latent_key, spec, cells) for row in sample.rows()]
    counts = [0, 0, 0]
    for (batch,) in steps_of(dataset, 0, 180):
        if batch.sample_ids == (sample.sample_id,):
            found = batch.tensors["latents"][0].numpy()
            counts[next(n for n in range(3) if np.array_equal(latents[n], found))] += 1
    assert sum(counts) == 90  # half of 180: an epoch is two steps
    assert min(counts) > 8  # 30 expected, 5 deviations of 4.5


def test_weights_are_those_of_the_samples(rich_store):
    weights = {row.sample_id: row.weight for row in rich_store.index.iter_samples()}
    for (batch,) in steps_of(dataset_of(rich_store), 0, 5):
        assert batch.weights.tolist() == [weights[key] for key in batch.sample_ids]
        assert batch.weights.dtype == torch.float32


def test_a_rank_without_a_sample_gets_one_of_weight_zero(tmp_path):
    # Three samples over two ranks: in the last micro-batch the second rank has none.
    samples = [Sample(f"{n}.png") for n in range(3)]
    store = train_store(tmp_path / "s", samples)
    ranks = [dataset_of(store, BatchShape(1, world_size=2), rank=rank) for rank in (0, 1)]
    steps = list(zip(*(steps_of(dataset, 0, 2) for dataset in ranks), strict=True))
    assert sorted(first.num_samples for (first,), _ in steps) == [1, 2]
    for (first,), (second,) in steps:
        assert first.num_samples == second.num_samples
        assert first.weights.tolist() == [1.0]
        if first.num_samples == 1:
            assert second.weights.tolist() == [0.0]
            assert second.sample_ids == first.sample_ids
        else:
            assert second.weights.tolist() == [1.0]
            assert second.sample_ids != first.sample_ids


def test_ranks_share_the_bucket_and_together_see_every_sample_once(rich_store):
    ranks = [dataset_of(rich_store, BatchShape(1, 3, 2), rank=rank) for rank in range(3)]
    num_steps = ranks[0]._order.steps_per_epoch
    seen = []
    for batches in zip(*(steps_of(dataset, 0, num_steps) for dataset in ranks), strict=True):
        for of_ranks in zip(*batches, strict=True):
            assert len({batch.bucket_px for batch in of_ranks}) == 1
            seen += [key for b in of_ranks if b.weights.sum() > 0 for key in b.sample_ids]
    assert sorted(seen) == sorted(set(rich_store.sample_ids))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bfloat16_comes_as_bfloat16(tmp_path, num_workers):
    sample = Sample("a.png")
    store = train_store(tmp_path / "s", [sample], dtype="bfloat16")
    ((batch,),) = steps_of(dataset_of(store), 0, 1, num_workers)
    latents = batch.tensors["latents"]
    assert latents.dtype == torch.bfloat16
    raw = expected_latents(store, sample)  # the upper half of each float32
    exact = (raw.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(latents[0].float(), exact)


def test_moments_come_as_stored(tmp_path):
    store = train_store(tmp_path / "s", tensors=TRAIN_MOMENTS)
    ((batch,),) = steps_of(dataset_of(store), 0, 1)
    assert set(batch.tensors) == {"latents_mean", "latents_std", "encoder_hidden_states"}
    for spec in store.manifest.variant_tensors:
        row = store.sample(store.row_of(batch.sample_ids[0]))
        stored = numbers(row.latent_key, spec, store.manifest.cells(row.bucket_px))
        np.testing.assert_array_equal(batch.tensors[spec.name][0], stored)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_damaged_shard_is_one_line_and_no_hang(tmp_path, num_workers):
    store = train_store(tmp_path / "s")
    place = store.sample(3).place
    (shard,) = (s for s in store.index.shards.values() if s.name == place.shard)
    path = max((Path(store.root.at(f.path)) for f in shard.files), key=lambda p: p.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[place.offsets[0] + 7] ^= 1
    path.write_bytes(damaged)
    before = children()
    with pytest.raises(DamagedStoreError, match="crc32c of the latents") as caught:
        steps_of(dataset_of(open_store(store.root)), 0, 4, num_workers)
    assert "\n" not in str(caught.value)
    assert "prebake store verify" in str(caught.value)
    assert children() == before  # although `caught` holds the frames of the loader


def test_closing_ends_the_workers(rich_store):
    before = children()
    steps = iterate_steps(dataset_of(rich_store), 0, 500, num_workers=2, pin_memory=False)
    next(steps)
    workers = children() - before
    assert len(workers) == 2
    steps.close()
    assert not workers & children()


def test_workers_leave_signals_to_the_training_process(rich_store):
    steps = iterate_steps(dataset_of(rich_store), 0, 40, num_workers=1, pin_memory=False)
    with closing(steps):
        before = children()
        first = next(steps)
        for worker in children() - before:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        assert [step[0].step for step in [first, *steps]] == list(range(40))


def test_a_killed_worker_is_one_line_and_no_hang(rich_store):
    steps = iterate_steps(dataset_of(rich_store), 0, 500, num_workers=2, pin_memory=False)
    with closing(steps):
        before = children()
        next(steps)
        for worker in children() - before:
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(PrebakeError, match=r"has ended \(exit code -9\).*--num-workers 0"):
            list(steps)


def test_workers_end_with_the_training_process(rich_store):
    """Killed, so that it cannot end them."""
    ready, tell = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        steps = iterate_steps(dataset_of(rich_store), 0, 500, num_workers=2, pin_memory=False)
        next(steps)
        os.write(tell, " ".join(map(str, children())).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(trainer, 0)
    workers = list(map(int, os.read(ready, 100).split()))
    assert len(workers) == 2
    deadline_s = time.monotonic() + 10
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.close(ready)
    os.close(tell)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_error_of_the_program_shows_where_in_the_worker(rich_store, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(StepDataset, "read", fail)
    with pytest.raises(RuntimeError, match=r"(?s)reads the store:.*in fail\n.*in the middle"):
        steps_of(dataset_of(rich_store), 0, 4, num_workers=1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_steps_that_are_held_do_not_change(rich_store, num_workers):
    """There are places for far fewer."""
    dataset = dataset_of(rich_store)
    assert_equal_steps(steps_of(dataset, 0, 60, num_workers), steps_of(dataset, 0, 60))


def test_a_slow_worker_does_not_hold_up_the_other(rich_store, tmp_path, monkeypatch):
    """It is asked for fewer steps, and all still come in their order."""
    dataset = dataset_of(rich_store)
    expected = steps_of(dataset, 0, 60)
    read, parent, slow = StepDataset.read, os.getpid(), tmp_path / "slow"

    def read_slowly_in_one(*args):
        with contextlib.suppress(FileExistsError):
            slow.mkdir()  # by whoever comes first
            (slow / str(os.getpid())).touch()
        if (slow / str(os.getpid())).exists():
            with (tmp_path / "reads").open("a") as reads:
                reads.write(".")
            time.sleep(0.03)
        assert os.getpid() != parent
        return read(*args)

    monkeypatch.setattr(StepDataset, "read", read_slowly_in_one)
    with closing(iterate_steps(dataset, 0, 60, num_workers=2, pin_memory=False)) as steps:
        for theirs, ours in zip(steps, expected, strict=True):  # held no longer than in training
            assert_equal_steps([theirs], [ours])
    assert len((tmp_path / "reads").read_text()) < 26  # 30 if they took turns


def children():
    """The process ids of this process's children that still run."""
    pids = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            pids |= set(map(int, (thread / "children").read_text().split()))
    return pids


def test_long_accumulation_needs_no_more_files_than_short(tmp_path):
    samples = [Sample(f"{n}.png", bucket_px=(48, 48)) for n in range(64)]
    dataset = dataset_of(train_store(tmp_path / "s", samples), BatchShape(1, 1, 64))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 60, limits[1]))
    try:
        steps = steps_of(dataset, 0, 4, num_workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [len(step) for step in steps] == [64] * 4


def test_a_dataset_travels_to_a_spawned_worker(rich_store):
    dataset = dataset_of(rich_store, caption_dropout=0.3)
    expected = steps_of(dataset, 0, 5)
    assert_equal_steps(steps_of(pickle.loads(pickle.dumps(dataset)), 0, 5), expected)


def test_a_micro_batch_travels_whole():
    batch = MicroBatch(
        step=3,
        sample_ids=("ab",),
        bucket_px=(64, 48),
        tensors={
            "latents": torch.randn(1, 4, 6, 8, dtype=torch.bfloat16),
            "mask": torch.ones(1, 2, dtype=torch.uint8),
        },
        weights=torch.tensor([2.5]),
        num_samples=1,
    )
    assert_equal_steps([[pickle.loads(pickle.dumps(batch))]], [[batch]])


def test_page_locked_memory_is_asked_for_each_tensor(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    tensors = {"a": torch.ones(1), "b": torch.zeros(2)}
    batch = MicroBatch(0, ("x",), (8, 8), tensors, torch.ones(1), 1)
    from torch.utils.data._utils.pin_memory import pin_memory

    (found,) = pin_memory([batch])
    assert pinned == list(tensors.values())
    assert isinstance(found, MicroBatch)


def test_an_empty_store_is_refused(tmp_path):
    with pytest.raises(PrebakeError, match=r"holds no samples\. Bake some images into it first"):
        Samples(train_store(tmp_path / "s", []))
