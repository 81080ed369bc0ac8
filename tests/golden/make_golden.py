"""Make the golden stores of format version 1; run once, on 2026-11-30, with prebake 0.1.0.

    python tests/golden/make_golden.py FOLDER

Every later prebake must read them. They are never made anew so that a test passes: a later format
gets stores of its own beside these. `store_builders` gives the numbers (`numbers`) and the keys.
"""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # store_builders

from store_builders import LAYOUTS, SD1_TENSORS, SDXL_TENSORS, Sample, bring_to, make_manifest

WIDE = (96, 64)

FIRST = [
    Sample("cats/a.png", ["a cat"]),
    Sample("cats/a.jpg", ["a cat"], WIDE),
    Sample("ünïcode.webp", ["„ein“ Kätzchen 🐈"], WIDE),
    Sample("dropped.png", ["gone"]),
]
LAST = [
    Sample("cats/a.png", ["a black cat"]),  # its caption was edited
    Sample("cats/a.jpg", ["a cat"], WIDE, image=1),  # its picture was edited
    FIRST[2],
    Sample("cats/a.png", ["a cat"], source="others", weight=0.5),
]
SDXL = [
    Sample(
        f"{name}.png",
        [f"{name} at night", "night"],
        bucket_px,
        text_weights=[0.75, 0.25],
        num_variants=2,
        weight=weight,
        tags={"artist": name, "licence": "CC0"},
    )
    for name, bucket_px, weight in [("owl", (64, 64), 1.0), ("bat", WIDE, 2.5), ("fox", WIDE, 0.1)]
]


def main(folder: Path) -> None:
    """Write the four stores into `folder`."""
    for layout in LAYOUTS:
        plain, sdxl = (folder / f"v1-{layout}{suffix}" for suffix in ("", "-sdxl"))
        for writer, samples in (("0000000a", FIRST), ("0000000b", LAST)):
            with mock.patch("secrets.token_hex", return_value=writer):
                bring_to(plain, make_manifest(layout, SD1_TENSORS), samples, rows_per_shard=2)
        with mock.patch("secrets.token_hex", return_value="0000000c"):
            manifest = make_manifest(layout, SDXL_TENSORS, dtype="bfloat16")
            bring_to(sdxl, manifest, SDXL, rows_per_shard=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
