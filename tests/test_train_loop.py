import json
import math
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from store_builders import SD1_TENSORS, Sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_models import make_tiny_sd
from train_builders import (
    TRAIN_MOMENTS,
    WIDE,
    Said,
    assert_same_run,
    assert_same_tensors,
    clean_process,
    config_for,
    curve,
    newest_checkpoint,
    run,
    run_as_rank,
    run_cli,
    run_until_rename,
    run_until_write,
    some_samples,
    train_store,
)

import prebake
import train.loop
from store_format.errors import DamagedStoreError, PrebakeError
from store_format.store import Store
from train.config import MAY_CHANGE, TrainConfig
from train.loader import StepDataset
from train.loop import NonFiniteError
from train.metrics import MetricsLog, read_metrics, running_mean

GOLDEN = Path(__file__).parent / "golden" / "losses.json"
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_sd(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Five samples of one bucket, two of another; fp32."""
    return train_store(tmp_path_factory.mktemp("store") / "s").root


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    return train_store(tmp_path_factory.mktemp("moments") / "s", tensors=TRAIN_MOMENTS).root


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def draw_curve():
    """Drawing takes longer than training here; one test wants it."""
    with mock.patch("train.loop.draw_curve") as drawn:
        yield drawn


def undisturbed(folder, store, model, **options):
    with mock.patch("train.loop.draw_curve"):
        run(config_for(store, model, folder, **options))
    return folder


@pytest.fixture(scope="module")
def six(tmp_path_factory, store, model):
    """A run of 6 steps that nothing disturbed; for comparison only."""
    return undisturbed(tmp_path_factory.mktemp("six") / "whole", store, model)


@pytest.fixture(scope="module")
def nine(tmp_path_factory, store, model):
    return undisturbed(tmp_path_factory.mktemp("nine") / "whole", store, model, max_steps=9)


@pytest.fixture(scope="module")
def forty(tmp_path_factory, store, model):
    folder = tmp_path_factory.mktemp("forty") / "whole"
    return undisturbed(folder, store, model, max_steps=40, batch_size=2)


@pytest.fixture(scope="module")
def forks():
    return clean_process()


def in_process(forks, target, *args, **kwargs):
    process = forks.Process(target=target, args=args, kwargs=kwargs)
    process.start()
    return process


# Stopped and continued


RESUMED = {
    "constant": {},
    "cosine, warm-up": {"lr_scheduler": "cosine", "warmup_steps": 2, "batch_size": 2},
    "8 bits, accumulation": {
        "optimizer": "adamw8bit",
        "rank": 256,
        "alpha": 64,
        "learning_rate": 1e-3,
        "gradient_accumulation": 3,
        "batch_size": 2,
        "lr_scheduler": "cosine",
    },
    "dropout, checkpointing, workers": {
        "caption_dropout": 0.4,
        "gradient_checkpointing": True,
        "num_workers": 1,
    },
    "bf16": {"mixed_precision": "bf16", "gradient_checkpointing": True, "batch_size": 2},
    "all layers": {"target_modules": "attn+ff+proj+conv", "gradient_accumulation": 2, "seed": 5},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED.keys())
def test_stopped_and_continued_is_never_having_stopped(tmp_path, store, model, options):
    run(config_for(store, model, tmp_path / "whole", **options))
    parts = config_for(store, model, tmp_path / "parts", **options)
    assert run(parts, stop_after=3).step == 3
    assert len(curve(tmp_path / "parts")) == 3
    run(parts)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_stopped_twice_with_moments_is_never_having_stopped(tmp_path, moments, model):
    whole = config_for(moments, model, tmp_path / "whole", lr_scheduler="cosine")
    parts = config_for(moments, model, tmp_path / "parts", lr_scheduler="cosine")
    run(whole)
    assert [run(parts, stop_after=2).step for _ in range(3)] == [2, 4, 6]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_workers_and_the_layout_of_the_store_change_nothing(tmp_path, model, six):
    tars = train_store(tmp_path / "tars", layout="webdataset").root
    run(config_for(tars, model, tmp_path / "b", num_workers=2))
    assert_same_run(six, tmp_path / "b")


def test_from_moments_a_sample_is_drawn_anew_each_visit(tmp_path, model):
    one = train_store(tmp_path / "s", [Sample("a.png")], tensors=TRAIN_MOMENTS).root
    seen = []
    original = train.loop.noisy_latents_and_target

    def record(scheduler, latents, noise, timesteps):
        seen.append(latents)
        return original(scheduler, latents, noise, timesteps)

    with mock.patch("train.loop.noisy_latents_and_target", record):
        run(config_for(one, model, tmp_path / "run", max_steps=2))
    assert not torch.equal(*seen)


# More steps, fewer steps, other settings


def test_a_constant_run_that_grows_is_the_longer_run(tmp_path, store, model, six):
    run(config_for(store, model, tmp_path / "grown", max_steps=4))
    said = Said()
    run(config_for(store, model, tmp_path / "grown", max_steps=6), say=said)
    assert "continuing after step 4" in said
    assert_same_run(six, tmp_path / "grown")


def test_a_cosine_that_grows_is_recomputed_and_said(tmp_path, store, model):
    run(config_for(store, model, tmp_path / "r", max_steps=4, lr_scheduler="cosine"))
    said = Said()
    run(config_for(store, model, tmp_path / "r", max_steps=8, lr_scheduler="cosine"), say=said)
    assert any(line.startswith("the cosine is stretched from 4 to 8 steps") for line in said)
    rates = [m["learning_rate"] for m in read_metrics(tmp_path / "r")]
    expected = [0.005 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    expected += [0.005 * (1 + math.cos(math.pi * step / 8)) for step in range(4, 8)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_fewer_steps_are_refused(tmp_path, store, model):
    run(config_for(store, model, tmp_path / "r"), stop_after=2)
    with pytest.raises(PrebakeError, match="other settings: total steps was 6, now 5"):
        run(config_for(store, model, tmp_path / "r", max_steps=5))


CHANGED = {
    "rank": 8,
    "alpha": 8.5,
    "target_modules": "to_q",
    "learning_rate": 2e-2,
    "lr_scheduler": "cosine",
    "warmup_steps": 1,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "optimizer": "adamw8bit",
    "max_grad_norm": 0.5,
    "caption_dropout": 0.25,
    "seed": 1,
    "order": "shards",
    "mixed_precision": "bf16",
    "attention": "auto",
    "gradient_checkpointing": True,
    "device": "auto",
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, store, model):
    """A run stopped after 2 of 6 steps; tests work on copies."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with mock.patch("train.loop.draw_curve"):
        run(config_for(store, model, folder), stop_after=2)
    return folder


def test_the_table_of_settings_that_are_refused_is_complete():
    assert CHANGED.keys() == TrainConfig.model_fields.keys() - MAY_CHANGE


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_refused_by_name(stopped, store, model, name):
    before = json.loads((stopped / "config.json").read_text())[name]
    expected = f"other settings: {name} was {before!r}, now {CHANGED[name]!r}. Give the same"
    with pytest.raises(PrebakeError, match=expected):
        run(config_for(store, model, stopped, **{name: CHANGED[name]}))


def test_all_changed_settings_are_named_together(stopped, store, model):
    with pytest.raises(PrebakeError, match=r"alpha was 4.0, now 2.0; rank was 4, now 2; seed was"):
        run(config_for(store, model, stopped, rank=2, alpha=2, seed=9))


def test_another_base_model_is_refused(tmp_path, stopped, store):
    other = make_tiny_sd(tmp_path / "other", seed=1)
    with pytest.raises(PrebakeError, match="other settings: base U-Net was '"):
        run(config_for(store, other, stopped))


@pytest.mark.parametrize(
    "change",
    [
        lambda samples: samples[:-1],
        lambda samples: [Sample("w0.png", ["another caption"], WIDE), *samples[1:]],
        lambda samples: [Sample("w0.png", ["wide 0"], WIDE, image=1), *samples[1:]],
        lambda samples: [Sample("w0.png", ["wide 0"], WIDE, weight=2), *samples[1:]],
        lambda samples: [
            Sample("w0.png", ["wide 0"], WIDE, text_weights=[0.5]),
            *samples[1:],
        ],
    ],
    ids=["dropped", "caption", "image", "weight", "text weight"],
)
def test_another_content_of_the_store_is_refused(tmp_path, stopped, model, change):
    other = train_store(tmp_path / "s", change(some_samples())).root
    with pytest.raises(PrebakeError, match="other settings: content of the store was '"):
        run(config_for(other, model, stopped))


def test_what_may_change_may_change(tmp_path, stopped, model, six):
    shutil.copytree(stopped, tmp_path / "elsewhere")
    shutil.copytree(model, tmp_path / "model")
    same = train_store(tmp_path / "tars", layout="webdataset").root
    options = {"num_workers": 1, "save_every": 1, "keep_last": 1, "lora_dtype": "fp32"}
    run(config_for(same, tmp_path / "model", tmp_path / "elsewhere", **options))
    newest = newest_checkpoint(tmp_path / "elsewhere")
    assert_same_tensors(
        newest / "adapter.safetensors", newest_checkpoint(six) / "adapter.safetensors"
    )
    assert curve(tmp_path / "elsewhere") == curve(six)
    assert load_file(tmp_path / "elsewhere" / LORA).popitem()[1].dtype == torch.float32


# Done, never, branches, two at once


def everything_in(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def test_with_everything_done_it_says_so_and_does_nothing(tmp_path, store, model):
    config = config_for(store, model, tmp_path / "r", max_steps=2)
    run(config)
    before = {p: v for p, v in everything_in(tmp_path / "r").items() if p.name != "run.lock"}
    said = Said()
    with mock.patch("train.loop.load_unet", side_effect=AssertionError("loads the model")):
        result = run(config, say=said)
    assert (result.step, result.total_steps) == (2, 2)
    assert said[-1] == f"{tmp_path / 'r'} has all 2 steps; nothing to do"
    after = {p: v for p, v in everything_in(tmp_path / "r").items() if p.name != "run.lock"}
    assert after == before


def test_a_run_killed_before_its_lora_was_in_place_gets_it_when_run_again(tmp_path, store, model):
    config = config_for(store, model, tmp_path / "r", max_steps=2)
    run(config)
    kept = {name: (tmp_path / "r" / name).read_bytes() for name in (LORA, "r.safetensors")}
    (tmp_path / "r" / LORA).unlink()
    (tmp_path / "r" / "r.safetensors").write_bytes(b"of an earlier step")
    run(config)
    assert kept == {name: (tmp_path / "r" / name).read_bytes() for name in kept}


def test_max_epochs_counts_whole_epochs(tmp_path, store, model):
    # 5 and 2 samples by twos: 3 + 1 micro-batches; accumulation 3 makes 2 steps an epoch.
    options = {"batch_size": 2, "gradient_accumulation": 3, "max_epochs": 2}
    assert run(config_for(store, model, tmp_path / "r", **options)).step == 4


def test_never_refuses_a_folder_that_holds_a_run(stopped, store, model):
    with pytest.raises(PrebakeError, match=r"holds a run\. Give --resume auto to continue it, or"):
        run(config_for(store, model, stopped, resume="never"))


def test_never_starts_in_a_folder_without_a_run(tmp_path, store, model):
    (tmp_path / "r").mkdir()
    assert run(config_for(store, model, tmp_path / "r", max_steps=1, resume="never")).step == 1


def test_a_run_branches_off_from_a_checkpoint_of_another(tmp_path, store, model, stopped, six):
    chosen = newest_checkpoint(stopped)
    run(config_for(store, model, tmp_path / "branch", resume=str(chosen)))
    assert_same_tensors(
        newest_checkpoint(tmp_path / "branch") / "adapter.safetensors",
        newest_checkpoint(six) / "adapter.safetensors",
    )
    assert curve(tmp_path / "branch") == curve(six)[2:]
    # Its own checkpoints are later now.
    with pytest.raises(PrebakeError, match=r"another checkpoint than .*: step-00000006\. Give"):
        run(config_for(store, model, tmp_path / "branch", resume=str(chosen)))


def test_a_run_continues_from_its_own_newest_checkpoint_when_that_is_named(
    tmp_path, store, model, stopped
):
    shutil.copytree(stopped, tmp_path / "r")
    chosen = newest_checkpoint(tmp_path / "r")
    assert run(config_for(store, model, tmp_path / "r", resume=str(chosen))).step == 6


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("atuo", "--resume atuo: no such checkpoint. Give auto, never, or a folder such as"),
        ("{empty}", "is damaged"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused(tmp_path, store, model, resume, message):
    (tmp_path / "empty").mkdir()
    resume = resume.format(empty=tmp_path / "empty")
    with pytest.raises(PrebakeError, match=message):
        run(config_for(store, model, tmp_path / "r", resume=resume))


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(tmp_path, store, model, six):
    config = config_for(store, model, tmp_path / "r", save_every=1, keep_last=1)
    run(config.model_copy(update={"keep_last": 3}), stop_after=4)
    path = newest_checkpoint(tmp_path / "r") / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    said = Said()
    run(config, say=said)
    assert any("step-00000004 is damaged" in line for line in said)
    assert "continuing after step 3" in said
    assert_same_run(six, tmp_path / "r")


def test_an_optimizer_state_that_is_none_is_one_line(tmp_path, stopped, store, model):
    shutil.copytree(stopped, tmp_path / "r")
    folder = newest_checkpoint(tmp_path / "r")
    body = json.loads((folder / "state.json").read_text())
    body["optimizer"]["state"] = {"x": 3}
    body["sha256"] = train.checkpoint._hash_of(body)
    (folder / "state.json").write_text(json.dumps(body))
    with pytest.raises(PrebakeError, match="the optimizer state of step 2 cannot be used"):
        run(config_for(store, model, tmp_path / "r"))


def test_a_second_run_into_the_same_folder_is_refused(tmp_path, store, model, forks):
    config = config_for(store, model, tmp_path / "r", max_steps=10_000)
    arguments = ["train", *prebake.command_line(config)]
    first = in_process(forks, run_cli, arguments, tmp_path / "log")
    try:
        wait_for_steps(tmp_path / "r", 1, first)
        with pytest.raises(PrebakeError, match="r is in use by another training process"):
            run(config, stop_after=1)
        # A dry run writes nothing and may look.
        AcceleratorState._reset_state(True)
        train.loop.train(config, say=Said(), dry_run=True)
    finally:
        first.kill()
        first.join()


def test_files_of_others_are_never_overwritten(tmp_path, store, model):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / LORA).write_bytes(b"downloaded")
    with pytest.raises(PrebakeError, match=f"holds {LORA} and is not a run of prebake"):
        run(config_for(store, model, tmp_path / "r"))
    assert [p.name for p in (tmp_path / "r").iterdir()] == [LORA]


@pytest.mark.parametrize("out", ["file", "file/r"])
def test_an_out_that_cannot_be_a_folder_is_one_line(tmp_path, store, model, out):
    (tmp_path / "file").write_text("the user's own")
    with pytest.raises(PrebakeError, match=r"is, or is in, a file\. Give another --out"):
        run(config_for(store, model, tmp_path / out))
    assert (tmp_path / "file").read_text() == "the user's own"


def test_a_dry_run_says_the_plan_and_writes_nothing(tmp_path, store, model):
    AcceleratorState._reset_state(True)
    said = Said()
    config = config_for(store, model, tmp_path / "r", batch_size=2, max_steps=8)
    train.loop.train(config, say=said, dry_run=True)
    assert not (tmp_path / "r").exists()
    assert f"store: {store}, 7 samples in buckets 48x64: 2, 80x48: 5" in said
    assert any(line.endswith("4 an epoch, 2.0 epochs") for line in said)


# Numbers that are none


def spoil(path, name, value=math.nan):
    """Return a patch by which one sample's tensor comes from the store with one bad number."""
    original = StepDataset._read

    def read(self, step, slots, allocate):
        batch = original(self, step, slots, allocate)
        for row, key in enumerate(batch.sample_ids):
            if self._store.sample(self._store.row_of(key)).path == path:
                batch.tensors[name][row].view(-1)[3] = value
        return batch

    return mock.patch.object(StepDataset, "_read", read)


def step_of_sample(store, model, path):
    """The first step of a run with batch size 1 in which a sample is seen."""
    setup = train.loop.set_up(config_for(store, model, Path("unused")), 1)
    row = setup.store.row_of(next(s.sample_id for s in some_samples() if s.path == path))
    return next(step for step in range(7) if setup.order.step(step).item() == row)


@pytest.mark.parametrize(
    ("name", "value"),
    [("latents", math.nan), ("latents", math.inf), ("encoder_hidden_states", math.nan)],
)
def test_a_bad_number_in_the_store_stops_the_run_before_the_step(
    tmp_path, store, model, nine, name, value
):
    # The sample that is seen last, so that there is something to keep.
    steps = {s.path: step_of_sample(store, model, s.path) for s in some_samples()}
    path, step = max(steps.items(), key=lambda item: item[1])
    assert step == 6
    config = config_for(store, model, tmp_path / "r", max_steps=9, save_every=2, keep_last=9)
    with spoil(path, name, value), pytest.raises(NonFiniteError) as caught:
        run(config)
    message = str(caught.value)
    sample_id = next(s.sample_id for s in some_samples() if s.path == path)
    assert f"step {step}: {name} is not finite; the step was not applied." in message
    assert f"Samples: {path} (id {sample_id}, bucket " in message
    assert "timestep " in message
    last = tmp_path / "r" / "checkpoints" / f"step-{step // 2 * 2:08d}"
    assert message.endswith(f"Last good checkpoint: {last}.")
    assert newest_checkpoint(tmp_path / "r") == last
    assert len(curve(tmp_path / "r")) == step
    assert_all_finite(tmp_path / "r")
    # With the number mended, the run goes on as if it had never met it.
    run(config)
    assert_same_run(nine, tmp_path / "r")


def assert_all_finite(folder):
    files = list(folder.rglob("*.safetensors"))
    assert files
    for file in files:
        assert all(torch.isfinite(tensor.float()).all() for tensor in load_file(file).values())


def with_parameters(act):
    """Return a patch that calls `act` with the named parameters before each step's loss."""
    original = train.loop._Run._loss

    def loss(self, batch, num_samples):
        act(batch.step, dict(self._named))
        return original(self, batch, num_samples)

    return mock.patch.object(train.loop._Run, "_loss", loss)


def test_a_bad_weight_stops_the_run_before_the_step(tmp_path, store, model):
    def act(step, named):
        if step == 3:
            next(iter(named.values())).data[0, 0] = math.nan

    config = config_for(store, model, tmp_path / "r", save_every=3)
    message = "step 3: model_pred is not finite; the step was not applied"
    with with_parameters(act), pytest.raises(NonFiniteError, match=message):
        run(config)
    assert newest_checkpoint(tmp_path / "r").name == "step-00000003"
    assert_all_finite(tmp_path / "r")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_is_named_and_not_applied(tmp_path, store, model, value):
    bad, seen = "up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.default.weight", {}

    def act(step, named):
        if step == 3:
            seen.update({name: p.detach().clone() for name, p in named.items()}, named=named)
            named[bad].register_hook(lambda gradient: gradient * value)

    config = config_for(store, model, tmp_path / "r", save_every=1)
    message = rf"step 3: gradient of {bad} \(1 of 64 tensors\) is not finite; the step was not"
    with with_parameters(act), pytest.raises(NonFiniteError, match=message):
        run(config)
    named = seen.pop("named")
    assert all(torch.equal(named[name], before) for name, before in seen.items())
    assert newest_checkpoint(tmp_path / "r").name == "step-00000003"
    assert len(curve(tmp_path / "r")) == 3
    assert_all_finite(tmp_path / "r")


# What is logged


def test_every_step_is_logged_with_everything(tmp_path, store, model):
    run(config_for(store, model, tmp_path / "r"), stop_after=2)
    run(config_for(store, model, tmp_path / "r"))
    metrics = read_metrics(tmp_path / "r")
    assert [m["step"] for m in metrics] == list(range(6))
    names = {"loss", "grad_norm", "grad_norm_clipped", "learning_rate", "memory_mib"}
    names |= {"data_wait_s", "step_s"}
    for m in metrics:
        assert m.keys() == names | {"step"}
        assert all(math.isfinite(value) for value in m.values())
        assert 0 <= m["data_wait_s"] < m["step_s"] < 60
        assert 10 < m["memory_mib"] < 100_000
    board = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {f"train/{name}" for name in names}
    for name in names:
        events = board.Scalars(f"train/{name}")
        assert [event.step for event in events] == list(range(6))
        assert [e.value for e in events] == pytest.approx([m[name] for m in metrics], rel=1e-6)


def test_the_norm_after_clipping_is_the_smaller_of_norm_and_limit(tmp_path, store, model):
    run(config_for(store, model, tmp_path / "free", max_grad_norm=1e9))
    norms = [m["grad_norm"] for m in read_metrics(tmp_path / "free")]
    limit = sorted(norms)[2]
    run(config_for(store, model, tmp_path / "r", max_grad_norm=limit * 1.0001))
    metrics = read_metrics(tmp_path / "r")
    clipped = [m["grad_norm_clipped"] for m in metrics]
    assert max(clipped) <= limit * 1.0002
    # torch divides by the norm plus 1e-6, which the norms here are 1e4 times.
    assert clipped == pytest.approx(
        [min(m["grad_norm"], limit * 1.0001) for m in metrics], rel=1e-4
    )
    assert any(m["grad_norm"] > limit * 1.01 for m in metrics)
    free = read_metrics(tmp_path / "free")
    assert [m["grad_norm_clipped"] for m in free] == norms


def test_the_learning_rate_is_that_of_the_schedule(tmp_path, store, model):
    options = {"lr_scheduler": "cosine", "warmup_steps": 2, "learning_rate": 8e-3}
    run(config_for(store, model, tmp_path / "r", **options))
    rates = [m["learning_rate"] for m in read_metrics(tmp_path / "r")]
    # 0, 1/2, then half a cosine over 4 steps: 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2.
    falling = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert rates == pytest.approx([0, 4e-3, *(8e-3 * factor for factor in falling)])


def test_a_step_with_learning_rate_zero_changes_nothing(tmp_path, store, model):
    said = Said()
    run(config_for(store, model, tmp_path / "r", max_steps=1, warmup_steps=1), say=said)
    assert "warning: all 1 steps are warm-up; the rate never gets to its peak" in said
    weights = load_file(newest_checkpoint(tmp_path / "r") / "adapter.safetensors")
    assert all((w == 0).all() for name, w in weights.items() if name.endswith("lora_B"))


def test_a_torn_last_line_of_the_metrics_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]
    with MetricsLog(tmp_path, 1) as log:
        log.write(1, {"loss": 0.5, "grad_norm": math.inf})  # as when fp16 overflows
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0}\n{"step": 1, "loss": 0.5, "grad_norm": null}\n'


def test_the_running_mean_of_a_long_run_is_quick():
    assert running_mean([1.0, 2.0, 6.0, 4.0], 2) == [1.0, 1.5, 4.0, 5.0]
    assert running_mean([], 3) == []
    start_s = time.process_time()
    assert running_mean([2.0] * 300_000, 15_000)[-1] == 2
    assert time.process_time() - start_s < 2


def test_the_run_leaves_these_files(tmp_path, store, model, draw_curve):
    draw_curve.side_effect = train.metrics.draw_curve
    config = config_for(store, model, tmp_path / "mine", max_steps=3, save_every=1, keep_last=2)
    said = Said()
    run(config, say=said)
    folder = tmp_path / "mine"
    names = {p.name for p in folder.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "tensorboard", "checkpoints", "run.lock", "loss.png"),
        *(LORA, "mine.safetensors"),
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert TrainConfig.model_validate_json((folder / "config.json").read_text()) == config
    assert [p.name[-1] for p in sorted((folder / "checkpoints").iterdir())] == ["2", "3"]
    newest = newest_checkpoint(folder)
    assert (folder / LORA).read_bytes() == (newest / LORA).read_bytes()
    assert (folder / "mine.safetensors").read_bytes() == (
        newest / "kohya_lora.safetensors"
    ).read_bytes()
    with safe_open(folder / "mine.safetensors", "pt") as file:
        assert file.metadata()["ss_output_name"] == "mine"
        assert file.metadata()["ss_steps"] == "3"
    assert any(line.startswith("model: 5,056 of 146,196 parameters are trained") for line in said)
    assert said[-1].startswith("LoRA after step 3: ")


# The arithmetic of a step


def test_accumulation_is_one_large_batch_also_with_a_short_last_one(tmp_path, model):
    # Five samples as 2 + 2 + 1, and as one batch of five: each counts one fifth.
    five = train_store(tmp_path / "s", some_samples(5, 0)).root
    options = {"max_steps": 4, "learning_rate": 1e-3}
    parts = {"batch_size": 2, "gradient_accumulation": 3}
    run(config_for(five, model, tmp_path / "parts", **options, **parts))
    run(config_for(five, model, tmp_path / "whole", **options, batch_size=5))
    for ours, theirs in zip(curve(tmp_path / "parts"), curve(tmp_path / "whole"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_the_weight_of_a_sample_multiplies_its_loss(tmp_path, model):
    def loss_of(name, *weights):
        samples = [Sample(f"{n}.png", weight=w) for n, w in enumerate(weights)]
        held = train_store(tmp_path / f"{name}-store", samples).root
        run(config_for(held, model, tmp_path / name, max_steps=1, batch_size=2))
        (metrics,) = read_metrics(tmp_path / name)
        return metrics["loss"]

    first, second = loss_of("first", 1, 0), loss_of("second", 0, 1)
    assert first > 0.1
    assert second > 0.1
    assert loss_of("both", 1, 1) == pytest.approx(first + second, rel=1e-5)
    assert loss_of("weighted", 3, 0.5) == pytest.approx(3 * first + 0.5 * second, rel=1e-5)


def test_two_ranks_are_one_rank_with_twice_the_batch(tmp_path, store, model, forks):
    # The last micro-batch of a bucket is short: a rank without a sample, in steps of 2.
    options = {"gradient_accumulation": 2, "max_steps": 4, "learning_rate": 1e-3}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = config_for(store, model, tmp_path / "two", batch_size=1, **options)
    ranks = [in_process(forks, run_as_rank, config, rank, 2, port) for rank in range(2)]
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    run(config_for(store, model, tmp_path / "one", batch_size=2, **options))
    ours, theirs = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert len(ours) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=2e-5)


def test_the_losses_are_what_they_were(tmp_path, store, model):
    golden = json.loads(GOLDEN.read_text())
    if torch.__version__.split("+")[0] != golden["torch"]:
        pytest.skip(f"the losses are of torch {golden['torch']}")
    run(config_for(store, model, tmp_path / "r", **golden["options"]))
    losses = [m["loss"] for m in read_metrics(tmp_path / "r")]
    assert losses == pytest.approx(golden["losses"], rel=1e-5)


# Refused


def altered(model, folder, file, **changes):
    shutil.copytree(model, folder)
    content = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(content))
    return folder


def test_a_store_of_another_model_is_refused_with_both_sides(tmp_path, store, model):
    v_model = altered(
        model, tmp_path / "v", "scheduler/scheduler_config.json", prediction_type="v_prediction"
    )
    scaled = altered(model, tmp_path / "scaled", "vae/config.json", scaling_factor=0.13025)
    narrow = train_store(tmp_path / "narrow", tensors=SD1_TENSORS).root
    three = train_store(
        tmp_path / "three",
        tensors=(("latents", "variant", (3, "h", "w")), SD1_TENSORS[1]),
    ).root
    for held, base, expected in (
        (store, v_model, r"has prediction type epsilon \(the model's: v_prediction\)\. Train with"),
        (store, scaled, r"VAE scaling factor 0.18215 \(the model's: 0.13025\)\. Train with"),
        (narrow, model, r"text width 6 \(the model's: 32\)\. Train with"),
        (
            three,
            v_model,
            r"latent channels 3 \(the model's: 4\), text width 6 .*, prediction type epsilon",
        ),
    ):
        with pytest.raises(PrebakeError, match=expected):
            run(config_for(held, base, tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_the_scaling_factor_is_not_asked_for_where_there_is_no_vae(tmp_path, store, model):
    shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns("vae"))
    assert run(config_for(store, tmp_path / "m", tmp_path / "r", max_steps=1)).step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp16"}, "fp16 needs a GPU; on a CPU give no .fp32. or bf16"),
        ({"device": "cuda"}, "torch finds no GPU here. Give --device cpu or auto"),
        ({"target_modules": "to_qq"}, "'to_qq' matches no module of the U-Net. Suffixes that do:"),
        ({"attention": "xformers"}, "attention 'xformers' does not work with this model on cpu"),
    ],
)
def test_what_cannot_be_done_here_is_refused(tmp_path, store, model, options, message):
    if torch.cuda.is_available():
        pytest.skip("with a GPU most of it can be done")
    with pytest.raises(PrebakeError, match=message):
        run(config_for(store, model, tmp_path / "r", **options))


def test_a_damaged_store_is_refused(tmp_path, model):
    held = train_store(tmp_path / "s")
    place = held.sample(0).place
    (shard,) = (s for s in held.index.shards.values() if s.name == place.shard)
    path = Path(held.root.at(max(shard.files, key=lambda file: file.bytes).path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedStoreError, match=r"is damaged: .*expected .*prebake store verify"):
        run(config_for(held.root, model, tmp_path / "r"))


def test_an_empty_store_a_missing_store_and_a_missing_model_are_refused(tmp_path, store, model):
    empty = train_store(tmp_path / "empty", []).root
    with pytest.raises(PrebakeError, match="empty holds no samples"):
        run(config_for(empty, model, tmp_path / "r"))
    with pytest.raises(PrebakeError, match="nowhere is not a prebake store"):
        run(config_for(tmp_path / "nowhere", model, tmp_path / "r"))
    with pytest.raises(PrebakeError, match="no-model: no such folder"):
        run(config_for(store, tmp_path / "no-model", tmp_path / "r"))
    (tmp_path / "half" / "scheduler").mkdir(parents=True)
    with pytest.raises(PrebakeError, match=r"half has no unet/config\.json"):
        run(config_for(store, tmp_path / "half", tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_a_sample_damaged_during_the_run_is_one_line_and_the_run_can_go_on(
    tmp_path, store, model, nine
):
    options = {"max_steps": 9, "save_every": 1, "num_workers": 2}
    config = config_for(store, model, tmp_path / "r", **options)
    original = Store.read

    def read(self, rows, *options):
        if self.sample(rows[0]).path == "t1.png":
            raise DamagedStoreError("t1 is damaged.")
        return original(self, rows, *options)

    with mock.patch.object(Store, "read", read), pytest.raises(DamagedStoreError) as caught:
        run(config)
    assert str(caught.value) == "t1 is damaged."
    run(config)
    assert_same_run(nine, tmp_path / "r")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give one of --max-steps and --max-epochs"),
        (["--max-steps", "2", "--max-epochs", "2"], 2, "give one of --max-steps and --max-epochs"),
        (["--max-steps", "0"], 2, "--max-steps: Input should be greater than or equal to 1, got 0"),
        (["--max-steps", "1", "--rank", "0"], 2, "--rank: Input should be greater than or equal"),
        (["--max-steps", "1", "--caption-dropout", "1.5"], 2, "--caption-dropout: Input should"),
        (["--max-steps", "1", "--learning-rate", "nan"], 2, "--learning-rate: Input should"),
        (["--max-steps", "1", "--mixed-precision", "fp16"], 1, "Error: --mixed-precision fp16"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, store, model, arguments, code, message):
    given = [str(store), "--model", str(model), "--out", str(tmp_path / "r"), *arguments]
    result = CliRunner().invoke(prebake.cli, ["train", *given, "--device", "cpu"])
    assert result.exit_code == code
    assert message in result.output.splitlines()[-1]


# Signals, to a process of its own


def wait_for_steps(folder, count, process):
    deadline = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < count:
        assert process.is_alive(), "the run ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_group_ends_the_run_with_a_checkpoint(
    tmp_path, store, model, forks, forty, number, code
):
    config = config_for(store, model, tmp_path / "r", max_steps=40, batch_size=2, num_workers=2)
    arguments = ["train", *prebake.command_line(config)]
    process = in_process(forks, run_cli, arguments, tmp_path / "log")
    wait_for_steps(tmp_path / "r", 3, process)
    os.killpg(process.pid, number)
    process.join(300)
    assert process.exitcode == code
    said = (tmp_path / "log").read_text()
    assert said.count("stopping after the step under way") == 1
    assert "Traceback" not in said
    step = int(newest_checkpoint(tmp_path / "r").name[5:])
    assert 3 <= step < 40
    assert len(curve(tmp_path / "r")) == step
    assert (tmp_path / "r" / LORA).exists()
    run(config)
    assert_same_run(forty, tmp_path / "r")


# At each of three checkpoints: adapter, optimizer, state (the LoRA files go another way); the 10th
# and 11th are the LoRA files of the run itself.
@pytest.mark.parametrize("at", [1, 3, 5, 9, 10])
def test_a_run_killed_while_it_writes_ends_the_same(tmp_path, store, model, forks, six, at):
    config = config_for(store, model, tmp_path / "r", save_every=2)
    process = in_process(forks, run_until_write, config, at)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    left = list((tmp_path / "r").rglob("*.part"))
    assert left, "the killed run left nothing half-written"
    said = Said()
    run(config, say=said)
    assert not any("damaged" in line for line in said)
    assert_same_run(six, tmp_path / "r")
    assert not list((tmp_path / "r").rglob("*.part"))


@pytest.mark.parametrize("before", [True, False])
def test_a_run_killed_around_the_moment_a_checkpoint_counts_ends_the_same(
    tmp_path, store, model, forks, six, before
):
    config = config_for(store, model, tmp_path / "r", save_every=2)
    process = in_process(forks, run_until_rename, config, 4, before=before)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert newest_checkpoint(tmp_path / "r").name == f"step-{2 if before else 4:08d}"
    run(config)
    assert_same_run(six, tmp_path / "r")
