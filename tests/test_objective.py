import math

import pytest
import torch
from diffusers import DDPMScheduler

from store_format.errors import PrebakeError
from train.objective import mse_loss, noisy_latents_and_target


def scheduler(prediction_type="epsilon"):
    """Two steps whose alphas_cumprod are 0.64 and 0.36: roots 0.8, 0.6 and 0.6, 0.8."""
    betas = [1 - 0.64, 1 - 0.36 / 0.64]
    return DDPMScheduler(
        num_train_timesteps=2, trained_betas=betas, prediction_type=prediction_type
    )


LATENTS = torch.tensor([1.0, 10.0]).reshape(2, 1, 1, 1)
NOISE = torch.tensor([2.0, -5.0]).reshape(2, 1, 1, 1)
TIMESTEPS = torch.tensor([0, 1])


def test_noise_is_added_as_in_ddpm_equation_4():
    noisy, _ = noisy_latents_and_target(scheduler(), LATENTS, NOISE, TIMESTEPS)
    # 0.8 * 1 + 0.6 * 2 = 2;  0.6 * 10 + 0.8 * -5 = 2
    torch.testing.assert_close(noisy.flatten(), torch.tensor([2.0, 2.0]))


def test_an_epsilon_model_is_to_predict_the_noise():
    _, target = noisy_latents_and_target(scheduler(), LATENTS, NOISE, TIMESTEPS)
    assert torch.equal(target, NOISE)


def test_a_v_model_is_to_predict_the_velocity_of_progressive_distillation():
    noisy, target = noisy_latents_and_target(scheduler("v_prediction"), LATENTS, NOISE, TIMESTEPS)
    # v = sqrt(a) noise - sqrt(1 - a) latents: 0.8 * 2 - 0.6 * 1;  0.6 * -5 - 0.8 * 10
    torch.testing.assert_close(target.flatten(), torch.tensor([1.0, -11.0]))
    torch.testing.assert_close(noisy.flatten(), torch.tensor([2.0, 2.0]))


def test_sd1_betas_give_the_signal_levels_known_for_it():
    sd1 = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    betas = [
        (math.sqrt(0.00085) + i / 999 * (math.sqrt(0.012) - math.sqrt(0.00085))) ** 2
        for i in range(1000)
    ]
    alphas_cumprod = math.prod(1 - beta for beta in betas[:500])  # at t = 499
    one = torch.ones(1, 1, 1, 1)
    noisy, _ = noisy_latents_and_target(sd1, one, 0 * one, torch.tensor([499]))
    assert noisy.item() == pytest.approx(math.sqrt(alphas_cumprod), rel=1e-5)


def test_another_prediction_type_is_refused_by_name():
    with pytest.raises(PrebakeError, match=r"prediction_type 'sample' .* not one of epsilon, v_pr"):
        noisy_latents_and_target(scheduler("sample"), LATENTS, NOISE, TIMESTEPS)


def test_the_loss_is_the_mean_square_of_each_sample_and_their_mean():
    prediction = torch.tensor([[1.0, 3.0], [0.0, 0.0]]).reshape(2, 2, 1, 1)
    target = torch.tensor([[0.0, 0.0], [2.0, 0.0]]).reshape(2, 2, 1, 1)
    per_sample, mean = mse_loss(prediction, target)
    assert per_sample.tolist() == [5.0, 2.0]  # (1 + 9) / 2, (4 + 0) / 2
    assert mean.item() == 3.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_is_fp32_where_half_precision_would_overflow_or_round(dtype):
    prediction = torch.full((1, 4, 8, 8), 300.0, dtype=dtype)  # 300 ** 2 > 65504
    per_sample, mean = mse_loss(prediction, torch.zeros_like(prediction))
    assert per_sample.dtype == mean.dtype == torch.float32
    assert mean.item() == 90000.0
