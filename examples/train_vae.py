"""Train the VAE of the bundled model: an AutoencoderKL of 0.7 million parameters.

Writes `vae/` of a diffusers folder, in fp16, with the scaling factor that it measures.
The pictures are those of `training_pictures`. B pictures, H height and W width in pixels,
C = 4 latent channels, h = H / 8, w = W / 8.

The loss of a picture x and its reconstruction y, both in [-1, 1], is the sum of

* the mean of |x - y| and of (x - y)^2;
* half the mean absolute error of the differences between neighbouring pixels, along each
  axis, which keeps edges sharp;
* a small weight times the KL divergence of the posterior from N(0, 1), summed over the
  latents of a picture. It falls in three steps: a large one spreads the latents at first,
  and to the end it leaves a channel mostly noise.

There are three stages. The first learns colours and patterns. From the second on, the
square around the shape has as large a share in each mean as the whole picture, and more
where the shape differs little from its background: else a small or a pale shape counts for
nothing. In the third the encoder is left as it is, so the latents stay what they are, and
the decoder learns to do with slightly wrong ones, as a diffusion model makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from diffusers import AutoencoderKL
from make_model import NUM_LATENT_CHANNELS, VAE, write_json, write_weights
from training_loop import Recipe, step_generator, train
from training_pictures import Pictures, SizePx, draw_pictures, to_tensor

from sampling.shapes import COLOURS, PictureSpec

NUM_PICTURES: Final = 12_000
EDGE_WEIGHT: Final = 0.5
NUM_MEASURED: Final = 64  # pictures of each size that the latents are measured on


@dataclass(frozen=True)
class Stage:
    """One stage of the training."""

    name: str
    """Of its checkpoint, and of its random draws."""
    num_steps: int
    schedule_steps: int
    batch_size: int
    learning_rate: float
    ema_decay: float
    kl_weights: tuple[tuple[int, float], ...]
    """(first step, weight) in order."""
    focused: bool
    """Whether the square around the shape has a share of its own."""
    latent_noise: float | None = None
    """Deviation of what is added to the latents, for a stage of the decoder alone."""

    def kl_weight(self, step: int) -> float:
        """Return the weight of the KL divergence at a step."""
        return [weight for first, weight in self.kl_weights if first <= step][-1]


STAGES: Final = (
    Stage(
        "vae",
        num_steps=2_000,
        schedule_steps=3_000,
        batch_size=16,
        learning_rate=2e-3,
        ema_decay=0.995,
        kl_weights=((0, 1e-6), (1_000, 1e-7)),
        focused=False,
    ),
    Stage(
        "vae-fine",
        num_steps=4_000,
        schedule_steps=4_000,
        batch_size=8,
        learning_rate=1.5e-3,
        ema_decay=0.998,
        kl_weights=((0, 1e-8),),
        focused=True,
    ),
    Stage(
        "vae-decoder",
        num_steps=2_000,
        schedule_steps=2_000,
        batch_size=8,
        learning_rate=1e-3,
        ema_decay=0.998,
        kl_weights=((0, 0.0),),
        focused=True,
        latent_noise=0.1,
    ),
)

FOCUS_MARGIN: Final = 1.15
"""Half the side of the square around a shape, as a multiple of the shape's radius."""
FULL_CONTRAST: Final = 250.0
"""Distance in sRGB of a shape from its background from which it has no extra weight."""


def new_vae(seed: int) -> AutoencoderKL:
    """Make the VAE with the random weights of `seed`."""
    torch.manual_seed(seed)  # the initialisers of torch draw from no other stream
    return AutoencoderKL.from_config(VAE)


def focus(specs: Sequence[PictureSpec]) -> torch.Tensor:
    """Return the weights [B, 1, H, W] f32 of the pixels of B pictures of one size."""
    weights = []
    for spec in specs:
        reach = FOCUS_MARGIN * spec.radius * min(spec.width_px, spec.height_px)
        rows, columns = torch.arange(spec.height_px) + 0.5, torch.arange(spec.width_px) + 0.5
        inside_y = (rows - spec.centre[1] * spec.height_px).abs() <= reach
        inside_x = (columns - spec.centre[0] * spec.width_px).abs() <= reach
        inside = (inside_y[:, None] & inside_x[None, :]).float()  # [H, W]
        colours = [np.array(COLOURS[name]) for name in (spec.colour, spec.background)]
        contrast = float(np.linalg.norm(colours[0] - colours[1]))
        share = max(1.0, FULL_CONTRAST / contrast)
        weights.append(1 + share * inside / inside.mean())
    return torch.stack(weights)[:, None]


def vae_loss(
    vae: AutoencoderKL,
    images: torch.Tensor,
    weights: torch.Tensor | None,
    kl_weight: float,
    generator: torch.Generator,
    latent_noise: float | None = None,
) -> torch.Tensor:
    """Return the loss of `images` [B, 3, H, W] f32 in [-1, 1]; see the top of the file.

    `weights` [B, 1, H, W] f32 are those of the pixels; None is 1 for all.
    """
    posterior = vae.encode(images).latent_dist
    latents = posterior.sample(generator)  # [B, C, h, w] f32
    if latent_noise is not None:
        latents = latents + latent_noise * torch.randn(latents.shape, generator=generator)
    error = vae.decode(latents).sample - images  # [B, 3, H, W] f32
    along_x, along_y = error.diff(dim=-1), error.diff(dim=-2)
    if weights is None:
        absolute, square = error.abs(), error.square()
        along_x, along_y = along_x.abs(), along_y.abs()
    else:
        absolute, square = weights * error.abs(), weights * error.square()
        along_x, along_y = weights[..., 1:] * along_x.abs(), weights[..., 1:, :] * along_y.abs()
    edges = along_x.mean() + along_y.mean()
    kl = posterior.kl().mean()
    loss: torch.Tensor = absolute.mean() + square.mean() + EDGE_WEIGHT * edges + kl_weight * kl
    return loss


def measure_latents(
    vae: AutoencoderKL, pictures: dict[SizePx, Pictures]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the standard deviation [C] f32 of each channel of the latents."""
    latents = []
    for group in pictures.values():
        with torch.no_grad():
            posterior = vae.encode(to_tensor(group.pixels[:NUM_MEASURED])).latent_dist
        latents.append(posterior.mean.transpose(0, 1).flatten(1))  # [C, latents]
    found = torch.cat(latents, dim=1)
    return found.mean(dim=1), found.std(dim=1)


def standardise(vae: AutoencoderKL, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Give every latent channel mean 0 and deviation 1, without changing a reconstruction.

    The channels of a small VAE differ tenfold in scale, and one scaling factor cannot make
    up for that. Here z becomes (z - mean) / std at the end of the encoder and is turned
    back at the start of the decoder; both are 1 x 1 convolutions. `mean` and `std` are [C].
    """
    num = NUM_LATENT_CHANNELS
    quant, post_quant = vae.quant_conv, vae.post_quant_conv
    with torch.no_grad():
        quant.weight[:num] /= std[:, None, None, None]
        quant.bias[:num] = (quant.bias[:num] - mean) / std
        quant.bias[num:] -= 2 * std.log()  # the log variance
        post_quant.bias += post_quant.weight[:, :, 0, 0] @ mean
        post_quant.weight *= std[None, :, None, None]


def train_vae(
    out: Path, work: Path, *, seed: int, num_pictures: int, stages: Sequence[Stage] = STAGES
) -> None:
    """Train the VAE of `seed` with checkpoints in `work`, and write it to `out`/vae."""
    pictures = draw_pictures(seed=seed, count=num_pictures)
    click.echo(f"drew {num_pictures} pictures")
    vae = new_vae(seed)
    for stage in stages:
        click.echo(f"stage {stage.name}")
        weights = _train_stage(vae, pictures, stage, work, seed=seed)
        vae.load_state_dict(vae.state_dict() | weights)
    standardise(vae, *measure_latents(vae, pictures))
    _write_vae(out, vae, pictures)


def _train_stage(
    vae: AutoencoderKL,
    pictures: dict[SizePx, Pictures],
    stage: Stage,
    work: Path,
    *,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Train `vae` for a stage; return the moving average of what was trained."""
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(stage.latent_noise is None)
    sizes_px = list(pictures)
    shares = torch.tensor([len(pictures[size_px].captions) for size_px in sizes_px]).float()
    recipe = Recipe(
        seed=seed,
        num_steps=stage.num_steps,
        schedule_steps=stage.schedule_steps,
        batch_size=stage.batch_size,
        learning_rate=stage.learning_rate,
        warmup_steps=100,
        weight_decay=0.0,
        ema_decay=stage.ema_decay,
    )

    def loss_of_step(step: int) -> torch.Tensor:
        generator = step_generator(seed, stage.name, step)
        size_px = sizes_px[int(torch.multinomial(shares, 1, generator=generator))]
        group = pictures[size_px]
        num = len(group.captions)
        chosen = torch.randint(num, (stage.batch_size,), generator=generator).tolist()
        images = to_tensor(group.pixels[chosen])
        specs = [group.specs[index] for index in chosen]
        weights = focus(specs) if stage.focused else None
        kl_weight = stage.kl_weight(step)
        return vae_loss(vae, images, weights, kl_weight, generator, stage.latent_noise)

    checkpoint = work / f"{stage.name}.safetensors"
    return train(vae, loss_of_step, recipe, checkpoint, checkpoint_every=250)


def _write_vae(out: Path, vae: AutoencoderKL, pictures: dict[SizePx, Pictures]) -> None:
    """Write the VAE in fp16 to `out`/vae, with the scaling factor of what was written.

    Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion
    Models", appendix G: the factor is 1 / the standard deviation of the latents.
    """
    halves = {name: weight.to(torch.float16) for name, weight in vae.state_dict().items()}
    vae.load_state_dict({name: weight.float() for name, weight in halves.items()})
    mean, std = measure_latents(vae, pictures)
    # Of all channels together, which have about equal means: root mean square of the stds.
    scaling_factor = float(f"{1 / std.square().mean().sqrt().item():.5g}")
    click.echo(f"channel means {mean.tolist()}, standard deviations {std.tolist()}")
    write_weights(out / "vae" / "diffusion_pytorch_model.safetensors", halves)
    write_json(out / "vae" / "config.json", VAE | {"scaling_factor": scaling_factor})
    click.echo(f"VAE in {out / 'vae'}, scaling factor {scaling_factor}")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Model folder.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoint folder.")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of all.")
@click.option(
    "--pictures", type=click.IntRange(16), metavar="N", default=NUM_PICTURES, show_default=True
)
def main(out: Path, work: Path, seed: int, pictures: int) -> None:
    """Train the VAE; killed and started again, it goes on from its last checkpoint."""
    torch.set_num_threads(1)
    train_vae(out, work, seed=seed, num_pictures=pictures)


if __name__ == "__main__":
    main()
