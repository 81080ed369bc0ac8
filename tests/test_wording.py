"""Counts and sizes as people read them."""

import pytest

from store_format.wording import counted, size


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1000, "1000 samples")],
)
def test_one_thing_is_not_several(number: int, text: str) -> None:
    assert counted(number, "sample") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_have_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
