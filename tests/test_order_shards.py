"""The order by blocks of shards: what it has in common with the global one is asked of both."""

import hashlib
import pickle
from collections import Counter, OrderedDict
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from store_builders import Sample
from test_order import SEEDS, SHAPES, epoch_of, members, numbered_ids, sample_sets
from tiny_models import make_tiny_sd
from train_builders import (
    TALL,
    WIDE,
    Said,
    assert_same_run,
    config_for,
    run,
    some_samples,
    train_store,
)

import prebake
from store_format.errors import PrebakeError
from train.checkpoint import check_settings
from train.config import MAY_CHANGE, TrainConfig
from train.loader import Samples
from train.order import EMPTY, BatchShape, Blocks, Order, stream
from train.setup import assignment_hash, find_blocks, set_up

EPOCHS = st.integers(0, 3)


def blocks_of(shard_bytes, shard_of, block_bytes):
    """Shards named a, b, c, ..."""
    names = tuple(chr(ord("a") + number) for number in range(len(shard_bytes)))
    return Blocks(names, np.array(shard_bytes), np.array(shard_of, np.int32), block_bytes)


@st.composite
def sharded_sets(draw, max_size=40):
    """Sorted ids [N, 16], a bucket [N, 2] for each, and blocks of their shards, of 1 to 9 bytes."""
    ids, buckets = draw(sample_sets(max_size=max_size))
    shard_bytes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    shard_of = [draw(st.integers(0, len(shard_bytes) - 1)) for _ in ids]
    return ids, buckets, blocks_of(shard_bytes, shard_of, draw(st.integers(1, 30)))


def order_of(samples, shape, seed):
    ids, buckets, blocks = samples
    return Order(ids, buckets, shape, seed, blocks)


def micro_batches(order, epoch):
    """The members of each micro-batch of an epoch."""
    return [members(slots) for step in epoch_of(order, epoch) for slots in step]


def in_blocks(samples, order, seed, epoch):
    """The micro-batches of an epoch: for each its block, its members, those of earlier blocks."""
    block_of = samples[2].of_samples(seed, epoch)
    for batch in micro_batches(order, epoch):
        block = max(block_of[batch])
        yield block, batch, [sample for sample in batch if block_of[sample] < block]


# Shards in blocks


@given(sharded_sets(), SEEDS, EPOCHS)
def test_a_block_is_a_shard_or_holds_at_most_its_size(samples, seed, epoch):
    blocks = samples[2]
    block_of = blocks.of_shards(seed, epoch)
    held_bytes = np.bincount(block_of, blocks.shard_bytes)
    num_shards = np.bincount(block_of)
    assert (num_shards >= 1).all()  # so they are numbered without a gap
    assert ((held_bytes <= blocks.block_bytes) | (num_shards == 1)).all()


@given(sharded_sets(), SEEDS, EPOCHS)
def test_two_neighbouring_blocks_would_not_fit_into_one(samples, seed, epoch):
    blocks = samples[2]
    held_bytes = np.bincount(blocks.of_shards(seed, epoch), blocks.shard_bytes)
    assert (held_bytes[:-1] + held_bytes[1:] > blocks.block_bytes).all()


def test_epochs_and_seeds_gather_other_shards():
    blocks = blocks_of([1] * 12, [0], 3)
    drawn = {tuple(blocks.of_shards(seed, epoch)) for seed in (0, 1) for epoch in range(3)}
    assert len(drawn) == 6


def test_every_shard_is_first_equally_often():
    blocks = blocks_of([1] * 8, [0], 1)
    firsts = Counter(int(np.argmin(blocks.of_shards(0, epoch))) for epoch in range(1600))
    # 200 expected; binomial deviation 13, so 70 is beyond 5 of them.
    assert all(abs(firsts[shard] - 200) < 70 for shard in range(8))


# What holds for every order


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS)
def test_every_sample_appears_once_an_epoch(samples, shape, seed, epoch):
    seen = Counter(
        s for batch in micro_batches(order_of(samples, shape, seed), epoch) for s in batch
    )
    assert seen == Counter(range(len(samples[0])))


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS)
def test_a_micro_batch_is_of_one_bucket(samples, shape, seed, epoch):
    for batch in micro_batches(order_of(samples, shape, seed), epoch):
        assert len({tuple(samples[1][sample]) for sample in batch}) == 1


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS)
def test_it_has_the_steps_and_short_micro_batches_of_the_global_order(samples, shape, seed, epoch):
    order, plain = order_of(samples, shape, seed), Order(*samples[:2], shape, seed)
    assert order.num_micro_batches == plain.num_micro_batches
    assert order.steps_per_epoch == plain.steps_per_epoch
    sizes = [
        Counter((tuple(samples[1][batch[0]]), len(batch)) for batch in micro_batches(o, epoch))
        for o in (order, plain)
    ]
    assert sizes[0] == sizes[1]
    shapes = [[step.shape for step in epoch_of(o, epoch)] for o in (order, plain)]
    assert shapes[0] == shapes[1]


@given(sharded_sets(), SHAPES, SEEDS)
def test_the_ranks_of_a_step_have_different_samples_and_evenly_many(samples, shape, seed):
    for step in epoch_of(order_of(samples, shape, seed), 0):
        by_rank = [members(step[:, rank]) for rank in range(shape.world_size)]
        assert len(set().union(*by_rank)) == sum(map(len, by_rank))
        for slots in step:
            counts = [len(members(rank)) for rank in slots]
            assert max(counts) - min(counts) <= 1


@given(sharded_sets(max_size=20), SHAPES, SEEDS, st.data())
def test_a_resumed_order_is_the_rest_of_the_whole_one(samples, shape, seed, data):
    whole = order_of(samples, shape, seed)
    num_steps = 3 * whole.steps_per_epoch
    steps = [whole.step(number) for number in range(num_steps)]
    first = data.draw(st.integers(0, num_steps - 1))
    resumed = pickle.loads(pickle.dumps(order_of(samples, shape, seed)))  # as in a spawned worker
    for number in range(first, num_steps):
        np.testing.assert_array_equal(resumed.step(number), steps[number])


@given(sample_sets(), SHAPES, SEEDS, st.data())
def test_one_block_of_all_shards_is_the_global_order(samples, shape, seed, data):
    shard_of = [data.draw(st.integers(0, 3)) for _ in samples[0]]
    order = Order(*samples, shape, seed, blocks_of([1, 2, 3, 4], shard_of, 10))
    plain = Order(*samples, shape, seed)
    for number in range(2 * plain.steps_per_epoch):
        np.testing.assert_array_equal(order.step(number), plain.step(number))


# Where it reads


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS)
def test_blocks_come_one_after_the_other(samples, shape, seed, epoch):
    order = order_of(samples, shape, seed)
    blocks = [block for block, _, _ in in_blocks(samples, order, seed, epoch)]
    assert blocks == sorted(blocks)


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS)
def test_leftovers_are_few_and_the_first_of_a_block(samples, shape, seed, epoch):
    order = order_of(samples, shape, seed)
    leftovers, has_begun = Counter(), set()
    for block, batch, older in in_blocks(samples, order, seed, epoch):
        if older:
            assert block not in has_begun
            assert len(older) < shape.batch_size * shape.world_size
            leftovers[block, tuple(samples[1][batch[0]])] += 1
        else:
            has_begun.add(block)
    assert max(leftovers.values(), default=0) <= 1


@given(sharded_sets(), SHAPES, SEEDS, EPOCHS, st.data())
def test_between_two_positions_only_the_shards_of_their_blocks_are_read(
    samples, shape, seed, epoch, data
):
    """And, for leftovers, less than R x S others for each bucket of each block."""
    _, buckets, blocks = samples
    order = order_of(samples, shape, seed)
    placed = list(in_blocks(samples, order, seed, epoch))
    start = data.draw(st.integers(0, len(placed) - 1))
    stop = data.draw(st.integers(start, len(placed) - 1))
    first, last = placed[start][0], placed[stop][0]
    block_of = blocks.of_shards(seed, epoch)
    own = {shard for shard, block in enumerate(block_of) if first <= block <= last}
    others, groups = set(), set()
    for block, batch, older in placed[start : stop + 1]:
        read = {int(blocks.shard_of[sample]) for sample in batch}
        others |= read - own
        groups.add((block, tuple(buckets[batch[0]])))
        assert older or read <= own
        assert max(block_of[list(read)]) <= last  # nothing is read ahead of its block
    assert len(others) <= len(groups) * (shape.batch_size * shape.world_size - 1)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_cache_of_two_blocks_fetches_each_shard_once_an_epoch(batch_size):
    # One bucket; 40 shards of 50 samples, 6 a block, 12 in a cache that drops the least recent.
    shard_of = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 50))
    blocks = blocks_of([10] * 40, shard_of, 60)
    order = Order(numbered_ids(2000), np.full((2000, 2), 64), BatchShape(batch_size), 0, blocks)
    cache, fetched = OrderedDict(), []
    for epoch in range(3):
        fetched.append(Counter())
        for batch in micro_batches(order, epoch):
            for shard in shard_of[batch].tolist():
                if shard not in cache:
                    fetched[-1][shard] += 1
                cache[shard] = True
                cache.move_to_end(shard)
                if len(cache) > 12:
                    cache.popitem(last=False)
    assert fetched[0] == Counter(range(40))
    assert max(fetched[1].values()) == max(fetched[2].values()) == 1


def test_a_short_micro_batch_is_of_the_block_of_its_samples():
    # Four samples, each of a bucket and a shard of its own: read as the shards are.
    blocks = blocks_of([1] * 4, range(4), 1)
    buckets = np.array([(64, 64), (80, 48), (48, 80), (96, 48)])
    order = Order(numbered_ids(4), buckets, BatchShape(2), 0, blocks)
    for epoch in range(8):
        steps = [step.ravel().tolist() for step in epoch_of(order, epoch)]
        read = np.argsort(blocks.of_shards(0, epoch)).tolist()
        assert steps == [[sample, EMPTY] for sample in read]


# Worked out by hand


def by_hand(word):
    """SplitMix64 in Python's own integers."""
    z = (word + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_eight_samples_in_three_shards_by_hand():
    # Shard a holds samples 0, 1, 2 (wide) and 3 (tall), b holds 4 and 5 (wide), c holds 6 (wide)
    # and 7 (tall); a block has two shards of 10 bytes. Two ranks of one sample each.
    ids = np.arange(8, dtype=np.uint8)[:, None].repeat(16, axis=1)
    buckets = np.array([(80, 48)] * 3 + [(48, 80)] + [(80, 48)] * 3 + [(48, 80)])
    blocks = blocks_of([10, 10, 10], [0, 0, 0, 0, 1, 1, 2, 2], 20)
    order = Order(ids, buckets, BatchShape(1, world_size=2), 3, blocks)

    def drawn(purpose, word):
        return by_hand(word ^ int(stream(3, purpose, 0)))

    def sha(name):
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    assert sorted("abc", key=lambda name: drawn("shards", sha(name))) == ["c", "b", "a"]
    assert blocks.of_shards(3, epoch=0).tolist() == [1, 0, 0]

    def shuffled(samples):
        return sorted(
            samples, key=lambda n: drawn("samples", int.from_bytes(bytes([n] * 8), "big"))
        )

    # Block 0, b and c: tall 7 is left over; of wide 4, 5, 6 one is. Block 1, a: they come first.
    wide, tall = shuffled([4, 5, 6]) + shuffled([0, 1, 2]), [7, 3]
    filled = [tall, wide[:2], wide[2:4], wide[4:]]  # tall is first: buckets by (width, height)
    key = [drawn("batches", number) for number in range(4)]
    leftovers = sorted([0, 2], key=lambda number: key[number])
    expected = [filled[number] for number in [1, *leftovers, 3]]
    assert [step.ravel().tolist() for step in epoch_of(order, 0)] == expected


def test_the_order_of_a_run_stays_what_it_was():
    # Written once: another order would silently change every run that is resumed.
    buckets = np.array([(64, 64), (80, 48)] * 5)
    blocks = blocks_of([5, 6, 7, 8], np.arange(10) % 4, 13)
    order = Order(numbered_ids(10), buckets, BatchShape(2), 3, blocks)
    assert blocks.of_shards(3, epoch=2).tolist() == [0, 0, 2, 1]
    assert [step.ravel().tolist() for step in epoch_of(order, 2)] == [
        [1, 9],
        [8, 4],
        [5, 3],
        [7, -1],
        [0, 6],
        [2, -1],
    ]


# The shards of a store


def assigned(store, block_bytes=1000):
    return find_blocks(store, Samples(store), block_bytes=block_bytes)


@pytest.mark.parametrize("layout", ["zarr", "webdataset"])
def test_a_sample_is_of_its_shard_and_all_files_of_a_shard_count(tmp_path, layout):
    store = train_store(tmp_path / "s", some_samples(9, 2), layout=layout)
    blocks = assigned(store)
    assert list(blocks.names) == sorted(set(blocks.names))
    assert len(blocks.names) == 4  # of 4, 4 and 1 wide and of 2 tall samples
    for sample, shard in enumerate(blocks.shard_of):
        assert store.sample(sample).place.shard == blocks.names[shard]
    for name, num_bytes in zip(blocks.names, blocks.shard_bytes, strict=True):
        files = [tmp_path / "s" / f"{name}.tar"]
        if layout == "zarr":  # all but the arrays of a view, which training does not read
            folder = tmp_path / "s" / name
            files = [folder / "zarr.json"]
            for array in ("latents", "sample_id", "variant"):
                files += [path for path in (folder / array).rglob("*") if path.is_file()]
        assert num_bytes == sum(file.stat().st_size for file in files)


def test_a_sample_in_several_shards_is_of_that_of_its_first_variant(tmp_path):
    several = [Sample(f"{n}.png", [f"{n}"], WIDE, num_variants=3) for n in range(4)]
    store = train_store(tmp_path / "s", [*several, Sample("t.png", ["t"], TALL)])
    blocks = assigned(store)
    first = {
        row.sample_id: row.place.shard for row in store.index.iter_samples() if row.variant == 0
    }
    ours = [blocks.names[shard] for shard in blocks.shard_of]
    assert ours == [shard for _, shard in sorted(first.items())]


def named_alike():
    """Let every writer give its shards the same names."""
    return mock.patch("store_format.writer.secrets.token_hex", return_value="0" * 8)


def test_where_in_its_shard_a_sample_lies_plays_no_part(tmp_path):
    samples = some_samples(8, 0)
    with named_alike():
        stores = [
            train_store(tmp_path / "a", samples),
            train_store(tmp_path / "b", [*samples[3::-1], *samples[:3:-1]]),
        ]
    rows = [[store.sample(n).place.row for n in range(8)] for store in stores]
    assert rows[0] != rows[1]
    ours, theirs = (assigned(store) for store in stores)
    assert assignment_hash(ours) == assignment_hash(theirs)
    np.testing.assert_array_equal(ours.of_samples(1, 2), theirs.of_samples(1, 2))


def test_the_hash_tells_every_assignment_that_orders_differently():
    given = [("a", "b"), [1, 2], [0, 1, 1], 10]
    others = [
        [("a", "c"), [1, 2], [0, 1, 1], 10],
        [("a", "b"), [1, 3], [0, 1, 1], 10],
        [("a", "b"), [1, 2], [0, 0, 1], 10],
    ]
    hashes = {
        assignment_hash(Blocks(n, np.array(b), np.array(s, np.int32), size))
        for n, b, s, size in [given, given, *others]
    }
    assert len(hashes) == 4


# Runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_sd(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "s"
    train_store(root)
    return root


def settings_of(store, model, **options):
    return set_up(config_for(store, model, store.parent / "run", **options), 1).settings


def test_blocks_are_no_setting_of_a_run_in_the_global_order(store, model):
    names = TrainConfig.model_fields.keys() - MAY_CHANGE | {"world_size", "content of the store"}
    settings = settings_of(store, model, order_block_mib=7)
    assert settings.keys() == names
    assert settings["order"] == "global"
    assert "order_block_mib" not in names


def test_the_order_by_shards_is_recorded_with_what_it_depends_on(store, model):
    settings = settings_of(store, model, order="shards", order_block_mib=7)
    added = settings.items() - settings_of(store, model).items()
    assert {name for name, _ in added} == {
        "order",
        "order_block_mib",
        "assignment of samples to shards",
    }
    assert (settings["order"], settings["order_block_mib"]) == ("shards", 7)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"order": "shards"}, "order was 'global', now 'shards'"),
        ({"order": "shards"}, {}, "order was 'shards', now 'global'"),
        (
            {"order": "shards"},
            {"order": "shards", "order_block_mib": 9},
            "settings: order_block_mib was 2048, now 9. Give the same ones",
        ),
    ],
)
def test_another_order_is_refused(store, model, before, now, message):
    settings = [settings_of(store, model, **options) for options in (before, now)]
    with pytest.raises(PrebakeError, match=message):
        check_settings(*settings, store.parent / "run")


def test_the_same_samples_in_other_shards_are_refused_only_by_shards(tmp_path, store, model):
    train_store(tmp_path / "s", layout="webdataset")
    now = settings_of(tmp_path / "s", model, order="shards")
    with pytest.raises(PrebakeError, match="settings: assignment of samples to shards was '"):
        check_settings(settings_of(store, model, order="shards"), now, tmp_path)
    now = settings_of(tmp_path / "s", model)
    check_settings(settings_of(store, model), now, tmp_path)


def test_a_run_by_shards_says_so_and_goes_on_exactly(tmp_path, model):
    train_store(tmp_path / "s", some_samples(9, 3))

    def find_small_blocks(store, samples, *, block_bytes):
        assert block_bytes == 5 << 20
        return find_blocks(store, samples, block_bytes=1)  # each shard is a block

    options = {"order": "shards", "order_block_mib": 5, "batch_size": 2}
    said = Said()
    with (
        mock.patch("train.loop.draw_curve"),
        mock.patch("train.setup.find_blocks", find_small_blocks),
    ):
        run(config_for(tmp_path / "s", model, tmp_path / "whole", **options), say=said)
        run(config_for(tmp_path / "s", model, tmp_path / "two", **options), stop_after=2)
        with pytest.raises(PrebakeError, match="order was 'shards', now 'global'"):
            run(config_for(tmp_path / "s", model, tmp_path / "two", batch_size=2))
        run(config_for(tmp_path / "s", model, tmp_path / "two", **options))
    expected = "order: 4 shards in 4 blocks of up to 5 MiB; samples are shuffled within a block"
    assert expected in said
    assert_same_run(tmp_path / "whole", tmp_path / "two")


def test_the_option_is_there_and_global_is_the_default():
    text = " ".join(CliRunner().invoke(prebake.cli, ["train", "--help"]).output.split())
    assert "--order [global|shards]" in text
    assert "--order-block-mib N" in text
    config = TrainConfig(store="s", model="m", out="o", max_steps=1)
    assert (config.order, config.order_block_mib) == ("global", 2048)
    by_shards = TrainConfig(store="s", model="m", out="o", max_steps=1, order="shards")
    assert prebake.command_line(by_shards)[-2:] == ["--order", "shards"]


@pytest.mark.parametrize("option", [["--order", "other"], ["--order-block-mib", "0"]])
def test_a_wrong_order_is_a_usage_error(option):
    arguments = ["train", "s", "--model", "m", "--out", "o", "--max-steps", "1", *option]
    result = CliRunner().invoke(prebake.cli, arguments)
    assert result.exit_code == 2
    assert option[0] in result.output
