import contextlib
import json
import os
import pickletools
import shutil
import signal
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from train_builders import Said, same_bits

from store_format.errors import PrebakeError
from store_format.files import sha256_of, write_file
from train.checkpoint import (
    TrainingState,
    _hash_of,
    check_settings,
    checkpoint_folder,
    fingerprint,
    list_checkpoints,
    locked,
    newest_valid,
    read_checkpoint,
    remove_unfinished,
    replace_in,
    save_checkpoint,
)
from train.lora_files import LoraPair

FILES = ("adapter.safetensors", "lora.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(autouse=True)
def _no_flushing(monkeypatch):
    """Tests end with their process, not with the power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def state_at(step):
    """A small state whose numbers follow from the step."""
    base = torch.arange(6.0).reshape(2, 3) + 100 * step
    return TrainingState(
        step=step,
        adapter={
            "down.to_q": LoraPair(base, base.T + 0.5),
            "mid.to_out.0": LoraPair(base + 1, base.T - 1),
        },
        optimizer_tensors={"0/exp_avg": base / 3, "0/state1": torch.tensor([step, 255]).byte()},
        optimizer_meta={"param_groups": [{"lr": 0.1, "params": [0]}], "state": {"0": {}}},
        scaler={"scale": 65536.0, "_growth_tracker": 7},
        settings={"seed": 1, "total_steps": 20, "base U-Net": "ab"},
    )


def save(run, step, keep_last=3):
    run.mkdir(exist_ok=True)
    return save_checkpoint(
        run,
        state_at(step),
        keep_last=keep_last,
        write_lora_files=lambda folder: write_file(folder / "lora.safetensors", b"lora %d" % step),
    )


def assert_is_state(found, step):
    expected = state_at(step)
    for name in ("step", "optimizer_meta", "scaler", "settings"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.adapter.keys() == expected.adapter.keys()
    for module, pair in expected.adapter.items():
        assert same_bits(found.adapter[module].lora_A, pair.lora_A)
        assert same_bits(found.adapter[module].lora_B, pair.lora_B)
    assert found.optimizer_tensors.keys() == expected.optimizer_tensors.keys()
    for name, tensor in expected.optimizer_tensors.items():
        assert same_bits(found.optimizer_tensors[name], tensor)


def steps_in(run):
    return [int(path.name[5:]) for path in list_checkpoints(run)]


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path):
    folder = save(tmp_path, 200)
    assert folder == tmp_path / "checkpoints" / "step-00000200"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert_is_state(read_checkpoint(folder), 200)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    for path in save(tmp_path, 1).iterdir():
        data = path.read_bytes()
        assert not data.startswith(b"PK")  # torch.save writes zip files of pickles
        with pytest.raises((ValueError, IndexError)):
            list(pickletools.genops(data))


# Killed at any moment


class Killer:
    """Ends the process at the k-th operation on files, without any cleaning up."""

    OPERATIONS = (
        *("os.open", "os.mkdir", "os.rename", "os.replace", "os.fsync", "os.rmdir", "os.unlink"),
        *("io.open", "shutil.rmtree"),
    )

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        for name in self.OPERATIONS:
            module, attribute = name.split(".")
            original = getattr(sys.modules[module], attribute)
            self.stack.enter_context(mock.patch(name, self.counting(original)))
        return self

    def __exit__(self, *exception):
        self.stack.close()

    def counting(self, original):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os._exit(42)
            return original(*args, **kwargs)

        return call


def run_and_be_killed(work, at):
    """Do `work` in a child that is killed at its `at`-th file operation; tell whether it was."""
    child = os.fork()
    if child == 0:
        try:
            with Killer(at):
                work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 42)
    return code == 42


def test_a_save_killed_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path):
    points, outcomes = 0, []
    while True:
        points += 1
        run = tmp_path / str(points)
        save(run, 1, keep_last=1)
        was_killed = run_and_be_killed(lambda run=run: save(run, 2, keep_last=1), points)
        said = Said()
        found = newest_valid(run, said)
        outcomes.append(found.step)
        assert_is_state(found, found.step)
        assert said == []
        # The same again, as a new process would.
        remove_unfinished(run)
        assert_is_state(read_checkpoint(save(run, 2, keep_last=1)), 2)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
        if not was_killed:
            break
    assert points > 15  # so many file operations there are, at least
    assert set(outcomes) == {1, 2}
    assert outcomes == sorted(outcomes)  # once the new one counts, it counts


def test_a_save_over_a_damaged_one_killed_at_any_point_never_harms_the_good_one(tmp_path):
    points = 0
    while True:
        points += 1
        run = tmp_path / str(points)
        save(run, 1)
        (save(run, 2) / "adapter.safetensors").write_bytes(b"damaged")
        was_killed = run_and_be_killed(lambda run=run: save(run, 2), points)
        found = newest_valid(run, Said())
        assert_is_state(found, found.step)
        if not was_killed:
            break
    assert found.step == 2


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    (folder / ".step-00000002.part").mkdir()
    (folder / ".step-00000002.part" / "adapter.safetensors").write_bytes(b"half")
    (folder / "notes.part").write_text("the user's own")
    remove_unfinished(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "notes.part"}


# Damaged


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut_short, flip_a_bit, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, name, harm):
    save(tmp_path, 1)
    save(tmp_path, 2)
    harm(save(tmp_path, 3) / name)
    said = Said()
    assert_is_state(newest_valid(tmp_path, said), 2)
    (line,) = said
    assert line.startswith("warning: checkpoint")
    assert "step-00000003 is damaged" in line
    assert line.endswith("Falling back to the one before it.")


def test_no_single_flipped_bit_in_the_state_goes_unnoticed(tmp_path):
    path = save(tmp_path, 123) / "state.json"
    data = path.read_bytes()
    for at in range(0, len(data), 2):
        for bit in (1, 8):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                found = read_checkpoint(path.parent)
            except PrebakeError:
                continue
            assert_is_state(found, 123)  # white space between the values is free


def test_two_damaged_ones_are_passed_over(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip_a_bit(tmp_path / "checkpoints" / "step-00000003" / "optimizer.safetensors")
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").unlink()
    said = Said()
    assert_is_state(newest_valid(tmp_path, said), 1)
    assert [line.split()[2][-1] for line in said] == ["3", "2"]


def test_only_damaged_ones_are_an_error_and_not_a_new_start(tmp_path):
    empty(save(tmp_path, 1) / "state.json")
    with pytest.raises(PrebakeError, match=r"none of the 1 checkpoints in .* is whole"):
        newest_valid(tmp_path, Said())


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert newest_valid(tmp_path / "absent", Said()) is None
    assert list_checkpoints(tmp_path) == []


# Which is the newest


def test_the_newest_is_the_one_of_the_highest_step_whatever_its_time(tmp_path):
    for step in (9, 10, 2):
        save(tmp_path, step, keep_last=9)
    os.utime(checkpoint_folder(tmp_path, 2))
    os.utime(checkpoint_folder(tmp_path, 10), (0, 0))
    os.utime(checkpoint_folder(tmp_path, 10) / "state.json", (0, 0))
    assert steps_in(tmp_path) == [10, 9, 2]
    assert newest_valid(tmp_path, Said()).step == 10


def test_a_copied_run_is_the_same_run(tmp_path):
    for step in (1, 2):
        save(tmp_path / "a", step)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    assert_is_state(newest_valid(tmp_path / "b", Said()), 2)


def test_a_folder_renamed_to_another_step_does_not_count(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    checkpoint_folder(tmp_path, 1).rename(checkpoint_folder(tmp_path, 99))
    said = Said()
    assert newest_valid(tmp_path, said).step == 2
    assert "state.json is of step 1" in said[0]


def test_other_names_are_no_checkpoints(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in ("step-", "step-x", "step-00000001 (copy)", "step-²²²²²²²²", "other"):
        (folder / name).mkdir()
    (folder / "step-00000007").write_text("a file")
    assert steps_in(tmp_path) == [1]
    save(tmp_path, 2, keep_last=1)
    assert {"step-x", "step-00000001 (copy)", "step-00000007"} < {p.name for p in folder.iterdir()}


# Pruning


def test_the_last_ones_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep_last=2)
    assert steps_in(tmp_path) == [5, 4]


def test_nothing_is_pruned_before_the_new_one_is_safe(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)

    def fail(folder):
        assert steps_in(tmp_path) == [2, 1]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, state_at(3), keep_last=1, write_lora_files=fail)
    assert steps_in(tmp_path) == [2, 1]
    assert newest_valid(tmp_path, Said()).step == 2


def test_a_damaged_later_one_never_costs_the_new_one(tmp_path):
    save(tmp_path, 4)
    flip_a_bit(save(tmp_path, 9) / "adapter.safetensors")
    save(tmp_path, 5, keep_last=1)  # the run went on from 4
    assert steps_in(tmp_path) == [9, 5]
    assert_is_state(newest_valid(tmp_path, Said()), 5)


# Hostile


def rewrite(folder, change):
    """Change the state and make its own hash fit, as an attacker would."""
    body = json.loads((folder / "state.json").read_bytes())
    body = change(body) or body
    if isinstance(body, dict):
        body["sha256"] = _hash_of(body)
    (folder / "state.json").write_text(json.dumps(body))


def point_outside(body):
    body["files"]["../../secret"] = {"bytes": 6, "sha256": "0" * 64}


def point_to_root(body):
    body["files"]["/etc/passwd"] = {"bytes": 1, "sha256": ""}


HOSTILE = {
    "a list": lambda body: [1, 2],
    "a number": lambda body: 7,
    "no version": lambda body: body.pop("version") and None,
    "later version": lambda body: body.update(version=2),
    "other format": lambda body: body.update(format="zip"),
    "outside": point_outside,
    "absolute": point_to_root,
    "files a list": lambda body: body.update(files=["adapter.safetensors"]),
    "files a text": lambda body: body.update(files="adapter.safetensors"),
    "no adapter listed": lambda body: body["files"].pop("adapter.safetensors") and None,
    "entry a text": lambda body: body["files"].update({"lora.safetensors": "x"}),
    "step a text": lambda body: body.update(step="1"),
    "step a float": lambda body: body.update(step=1.0),
    "step true": lambda body: body.update(step=True),
    "step none": lambda body: body.update(step=None),
    "settings a list": lambda body: body.update(settings=[1]),
    "settings without total": lambda body: body["settings"].pop("total_steps") and None,
    "total a text": lambda body: body["settings"].update(total_steps="20"),
    "optimizer a number": lambda body: body.update(optimizer=3),
    "scaler a number": lambda body: body.update(scaler=3),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_state_is_one_line(tmp_path, change):
    folder = save(tmp_path / "run", 1)
    rewrite(folder, change)
    with pytest.raises(PrebakeError, match="step-00000001 is damaged") as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_file_outside_of_the_folder_is_never_read(tmp_path):
    folder = save(tmp_path, 1)
    rewrite(folder, point_outside)
    with (
        mock.patch("train.checkpoint.sha256_of", wraps=sha256_of) as opened,
        pytest.raises(PrebakeError, match="is not a file of this folder"),
    ):
        read_checkpoint(folder)
    assert all(call.args[0].parent == folder for call in opened.call_args_list)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "{", "\x00", "nul"])
def test_a_state_that_is_not_json_is_one_line(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / "state.json").write_text(text)
    with pytest.raises(PrebakeError, match="is damaged"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0{}      "])
def test_tensors_that_are_none_are_one_line_though_their_hash_fits(tmp_path, content):
    folder = save(tmp_path, 1)
    path = folder / "adapter.safetensors"
    path.write_bytes(content)

    def fit(body):
        body["files"][path.name] = {"bytes": len(content), "sha256": sha256_of(path)}

    rewrite(folder, fit)
    if content.endswith(b"{}      "):  # valid, and empty: an adapter of no modules
        assert read_checkpoint(folder).adapter == {}
        return
    with pytest.raises(PrebakeError, match="is damaged"):
        read_checkpoint(folder)


def test_an_adapter_with_half_a_pair_is_one_line(tmp_path):
    folder = save(tmp_path, 1)
    path = folder / "adapter.safetensors"
    save_file({"to_q.lora_A": torch.ones(1)}, path)

    def fit(body):
        body["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}

    rewrite(folder, fit)
    with pytest.raises(PrebakeError, match=r"it lacks 'to_q.lora_B'"):
        read_checkpoint(folder)


# Settings


def test_every_changed_setting_is_named(tmp_path):
    before = {"rank": 8, "seed": 0, "gone": 1, "same": "x"}
    now = {"rank": 16, "seed": 0, "same": "x", "new": 2.5}
    expected = "gone was 1, now None; new was None, now 2.5; rank was 8, now 16"
    with pytest.raises(PrebakeError, match=f"trained with other settings: {expected}. Give the"):
        check_settings(before, now, tmp_path)
    check_settings(before, dict(before), tmp_path)


# Two at once


def test_a_second_process_is_kept_out_until_the_first_ends(tmp_path):
    is_in, never = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        with locked(tmp_path / "run"):
            os.write(is_in[1], b"x")
            os.read(never[0], 1)
    assert os.read(is_in[0], 1) == b"x"
    with (
        pytest.raises(PrebakeError, match="run is in use by another training process"),
        locked(tmp_path / "run"),
    ):
        pass
    os.kill(other, signal.SIGKILL)  # its lock goes with it
    os.waitpid(other, 0)
    with locked(tmp_path / "run"):
        pass
    for descriptor in (*is_in, *never):
        os.close(descriptor)


def test_a_loader_worker_that_outlives_a_killed_run_does_not_hold_its_lock(tmp_path):
    is_up, end = os.pipe(), os.pipe()
    trainer = os.fork()
    if trainer == 0:
        with locked(tmp_path):
            if os.fork() == 0:  # as DataLoader does
                os.close(end[1])
                os.write(is_up[1], b"x")
                os.read(end[0], 1)  # until the test ends
                os._exit(0)
            os._exit(0)
    os.waitpid(trainer, 0)
    assert os.read(is_up[0], 1) == b"x"
    with locked(tmp_path):
        pass
    for descriptor in (*is_up, *end):
        os.close(descriptor)


# What lies beside the checkpoints


def test_lora_files_are_put_into_the_run_only_where_they_differ(tmp_path):
    folder = save(tmp_path, 1)
    names = {"lora.safetensors": "mine.safetensors"}
    replace_in(tmp_path, folder, names)
    target = tmp_path / "mine.safetensors"
    assert target.read_bytes() == b"lora 1"
    os.utime(target, (5, 5))
    replace_in(tmp_path, folder, names)
    assert target.stat().st_mtime == 5
    replace_in(tmp_path, save(tmp_path, 2), names)
    assert target.read_bytes() == b"lora 2"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "mine.safetensors"}


def test_a_fingerprint_knows_names_shapes_dtypes_and_numbers():
    base = [("a", torch.zeros(2, 3)), ("b", torch.ones(4))]
    others = [
        [("a", torch.zeros(3, 2)), ("b", torch.ones(4))],
        [("a", torch.zeros(2, 3)), ("c", torch.ones(4))],
        [("a", torch.zeros(2, 3)), ("b", torch.ones(4).bfloat16())],
        [("a", torch.zeros(2, 3)), ("b", torch.tensor([1.0, 1, 1, 1.0000001]))],
        [("a", torch.zeros(2, 3))],
    ]
    assert fingerprint(base) == fingerprint(base[::-1])
    assert fingerprint(base) not in map(fingerprint, others)
