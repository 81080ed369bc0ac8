"""The front door: the `prebake` command. By itself it loads neither torch nor diffusers.

Commands are loaded when they are called; `run` and `demo` call them as child processes, with
`python -P`, so that a `train.py` of the user's in the current folder is never imported instead.
"""

import difflib
import errno
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click

from store_format.errors import PrebakeError, one_line

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

    Model = TypeVar("Model", bound=BaseModel)

Command = TypeVar("Command", bound=Callable[..., Any])

_COMMANDS = {  # in the order in which a person meets them
    "precompute": ("precompute.commands", "Bake captioned images into a store."),
    "train": ("train.commands", "Train a LoRA from a store, with only the U-Net in memory."),
    "sample": ("sampling.commands", "Draw prompts with a model and LoRA files, as a grid."),
    "demo": ("sampling.commands", "See a LoRA learn a new shape, in minutes, on a tiny model."),
    "store": ("store_format.commands", "Look into a store, check it, mend it, copy it."),
}
_SUBCOMMANDS_ELSEWHERE = {
    "store": {
        "repair": ("precompute.commands", "Mend a damaged store: encode anew what is unreadable."),
    },
}
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BAD_PLACE = {
    errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EISDIR, errno.ELOOP,
    errno.EIO, errno.ESTALE,
}  # fmt: skip


class LaterCommand(click.Command):
    """A command that is imported when it is called; until then only its name and help are there."""

    def __init__(self, name: str, module: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._module = module

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Return the context of the real command."""
        name = self.name or ""
        command: click.Command = getattr(importlib.import_module(self._module), name)
        if isinstance(command, click.Group):
            for subname, (module, text) in _SUBCOMMANDS_ELSEWHERE.get(name, {}).items():
                command.add_command(LaterCommand(subname, module, text))
        return command.make_context(info_name, args, parent, **extra)


class FrontDoor(click.Group):
    """A click group that turns users' mistakes into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in their order, not by the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a mistake or a full disk becomes one line and exit code 1."""
        try:
            return super().invoke(ctx)
        except PrebakeError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted; what was written is kept, run it again to finish", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        except OSError as error:
            if error.errno in _FULL_DISK:
                where = error.filename or "while writing"
                raise click.ClickException(
                    f"{where}: {os.strerror(error.errno)}. What was finished is kept; "
                    "free some space and run the same command again."
                ) from error
            if isinstance(error, PermissionError):
                raise click.ClickException(f"{error.filename}: permission denied.") from error
            if error.errno in _BAD_PLACE and error.filename is not None:
                text = f"{os.fsdecode(error.filename)}: {os.strerror(error.errno)}."
                raise click.ClickException(one_line(text)) from error
            raise


@click.group(cls=FrontDoor, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="prebake")
def cli() -> None:
    """Bake a captioned image set once, then train any number of Stable Diffusion LoRAs from it.

    \b
    prebake precompute photos/ --model MODEL --out stores/photos
    prebake train stores/photos --model MODEL --out runs/first --max-steps 1000
    """


for _name, (_module, _text) in _COMMANDS.items():
    cli.add_command(LaterCommand(_name, _module, _text))


def config_options(model: "type[BaseModel]") -> Callable[[Command], Command]:
    """Return a decorator that gives a command one option for each field of a config model."""

    def decorate(command: Command) -> Command:
        for name, field in reversed(model.model_fields.items()):
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("argument"):
                kind = click.Path(path_type=Path) if field.annotation is Path else str
                command = click.argument(name, type=kind)(command)
            else:
                command = click.option(option_name(name), name, **_option(field))(command)
        return command

    return decorate


def option_name(field: str) -> str:
    """Return the long option of a config field."""
    return "--" + field.replace("_", "-")


def _option(field: "FieldInfo") -> dict[str, Any]:
    kinds = [k for k in get_args(field.annotation) or (field.annotation,) if k is not type(None)]
    option: dict[str, Any] = {"help": field.description, "required": field.is_required()}
    if get_origin(field.annotation) is Literal:
        option["type"] = click.Choice(get_args(field.annotation))
    elif kinds[0] is bool:
        return {"help": field.description, "is_flag": True}
    elif kinds[0] is Path:
        option |= {"type": click.Path(path_type=Path), "metavar": "PATH"}
    else:
        option |= {"type": kinds[0], "metavar": {int: "N", float: "X"}.get(kinds[0], "TEXT")}
    if (
        not field.is_required()
        and field.default_factory is None
        and field.default not in (None, "")
    ):
        option |= {"default": field.default, "show_default": True}
    return option


def validated(model: "type[Model]", values: Mapping[str, Any]) -> "Model":
    """Return the config of a command line; a bad value is a usage error that names its option."""
    from pydantic import ValidationError

    try:
        return model.model_validate({k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        text = "; ".join(_explain(error, model, lambda f: option_name(f) if f else ""))
        for name in model.model_fields:  # messages about several fields name them as in Python
            text = text.replace(name, option_name(name)) if "_" in name else text
        raise click.UsageError(text) from None


def _explain(
    error: "ValidationError", model: "type[BaseModel]", where: Callable[[str], str]
) -> list[str]:
    """Return one line for each invalid field: where it is, what was expected, what was found."""
    lines = []
    for item in error.errors():
        field = str(item["loc"][0]) if item["loc"] else ""
        prefix = f"{where(field)}: " if where(field) else ""
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, model.model_fields, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            lines.append(f"{prefix}unknown key.{hint}")
        elif item["type"] == "missing":
            lines.append(f"{prefix}required, but not given")
        else:
            found = f", got {item['input']!r}" if field else ""
            lines.append(f"{prefix}{item['msg'].removeprefix('Value error, ')}{found}")
    return lines


def announce(line: str) -> None:
    """Tell a person at a terminal what the seconds before the first line go to."""
    if sys.stderr.isatty():
        click.echo(one_line(line), err=True)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a question that long work asks between its steps.

    Calling the object says whether to stop; a second signal acts as without it.
    """

    def __enter__(self) -> "StopRequest":
        self._signal = 0
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self._signal != 0

    def exit_if_requested(self) -> None:
        """End the process as the signal would have: exit code 128 + its number."""
        if self._signal:
            raise click.exceptions.Exit(128 + self._signal)

    def _note(self, number: int, frame: object) -> None:
        self._signal = number
        signal.signal(number, self._before[signal.Signals(number)])
        # Not click.echo: a handler may run in the middle of another write to the same stream.
        os.write(2, b"stopping after the step under way; once more to stop at once\n")


def bundled_folder() -> Path:
    """Return the folder of the bundled model and pictures: in the checkout, or in the wheel."""
    checkout = Path(__file__).parent / "examples" / "bundled"
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec("precompute")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bundled"


def resolve_model(model: str) -> str:
    """Return the folder or hub id that MODEL means.

    Raises:
        PrebakeError: it is a single checkpoint file, or a path that does not exist.
    """
    if model == "bundled":
        return str(bundled_folder() / "model")
    path = Path(model)
    if path.suffix in (".safetensors", ".ckpt"):
        raise PrebakeError(
            f"{model} is a single-file checkpoint; prebake needs a diffusers folder so far. "
            'Convert it once: python -c "from diffusers import StableDiffusionPipeline as P; '
            f"P.from_single_file('{model}').save_pretrained('{path.stem}')\""
        )
    looks_like_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not path.is_dir() and (path.exists() or not looks_like_hub_id):
        raise PrebakeError(
            f"--model {model}: no such folder. Give a diffusers folder, a hub id (owner/name) "
            "or 'bundled'."
        )
    return model


@cli.command()
@click.argument("name")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    default=Path("pipelines.yaml"),
    show_default=True,
    help="The file that names stores and runs.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
def run(name: str, file: Path, dry_run: bool) -> None:
    """Bake and train the run NAME of pipelines.yaml.

    The store is baked as far as it is not yet, then training starts in a fresh process. Paths in
    the file are relative to the file. Running it again continues or confirms what is there.
    """
    bake, training = resolve_run(file, name)
    if dry_run:
        resolved = {"store": bake.model_dump(mode="json"), "run": training.model_dump(mode="json")}
        click.echo(json.dumps(resolved, indent=2))
        return
    call("precompute", command_line(bake))
    call("train", command_line(training))


def resolve_run(file: Path, name: str) -> "tuple[BaseModel, BaseModel]":
    """Return the (bake, training) configurations of a run in a pipelines file.

    Raises:
        PrebakeError: the file, the run or its store is missing, or a key or value is wrong.
    """
    import yaml

    from precompute.config import BakeConfig
    from train.config import TrainConfig

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PrebakeError(f"{file}: no such file. Name it with -f FILE.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PrebakeError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PrebakeError(f"{file}: expected the keys 'stores' and 'runs'.")
    for key in content:
        if key not in ("stores", "runs"):
            raise PrebakeError(f"{file}: {key}: unknown key. Expected 'stores' and 'runs'.")
    run_values = _entry(file, content, "runs", name)
    store_name = run_values.get("store")
    if not isinstance(store_name, str):
        raise PrebakeError(f"{file}: runs.{name}.store: name one of the stores of this file.")
    store_values = _entry(file, content, "stores", store_name)
    bake = _from_yaml(file, BakeConfig, f"stores.{store_name}", store_values, ("images", "out"))
    run_values = {"model": store_values.get("model"), **run_values, "store": str(bake.out)}
    return bake, _from_yaml(file, TrainConfig, f"runs.{name}", run_values, ("out",))


def _entry(file: Path, content: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    entries = content.get(section) or {}
    if not isinstance(entries, dict) or not isinstance(entries.get(name), dict):
        names = list(entries) if isinstance(entries, dict) else []
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"It has: {', '.join(names) or 'none'}."
        raise PrebakeError(f"{file}: {section}.{name} does not exist. {hint}")
    entry: dict[str, Any] = entries[name]
    return entry


def _from_yaml(
    file: Path,
    model: "type[Model]",
    where: str,
    values: dict[str, Any],
    paths: tuple[str, ...],
) -> "Model":
    from pydantic import ValidationError

    values = dict(values)
    for key in paths:
        if isinstance(values.get(key), str) and "://" not in values[key]:
            values[key] = str(file.parent / Path(values[key]).expanduser())
    if isinstance(values.get("model"), str) and (file.parent / values["model"]).is_dir():
        values["model"] = str(file.parent / values["model"])
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = _explain(error, model, lambda field: f"{where}.{field}" if field else where)
        raise PrebakeError(f"{file}: {'; '.join(lines)}") from None


def command_line(config: "BaseModel") -> list[str]:
    """Return the arguments that give `config` on the command line: what differs from defaults."""
    arguments, options = [], []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("argument"):
            arguments.append(str(value))
        elif name in config.model_fields_set and value is not None and value is not False:
            options += [option_name(name)] if value is True else [option_name(name), str(value)]
    return arguments + options


def call(command: str, arguments: Sequence[str], *, num_threads: int | None = None) -> None:
    """Run one prebake command in a fresh process, after showing it; fail as it fails.

    The child has a process group of its own and gets each signal once, from here: Ctrl-C then lets
    it finish what it must.
    """
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    shown = [f"{name}={value}" for name, value in threads.items()]
    click.echo(f"$ {shlex.join([*shown, 'prebake', command, *arguments])}")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prebake", command, *arguments],
        process_group=0,
        env=os.environ | threads,
    )
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, lambda n, frame: process.send_signal(n)) for s in signals}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise click.exceptions.Exit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    from prebake import cli as front_door  # under its own name: commands import `prebake`

    front_door(prog_name="prebake")
