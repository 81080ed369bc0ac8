"""Ends a forked child at the n-th of its file operations, as SIGKILL would.

    number = 1
    while run_killed_at(number, work):
        ...  # look at what is there, then let the same work finish
        number += 1

Counted are the calls to the functions of `files.py`, and to what makes, renames and removes files
and folders below them. A write is cut in half; of anything else nothing is done.
"""

import os
import shutil
import sys
from pathlib import Path

from store_format import files

FUNCTIONS = ("write_file", "publish", "replace_file", "flush_folder", "make_folder")
METHODS = (
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "rmdir"),
    (shutil, "rmtree"),
)
KILLED = 99


def run_killed_at(number, work):
    """Run `work` in a forked child that dies at call `number`; return whether it did."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(number)
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def kill_at(number):
    """Replace file operations, wherever they were imported, by ones that may die."""
    calls = 0

    def wrap(function, data_at=None):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                if data_at is not None:
                    half = bytes(args[data_at])[: len(args[data_at]) // 2]
                    function(*args[:data_at], half, *args[data_at + 1 :])
                    if function is original_write:
                        args[0]._write_block()
                        args[0]._file.flush()
                os._exit(KILLED)
            return function(*args, **options)

        return call

    original_write = files.HashedFile.write
    for name in FUNCTIONS:
        function = getattr(files, name)
        replacement = wrap(function, 1 if name == "write_file" else None)
        for module in [m for n, m in sys.modules.items() if n.startswith("store_format")]:
            if getattr(module, name, None) is function:
                setattr(module, name, replacement)
    files.HashedFile.write = wrap(original_write, 1)
    files.HashedFile.close = wrap(files.HashedFile.close)
    for owner, name in METHODS:
        setattr(owner, name, wrap(getattr(owner, name)))
