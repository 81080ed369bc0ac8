import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.draws import _encode, draw_dropout, draw_noise, draw_timesteps, generator

IDS = ["00ff", "1234", "abcd", "beef"]
KEYS = st.lists(st.integers() | st.text() | st.binary(), max_size=4)


@given(KEYS, KEYS)
def test_different_keys_are_never_encoded_alike(first, second):
    same = [(type(k), k) for k in first] == [(type(k), k) for k in second]
    assert (_encode(first) == _encode(second)) == same


def test_a_key_is_encoded_as_type_length_and_content():
    assert _encode([7, "é", b"\x00"]) == (
        b"i\x01\0\0\0\0\0\0\0" + b"7s\x02\0\0\0\0\0\0\0" + b"\xc3\xa9b\x01\0\0\0\0\0\0\0" + b"\x00"
    )


def test_the_generator_is_seeded_with_the_first_8_bytes_of_the_sha256_of_its_key():
    digest = hashlib.sha256(_encode([3, "noise", 5, "00ff"])).digest()
    expected = int.from_bytes(digest[:8], "little")
    assert generator(3, "noise", 5, "00ff").initial_seed() == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, "ab", "c"), (0, "a", "bc")), ((0, "a", 1), (0, "a", "1")), ((0, "a"), (1, "a"))],
)
def test_keys_that_read_alike_give_different_streams(first, second):
    drawn = [torch.randn(8, generator=generator(*key)) for key in (first, second)]
    assert not torch.equal(*drawn)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_a_sample_draws_the_same_in_any_batch(order, size):
    chosen = list(order)[:size]
    ids = [IDS[i] for i in chosen]
    assert torch.equal(draw_noise(1, 9, ids, (4, 6, 6)), draw_noise(1, 9, IDS, (4, 6, 6))[chosen])
    assert torch.equal(draw_timesteps(1, 9, ids, 1000), draw_timesteps(1, 9, IDS, 1000)[chosen])
    assert torch.equal(draw_dropout(1, 9, ids, 0.5), draw_dropout(1, 9, IDS, 0.5)[chosen])


def test_seed_step_and_sample_each_change_the_noise():
    drawn = [
        draw_noise(seed, step, [sample_id], (4, 8, 8))
        for seed, step, sample_id in [(0, 0, "aa"), (1, 0, "aa"), (0, 1, "aa"), (0, 0, "ab")]
    ]
    for first in range(4):
        for second in range(first):
            assert not torch.equal(drawn[first], drawn[second])


def test_draws_neither_use_nor_move_the_global_random_state():
    before = torch.get_rng_state()
    torch.manual_seed(1)
    first = draw_noise(0, 0, IDS, (4, 8, 8))
    torch.manual_seed(2)
    assert torch.equal(first, draw_noise(0, 0, IDS, (4, 8, 8)))
    state = torch.get_rng_state()
    draw_timesteps(0, 0, IDS, 1000)
    draw_dropout(0, 0, IDS, 0.1)
    assert torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(before)


def test_noise_is_standard_normal_in_fp32():
    noise = draw_noise(0, 0, [f"{i:04x}" for i in range(500)], (4, 8, 8))
    assert noise.dtype == torch.float32
    assert noise.shape == (500, 4, 8, 8)
    # 128 000 values: the standard errors are 0.0028 and 0.0020; 4 of them allowed.
    assert abs(noise.mean().item()) < 0.0112
    assert abs(noise.std().item() - 1) < 0.008


def test_timesteps_cover_the_whole_range_evenly():
    ids = [f"{i:04x}" for i in range(5000)]
    timesteps = draw_timesteps(0, 0, ids, 5)
    assert timesteps.dtype == torch.int64
    counts = torch.bincount(timesteps, minlength=5)
    assert counts.shape == (5,)  # nothing at 5 or above
    assert (counts - 1000).abs().max() < 4 * (5000 * 0.2 * 0.8) ** 0.5


def test_dropout_drops_the_share_asked_for_and_never_or_always_at_the_ends():
    ids = [f"{i:04x}" for i in range(5000)]
    assert abs(draw_dropout(0, 0, ids, 0.1).sum().item() - 500) < 4 * (5000 * 0.09) ** 0.5
    assert not draw_dropout(0, 0, ids, 0.0).any()
    assert draw_dropout(0, 0, ids, 1.0).all()


def test_an_empty_batch_draws_empty_tensors():
    assert draw_noise(0, 0, [], (4, 8, 8)).shape == (0, 4, 8, 8)
    assert draw_timesteps(0, 0, [], 1000).shape == (0,)
    assert draw_dropout(0, 0, [], 0.5).shape == (0,)
