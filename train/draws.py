"""Every random number of a training run, each from a generator of its own key.

The key is (seed, purpose, step, sample id). So a draw does not change with the other
samples of the batch, the number of ranks or loader workers, or an interruption.

Shapes: B batch, then the shape of one sample's latents, usually [C, h, w].
"""

import hashlib
from collections.abc import Sequence

import torch


def generator(seed: int, purpose: str, *keys: int | str | bytes) -> torch.Generator:
    """Return a CPU generator that depends on (seed, purpose, *keys) and on nothing else.

    PyTorch seeds its Mersenne Twister with the low 32 bits of the 64 given here, so two
    different keys share a stream with probability 2**-32.
    """
    digest = hashlib.sha256(_encode((seed, purpose, *keys))).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def draw_noise(
    seed: int, step: int, sample_ids: Sequence[str], shape: Sequence[int]
) -> torch.Tensor:
    """Draw standard normal noise for each sample: [B, *shape] f32 on the CPU."""
    noise = torch.empty((len(sample_ids), *shape))  # [B, *shape] f32
    for row, sample_id in enumerate(sample_ids):
        noise[row].normal_(generator=generator(seed, "noise", step, sample_id))
    return noise


def draw_timesteps(
    seed: int, step: int, sample_ids: Sequence[str], num_train_timesteps: int
) -> torch.Tensor:
    """Draw a timestep in 0..num_train_timesteps-1, all equally likely, for each: [B] i64."""
    timesteps = torch.empty(len(sample_ids), dtype=torch.int64)  # [B] i64
    for row, sample_id in enumerate(sample_ids):
        drawn = generator(seed, "timestep", step, sample_id)
        timesteps[row] = torch.randint(num_train_timesteps, (), generator=drawn)
    return timesteps


def draw_dropout(seed: int, step: int, sample_ids: Sequence[str], p: float) -> torch.Tensor:
    """Draw for each sample whether its caption is dropped, with probability p: [B] bool."""
    dropped = torch.empty(len(sample_ids), dtype=torch.bool)  # [B] bool
    for row, sample_id in enumerate(sample_ids):
        drawn = generator(seed, "caption dropout", step, sample_id)
        dropped[row] = torch.rand((), generator=drawn) < p
    return dropped


def _encode(keys: Sequence[int | str | bytes]) -> bytes:
    """Turn keys into bytes so that different keys always give different bytes.

    Each is written as its type, its length in 8 bytes, and its content. Joining the bare
    texts would give ("a", "bc") and ("ab", "c"), or 1 and "1", one stream.
    """
    parts = []
    for key in keys:
        if isinstance(key, bytes):
            kind, content = b"b", key
        elif isinstance(key, str):
            kind, content = b"s", key.encode("utf-8")
        else:
            kind, content = b"i", str(int(key)).encode("ascii")
        parts.append(kind + len(content).to_bytes(8, "little") + content)
    return b"".join(parts)
