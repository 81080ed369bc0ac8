"""Index rows as dataclasses and as Parquet tables (FORMAT.md, section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

_ID = pa.binary(16)

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", _ID, nullable=False),
        pa.field("variant", pa.int16(), nullable=False),
        pa.field("dropped", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("image_sha256", pa.binary(32)),
        pa.field("image_bytes", pa.int64()),
        pa.field("image_mtime_ns", pa.int64()),
        pa.field("latent_key", _ID),
        pa.field("original_width_px", pa.int32()),
        pa.field("original_height_px", pa.int32()),
        pa.field("resized_width_px", pa.int32()),
        pa.field("resized_height_px", pa.int32()),
        pa.field("crop_left_px", pa.int32()),
        pa.field("crop_top_px", pa.int32()),
        pa.field("bucket_width_px", pa.int32()),
        pa.field("bucket_height_px", pa.int32()),
        pa.field("flipped", pa.bool_()),
        pa.field("weight", pa.float64()),
        pa.field("tags", pa.map_(pa.string(), pa.string())),
        pa.field("captions", pa.list_(pa.string())),
        pa.field("text_keys", pa.list_(_ID)),
        pa.field("text_weights", pa.list_(pa.float64())),
        pa.field("shard", pa.string()),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("offsets", pa.list_(pa.int64())),
        pa.field("crc32c", pa.list_(pa.uint32())),
    ]
)

TEXT_SCHEMA = pa.schema(
    [
        pa.field("text_key", _ID, nullable=False),
        pa.field("caption", pa.string(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("crc32c", pa.list_(pa.uint32()), nullable=False),
    ]
)

_READING = (
    *("sample_id", "variant", "dropped", "latent_key"),
    *("bucket_width_px", "bucket_height_px", "weight"),
    *("text_key", "text_keys", "text_weights", "shard", "row", "offsets", "crc32c"),
)


def reading_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns that reading tensors takes; shard names, which repeat, as a dictionary."""
    shard = pa.field("shard", pa.dictionary(pa.int32(), pa.string()))
    fields = [field for field in schema if field.name in _READING]
    return pa.schema([shard if field.name == "shard" else field for field in fields])


def detail_schema(schema: pa.Schema) -> pa.Schema:
    """Return the other columns: what people, and a bake, want to know of a row."""
    return pa.schema([field for field in schema if field.name not in _READING])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's tensors lie: shard, row, and each tensor's offset and crc32c."""

    shard: str
    row: int
    offsets: tuple[int, ...]
    crc32c: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One expanded caption of a sample."""

    caption: str
    text_key: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TextRow:
    """A stored text; `num_tokens` counts before truncation, begin and end tokens included."""

    text_key: str
    caption: str
    num_tokens: int
    place: Place | None = None


TOKENS_UNKNOWN = 0  # of a text of a webdataset store's samples, which does not say (section 5.2)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One variant of a sample: identity, geometry (px; sizes are (width, height)), texts."""

    sample_id: str
    source: str
    path: str
    image_sha256: str
    image_bytes: int
    image_mtime_ns: int
    latent_key: str
    original_px: tuple[int, int]
    resized_px: tuple[int, int]
    crop_px: tuple[int, int]  # (left, top) in the resized image
    bucket_px: tuple[int, int]
    texts: tuple[Text, ...]
    variant: int = 0
    flipped: bool = False
    weight: float = 1.0
    tags: dict[str, str] = field(default_factory=dict)
    place: Place | None = None

    @property
    def key(self) -> str:
        """The row's name inside shards: the id, with `-V` for variant V > 0."""
        return f"{self.sample_id}-{self.variant}" if self.variant else self.sample_id

    def placed(self, place: Place) -> "SampleRow":
        """Return the row at its place."""
        return replace(self, place=place)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A sample that has left its source."""

    sample_id: str
    source: str
    path: str


def sample_table(rows: Sequence[SampleRow], tombstones: Sequence[Tombstone] = ()) -> pa.Table:
    """Return placed rows, then tombstones, as a table of `SAMPLE_SCHEMA`."""
    records = [_sample_record(row) for row in rows]
    for tombstone in tombstones:
        record: dict[str, Any] = dict.fromkeys(SAMPLE_SCHEMA.names)
        record.update(
            sample_id=bytes.fromhex(tombstone.sample_id),
            variant=0,
            dropped=True,
            source=tombstone.source,
            path=tombstone.path,
            row=-1,
        )
        records.append(record)
    return pa.Table.from_pylist(records, schema=SAMPLE_SCHEMA)


def text_table(rows: Sequence[TextRow]) -> pa.Table:
    """Return placed text rows as a table of `TEXT_SCHEMA`."""
    return pa.Table.from_pylist([_text_record(row) for row in rows], schema=TEXT_SCHEMA)


def _place_record(place: Place | None) -> dict[str, Any]:
    assert place is not None, "only placed rows are written to an index"
    return {
        "shard": place.shard,
        "row": place.row,
        "offsets": list(place.offsets),
        "crc32c": list(place.crc32c),
    }


def _text_record(row: TextRow) -> dict[str, Any]:
    return {
        "text_key": bytes.fromhex(row.text_key),
        "caption": row.caption,
        "num_tokens": row.num_tokens,
        **_place_record(row.place),
    }


def _sample_record(row: SampleRow) -> dict[str, Any]:
    return {
        "sample_id": bytes.fromhex(row.sample_id),
        "variant": row.variant,
        "dropped": False,
        "source": row.source,
        "path": row.path,
        "image_sha256": bytes.fromhex(row.image_sha256),
        "image_bytes": row.image_bytes,
        "image_mtime_ns": row.image_mtime_ns,
        "latent_key": bytes.fromhex(row.latent_key),
        "original_width_px": row.original_px[0],
        "original_height_px": row.original_px[1],
        "resized_width_px": row.resized_px[0],
        "resized_height_px": row.resized_px[1],
        "crop_left_px": row.crop_px[0],
        "crop_top_px": row.crop_px[1],
        "bucket_width_px": row.bucket_px[0],
        "bucket_height_px": row.bucket_px[1],
        "flipped": row.flipped,
        "weight": row.weight,
        "tags": sorted(row.tags.items()),
        "captions": [text.caption for text in row.texts],
        "text_keys": [bytes.fromhex(text.text_key) for text in row.texts],
        "text_weights": [text.weight for text in row.texts],
        **_place_record(row.place),
    }


def sample_row(record: dict[str, Any]) -> SampleRow:
    """Return the row of one live record of a `SAMPLE_SCHEMA` table (as `to_pylist` gives it)."""
    return SampleRow(
        sample_id=record["sample_id"].hex(),
        source=record["source"],
        path=record["path"],
        image_sha256=record["image_sha256"].hex(),
        image_bytes=record["image_bytes"],
        image_mtime_ns=record["image_mtime_ns"],
        latent_key=record["latent_key"].hex(),
        original_px=(record["original_width_px"], record["original_height_px"]),
        resized_px=(record["resized_width_px"], record["resized_height_px"]),
        crop_px=(record["crop_left_px"], record["crop_top_px"]),
        bucket_px=(record["bucket_width_px"], record["bucket_height_px"]),
        texts=tuple(
            Text(caption, key.hex(), weight)
            for caption, key, weight in zip(
                record["captions"], record["text_keys"], record["text_weights"], strict=True
            )
        ),
        variant=record["variant"],
        flipped=record["flipped"],
        weight=record["weight"],
        tags=dict(record["tags"]),
        place=_place(record),
    )


def text_row(record: dict[str, Any]) -> TextRow:
    """Return the row of one record of a `TEXT_SCHEMA` table."""
    return TextRow(
        record["text_key"].hex(), record["caption"], record["num_tokens"], _place(record)
    )


def _place(record: dict[str, Any]) -> Place:
    return Place(record["shard"], record["row"], tuple(record["offsets"]), tuple(record["crc32c"]))


def describe_sample(row: SampleRow) -> dict[str, Any]:
    """Return the descriptive columns as JSON values, for shards that are read without the index."""
    return {
        "sample_id": row.sample_id,
        "variant": row.variant,
        "source": row.source,
        "path": row.path,
        "captions": [text.caption for text in row.texts],
        "text_weights": [text.weight for text in row.texts],
        "weight": row.weight,
        "tags": dict(sorted(row.tags.items())),
        "original_width_px": row.original_px[0],
        "original_height_px": row.original_px[1],
        "resized_width_px": row.resized_px[0],
        "resized_height_px": row.resized_px[1],
        "crop_left_px": row.crop_px[0],
        "crop_top_px": row.crop_px[1],
        "bucket_width_px": row.bucket_px[0],
        "bucket_height_px": row.bucket_px[1],
        "flipped": row.flipped,
    }
