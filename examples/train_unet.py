"""Train the text encoder and the U-Net of the bundled model, together, on VAE latents.

Reads the VAE that `train_vae.py` left in the model folder, and adds all the rest. The
pictures are those of `training_pictures`, encoded once: their scaled latents (posterior
means) and tokens are kept in the work folder. B pictures, C = 4 latent channels,
h = H / 8, w = W / 8, L = 77 tokens, D = 64 text width.

The U-Net predicts the noise on the schedule of SD 1.x; a tenth of the captions is left
empty, for classifier-free guidance. The error of the noise is weighted by SNR clipped to
0.05..5, over SNR: that is, the error of the picture it implies by the clipped SNR. Without
the lower bound, the noisiest steps, which alone decide by the caption what is drawn, hardly
count.

Sources: Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy",
section 3.4, for the upper bound. Ho & Salimans 2022, "Classifier-Free Diffusion Guidance",
algorithm 1, for the empty captions.
"""

import hashlib
from pathlib import Path
from typing import Final

import click
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from make_model import (
    NUM_TOKENS,
    SCHEDULER,
    UNET,
    text_encoder_config,
    write_json,
    write_settings,
    write_weights,
)
from safetensors.torch import load_file, save_file
from training_loop import Recipe, step_generator, train
from training_pictures import MADE_UP_SHARE, draw_pictures, to_tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

NUM_PICTURES: Final = 24_000
BATCH_SIZE: Final = 32
ENCODING_BATCH: Final = 64
MIN_SNR: Final = 0.05
MAX_SNR: Final = 5.0
EMPTY_SHARE: Final = 0.1

Samples = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By the name of a size: scaled latents [N, C, h, w] f32 and token ids [N, L] i64."""


class TextToNoise(torch.nn.Module):
    """The text encoder and the U-Net as one module, so that one optimizer trains both."""

    def __init__(self, vocab: dict[str, int], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the initialisers of torch draw from no other stream
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**text_encoder_config(vocab)))
        self.unet = UNet2DConditionModel.from_config(UNET)

    def forward(
        self, noisy_latents: torch.Tensor, timesteps: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Predict the noise [B, C, h, w] in `noisy_latents` for the captions of `input_ids`."""
        encoder_hidden_states = self.text_encoder(input_ids).last_hidden_state  # [B, L, D] f32
        model_pred: torch.Tensor = self.unet(noisy_latents, timesteps, encoder_hidden_states).sample
        return model_pred


class NoiseLoss:
    """The loss of one batch of scaled latents and captions."""

    def __init__(self, model: TextToNoise, empty_ids: torch.Tensor) -> None:
        self.model = model
        self.empty_ids = empty_ids  # [L] i64: the tokens of ""
        self.scheduler = DDIMScheduler.from_config(SCHEDULER)
        alphas_cumprod = self.scheduler.alphas_cumprod
        self.snr = alphas_cumprod / (1 - alphas_cumprod)  # [1000] f32

    def __call__(
        self, latents: torch.Tensor, input_ids: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the mean weighted error for `latents` [B, C, h, w] and `input_ids` [B, L]."""
        num = len(latents)
        # One timestep from each B-th part of the schedule: the same distribution as B
        # independent ones, but a loss that jumps less from batch to batch.
        parts = (torch.arange(num) + torch.rand(num, generator=generator)) / num
        timesteps = (parts * len(self.snr)).long().clamp_max(len(self.snr) - 1)  # [B] i64
        noise = torch.randn(latents.shape, generator=generator)
        empty = torch.rand(num, generator=generator) < EMPTY_SHARE
        input_ids = torch.where(empty[:, None], self.empty_ids, input_ids)
        noisy_latents = self.scheduler.add_noise(latents, noise, timesteps)
        model_pred = self.model(noisy_latents, timesteps, input_ids)
        snr = self.snr[timesteps]
        error = (model_pred - noise).square().mean(dim=(1, 2, 3))  # [B] f32
        loss: torch.Tensor = (error * snr.clamp(MIN_SNR, MAX_SNR) / snr).mean()
        return loss


def encode_pictures(model: Path, work: Path, *, seed: int, count: int) -> Samples:
    """Return the samples of `count` pictures, from the work folder if they are there."""
    vae_bytes = (model / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    vae_id = hashlib.sha256(vae_bytes).hexdigest()[:12]
    path = work / f"samples-{seed}-{count}-{MADE_UP_SHARE:g}-{vae_id}.safetensors"
    if not path.exists():
        click.echo(f"drawing and encoding {count} pictures")
        tensors = _encode(model, seed=seed, count=count)
        partial = path.with_suffix(".partial")
        work.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial)
        partial.replace(path)
    tensors = load_file(path)
    names = sorted({name.split("/")[0] for name in tensors})
    return {n: (tensors[f"{n}/latents"], tensors[f"{n}/input_ids"].long()) for n in names}


def _encode(model: Path, *, seed: int, count: int) -> dict[str, torch.Tensor]:
    vae = AutoencoderKL.from_pretrained(model / "vae").eval()
    tokenizer = CLIPTokenizer.from_pretrained(model / "tokenizer")
    tensors = {}
    for (width_px, height_px), pictures in draw_pictures(seed=seed, count=count).items():
        latents = []
        for start in range(0, len(pictures.captions), ENCODING_BATCH):
            images = to_tensor(pictures.pixels[start : start + ENCODING_BATCH])
            with torch.no_grad():
                latents.append(vae.encode(images).latent_dist.mean * vae.config.scaling_factor)
        name = f"{width_px}x{height_px}"
        tensors[f"{name}/latents"] = torch.cat(latents).contiguous()
        tensors[f"{name}/input_ids"] = tokenize(tokenizer, pictures.captions).short()
    return tensors


def tokenize(tokenizer: CLIPTokenizer, captions: tuple[str, ...]) -> torch.Tensor:
    """Return token ids [N, L] i64, cut or padded to 77."""
    ids: torch.Tensor = tokenizer(
        list(captions),
        padding="max_length",
        truncation=True,
        max_length=NUM_TOKENS,
        return_tensors="pt",
    ).input_ids
    return ids


def train_unet(out: Path, work: Path, *, seed: int, num_steps: int, num_pictures: int) -> None:
    """Train for the VAE in `out`/vae, with checkpoints in `work`, and write all else to `out`."""
    vocab = write_settings(out)
    samples = encode_pictures(out, work, seed=seed, count=num_pictures)
    empty_ids = tokenize(CLIPTokenizer.from_pretrained(out / "tokenizer"), ("",))[0]
    names = list(samples)
    shares = torch.tensor([len(samples[name][0]) for name in names]).float()
    recipe = Recipe(
        seed=seed,
        num_steps=num_steps,
        schedule_steps=num_steps,
        batch_size=BATCH_SIZE,
        learning_rate=1.5e-3,
        warmup_steps=200,
        weight_decay=0.01,
        ema_decay=0.998,
    )
    model = TextToNoise(vocab, seed)
    loss = NoiseLoss(model, empty_ids)

    def loss_of_step(step: int) -> torch.Tensor:
        generator = step_generator(seed, "unet", step)
        name = names[int(torch.multinomial(shares, 1, generator=generator))]
        latents, input_ids = samples[name]
        chosen = torch.randint(len(latents), (BATCH_SIZE,), generator=generator)
        return loss(latents[chosen], input_ids[chosen], generator)

    ema = train(model, loss_of_step, recipe, work / "unet.safetensors", checkpoint_every=250)
    write_unet(out, vocab, ema)
    click.echo(f"text encoder and U-Net in {out}")


def write_unet(out: Path, vocab: dict[str, int], weights: dict[str, torch.Tensor]) -> None:
    """Write the text encoder's and the U-Net's folders from the weights of a `TextToNoise`."""
    write_json(out / "text_encoder" / "config.json", text_encoder_config(vocab))
    write_json(out / "unet" / "config.json", UNET)
    text_encoder, unet = {}, {}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if part == "unet":
            unet[rest] = weight
        else:  # named as in SD 1.x folders; transformers 5 drops the prefix
            text_encoder[f"text_model.{rest.removeprefix('text_model.')}"] = weight
    write_weights(out / "text_encoder" / "model.safetensors", text_encoder)
    write_weights(out / "unet" / "diffusion_pytorch_model.safetensors", unet)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Model folder.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoint folder.")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of all.")
@click.option("--steps", type=click.IntRange(1), metavar="N", default=8_500, show_default=True)
@click.option(
    "--pictures", type=click.IntRange(16), metavar="N", default=NUM_PICTURES, show_default=True
)
def main(out: Path, work: Path, seed: int, steps: int, pictures: int) -> None:
    """Train text encoder and U-Net; started again, it goes on from its last checkpoint."""
    torch.set_num_threads(1)
    train_unet(out, work, seed=seed, num_steps=steps, num_pictures=pictures)


if __name__ == "__main__":
    main()
