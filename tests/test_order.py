import pickle
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.order import EMPTY, BatchShape, Blocks, Order, mix, stream

BUCKETS = [(64, 64), (80, 48), (48, 80)]
SHAPES = st.builds(BatchShape, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def sample_sets(draw, min_size=1, max_size=40):
    """Sorted ids [N, 16] and a bucket [N, 2] for each."""
    ids = draw(st.sets(st.binary(min_size=16, max_size=16), min_size=min_size, max_size=max_size))
    buckets = [draw(st.sampled_from(BUCKETS)) for _ in ids]
    rows = np.frombuffer(b"".join(sorted(ids)), np.uint8).reshape(-1, 16)
    return rows, np.array(buckets, np.int32)


def numbered_ids(count):
    """Ids as the store has them, hashes: [count, 16], sorted."""
    words = mix(np.arange(2 * count, dtype=np.uint64)).astype(">u8").view(np.uint8)
    return np.array(sorted(words.reshape(-1, 16).tolist()), np.uint8)


def epoch_of(order, epoch):
    """All steps of an epoch: a list of [A or fewer, R, S]."""
    first = epoch * order.steps_per_epoch
    return [order.step(first + number) for number in range(order.steps_per_epoch)]


def members(slots):
    return slots[slots != EMPTY].tolist()


@given(sample_sets(), SHAPES, SEEDS, st.integers(0, 3))
def test_every_sample_appears_once_an_epoch(samples, shape, seed, epoch):
    order = Order(*samples, shape, seed)
    seen = Counter(sample for step in epoch_of(order, epoch) for sample in members(step))
    assert seen == Counter(range(len(samples[0])))


@given(sample_sets(), SHAPES, SEEDS)
def test_a_micro_batch_is_of_one_bucket_and_of_the_asked_shape(samples, shape, seed):
    order = Order(*samples, shape, seed)
    for step in epoch_of(order, 0):
        assert 1 <= len(step) <= shape.accumulation
        assert step.shape[1:] == (shape.world_size, shape.batch_size)
        for micro_batch in step:
            assert len({tuple(samples[1][sample]) for sample in members(micro_batch)}) == 1


@given(sample_sets(), SHAPES, SEEDS)
def test_only_the_last_micro_batch_of_a_bucket_and_the_last_step_are_short(samples, shape, seed):
    order = Order(*samples, shape, seed)
    steps = epoch_of(order, 0)
    assert [len(step) for step in steps[:-1]] == [shape.accumulation] * (len(steps) - 1)
    full = shape.batch_size * shape.world_size
    short = Counter(
        tuple(samples[1][members(micro_batch)[0]])
        for step in steps
        for micro_batch in step
        if len(members(micro_batch)) < full
    )
    counts = Counter(map(tuple, samples[1].tolist()))
    assert short == Counter({bucket: 1 for bucket, count in counts.items() if count % full})


@given(sample_sets(), SHAPES, SEEDS)
def test_a_short_micro_batch_is_spread_evenly_over_the_ranks(samples, shape, seed):
    for step in epoch_of(Order(*samples, shape, seed), 0):
        for micro_batch in step:
            counts = [len(members(rank)) for rank in micro_batch]
            assert max(counts) - min(counts) <= 1
            assert counts == sorted(counts, reverse=True)


@given(sample_sets(), SHAPES, SEEDS)
def test_the_ranks_of_a_step_have_different_samples(samples, shape, seed):
    for step in epoch_of(Order(*samples, shape, seed), 0):
        by_rank = [members(step[:, rank]) for rank in range(shape.world_size)]
        assert len(set().union(*by_rank)) == sum(map(len, by_rank))


@given(sample_sets(max_size=20), SHAPES, SEEDS, st.data())
def test_any_step_is_found_without_those_before_it(samples, shape, seed, data):
    replay = Order(*samples, shape, seed)
    num_steps = 3 * replay.steps_per_epoch
    steps = [replay.step(number) for number in range(num_steps)]
    number = data.draw(st.integers(0, num_steps - 1))
    np.testing.assert_array_equal(Order(*samples, shape, seed).step(number), steps[number])
    np.testing.assert_array_equal(replay.step(number), steps[number])  # also backwards


@given(sample_sets(), SHAPES, SEEDS)
def test_no_step_straddles_epochs(samples, shape, seed):
    order = Order(*samples, shape, seed)
    per_batch = shape.batch_size * shape.world_size
    counts = Counter(map(tuple, samples[1].tolist())).values()
    num_micro_batches = sum(-(-count // per_batch) for count in counts)
    assert order.num_micro_batches == num_micro_batches
    assert order.steps_per_epoch == -(-num_micro_batches // shape.accumulation)
    for epoch in range(3):
        assert sum(len(members(s)) for s in epoch_of(order, epoch)) == len(samples[0])


@given(sample_sets(), SHAPES, SEEDS)
def test_nothing_but_ids_buckets_seed_and_shape_plays_a_part(samples, shape, seed):
    ids, buckets = samples
    order = Order(ids, buckets, shape, seed)
    copies = Order(
        np.asfortranarray(ids.copy()), buckets.astype(np.int64), BatchShape(**vars(shape)), seed
    )
    travelled = pickle.loads(pickle.dumps(order))  # as to a spawned worker
    np.random.seed(0)  # the global stream must not matter
    for number in range(order.steps_per_epoch + 1):
        np.testing.assert_array_equal(order.step(number), copies.step(number))
        np.testing.assert_array_equal(order.step(number), travelled.step(number))


@given(sample_sets(min_size=2), SEEDS, st.data())
def test_a_dropped_sample_leaves_the_order_of_the_others_of_its_bucket(samples, seed, data):
    ids, buckets = samples
    left_out = data.draw(st.integers(0, len(ids) - 1))
    kept = np.delete(np.arange(len(ids)), left_out)
    # In one micro-batch that holds all, the order of a bucket shows by itself.
    shape = BatchShape(batch_size=len(ids))
    whole = epoch_of(Order(ids, buckets, shape, seed), 1)
    fewer = epoch_of(Order(ids[kept], buckets[kept], shape, seed), 1)
    for bucket in {tuple(buckets[k]) for k in kept}:
        ours = next(m for step in whole if tuple(buckets[(m := members(step))[0]]) == bucket)
        theirs = next(
            m for step in fewer if tuple(buckets[(m := kept[members(step)].tolist())[0]]) == bucket
        )
        assert theirs == [sample for sample in ours if sample != left_out]


def test_epochs_and_seeds_differ():
    ids, buckets = numbered_ids(64), np.full((64, 2), 64)
    orders = [Order(ids, buckets, BatchShape(4), seed) for seed in (0, 1)]
    drawn = {
        tuple(np.concatenate(epoch_of(order, epoch)).ravel())
        for order in orders
        for epoch in range(3)
    }
    assert len(drawn) == 6


def test_a_place_in_the_epoch_is_taken_by_every_sample_equally_often():
    ids, buckets = numbered_ids(8), np.full((8, 2), 64)
    order = Order(ids, buckets, BatchShape(1), seed=0)
    counts = np.zeros((8, 8))
    for epoch in range(1600):
        counts[np.arange(8), np.concatenate(epoch_of(order, epoch)).ravel()] += 1
    # 200 expected; binomial deviation sqrt(1600/8*7/8) = 13, so 70 is beyond 5 of them.
    assert abs(counts - 200).max() < 70


def test_five_samples_of_two_buckets_by_hand():
    # Wide: samples 0, 2, 4. Tall: 1, 3. Two ranks, one sample each, two micro-batches a step.
    ids = np.arange(5, dtype=np.uint8)[:, None].repeat(16, axis=1)
    buckets = np.array([(80, 48), (48, 80)] * 2 + [(80, 48)])
    order = Order(ids, buckets, BatchShape(1, world_size=2, accumulation=2), seed=7)

    # Wide fills one micro-batch and leaves one sample, tall fills one: three, so two steps.
    assert (order.num_micro_batches, order.steps_per_epoch) == (3, 2)

    # The order by the definition, in Python's own integers.
    def by_hand(word):
        z = (word + 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    keys = [int.from_bytes(bytes([n] * 8), "big") ^ int(stream(7, "samples", 0)) for n in range(5)]
    tall = sorted([1, 3], key=lambda n: by_hand(keys[n]))
    wide = sorted([0, 2, 4], key=lambda n: by_hand(keys[n]))
    filled = [tall, wide[:2], [wide[2], EMPTY]]  # buckets in the order of (width, height)
    batch_keys = [n ^ int(stream(7, "batches", 0)) for n in range(3)]
    shuffled = [filled[n] for n in sorted(range(3), key=lambda n: by_hand(batch_keys[n]))]
    expected = [[[[a], [b]] for a, b in shuffled[:2]], [[[a], [b]] for a, b in shuffled[2:]]]
    assert [step.tolist() for step in epoch_of(order, 0)] == expected


def test_a_stream_is_the_first_8_bytes_of_the_sha256_of_its_name():
    # printf 'prebake.order/1/7/samples/3' | sha256sum
    assert stream(7, "samples", 3) == 0xDE1B5254B33BF5DE


def test_mix_gives_the_published_numbers_of_splitmix64():
    # The first five outputs for the seed 1234567, as in Rosetta Code, "Pseudo-random
    # numbers/Splitmix64", from the C of Vigna, https://prng.di.unimi.it/splitmix64.c
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(5)]
    assert mix(np.array(states, np.uint64)).tolist() == published


def test_the_order_of_a_run_stays_what_it_was():
    # Written once: another order would silently change every run that is resumed.
    ids, buckets = numbered_ids(7), np.array([(64, 64), (80, 48)] * 3 + [(64, 64)])
    order = Order(ids, buckets, BatchShape(2), seed=3)
    assert [step.ravel().tolist() for step in epoch_of(order, 2)] == [
        [0, 2],
        [1, -1],
        [4, 6],
        [5, 3],
    ]


@pytest.mark.parametrize("mode", ["global", "shards"])
def test_a_million_samples_are_ordered_in_two_seconds_and_sought_at_once(mode):
    ids = np.random.default_rng(0).bytes(16_000_000)
    ids = np.frombuffer(ids, np.uint8).reshape(-1, 16)
    buckets = np.array(BUCKETS, np.int32)[np.arange(1_000_000) % 3]
    blocks = None
    if mode == "shards":  # 2500 shards of 400 samples, in blocks of 32
        shard_of = (np.arange(1_000_000) % 2500).astype(np.int32)
        names = tuple(f"{number:04d}" for number in range(2500))
        blocks = Blocks(names, np.full(2500, 64 << 20), shard_of, 2048 << 20)
    order = Order(ids, buckets, BatchShape(4), 0, blocks)
    ordered_s, sought_s = [], []
    for epoch in range(3):
        for step, times_s in ((1, ordered_s), (order.steps_per_epoch - 1, sought_s)):
            start_s = time.process_time()
            order.step(order.steps_per_epoch * epoch + step)
            times_s.append(time.process_time() - start_s)
    assert min(ordered_s) < 2
    assert min(sought_s) < 0.1


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        Order(np.zeros((0, 16), np.uint8), np.zeros((0, 2)), BatchShape(1), 0)
