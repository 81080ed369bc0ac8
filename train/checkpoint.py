"""Checkpoints: what a run needs to go on bit for bit, and LoRA files that are usable at once.

`RUN/checkpoints/step-00000200/` holds `adapter.safetensors` (A and B of each adapted module, f32),
`optimizer.safetensors`, `state.json` (step, settings, scaler, sizes and hashes of the files, and of
itself) and the LoRA files. It is written under another name and renamed; nothing in it is a pickle.
All random draws are keyed by step (train/draws.py), so there is no generator state to keep.
"""

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from store_format.errors import PrebakeError
from store_format.files import flush_folder, is_file_with, make_folder, sha256_of, write_file
from train.lora_files import LoraPair

CHECKPOINTS_FOLDER = "checkpoints"
STATE_NAME = "state.json"
ADAPTER_NAME = "adapter.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
LOCK_NAME = "run.lock"
CHECKPOINT_VERSION = 1
_PREFIX = "step-"
_UNFINISHED = ".part"


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes while a run trains."""

    step: int
    """Optimizer steps done."""
    adapter: dict[str, LoraPair]
    optimizer_tensors: dict[str, torch.Tensor]
    optimizer_meta: dict[str, Any]
    scaler: dict[str, Any]
    """State of the gradient scaler; empty without one."""
    settings: dict[str, Any]
    """What must be equal for the run to go on (see `check_settings`)."""


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Make the run's folder and keep other processes out of it; the system frees a dead one's lock.

    Raises:
        PrebakeError: another process trains in it, or it cannot be a folder.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise PrebakeError(f"{run} is, or is in, a file. Give another --out.") from None
    with (run / LOCK_NAME).open("w") as file:
        try:
            # Not flock: loader workers inherit that, and outlive a killed run by seconds.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            raise PrebakeError(
                f"{run} is in use by another training process. Wait for it to end, or give "
                "another --out."
            ) from None
        yield


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return run / CHECKPOINTS_FOLDER / f"{_PREFIX}{step:08d}"


def save_checkpoint(
    run: Path,
    state: TrainingState,
    *,
    keep_last: int,
    write_lora_files: Callable[[Path], None],
) -> Path:
    """Write a checkpoint in one atomic step, then remove the oldest beyond `keep_last`.

    Args:
        run: the run's folder.
        state: what to keep.
        keep_last: how many checkpoints stay, this one included. Later ones do not count: they were
            found damaged when the run was resumed.
        write_lora_files: writes the usable LoRA files into the folder that it is given.
    """
    final = checkpoint_folder(run, state.step)
    part = final.with_name(f".{final.name}{_UNFINISHED}")
    make_folder(final.parent)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    adapter = {}
    for module, pair in state.adapter.items():
        adapter[f"{module}.lora_A"] = pair.lora_A.contiguous()
        adapter[f"{module}.lora_B"] = pair.lora_B.contiguous()
    write_file(part / ADAPTER_NAME, save(adapter))
    write_file(part / OPTIMIZER_NAME, save(state.optimizer_tensors))
    write_lora_files(part)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(part.iterdir())
    }
    body = {
        "format": "prebake-checkpoint",
        "version": CHECKPOINT_VERSION,
        "step": state.step,
        "settings": state.settings,
        "optimizer": state.optimizer_meta,
        "scaler": state.scaler,
        "files": files,
    }
    body["sha256"] = _hash_of(body)
    write_file(part / STATE_NAME, json.dumps(body, indent=1, sort_keys=True).encode())
    flush_folder(part)
    if final.exists():  # a damaged one that was passed over when the run was resumed
        shutil.rmtree(final)
    part.rename(final)
    flush_folder(final.parent)
    for old in [p for p in list_checkpoints(run) if _step_of(p) <= state.step][keep_last:]:
        shutil.rmtree(old)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, the newest first, by the step in their names."""
    folders = [path for path in (run / CHECKPOINTS_FOLDER).glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted((path for path in folders if _step_of(path) >= 0), key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 for another name."""
    found = re.fullmatch(f"{_PREFIX}([0-9]{{8,18}})", folder.name)
    return int(found[1]) if found else -1


def _hash_of(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of `state.json`, but for the hash itself."""
    content = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_checkpoint(folder: Path) -> TrainingState:
    """Read a checkpoint and check every file of it.

    Raises:
        PrebakeError: it is damaged, incomplete or of a later version.
    """
    try:
        body = json.loads((folder / STATE_NAME).read_bytes())
        if body["format"] != "prebake-checkpoint" or body["version"] != CHECKPOINT_VERSION:
            raise ValueError(f"{STATE_NAME} is of format {body['format']}, {body['version']}")
        if body["sha256"] != _hash_of(body):
            raise ValueError(f"{STATE_NAME} differs from its hash")
        if _step_of(folder) not in (-1, body["step"]):
            raise ValueError(f"{STATE_NAME} is of step {body['step']}")
        for name in {ADAPTER_NAME, OPTIMIZER_NAME, *body["files"]}:
            entry = body["files"][name]
            path = folder / name
            if path.parent != folder:
                raise ValueError(f"{name} is not a file of this folder")
            if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
                raise ValueError(f"{name} differs from its hash")
        tensors = load_file(folder / ADAPTER_NAME)
        modules = sorted({name.rsplit(".", 1)[0] for name in tensors})
        settings = dict(body["settings"])
        if type(settings["total_steps"]) is not int or type(body["step"]) is not int:
            raise ValueError(f"{STATE_NAME} has a step that is no number")
        return TrainingState(
            step=body["step"],
            adapter={m: LoraPair(tensors[f"{m}.lora_A"], tensors[f"{m}.lora_B"]) for m in modules},
            optimizer_tensors=load_file(folder / OPTIMIZER_NAME),
            optimizer_meta=dict(body["optimizer"]),
            scaler=dict(body["scaler"]),
            settings=settings,
        )
    except KeyError as error:
        raise PrebakeError(f"checkpoint {folder} is damaged (it lacks {error}).") from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise PrebakeError(f"checkpoint {folder} is damaged ({error}).") from None


def newest_valid(run: Path, say: Callable[[str], None]) -> TrainingState | None:
    """Return the newest checkpoint that is whole, saying which ones are not; None without any.

    Raises:
        PrebakeError: there are checkpoints, but none is whole.
    """
    folders = list_checkpoints(run)
    for folder in folders:
        try:
            return read_checkpoint(folder)
        except PrebakeError as error:
            say(f"warning: {error} Falling back to the one before it.")
    if folders:
        raise PrebakeError(
            f"none of the {len(folders)} checkpoints in {run / CHECKPOINTS_FOLDER} is whole. "
            "Give --resume never and another --out to start anew."
        )
    return None


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any], run: Path) -> None:
    """Refuse to continue a run under other settings, naming each.

    Raises:
        PrebakeError: a setting differs.
    """
    names = sorted(before.keys() | now.keys())
    changed = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise PrebakeError(
            f"{run} was trained with other settings: {'; '.join(changed)}. Give the same ones to "
            "continue, or another --out to start anew."
        )


def fingerprint(named: "list[tuple[str, torch.Tensor]]") -> str:
    """Return a hash of named tensors, by which a resumed run knows its base model again."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(hashlib.sha256(data.data).digest())
    return digest.hexdigest()


def remove_unfinished(run: Path) -> None:
    """Remove what a killed writer left half-written."""
    for path in (run / CHECKPOINTS_FOLDER).glob(f".{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(path)


def replace_in(run: Path, checkpoint: Path, names: Mapping[str, str]) -> None:
    """Put copies of a checkpoint's LoRA files into the run's folder, each in one atomic step.

    Args:
        run: the run's folder.
        checkpoint: the checkpoint's folder.
        names: file name in the checkpoint to file name in the run's folder.
    """
    for source, target in names.items():
        data = (checkpoint / source).read_bytes()
        if not is_file_with(run / target, data):
            part = run / f".{target}{_UNFINISHED}"
            write_file(part, data)
            part.replace(run / target)
    flush_folder(run)
