"""SQL conditions over an index: what they see, what they select, what they cannot do."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import LAYOUTS, Sample, bring_to, build_store

from store_format.errors import PrebakeError
from store_format.rows import SAMPLE_SCHEMA
from store_format.sql import COLUMNS, list_rows, select_rows

WIDE = (96, 48)
SAMPLES = [
    Sample("d1/a.png", ["one", "two"], text_weights=[0.75, 0.25], num_variants=2, tags={"k": "v"}),
    Sample("d2/a.png", ["one"], WIDE, weight=0.5),
    Sample("d2/a.png", ['it\'s "one"'], WIDE, source="others"),
    Sample("ü b.jpg", ["three"], image=7),
]
PICTURE_2 = ("pictures", "d2/a.png", 0)


@pytest.fixture(scope="module", params=LAYOUTS)
def store(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    manifest = build_store(root, request.param, [*SAMPLES, Sample("dead.png", ["gone"])]).manifest
    return bring_to(root, manifest, SAMPLES)


def selected(store, where):
    """Return (source, path, variant) of what a condition selects."""
    rows = map(store.sample, select_rows(store, where).tolist())
    return sorted((row.source, row.path, row.variant) for row in rows)


def test_every_column_says_what_the_row_says(store):
    found = list(list_rows(store, None, *COLUMNS))
    rows = sorted(store.index.iter_samples(), key=lambda r: (r.source, r.path, r.variant))
    assert len(found) == len(rows) == 5
    for record, row in zip(found, rows, strict=True):
        assert record == {
            "sample_id": row.sample_id,
            "variant": row.variant,
            "source": row.source,
            "path": row.path,
            "image_sha256": row.image_sha256,
            "image_bytes": row.image_bytes,
            "image_mtime_ns": row.image_mtime_ns,
            "latent_key": row.latent_key,
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
            "tags": list(row.tags.items()),
            "captions": [text.caption for text in row.texts],
            "text_keys": [text.text_key for text in row.texts],
            "text_weights": [text.weight for text in row.texts],
            "shard": row.place.shard,
            "row": row.place.row,
            "offsets": list(row.place.offsets),
            "crc32c": list(row.place.crc32c),
            "bucket": "x".join(map(str, row.bucket_px)),
            "caption": row.texts[0].caption,
            "num_texts": len(row.texts),
        }


def test_the_columns_are_those_of_the_format_and_three_more():
    assert set(COLUMNS) ^ set(SAMPLE_SCHEMA.names) == {"dropped", "bucket", "caption", "num_texts"}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("bucket == '96x48'", [("others", "d2/a.png", 0), ("pictures", "d2/a.png", 0)]),
        ("bucket = '96x48' and source like 'pict%'", [PICTURE_2]),
        ("variant = 1", [("pictures", "d1/a.png", 0), ("pictures", "d1/a.png", 1)]),
        ("num_texts > 1", [("pictures", "d1/a.png", 0), ("pictures", "d1/a.png", 1)]),
        ("tags['k'] = 'v' and not flipped", [("pictures", "d1/a.png", v) for v in (0, 1)]),
        ("'two' in captions", [("pictures", "d1/a.png", 0), ("pictures", "d1/a.png", 1)]),
        ("weight < 1", [PICTURE_2]),
        ("path = 'ü b.jpg' -- the last", [("pictures", "ü b.jpg", 0)]),
        ("caption = 'it''s \"one\"'", [("others", "d2/a.png", 0)]),
        (f"sample_id = '{SAMPLES[3].sample_id}'", [("pictures", "ü b.jpg", 0)]),
        (f"latent_key = '{SAMPLES[3].row().latent_key}'", [("pictures", "ü b.jpg", 0)]),
        (f"image_sha256 = '{SAMPLES[3].row().image_sha256}'", [("pictures", "ü b.jpg", 0)]),
        (f"text_keys[1] = '{SAMPLES[3].row().texts[0].text_key}'", [("pictures", "ü b.jpg", 0)]),
        ("regexp_matches(path, '^d[0-9]/') and source > 'p' and weight < 1", [PICTURE_2]),
    ],
)
def test_a_condition_selects_samples_with_all_their_variants(store, where, expected):
    assert selected(store, where) == expected


@settings(max_examples=30, deadline=None)
@given(names=st.sets(st.integers(0, 3), min_size=1))
def test_any_samples_can_be_selected(store, names):
    chosen = [SAMPLES[i] for i in names]
    where = " or ".join(f"(source, path) = ('{s.source}', '{s.path}')" for s in chosen)
    expected = sorted((s.source, s.path, v) for s in chosen for v in range(s.num_variants))
    assert selected(store, where) == expected


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("buckett = '64x64'", 'Binder Error: Referenced column "buckett" not found'),
        ("weight >", "Parser Error: syntax error at "),
        ("", "Parser Error: "),
        ("caption = 1", "Conversion Error: Could not convert string"),
        ("true, false", "Parser Error: Expected a single expression"),
        ("count(*) > 1", "Binder Error: WHERE clause cannot contain aggregates"),
        ("true) or (true", 'Parser Error: syntax error at or near ")"'),
        ("true; drop table x", "Parser Error: "),
        ("dropped", 'Binder Error: Referenced column "dropped" not found'),
    ],
)
def test_a_mistake_is_one_line_with_the_reason_and_the_columns(store, where, reason):
    with pytest.raises(PrebakeError) as raised:
        select_rows(store, where)
    line = str(raised.value)
    assert line.startswith(f"--where {where!r}: {reason}")
    assert line.endswith(f". The columns are: {', '.join(COLUMNS)}.")
    assert "\n" not in line
    with pytest.raises(PrebakeError, match="The columns are"):
        list(list_rows(store, where or " ", "path"))


secret_table = pa.table({"word": ["secret"]})


@pytest.mark.parametrize(
    "source",
    [
        "read_text('/etc/passwd')",
        "'/etc/passwd'",
        "read_csv('https://example.org/x.csv')",
        "secret_table",
        '"table"',
        "store",
    ],
)
def test_a_condition_sees_neither_files_nor_networks_nor_variables(store, source):
    with pytest.raises(PrebakeError, match=r"(Permission|Catalog|Parser|Binder) Error"):
        select_rows(store, f"exists (select * from {source})")


def test_nothing_selected_is_an_error_that_says_where_to_look(store):
    with pytest.raises(PrebakeError, match=r"selects none of the 5 rows of .* 'prebake store ls"):
        select_rows(store, "weight > 9")
    assert list(list_rows(store, "weight > 9", "path")) == []


def test_an_empty_store_has_no_rows(tmp_path):
    for layout in LAYOUTS:
        empty = build_store(tmp_path / layout, layout, [])
        assert list(list_rows(empty, None, "path")) == []
        with pytest.raises(PrebakeError, match="selects none of the 0 rows"):
            select_rows(empty, "true")


def test_rows_come_by_source_path_and_variant(store):
    found = [tuple(row.values()) for row in list_rows(store, None, "source", "path", "variant")]
    assert found == sorted(found)
    assert json.dumps(found[0]) == '["others", "d2/a.png", 0]'
