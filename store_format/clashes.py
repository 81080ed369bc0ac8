"""Samples of equal ids in several stores: equal ones are one, others are a clash.

Equal are: image, geometry, latents (by key and by checksum), captions with keys and weights, weight
and tags. Not compared are the hints at the image file, and the states of captions: these follow
from their keys.
"""

import textwrap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format.errors import PrebakeError
from store_format.index import Ints
from store_format.rows import SampleRow
from store_format.selection import Part, Rows, as_binary, bounds_of, differs_from_before
from store_format.wording import counted

ROWS_COMPARED_AT_ONCE = 1 << 14
NUM_SHOWN = 3
_HASHES = ("image", "latents", "text keys")
_NO_CONTENT = ("sample_id", "image_bytes", "image_mtime_ns", "shard", "row", "offsets", "crc32c")


def select_once(rows: Rows) -> Ints:
    """Return the positions of the rows of a copy, by (sample id, variant): each sample once.

    Raises:
        PrebakeError: samples of equal ids differ.
    """
    words = rows.ids.view(">u8")
    order = np.lexsort((rows.column("variant"), rows.sample, words[:, 1], words[:, 0]))
    starts = differs_from_before(rows.ids[order])
    sample = rows.sample[order]
    is_first = sample == sample[starts][np.cumsum(starts) - 1]
    chosen: Ints = order[is_first]
    num_clashes, shown = find_clashes(rows, chosen, rows, order[~is_first])
    if num_clashes:
        raise PrebakeError(
            f"the stores differ in {counted(num_clashes, 'sample')}: {shown}. If they are "
            f"different pictures of one name, rename the source of one store with --rename; else "
            f"leave one side out with 'prebake store subset'."
        )
    return chosen


def find_clashes(rows: Rows, chosen: Ints, others: Rows, at: Ints) -> tuple[int, str]:
    """Look up samples by their ids among chosen ones, and compare their contents.

    Args:
        rows: some rows.
        chosen: positions in `rows`, by (sample id, variant); each sample once.
        others: where the samples to look up are, perhaps the same.
        at: positions in `others`, by sample and variant.

    Returns:
        How many samples of `at` are not there or differ, and the first of them in words.
    """
    ours, theirs = bounds_of(rows.sample[chosen]), bounds_of(others.sample[at])
    ids = as_binary(rows.ids[chosen[ours[:-1]]])
    match = pc.index_in(as_binary(others.ids[at[theirs[:-1]]]), value_set=ids)
    match = match.fill_null(-1).to_numpy()  # [S] for each sample of `at` its partner
    num_variants = np.diff(theirs)
    differs = match < 0
    differs[~differs] = np.diff(ours)[match[~differs]] != num_variants[~differs]
    sample = np.repeat(np.arange(len(match)), num_variants)  # of each of `at`
    partner = ours[match][sample] + np.arange(len(at)) - theirs[:-1][sample]
    comparable = np.flatnonzero(~differs[sample])
    for start in range(0, len(comparable), ROWS_COMPARED_AT_ONCE):
        some = comparable[start : start + ROWS_COMPARED_AT_ONCE]
        differs[sample[some]] |= _differ(rows, chosen[partner[some]], others, at[some])
    shown = []
    for s in np.flatnonzero(differs)[:NUM_SHOWN]:
        our_rows = chosen[ours[match[s]] : ours[match[s] + 1]] if match[s] >= 0 else chosen[:0]
        shown.append(_describe(rows, our_rows, others, at[theirs[s] : theirs[s + 1]]))
    num_clashes = int(differs.sum())
    return num_clashes, "; ".join(shown) + ("; ..." if num_clashes > NUM_SHOWN else "")


def _differ(rows: Rows, ours: Ints, others: Rows, theirs: Ints) -> NDArray[np.bool_]:
    """Return for each of some rows whether it differs from its partner."""
    if _content(rows, ours).equals(_content(others, theirs)):  # nearly always, and fast
        return np.zeros(len(ours), bool)
    pairs = zip(rows.samples(ours), others.samples(theirs), strict=True)
    return np.array([bool(_differences(mine, other)) for mine, other in pairs])


def _content(rows: Rows, at: Ints) -> pa.Table:
    """Return what makes rows equal, as columns."""
    table = rows.table(at)
    num_tensors = len(rows.parts[0].store.manifest.variant_tensors)
    crcs = pc.list_slice(table["crc32c"], 0, num_tensors)
    return table.drop_columns(_NO_CONTENT).append_column("crc32c", crcs)


def _describe(rows: Rows, ours: Ints, others: Rows, theirs: Ints) -> str:
    """Say of a sample in which stores it is and how it differs there; `ours` may be empty."""
    mine, other = list(rows.samples(ours)), list(others.samples(theirs))
    row, part, _ = other[0]
    name = f"{row.source}/{row.path}"
    if not mine:
        return f"{name} of {part.store.root}"
    name = f"{name} of {mine[0][1].store.root} and {part.store.root}"
    if len(mine) != len(other):
        return f"{name} (number of variants: {len(mine)}, {len(other)})"
    differences = next(filter(None, map(_differences, mine, other)))
    return f"{name} ({'; '.join(differences)})"


def _differences(
    mine: tuple[SampleRow, Part, int], other: tuple[SampleRow, Part, int]
) -> list[str]:
    """Return in what two rows differ, with both values where these tell a person something."""
    facts, others = _facts(*mine[:2]), _facts(*other[:2])
    names = [name for name in facts if facts[name] != others[name]]
    follows = {"latents": "image", "text keys": "captions"}
    return [
        name if name in _HASHES else f"{name}: {_short(facts[name])}, {_short(others[name])}"
        for name in names
        if follows.get(name) not in names
    ]


def _facts(row: SampleRow, part: Part) -> dict[str, Any]:
    assert row.place is not None
    num_tensors = len(part.store.manifest.variant_tensors)
    return {
        "variant": row.variant,
        "image": row.image_sha256,
        "bucket": row.bucket_px,
        "geometry": (row.original_px, row.resized_px, row.crop_px, row.flipped),
        "latents": (row.latent_key, row.place.crc32c[:num_tensors]),
        "captions": [text.caption for text in row.texts],
        "text keys": [text.text_key for text in row.texts],
        "text weights": [text.weight for text in row.texts],
        "weight": row.weight,
        "tags": row.tags,
    }


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 60, placeholder=" ...")
