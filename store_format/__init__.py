"""The store: its format (FORMAT.md), its readers and its writers.

`open_store(path)` opens a store for reading; samples come as numpy arrays by row or by id.
"""

from typing import TYPE_CHECKING, Any

from store_format.errors import PrebakeError

if TYPE_CHECKING:
    from store_format.store import Store, open_store

__all__ = ["PrebakeError", "Store", "open_store"]


def __getattr__(name: str) -> Any:
    """Load the reader (numpy, pyarrow) on first use, so that the command line starts at once."""
    if name in ("Store", "open_store"):
        from store_format import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
