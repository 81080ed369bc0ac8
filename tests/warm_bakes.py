"""`prebake precompute` in processes that start at once, to be killed in their work.

A server process imports everything and loads the tiny model, then forks a child for each run: that
takes milliseconds instead of ten seconds. The server itself has no threads, so a fork is safe.

    with WarmBakes(log) as server:
        run = server.start(["precompute", ...])
        run.kill(signal.SIGKILL)
        code = run.wait()
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from crashes import KILLED, kill_at

DIED_AT_CALL = KILLED
MAX_RUN_S = 200  # a run that hangs ends then, and its test fails


@dataclass
class WarmRun:
    """One child. `pid` is its own; its output goes to the log."""

    server: "WarmBakes"
    pid: int

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return its exit code; minus the signal if one ended it. Until then the pid is its own."""
        self.server.write_line("")
        return int(self.server.read_line())


class WarmBakes:
    """The client of a server process."""

    def __init__(self, log: Path) -> None:
        self.log = log
        here = Path(__file__).parent
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(here / "warm_bakes.py"), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "OMP_NUM_THREADS": "1"},
        )
        self.model = Path(self.read_line())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()

    def read_line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def write_line(self, line: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()

    def bake_command(self, images: Path, out: Path, layout: str, **options: str) -> list[str]:
        """Return the command line of a bake whose every batch is a commit."""
        chosen = {
            "model": str(self.model), "out": str(out), "format": layout, "resolution": "64",
            "bucket-step": "16", "batch-size": "2", "num-workers": "2",
            "shard-max-seconds": "0.000001",
        }  # fmt: skip
        options = {name.replace("_", "-"): value for name, value in options.items()}
        pairs = (chosen | options).items()
        return ["precompute", str(images), *(part for k, v in pairs for part in (f"--{k}", v))]

    def start(self, arguments: list[str], **faults: Any) -> WarmRun:
        """Start a child that runs the command line; `faults` are those of `_child`."""
        self.log.write_text("")
        self.write_line(json.dumps({"arguments": arguments, **faults}))
        return WarmRun(self, int(self.read_line()))

    def run(self, arguments: list[str], **faults: Any) -> int:
        """Run the command line to its end and return its exit code."""
        return self.start(arguments, **faults).wait()


# Below: the server and its children.


def serve(log: Path) -> None:
    """Answer each line of JSON on stdin with a child's pid, the next line with its exit code."""
    from bake_builders import tiny_model

    import prebake  # noqa: F401
    from precompute import encoders
    from precompute.model import open_model

    tell = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    real_load, loaded = encoders._load, {}

    def load(kind: Any, *args: Any) -> Any:
        if kind not in loaded:
            loaded[kind] = real_load(kind, *args)
        return loaded[kind]

    encoders._load = load
    open_model(str(tiny_model()))
    for kind, part, unused in (
        (encoders.AutoencoderKL, "vae", encoders._DECODER),
        (encoders.CLIPTextModel, "text_encoder", ()),
    ):
        load(kind, tiny_model() / part, "fp32", encoders.torch.device("cpu"), unused)
    print(tiny_model(), file=tell, flush=True)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                os._exit(_child(**json.loads(line)))
            finally:  # never the server's own way out, which removes the model
                os._exit(71)
        print(child, file=tell, flush=True)
        sys.stdin.readline()
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=tell, flush=True)


def _child(
    arguments: list[str],
    die_at_call: int | None = None,
    max_file_bytes: int | None = None,
) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: as after `prebake`.
        die_at_call: end at this one of the calls that `crashes` counts.
        max_file_bytes: files cannot grow beyond (RLIMIT_FSIZE), as on a full disk.
    """
    import resource

    import click

    import prebake

    signal.alarm(MAX_RUN_S)
    os.fsync = lambda descriptor: None  # the process is killed, not the machine: all is faster
    if die_at_call is not None:
        kill_at(die_at_call)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        prebake.cli.main(arguments, prog_name="prebake")
    except SystemExit as end:
        code = end.code
    except click.exceptions.Exit as end:
        code = end.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    return int(code or 0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
