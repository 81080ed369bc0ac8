"""JSON that every parser reads alike (FORMAT.md, section 1), whoever wrote it."""

import json
from typing import Any, NoReturn

from store_format.keys import canonical_json


def parse_json(data: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is no JSON in UTF-8, nests too deep, names a key of an object twice, or holds
            a number or a string that JSON does not have (NaN, half of a surrogate pair).
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
        if b"\\u" in data:  # as an escape, half a pair passes; it could be printed nowhere
            canonical_json(value)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names the key {twice!r} twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
