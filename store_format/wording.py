"""Counts and sizes as people read them."""


def counted(number: int, noun: str) -> str:
    """Return "1 image" or "5 images"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
