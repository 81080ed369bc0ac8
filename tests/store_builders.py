"""Small synthetic stores, written through `StoreWriter`.

    store = build_store(tmp_path / "s", "zarr", [Sample("a.png", ["a cat"]), Sample("b.png")])

All numbers follow from keys by `numbers`, so that a test knows what a read must give without a
second copy: multiples of 1/256 in [-0.5, 0.5), which every dtype of the format holds exactly.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from store_format import Store, open_store
from store_format.keys import hash16, sample_id
from store_format.manifest import (
    BaseFacts,
    Encoders,
    Manifest,
    TensorSpec,
    TextEncoderFacts,
    VaeFacts,
)
from store_format.rows import SampleRow, Text, TextRow, Tombstone
from store_format.writer import StoreWriter

LAYOUTS = ("zarr", "webdataset")
SD1_TENSORS = (
    ("latents", "variant", (4, "h", "w")),
    ("encoder_hidden_states", "text", (7, 6)),
)
MOMENTS_TENSORS = (
    ("latents_mean", "variant", (4, "h", "w")),
    ("latents_std", "variant", (4, "h", "w")),
    ("encoder_hidden_states", "text", (7, 6)),
)
SDXL_TENSORS = (
    ("latents", "variant", (4, "h", "w")),
    ("mask", "variant", (1, "h", "w")),
    ("encoder_hidden_states", "text", (7, 6)),
    ("encoder_hidden_states_2", "text", (7, 10)),
    ("pooled_prompt_embeds", "text", (10,)),
)


@dataclass(frozen=True)
class Sample:
    """What a test wants to be in a store: an image file, its captions, its variants."""

    path: str
    captions: Sequence[str] = ("a picture",)
    bucket_px: tuple[int, int] = (64, 64)
    text_weights: Sequence[float] | None = None
    num_variants: int = 1
    image: int = 0  # another number is another content of the image
    source: str = "pictures"
    weight: float = 1.0
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def sample_id(self) -> str:
        return sample_id(self.source, self.path)

    def row(self, variant: int = 0) -> SampleRow:
        weights = self.text_weights or [1.0] * len(self.captions)
        width, height = self.bucket_px
        content = f"{self.source}/{self.path}/{self.image}"
        return SampleRow(
            sample_id=self.sample_id,
            source=self.source,
            path=self.path,
            image_sha256=hashlib.sha256(content.encode()).hexdigest(),
            image_bytes=1000 + self.image,
            image_mtime_ns=1_700_000_000_000_000_000 + self.image,
            latent_key=hash16(["latent", content, list(self.bucket_px), variant]),
            original_px=(2 * width + 10, 2 * height),
            resized_px=(width + 5, height),
            crop_px=(variant, 0),
            bucket_px=self.bucket_px,
            texts=tuple(
                Text(caption, text_key(caption), weight)
                for caption, weight in zip(self.captions, weights, strict=True)
            ),
            variant=variant,
            flipped=variant % 2 == 1,
            weight=self.weight,
            tags=self.tags,
        )

    def rows(self) -> list[SampleRow]:
        return [self.row(variant) for variant in range(self.num_variants)]


def text_key(caption: str) -> str:
    return hash16(["text", caption])


def make_manifest(
    layout: str,
    tensors: Sequence[tuple[str, str, tuple[Any, ...]]] = SD1_TENSORS,
    *,
    dtype: str = "float16",
    **config: Any,
) -> Manifest:
    """Return the manifest of a small store; `config` is added to its `config`."""
    specs = [
        TensorSpec(name=n, kind=k, dtype="uint8" if n == "mask" else dtype, shape=s)
        for n, k, s in tensors
    ]
    widths = [s.shape[-1] for s in specs if s.name.startswith("encoder_hidden_states")]
    return Manifest(
        layout=layout,
        config={"resolution": 64, "posterior": "sample", "stored_dtype": dtype, **config},
        encoders=Encoders(
            vae=VaeFacts(identity="5a" * 32, scaling_factor=0.18215, latent_channels=4),
            text=[
                TextEncoderFacts(identity="7e" * 32, tokenizer_identity="70" * 32, width=width)
                for width in widths
            ],
        ),
        base=BaseFacts(family="sd1", prediction_type="epsilon", num_train_timesteps=1000),
        tensors=specs,
        empty_text_key=text_key(""),
    )


def numbers(key: str, spec: TensorSpec, cells: tuple[int, int] | None = None) -> np.ndarray:
    """Return the tensor that a key stands for, as it is stored: [*row_shape].

    The bytes of SHAKE-128 of "KEY/NAME", each less 128 and divided by 256; for uint8 the bytes.
    """
    shape = spec.row_shape(cells)
    length = int(np.prod(shape))
    digest = hashlib.shake_128(f"{key}/{spec.name}".encode()).digest(length)
    raw = np.frombuffer(digest, np.uint8).reshape(shape)
    if spec.dtype == "uint8":
        return raw
    values = (raw.astype(np.float32) - 128) / 256
    if spec.dtype == "bfloat16":
        return (values.view("<u4") >> 16).astype("<u2")
    return values.astype(spec.numpy_dtype)


def variant_tensors(manifest: Manifest, row: SampleRow) -> list[np.ndarray]:
    cells = manifest.cells(row.bucket_px)
    return [numbers(row.latent_key, spec, cells) for spec in manifest.variant_tensors]


def text_tensors(manifest: Manifest, key: str) -> list[np.ndarray]:
    return [numbers(key, spec) for spec in manifest.text_tensors]


def write_samples(
    writer: StoreWriter,
    samples: Sequence[Sample],
    *,
    dropped: Sequence[Sample] = (),
    rows_per_shard: int = 4,
    samples_per_commit: int = 1000,
) -> None:
    """Add `samples` and the texts that are not yet stored; drop others."""
    for start in range(0, max(len(samples), 1), samples_per_commit):
        part = samples[start : start + samples_per_commit]
        known = {row.text_key for row in writer.reload().index.iter_texts()}
        captions = ["", *(c for s in part for c in s.captions if not writer.manifest.texts_inline)]
        new = [c for c in dict.fromkeys(captions) if text_key(c) not in known]
        drafts, texts, placed = [], [], []
        for first in range(0, len(new), rows_per_shard):
            draft = writer.new_text_shard()
            drafts.append(draft)
            for caption in new[first : first + rows_per_shard]:
                row = TextRow(text_key(caption), caption, 2 + len(caption.split()))
                place = draft.append(row, text_tensors(writer.manifest, row.text_key))
                texts.append(TextRow(row.text_key, caption, row.num_tokens, place))
        for bucket in dict.fromkeys(s.bucket_px for s in part):
            rows = [row for s in part if s.bucket_px == bucket for row in s.rows()]
            for first in range(0, len(rows), rows_per_shard):
                draft = writer.new_sample_shard(bucket)
                drafts.append(draft)
                for row in rows[first : first + rows_per_shard]:
                    tensors = variant_tensors(writer.manifest, row)
                    if writer.manifest.texts_inline:
                        for text in row.texts:
                            tensors += text_tensors(writer.manifest, text.text_key)
                    placed.append(row.placed(draft.append(row, tensors)))
        tombstones = [Tombstone(s.sample_id, s.source, s.path) for s in dropped]
        writer.commit(drafts, placed, texts, tombstones if start == 0 else ())


def bring_to(
    root: Path,
    manifest: Manifest,
    samples: Sequence[Sample],
    *,
    rows_per_shard: int = 4,
    samples_per_commit: int = 1000,
) -> Store:
    """Do what a bake does: write what is missing or other, drop the rest, refresh the views.

    Nothing is flushed to the disk: tests end with their process, not with the power.
    """
    with mock.patch("os.fsync"), StoreWriter(root, manifest) as writer:
        live = {(row.sample_id, row.variant): row for row in writer.index.iter_samples()}
        wanted = {s.sample_id for s in samples}
        old = {row.sample_id: Sample(row.path, source=row.source) for row in live.values()}
        dropped = [sample for sample in old.values() if sample.sample_id not in wanted]
        has_empty = any(row.caption == "" for row in writer.index.iter_texts())
        missing = [s for s in samples if not _is_live(s, live)]
        if missing or dropped or not has_empty:
            write_samples(
                writer,
                missing,
                dropped=dropped,
                rows_per_shard=rows_per_shard,
                samples_per_commit=samples_per_commit,
            )
        writer.rewrite_shards_with_dead_rows()
        writer.refresh_views()
    return open_store(root)


def _is_live(sample: Sample, live: dict[tuple[str, int], SampleRow]) -> bool:
    for row in sample.rows():
        found = live.get((row.sample_id, row.variant))
        if found is None or (found.latent_key, found.texts) != (row.latent_key, row.texts):
            return False
    return (sample.sample_id, sample.num_variants) not in live


def build_store(
    root: Path,
    layout: str,
    samples: Sequence[Sample],
    tensors: Sequence[tuple[str, str, tuple[Any, ...]]] = SD1_TENSORS,
    *,
    dtype: str = "float16",
    rows_per_shard: int = 4,
    samples_per_commit: int = 1000,
) -> Store:
    """Write a store of `samples` and open it."""
    manifest = make_manifest(layout, tensors, dtype=dtype)
    return bring_to(
        root,
        manifest,
        samples,
        rows_per_shard=rows_per_shard,
        samples_per_commit=samples_per_commit,
    )


def assert_holds(store: Store, samples: Sequence[Sample]) -> None:
    """Assert that a store holds exactly `samples`, each with its own numbers."""
    wanted = sorted((r for s in samples for r in s.rows()), key=lambda r: (r.sample_id, r.variant))
    assert [(r.sample_id, r.variant) for r in store.index.iter_samples()] == [
        (r.sample_id, r.variant) for r in wanted
    ]
    for number, row in enumerate(wanted):
        found = store.sample(number)
        assert found.place is not None
        assert row.placed(found.place) == found
        for text in range(len(row.texts)):
            batch = store.read([number], [text])
            expected = variant_tensors(store.manifest, row)
            expected += text_tensors(store.manifest, row.texts[text].text_key)
            for spec, array in zip(_specs(store), expected, strict=True):
                np.testing.assert_array_equal(batch[spec.name], array[None], strict=True)
    specs = store.manifest.text_tensors
    for spec, array in zip(specs, text_tensors(store.manifest, text_key("")), strict=True):
        np.testing.assert_array_equal(store.read_empty_text()[spec.name], array, strict=True)


def _specs(store: Store) -> list[TensorSpec]:
    return [*store.manifest.variant_tensors, *store.manifest.text_tensors]
