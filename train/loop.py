"""The training loop: micro-batches in, optimizer steps, checkpoints and LoRA files out.

B batch, C latent channels, h=H/8, w=W/8, L tokens, D text width. Latents are scaled latents.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from store_format.errors import PrebakeError
from store_format.progress import Progress
from train.attention import choose_attention
from train.checkpoint import (
    TrainingState,
    check_settings,
    fingerprint,
    list_checkpoints,
    locked,
    remove_unfinished,
    save_checkpoint,
)
from train.config import TrainConfig
from train.draws import draw_noise, draw_timesteps, generator
from train.loader import MicroBatch, StepDataset
from train.lora import (
    add_lora,
    check_every_adapter_has_gradient,
    load_lora_weights_into,
    lora_warnings,
    lora_weights,
    trainable_parameters,
)
from train.metrics import MetricsLog, draw_curve
from train.objective import mse_loss, noisy_latents_and_target
from train.optimizer import (
    learning_rate_factor,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)
from train.readers import iterate_steps
from train.resume import state_to_continue
from train.run_files import (
    describe_results,
    publish_lora_files,
    refuse_foreign_files,
    write_config,
    write_lora_files,
)
from train.setup import RunSetup, describe, latents_spec, set_up, text_spec
from train.unet import load_noise_scheduler, load_unet

Say = Callable[[str], None]

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SKIPPED_IN_A_ROW = 50


class NonFiniteError(PrebakeError):
    """A loss or gradient is NaN or infinite; the step was not applied."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int
    total_steps: int


def train(
    config: TrainConfig,
    *,
    say: Say,
    should_stop: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
) -> Result:
    """Train one LoRA from a store, or continue the run in `config.out`.

    Args:
        config: what to train.
        say: prints one line for the person who waits.
        should_stop: asked between steps; True ends the run after a checkpoint.
        dry_run: only check and describe.

    Raises:
        PrebakeError: an input is not what it should be.
        NonFiniteError: training diverged; the last checkpoint is intact.
    """
    accelerator = _accelerator(config)
    setup = set_up(config, accelerator.num_processes)
    describe(setup, config, say)
    for warning in lora_warnings(rank=config.rank, alpha=config.alpha):
        say(f"warning: {warning}")
    if dry_run:
        state = state_to_continue(config, setup, say)
        return Result(state.step if state else 0, setup.total_steps)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            refuse_foreign_files(config.out)
            stack.enter_context(locked(config.out))
        state = state_to_continue(config, setup, say)
        if state is not None and state.step >= setup.total_steps:
            say(f"{config.out} has all {setup.total_steps} steps; nothing to do")
            if accelerator.is_main_process and config.resume == "auto":
                # Again, should the run have been killed before it got there.
                publish_lora_files(config.out, state.step)
            return Result(state.step, setup.total_steps)
        run = _Run(config, setup, accelerator, state, say)
        if accelerator.is_main_process:
            remove_unfinished(config.out)
            write_config(config)
        return run.run(should_stop)


def _accelerator(config: TrainConfig) -> Accelerator:
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.device == "cuda" and on_cpu:
        raise PrebakeError("--device cuda: torch finds no GPU here. Give --device cpu or auto.")
    if config.mixed_precision == "fp16" and on_cpu:
        raise PrebakeError(
            "--mixed-precision fp16 needs a GPU; on a CPU give no (fp32) or bf16 (slow)."
        )
    return Accelerator(mixed_precision=config.mixed_precision, cpu=on_cpu)


class _Run:
    """One run: the model, its optimizer, and the steps."""

    def __init__(
        self,
        config: TrainConfig,
        setup: RunSetup,
        accelerator: Accelerator,
        state: TrainingState | None,
        say: Say,
    ) -> None:
        self._config = config
        self._setup = setup
        self._accelerator = accelerator
        self._say = say
        device, dtype = accelerator.device, DTYPES[config.mixed_precision]
        unet = load_unet(config.model, dtype, device)
        base = fingerprint([(name, tensor) for name, tensor in unet.state_dict().items()])
        self._settings = setup.settings | {"total_steps": setup.total_steps, "base U-Net": base}
        if state is not None:
            check_settings(
                {"base U-Net": state.settings["base U-Net"]}, {"base U-Net": base}, config.out
            )
        num_frozen = sum(p.numel() for p in unet.parameters())
        adapted = add_lora(
            unet,
            rank=config.rank,
            alpha=config.alpha,
            target_modules=config.target_modules,
            seed=config.seed,
        )
        unet.train()
        if config.gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        self._noise_scheduler = load_noise_scheduler(config.model)
        manifest = setup.store.manifest
        bucket_px = max(setup.samples.distinct_buckets, key=lambda b: b[0] * b[1])
        cells = manifest.cells((bucket_px[0], bucket_px[1]))
        attention = choose_attention(
            unet,
            config.attention,
            latent_shape=(config.batch_size, *latents_spec(manifest).row_shape(cells)),
            text_shape=(config.batch_size, *text_spec(manifest).row_shape(None)),
            dtype=dtype,
            device=device,
        )
        self._named = trainable_parameters(unet)
        self._parameters = [parameter for _, parameter in self._named]
        optimizer = make_optimizer(config.optimizer, self._parameters, config.learning_rate)
        num_trained = sum(p.numel() for p in self._parameters)
        say(
            f"model: {num_trained:,} of {num_trained + num_frozen:,} parameters are trained, in "
            f"{len(adapted)} modules; {config.mixed_precision} mixed precision on {device}"
        )
        say(f"attention: {attention.name}: {attention.reason}")
        self._bare_unet = unet
        self._unet, self._optimizer = accelerator.prepare(unet, optimizer)
        self._first_step = 0
        if state is not None:
            self._restore(state)

    def _restore(self, state: TrainingState) -> None:
        load_lora_weights_into(self._bare_unet, state.adapter)
        try:
            load_optimizer_tensors(
                self._optimizer.optimizer, state.optimizer_tensors, state.optimizer_meta
            )
            if self._accelerator.scaler is not None and state.scaler:
                self._accelerator.scaler.load_state_dict(state.scaler)
        except PrebakeError:
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise PrebakeError(
                f"the optimizer state of step {state.step} cannot be used ({error!r}). "
                "Give --resume another checkpoint, and another --out."
            ) from None
        self._first_step = state.step

    def run(self, should_stop: Callable[[], bool]) -> Result:
        """Train to the end, or until asked to stop; leave a checkpoint either way."""
        config, total = self._config, self._setup.total_steps
        step = self._first_step
        is_main = self._accelerator.is_main_process
        num_skipped = 0
        saved_step = step if step else None
        with ExitStack() as stack:
            log = stack.enter_context(MetricsLog(config.out, step)) if is_main else None
            bar = stack.enter_context(Progress(total, "steps", "training", step))
            batches = stack.enter_context(closing(self._batches(step, total)))
            for micro_batches, wait_s in _timed(batches):
                start_s = time.monotonic()
                metrics = self._train_step(step, micro_batches)
                metrics["data_wait_s"] = wait_s
                metrics["step_s"] = time.monotonic() - start_s + wait_s
                if log is not None:
                    log.write(step, metrics)
                num_skipped = num_skipped + 1 if metrics.get("skipped") else 0
                if num_skipped > MAX_SKIPPED_IN_A_ROW:
                    what = f"gradient, as in the {MAX_SKIPPED_IN_A_ROW} steps before,"
                    raise NonFiniteError(self._diagnosis(step, micro_batches, what))
                step += 1
                bar.advance(note=f"loss {metrics['loss']:.4f}")
                if step % config.save_every == 0 and step < total:
                    self._save(step)
                    saved_step = step
                if self._any_rank(should_stop()):
                    break
        if saved_step != step:
            self._save(step)
        if is_main:
            publish_lora_files(config.out, step)
            self._say(describe_results(config.out, step))
            draw_curve(config.out)
            if step < total:
                self._say(f"stopped at step {step} of {total}; run the same command to go on")
        return Result(step, total)

    def _batches(self, start: int, stop: int) -> Generator[list[MicroBatch], None, None]:
        config = self._config
        dataset = StepDataset(
            self._setup.store,
            self._setup.samples,
            self._setup.order,
            rank=self._accelerator.process_index,
            seed=config.seed,
            caption_dropout=config.caption_dropout,
        )
        return iterate_steps(
            dataset,
            start,
            stop,
            num_workers=config.num_workers,
            pin_memory=self._accelerator.device.type == "cuda",
        )

    def _train_step(self, step: int, micro_batches: list[MicroBatch]) -> dict[str, Any]:
        """Do one optimizer step; return its metrics."""
        config, accelerator = self._config, self._accelerator
        rate = config.learning_rate * learning_rate_factor(
            step,
            schedule=config.lr_scheduler,
            warmup_steps=config.warmup_steps,
            total_steps=self._setup.total_steps,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        num_samples = sum(batch.num_samples for batch in micro_batches)
        step_loss = 0.0
        for number, batch in enumerate(micro_batches):
            # Ranks exchange gradients once a step, after the last micro-batch.
            is_last = number == len(micro_batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(self._unet):
                loss = self._loss(batch, num_samples)
                accelerator.backward(loss)
            step_loss += accelerator.reduce(loss.detach(), reduction="mean").item()
        if step == self._first_step:
            check_every_adapter_has_gradient(self._bare_unet)
        # Unscale, then clip, then step. A norm that is not finite would spoil every gradient.
        accelerator.unscale_gradients()
        norm = _norm(self._parameters)
        grad_norm, scaler = norm.item(), accelerator.scaler
        clipped_norm = grad_norm
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, config.max_grad_norm, norm)
            clipped_norm = _norm(self._parameters).item()
        elif scaler is None:
            raise NonFiniteError(self._diagnosis(step, micro_batches, self._bad_gradient()))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Any] = {
            "loss": step_loss,
            "grad_norm": grad_norm,
            "grad_norm_clipped": clipped_norm,
            "learning_rate": rate,
            "memory_mib": _memory_mib(accelerator.device),
        }
        if scaler is not None:
            metrics["loss_scale"] = scaler.get_scale()
            metrics["skipped"] = bool(self._optimizer.step_was_skipped)
        return metrics

    def _loss(self, batch: MicroBatch, num_samples: int) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss, which is the mean of all its samples.

        A mean of the micro-batches' means would weigh the samples of a short one more than others.

        Args:
            batch: the micro-batch.
            num_samples: how many samples the step has, in all its micro-batches and on all ranks.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        config, device = self._config, self._accelerator.device
        latents = self._latents(batch)  # [B, C, h, w] f32
        noise = draw_noise(config.seed, batch.step, batch.sample_ids, latents.shape[1:]).to(device)
        timesteps = draw_timesteps(
            config.seed,
            batch.step,
            batch.sample_ids,
            self._setup.facts.num_train_timesteps,
        ).to(device)  # [B] i64
        noisy, target = noisy_latents_and_target(self._noise_scheduler, latents, noise, timesteps)
        dtype = self._bare_unet.conv_in.weight.dtype
        states = batch.tensors["encoder_hidden_states"].to(device, dtype)  # [B, L, D]
        model_pred = self._unet(noisy.to(dtype), timesteps, states).sample  # [B, C, h, w]
        per_sample, _ = mse_loss(model_pred, target)  # [B] f32
        weighted = per_sample * batch.weights.to(device)
        # Ranks average their gradients, hence the factor.
        loss: torch.Tensor = weighted.sum() * (self._accelerator.num_processes / num_samples)
        if not torch.isfinite(loss):
            tensors = {"latents": latents, "encoder_hidden_states": states}
            tensors |= {"model_pred": model_pred, "loss": loss}
            bad = next(name for name, t in tensors.items() if not torch.isfinite(t).all())
            raise NonFiniteError(self._diagnosis(batch.step, [batch], bad))
        return loss

    def _latents(self, batch: MicroBatch) -> torch.Tensor:
        """Return the scaled latents [B, C, h, w] f32; from stored moments a new draw each visit."""
        device = self._accelerator.device
        if "latents" in batch.tensors:
            return batch.tensors["latents"].to(device, torch.float32)
        mean = batch.tensors["latents_mean"].float()
        noise = torch.stack(
            [
                torch.randn(
                    mean.shape[1:],
                    generator=generator(self._config.seed, "posterior", batch.step, key),
                )
                for key in batch.sample_ids
            ]
        )
        return (mean + batch.tensors["latents_std"].float() * noise).to(device)

    def _any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank: all must leave the loop at the same step."""
        if self._accelerator.num_processes == 1:
            return flag
        mine = torch.tensor(float(flag), device=self._accelerator.device)
        return bool(self._accelerator.reduce(mine, reduction="sum").item() > 0)

    def _bad_gradient(self) -> str:
        """Name the first gradient that is not finite, and say how many there are."""
        bad = [
            name
            for name, parameter in self._named
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
        ]
        if not bad:
            return "gradient norm"
        return f"gradient of {bad[0]} ({len(bad)} of {len(self._named)} tensors)"

    def _diagnosis(self, step: int, batches: list[MicroBatch], what: str) -> str:
        """Say in one line what went wrong in which step, with which samples, and what to try."""
        store, seed = self._setup.store, self._config.seed
        samples = []
        for batch in batches:
            timesteps = draw_timesteps(
                seed, step, batch.sample_ids, self._setup.facts.num_train_timesteps
            )
            for key, timestep in zip(batch.sample_ids, timesteps.tolist(), strict=True):
                path = store.sample(store.row_of(key)).path
                bucket = "x".join(map(str, batch.bucket_px))
                samples.append(f"{path} (id {key}, bucket {bucket}, timestep {timestep})")
        kept = list_checkpoints(self._config.out)
        return (
            f"{self._config.out}: step {step}: {what} is not finite; the step was not applied. "
            f"Samples: {', '.join(samples)}. "
            f"Try bf16 or no mixed precision, a lower --learning-rate, a longer warm-up. "
            f"Last good checkpoint: {kept[0] if kept else 'none yet'}."
        )

    def _save(self, step: int) -> None:
        """Write a checkpoint with its LoRA files."""
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            tensors, meta = optimizer_tensors(self._optimizer.optimizer)
            scaler = self._accelerator.scaler
            state = TrainingState(
                step=step,
                adapter=lora_weights(self._bare_unet),
                optimizer_tensors=tensors,
                optimizer_meta=meta,
                scaler=scaler.state_dict() if scaler is not None else {},
                settings=self._settings,
            )
            save_checkpoint(
                self._config.out,
                state,
                keep_last=self._config.keep_last,
                write_lora_files=lambda folder: write_lora_files(
                    folder, state, self._config, self._setup, self._say
                ),
            )
        self._accelerator.wait_for_everyone()


def _timed(batches: Iterator[list[MicroBatch]]) -> Iterator[tuple[list[MicroBatch], float]]:
    """Yield each item with the seconds that were spent waiting for it."""
    while True:
        start_s = time.monotonic()
        try:
            item = next(batches)
        except StopIteration:
            return
        yield item, time.monotonic() - start_s


def _norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the L2 norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total: torch.Tensor = torch.nn.utils.get_total_norm(gradients)
    return total


def _memory_mib(device: torch.device) -> float:
    """Return the peak memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
