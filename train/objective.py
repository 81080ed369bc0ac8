"""What the U-Net is asked to predict, and how far off it was.

B batch, C latent channels, h=H/8, w=W/8. Latents are scaled latents.
"""

import torch
from diffusers import DDPMScheduler

from store_format.errors import PrebakeError

PREDICTION_TYPES = ("epsilon", "v_prediction")


def noisy_latents_and_target(
    scheduler: DDPMScheduler, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add noise to scaled latents and return (noisy latents, target), both [B, C, h, w].

    With a = alphas_cumprod[t]: noisy = sqrt(a) * latents + sqrt(1 - a) * noise.
    The target is the noise itself (`epsilon`), or v = sqrt(a) * noise - sqrt(1 - a) * latents
    (`v_prediction`).

    Raises: PrebakeError for any other prediction type.
    Source: Ho et al. 2020 (DDPM), eq. 4 and 14; Salimans & Ho 2022 (Progressive
    Distillation), appendix D.
    """
    prediction_type = scheduler.config.prediction_type
    require_prediction_type(prediction_type, "the noise scheduler")
    noisy_latents = scheduler.add_noise(latents, noise, timesteps)
    if prediction_type == "epsilon":
        return noisy_latents, noise
    return noisy_latents, scheduler.get_velocity(latents, noise, timesteps)


def mse_loss(model_pred: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squared error of each sample, [B] f32, and their mean, [] f32.

    In fp32 whatever the inputs: in fp16 a difference above 256 squares to infinity, and
    in bf16 the mean over a sample keeps 3 digits.
    Source: Ho et al. 2020, eq. 14 (the unweighted loss).
    """
    squared = (model_pred.float() - target.float()).square()  # [B, C, h, w] f32
    per_sample = squared.flatten(start_dim=1).mean(dim=1)  # [B] f32
    return per_sample, per_sample.mean()


def require_prediction_type(prediction_type: str, where: str) -> None:
    """Refuse a prediction type that this objective has no target for."""
    if prediction_type not in PREDICTION_TYPES:
        raise PrebakeError(
            f"prediction_type {prediction_type!r} of {where} is not one of "
            f"{', '.join(PREDICTION_TYPES)}. Choose a base model trained for one of these."
        )
