"""Whatever a store's files say, opening and reading ends in data or in a PrebakeError.

Some hundreds of fixed cases. Where a file is protected by a hash, the hash is made right again, as
a hostile author would do.
"""

import hashlib
import json
import random
import shutil
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from store_builders import LAYOUTS, Sample, build_store, make_manifest

from store_format import PrebakeError, open_store
from store_format.commits import Commit
from store_format.errors import DamagedStoreError, NotAStoreError
from store_format.keys import canonical_json
from store_format.manifest import Manifest, TensorSpec
from store_format.verify import store_hash, verify_store
from store_format.writer import StoreWriter

SAMPLES = [Sample("a.png", ["x", "y"], tags={"k": "v"}), Sample("b.png", ["x"], num_variants=2)]


@pytest.fixture(scope="module", params=LAYOUTS)
def pristine(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine") / "s"
    build_store(root, request.param, SAMPLES)
    return root


@pytest.fixture
def root(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "s")
    return tmp_path / "s"


def use(root):
    """Do all that reads a store; return the PrebakeError of one line, if that is how it ends."""
    error = how_it_ends(root)
    assert "\n" not in str(error)
    return error


def how_it_ends(root):
    try:
        verify_store(root, full=True)
        store = open_store(root)
        for row in range(len(store)):
            store.sample(row)
            store.read([row])
        store_hash(store)
        list(store.index.iter_texts())
    except PrebakeError as error:
        return error
    return None


def mutations(data, count, seed):
    """Yield `count` damaged copies of `data`: bytes changed, cut, removed, doubled, swapped."""
    rng = random.Random(seed)
    for _ in range(count):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            start = rng.randrange(max(1, len(damaged)))
            stop = min(len(damaged), start + rng.choice([1, 1, 2, 4, 30]))
            kind = rng.randrange(5)
            if kind == 0 and damaged:
                damaged[start] ^= 1 << rng.randrange(8)
            elif kind == 1:
                damaged[start:stop] = rng.randbytes(stop - start)
            elif kind == 2:
                del damaged[start:stop]
            elif kind == 3:
                damaged[start:start] = damaged[start:stop]
            elif start:
                del damaged[start:]
        yield bytes(damaged or b"{")


def commit_path(root):
    [path] = (root / "index").glob("*.json")
    return path


def rewrite_commit(root, change):
    """Change the parsed commit and make its hash right."""
    path = commit_path(root)
    body = json.loads(path.read_bytes())
    del body["sha256"]
    body = change(body) or body
    body["sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
    path.write_text(json.dumps(body))


def rewrite_manifest(root, body):
    """Replace the manifest, and have the commit name the new one."""
    (root / "prebake.json").write_text(json.dumps(body))
    found = hashlib.sha256((root / "prebake.json").read_bytes()).hexdigest()
    rewrite_commit(root, lambda commit: commit.update(manifest_sha256=found))


def test_a_damaged_manifest_ends_in_a_prebake_error(root):
    path = root / "prebake.json"
    ended = 0
    for data in mutations(path.read_bytes(), 150, seed=1):
        path.write_bytes(data)
        ended += use(root) is not None
    assert ended > 60


def test_a_damaged_commit_ends_in_a_prebake_error(root):
    path = commit_path(root)
    whole = path.read_bytes()
    for data in mutations(whole, 150, seed=2):
        path.write_bytes(data)
        assert use(root) is not None or canonical_json(json.loads(data)) == canonical_json(
            json.loads(whole)
        )


def leaves(value, path=()):
    """Yield the path of every value inside a JSON value."""
    if isinstance(value, dict):
        for key in value:
            yield (*path, key)
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield (*path, i)
            yield from leaves(value[i], (*path, i))


STRANGE = [
    None,
    "",
    "x",
    -1,
    0,
    10**30,
    2**63,
    1.5,
    True,
    [],
    {},
    [[]],
    "../../etc/passwd",
    "\ud800",
]


@pytest.mark.parametrize("name", ["prebake.json", "commit"])
def test_any_value_of_any_kind_in_any_place_ends_in_a_prebake_error(root, name):
    rng = random.Random(3)
    path = root / "prebake.json" if name == "prebake.json" else commit_path(root)
    whole = path.read_bytes()
    ended = 0
    places = list(leaves(json.loads(whole)))
    for place in rng.sample(places, min(len(places), 60)):
        for value in rng.sample(STRANGE, 3):
            body = json.loads(whole)
            inside = body
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = value
            if name == "commit" and place[0] != "sha256" and value != "\ud800":
                del body["sha256"]
                body["sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
            path.write_text(json.dumps(body))
            ended += use(root) is not None
    assert ended > 60


@pytest.mark.parametrize("kind", ["samples", "texts"])
def test_a_damaged_parquet_file_ends_in_a_prebake_error(root, kind):
    """With its size and hash stated right, so that the Parquet reader meets the damage."""
    [path] = (root / "index").glob(f"*.{kind}.parquet")
    whole = path.read_bytes()
    ended = 0
    for data in mutations(whole, 100, seed=4):
        path.write_bytes(data)

        def restate(body, data=data):
            segment = body["segments"][kind]
            segment.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

        rewrite_commit(root, restate)
        ended += use(root) is not None
    assert ended > 80


def rewrite_rows(root, kind, change):
    """Change the rows of a segment, as Python values, and make all hashes right."""
    [path] = (root / "index").glob(f"*.{kind}.parquet")
    table = pq.read_table(path)
    rows = [change(dict(row)) or row for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    data = path.read_bytes()

    def restate(body):
        segment = body["segments"][kind]
        segment.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    rewrite_commit(root, restate)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [-1, -1, -1]},
        {"offsets": [2**62, 2**62, 2**62]},
        {"offsets": [2**63 - 1] * 3},
        {"offsets": []},
        {"offsets": [0] * 50},
        {"row": -1},
        {"row": 2**31 - 1},
        {"shard": "../../etc/passwd"},
        {"shard": "texts/none"},
        {"bucket_width_px": 2**31 - 1},
        {"bucket_width_px": 1},
        {"bucket_height_px": -64},
        {"variant": -7},
        {"text_keys": [b"0" * 16], "captions": ["never stored"], "text_weights": [1.0]},
        {"text_weights": [float("nan")], "text_keys": [b"0" * 16], "captions": ["x"]},
    ],
)
def test_absurd_index_rows_end_in_a_prebake_error(root, change):
    def absurd(row):
        row.update(change)
        if "offsets" in change:
            row["crc32c"] = [0] * len(change["offsets"])
        return row

    rewrite_rows(root, "samples", absurd)
    assert use(root) is not None or change.keys() == {"variant"}  # whose number is just a number


def test_text_that_is_no_utf8_ends_in_a_prebake_error(root):
    [path] = (root / "index").glob("*.samples.parquet")
    table = pq.read_table(path)
    raw = pa.array([b"\xff\xfe"] * table.num_rows, pa.binary())
    bad = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    position = table.schema.get_field_index("path")
    pq.write_table(table.set_column(position, table.schema.field("path"), bad), path)
    data = path.read_bytes()
    rewrite_commit(
        root,
        lambda body: body["segments"]["samples"].update(
            bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
        ),
    )
    assert "Invalid UTF8" in str(use(root))


def test_missing_or_other_columns_end_in_a_prebake_error(root):
    for kind in ("samples", "texts"):
        [path] = (root / "index").glob(f"*.{kind}.parquet")
        whole, commit = path.read_bytes(), commit_path(root).read_bytes()
        table = pq.read_table(path)
        for name in table.column_names:
            others = [n for n in table.column_names if n != name]
            strings = pa.array(["?"] * table.num_rows)
            for bad in (table.select(others), table.select(others).append_column(name, strings)):
                if bad.schema.equals(table.schema):
                    continue
                pq.write_table(bad, path)
                data = path.read_bytes()
                rewrite_commit(
                    root,
                    lambda body, data=data, kind=kind: body["segments"][kind].update(
                        bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
                    ),
                )
                error = use(root)
                assert error is not None or name in ("source", "path", "caption", "shard"), name
        path.write_bytes(whole)
        commit_path(root).write_bytes(commit)


def test_unknown_columns_are_ignored(root):
    with mock.patch("os.fsync"):
        [path] = (root / "index").glob("*.samples.parquet")
        table = pq.read_table(path)
        extra = pa.array([{"later": n} for n in range(table.num_rows)])
        pq.write_table(table.append_column("of_a_later_version", extra), path)
        data = path.read_bytes()
        rewrite_commit(
            root,
            lambda body: body["segments"]["samples"].update(
                bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
            ),
        )
    assert use(root) is None


ESCAPES = ["../outside", "/etc/passwd", "a/../../b", "a\\..\\b", "", ".", "a//b", "nul\0"]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out_of_the_store(root, path):
    whole = commit_path(root).read_bytes()

    def shard_name(body):
        body["shards"][0]["name"] = path

    def file_path(body):
        body["shards"][0]["files"][0]["path"] = path

    def segment_path(body):
        body["segments"]["samples"]["path"] = path

    for change in (shard_name, file_path, segment_path):
        commit_path(root).write_bytes(whole)
        rewrite_commit(root, change)
        with pytest.raises(DamagedStoreError, match="is not a plain relative path"):
            open_store(root)


@pytest.mark.parametrize(
    "shape",
    [
        [],
        [0],
        [-1],
        [1 << 40],
        [1] * 7,
        ["x"],
        [1.5],
        [None],
        ["h", "h", "h"],
        "h",
        [[1]],
    ],
)
def test_absurd_shapes_are_refused_in_the_manifest(root, shape):
    path = root / "prebake.json"
    body = json.loads(path.read_text())
    body["tensors"][0]["shape"] = shape
    path.write_text(json.dumps(body))
    with pytest.raises(NotAStoreError, match=r"tensors\.0"):
        open_store(root)


@pytest.mark.parametrize("shape", [[1 << 20] * 6, [1 << 20, "h", "w"], [4, "w", "w"]])
def test_rows_larger_than_their_files_are_refused_without_being_allocated(root, shape):
    body = json.loads((root / "prebake.json").read_text())
    body["tensors"][0]["shape"] = shape
    rewrite_manifest(root, body)
    if shape == [4, "w", "w"]:  # as large, in a square bucket
        assert use(root) is None
    else:
        assert "places a tensor outside of this file" in str(use(root))


@pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "../a", "a" * 41, "ä", "1a", "a\n"])
def test_a_tensor_name_is_a_plain_word(name):
    with pytest.raises(ValidationError, match="String should match pattern"):
        TensorSpec(name=name, kind="text", dtype="float16", shape=(1,))


def test_tensor_names_do_not_repeat():
    spec = TensorSpec(name="a", kind="text", dtype="float16", shape=(1,))
    values = make_manifest("zarr").model_dump() | {"tensors": [spec, spec]}
    with pytest.raises(ValidationError, match="tensor names repeat"):
        Manifest.model_validate(values)


def test_a_text_tensor_does_not_depend_on_the_bucket():
    with pytest.raises(ValidationError, match="cannot depend on the bucket"):
        TensorSpec(name="a", kind="text", dtype="float16", shape=(4, "h"))


def test_unknown_keys_outside_of_config_are_refused(root):
    body = json.loads((root / "prebake.json").read_text())
    rewrite_manifest(root, body | {"config": body["config"] | {"later": 1}})
    assert use(root) is None
    rewrite_manifest(root, body | {"later": 1})
    with pytest.raises(NotAStoreError, match="later: Extra inputs are not permitted"):
        open_store(root)
    with pytest.raises(ValidationError, match="Extra inputs"):
        Commit(sequence=1, writer="0000000a", segments={}, shards=(), later=1)


def test_a_writer_refuses_what_a_reader_refuses(root):
    commit_path(root).write_text("{}")
    with pytest.raises(PrebakeError, match="is damaged"):
        StoreWriter(root, json_manifest(root))
    with pytest.raises(PrebakeError, match="is damaged"):  # the lock was freed
        StoreWriter(root, json_manifest(root))


def json_manifest(root):
    return Manifest.model_validate(json.loads((root / "prebake.json").read_text()))
