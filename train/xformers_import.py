"""Import xformers before diffusers does: quietly, and without letting it break diffusers.

diffusers imports xformers wherever it is installed. An xformers built for another torch
then prints six lines on every start, and one that cannot be imported at all takes the
U-Net down with it, even for a run that asked for another attention. So each module here
that imports diffusers' models imports this one first.

diffusers and peft import bitsandbytes too, wherever it is installed; what it then says of
matrices in 4 bits, on some processors, is of no use here.
"""

import importlib
import logging
import sys

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _import_problem() -> str | None:
    """Import xformers and say in one line what is wrong with it; None if nothing is."""
    log = logging.getLogger("xformers")
    level = log.level
    log.setLevel(logging.ERROR)  # its banner is a warning
    try:
        importlib.import_module("xformers.ops")
        cpp_lib = importlib.import_module("xformers._cpp_lib")
    except ModuleNotFoundError as error:
        if error.name == "xformers":
            return "not installed"
        return _block(error)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return _block(error)
    finally:
        log.setLevel(level)
    # The kernels are loaded apart from the package; this is what the banner reports.
    problem = getattr(cpp_lib, "_cpp_library_load_exception", None)
    return None if problem is None else _one_line(str(problem))


def _block(error: Exception) -> str:
    """Make every later import of xformers fail at once, so diffusers goes without it.

    `None` in `sys.modules` means "not to be imported" (Python reference, 5.3.1), and
    `importlib.util.find_spec`, which diffusers asks, then finds nothing.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        del sys.modules[name]
    sys.modules["xformers"] = None  # type: ignore[assignment]
    return _one_line(f"cannot be imported ({type(error).__name__}: {error})")


def _one_line(text: str) -> str:
    """Keep what the banner says is wrong; drop its advice, which is several lines long."""
    return " ".join(text.split("\n  Please")[0].split())


XFORMERS_PROBLEM: str | None = _import_problem()
