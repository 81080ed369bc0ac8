"""What a store and its samples are, in lines for people."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from store_format.wording import counted, size

if TYPE_CHECKING:
    import numpy as np

    from store_format.manifest import TensorSpec
    from store_format.rows import Place, SampleRow
    from store_format.store import Store


def describe_store(store: "Store") -> Iterator[str]:
    """Yield what a store is and holds, for people."""
    manifest, index = store.manifest, store.index
    vae = manifest.encoders.vae
    yield f"{store.root}: prebake store, version {manifest.version}, layout {manifest.layout}"
    yield _line("made by", ", ".join(f"{key} {value}" for key, value in manifest.config.items()))
    yield _line("VAE", f"{vae.identity[:12]}, latents scaled by {vae.scaling_factor:g}")
    for text in manifest.encoders.text:
        tokenizer = text.tokenizer_identity[:12]
        yield _line("text encoder", f"{text.identity[:12]}, width {text.width}, tokens {tokenizer}")
    base = manifest.base
    timesteps = f"{base.num_train_timesteps} timesteps"
    yield _line("for training", f"{base.family}, predicting {base.prediction_type}, {timesteps}")
    for spec in manifest.tensors:
        per = {"variant": "sample and variant", "text": "text"}[spec.kind]
        shape = " x ".join(str(n) for n in spec.shape)
        yield _line("tensor", f"{spec.name}: {shape}, {spec.dtype}, one a {per}")
    yield ""
    num_samples, num_writers = len(set(store.sample_ids)), len({c.writer for c in index.commits})
    yield _line("samples", f"{num_samples}, in {counted(len(store), 'variant')}")
    yield _line("commits", f"{len(index.commits)}, by {counted(num_writers, 'writer')}")
    yield _line("superseded", f"{counted(index.num_dead_rows, 'row')}, which no reader sees")
    num_texts, num_unique = _count_texts(store)
    if num_texts:
        ratio = f"{num_unique} different ones among {num_texts} ({num_unique / num_texts:.0%})"
        yield _line("captions", ratio)
    for name, num_bytes in bytes_by_kind(store).items():
        yield _line(name, size(num_bytes))
    sources = dict(zip(store.sample_ids, index.sample_details["source"].to_pylist(), strict=True))
    for source, count in sorted(Counter(sources.values()).items()):
        yield _line("source", f"{source}: {counted(count, 'sample')}")
    yield ""
    yield "  bucket (width x height)  variants"
    buckets = Counter((int(width), int(height)) for width, height in store.bucket_px)
    for (width, height), count in sorted(buckets.items()):
        yield f"  {f'{width} x {height}':<24}{count:>9}"


def bytes_by_kind(store: "Store") -> dict[str, int]:
    """Return the bytes of live latents, live texts, the rest of the shards, and the index."""
    from store_format.commits import INDEX_FOLDER

    manifest, index = store.manifest, store.index
    buckets = Counter((int(width), int(height)) for width, height in store.bucket_px)
    latents = sum(
        spec.row_bytes(manifest.cells(bucket)) * count
        for bucket, count in buckets.items()
        for spec in manifest.variant_tensors
    )
    num_texts = len(index.texts)
    if manifest.texts_inline:
        num_texts += _count_texts(store)[0]
    texts = sum(spec.row_bytes(None) for spec in manifest.text_tensors) * num_texts
    shards = sum(file.bytes for shard in index.shards.values() for file in shard.files)
    index_files = [f"{INDEX_FOLDER}/{name}" for name in store.root.names(INDEX_FOLDER)]
    return {
        "latents": latents,
        "text": texts,
        "other in shards": shards - latents - texts,
        "index": sum(store.root.sizes(index_files).values()),
    }


def _count_texts(store: "Store") -> tuple[int, int]:
    """Return how many captions the samples have, and how many different ones."""
    import pyarrow.compute as pc

    keys = pc.list_flatten(store.index.samples["text_keys"])
    return len(keys), len(keys.unique())


def describe_samples(store: "Store", wanted: str) -> Iterator[str]:
    """Yield all about the samples of an id, or of a path (which several sources may have).

    Raises:
        PrebakeError: there is none.
    """
    rows = [
        row
        for row, (path, sample_id) in enumerate(
            zip(store.index.sample_details["path"].to_pylist(), store.sample_ids, strict=True)
        )
        if wanted in (path, sample_id)
    ]
    if not rows:
        raise _no_such_sample(store, wanted)
    for row in rows:
        yield from _describe_sample(store, row)


def _no_such_sample(store: "Store", wanted: str) -> Exception:
    import difflib

    from store_format.errors import PrebakeError

    paths = store.index.sample_details["path"].unique().to_pylist()
    near = difflib.get_close_matches(wanted, paths, n=3)
    hint = f"Near to it are: {', '.join(near)}." if near else "Give an id, or a path in its source."
    return PrebakeError(f"{store.root} holds no sample {wanted}. {hint}")


def _describe_sample(store: "Store", row: int) -> Iterator[str]:
    sample = store.sample(row)
    yield f"{sample.path}" + (f", variant {sample.variant}" if sample.variant else "")
    yield _line("sample id", sample.sample_id)
    yield _line("source", sample.source)
    yield _line("image", f"{size(sample.image_bytes)}, sha256 {sample.image_sha256}")
    yield _line("geometry", _geometry(sample))
    yield _line("weight", f"{sample.weight:g}")
    for name, value in sorted(sample.tags.items()):
        yield _line("tag", f"{name} = {value}")
    assert sample.place is not None
    yield _line("latent key", sample.latent_key)
    specs = store.manifest.variant_tensors
    yield from _tensors(store, specs, sample.place, 0, store.read_variant(row))
    for number, (text, states) in enumerate(zip(sample.texts, store.read_texts(row), strict=True)):
        yield _line(f"text {number}", f'"{text.caption}", weight {text.weight:g}')
        yield _line("text key", text.text_key)
        place, first = sample.place, len(specs) + number * len(store.manifest.text_tensors)
        if not store.manifest.texts_inline:
            text_place = store.text_row(text.text_key).place
            assert text_place is not None
            place, first = text_place, 0
        yield from _tensors(store, store.manifest.text_tensors, place, first, states)


def _geometry(sample: "SampleRow") -> str:
    (width, height), (resized_width, resized_height) = sample.original_px, sample.resized_px
    (left, top), (bucket_width, bucket_height) = sample.crop_px, sample.bucket_px
    flipped = ", mirrored" if sample.flipped else ""
    return (
        f"{width} x {height} px, resized to {resized_width} x {resized_height}, cropped from "
        f"left {left}, top {top} to the bucket {bucket_width} x {bucket_height}{flipped}"
    )


def _tensors(
    store: "Store",
    specs: "tuple[TensorSpec, ...]",
    place: "Place",
    first: int,
    tensors: "dict[str, np.ndarray]",
) -> Iterator[str]:
    """Yield where each tensor of a row lies, and what numbers it has."""
    import numpy as np

    from store_format.places import file_of

    for i, spec in enumerate(specs):
        array = tensors[spec.name]
        values = array.astype(np.float64)
        if spec.dtype == "bfloat16":
            values = (array.astype("<u4") << 16).view("<f4").astype(np.float64)
        shape = " x ".join(str(n) for n in array.shape)
        yield _line(
            spec.name,
            f"{shape} {spec.dtype}, {values.min():.3g} to {values.max():.3g}, "
            f"mean {values.mean():.3g}, std {values.std():.3g}",
        )
        where = f"byte {place.offsets[first + i]} of {file_of(store.manifest, place.shard, spec)}"
        yield _line("", f"{where}, crc32c {place.crc32c[first + i]:08x}")


def _line(name: str, value: str) -> str:
    return f"  {name:<15} {value}"
