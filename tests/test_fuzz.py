"""Whatever bytes a store's files hold, opening and reading it ends in true data or a PrebakeError.

Some thousands of cases, the same each time. Most are a hostile author's: hashes are made right
again, so that the parsers behind them meet what was changed.
"""

import copy
import io
import json
import resource
import tarfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hostile_stores import MANIFEST, StoreFiles, Truth, restate, sealed, use
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import LAYOUTS, Sample, bring_to, build_store

MAX_CPU_S = 10  # a case takes 20 ms; what hangs or swells takes minutes
MAX_MORE_BYTES = 3 << 30  # of address space, beyond what the process has
TENSORS = (
    ("latents", "variant", (2, "h", "w")),
    ("encoder_hidden_states", "text", (2, 3)),
)
SAMPLES = [
    Sample("a.png", ["a cat", "x"], (16, 24), text_weights=[0.5, 0.25], tags={"k": "v"}),
    Sample("b.png", ["x"], (16, 24), num_variants=2),
    Sample("c.png", ["„ü“ 🐈"], (24, 16)),
]
CASES = {
    "manifest bytes": 50,
    "manifest values": 110,
    "commit bytes": 60,
    "commit values": 140,
    "segment bytes": 160,
    "segment tables": 150,
    "shard bytes": 150,
    "shard headers": 150,
    "lost and swapped files": 30,
}


def test_there_are_at_least_two_thousand_cases():
    assert len(LAYOUTS) * sum(CASES.values()) >= 2000


class FuzzedStore:
    def __init__(self, root, layout):
        with mock.patch("secrets.token_hex", return_value="0000000a"):
            build_store(root, layout, SAMPLES[:2], TENSORS)
        with mock.patch("secrets.token_hex", return_value="0000000b"):
            bring_to(root, json_manifest(root), SAMPLES)
        self.layout = layout
        self.files = StoreFiles(root)
        self.truth = Truth(root, SAMPLES)
        assert use(root, self.truth, always_true=True) == (None, [])
        check_with_plain_readers(self)

    def run(self, files, *, seal=True, always_true=False):
        """Use the store with other bytes in some files; return whether anything was found wrong."""
        start_s = time.process_time()
        with self.files.changed(files, seal=seal):
            error, findings = use(self.files.root, self.truth, always_true=always_true)
            if error is None and not findings:
                check_with_plain_readers(self)
        assert time.process_time() - start_s < MAX_CPU_S
        return bool(error or findings)


def json_manifest(root):
    from store_format.manifest import read_manifest

    return read_manifest(root)


@pytest.fixture(scope="module", params=LAYOUTS)
def store(request, tmp_path_factory):
    fuzzed = FuzzedStore(tmp_path_factory.mktemp("fuzzed") / "s", request.param)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MAX_MORE_BYTES, before[1]))
    yield fuzzed
    resource.setrlimit(resource.RLIMIT_AS, before)


def check_with_plain_readers(store):
    """Where `verify --full` finds nothing wrong, tarfile, numpy and zarr read the truth as well."""
    root, truth = store.files.root, store.truth
    if store.layout == "zarr":
        found = {}
        states = {}
        for shard in sorted((root / "texts").glob("*-*")):
            group = zarr.open_group(shard, mode="r")
            for row, key in enumerate(group["text_key"][:]):
                states[key.tobytes()] = group["encoder_hidden_states"][row].tobytes()
        for shard in sorted((root / "samples").glob("*/*-*")):
            group = zarr.open_group(shard, mode="r")
            for row in np.flatnonzero(group["live"][:]):
                key = group["sample_id"][row].tobytes().hex(), int(group["variant"][row])
                keys = [k.tobytes() for k in group["text_key"][row] if k.any()]
                assert [states[k] for k in keys] == [
                    truth.texts[c][0] for c in truth.captions[key[0]]
                ]
                found[key] = [group["latents"][row].tobytes()]
        assert found == truth.variants
        return
    found = {}
    for line in (root / "shards.txt").read_text().splitlines():
        with tarfile.open(root / line) as tar:
            for member in tar:
                assert member.isreg()
                data = tar.extractfile(member).read()
                key, _, name = member.name.partition(".")
                if name == "json":
                    found[key]["json"] = json.loads(data)
                else:
                    array = np.load(io.BytesIO(data), allow_pickle=False)
                    found.setdefault(key, {})[name] = array.tobytes()
    assert len(found) == len(truth.variants)
    for (sample_id, variant), tensors in truth.variants.items():
        row = found[f"{sample_id}-{variant}" if variant else sample_id]
        assert row.pop("json")["captions"] == truth.captions[sample_id]
        texts = [truth.texts[caption][0] for caption in truth.captions[sample_id]]
        assert [row.pop("latents.npy"), *row.values()] == [*tensors, *texts]


def fuzz(name, strategy, case):
    """Run `case` on so many values of a strategy as `CASES` says, always the same ones."""
    done = []

    @settings(
        max_examples=CASES[name],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value):
        done.append(case(value))

    run()
    assert len(done) >= CASES[name]
    return done


# Bytes


@st.composite
def damaged_bytes(draw, pristine):
    """Some bytes with one to four edits."""
    data = bytearray(pristine)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 40, 600]))
        stop = min(len(data), start + length)
        kind = draw(st.sampled_from(["flip", "flip", "set", "cut", "drop", "double", "swap"]))
        if kind == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            filler = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80", b"9", b'"', b"\n"]))
            data[start:stop] = filler * (stop - start)
        elif kind == "cut" and start:
            del data[start:]
        elif kind == "drop":
            del data[start:stop]
        elif kind == "double":
            data[start:start] = data[start:stop]
        elif kind == "swap":
            other = draw(st.integers(0, max(0, len(data) - 1)))
            size = max(0, min(length, abs(start - other), len(data) - max(start, other)))
            mine, theirs = data[start : start + size], data[other : other + size]
            data[start : start + size], data[other : other + size] = theirs, mine
    return bytes(data)


def files_of(paths, store):
    """Draw one of some files, and damage to its bytes."""
    return st.sampled_from(sorted(paths)).flatmap(
        lambda path: st.tuples(st.just(path), damaged_bytes(store.files.files[path]))
    )


def test_damaged_bytes_of_the_manifest(store):
    strategy = st.tuples(files_of([MANIFEST], store), st.booleans())
    fuzz("manifest bytes", strategy, lambda case: store.run([case[0]], seal=case[1]))


def test_damaged_bytes_of_a_commit(store):
    """Not sealed: its own hash is in it."""
    strategy = files_of(store.files.commits, store)
    fuzz("commit bytes", strategy, lambda case: store.run([case], seal=False, always_true=True))


def test_damaged_bytes_of_a_segment(store):
    strategy = files_of(store.files.named(".parquet"), store)
    assert any(fuzz("segment bytes", strategy, lambda case: store.run([case])))


def shard_files(store):
    return [path for path in store.files.files if path.startswith(("samples/", "texts/"))]


def test_damaged_bytes_of_a_shard(store):
    """Sealed, so that the crc32c and the structure are what is left to find it by."""
    strategy = st.tuples(files_of(shard_files(store), store), st.booleans())
    fuzz(
        "shard bytes",
        strategy,
        lambda case: store.run([case[0]], seal=case[1], always_true=True),
    )


# JSON

HOSTILE = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    99_999_999,
    10**30,
    2**24,
    2**31,
    2**62,
    2**63 - 1,
    2**64,
    -(2**63),
    1.5,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "\0",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    "é" * 3,
    "x" * 100_000,
    "0" * 32,
    "f" * 64,
    "../../etc/passwd",
    "/etc/passwd",
    "samples/../texts",
    "samples\\x",
    "samples",
    "index",
    "prebake.json",
    "file:///etc/passwd",
    "float32",
    "bfloat16",
    "uint8",
    "variant",
    "text",
    "h",
    "zarr",
    "webdataset",
    [],
    [[]],
    {},
    {"a": {"b": [None]}},
    ["h", "w"],
    [1] * 1000,
    "[" * 2000,
]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def places(value, path=()):
    """Yield the path of every value inside of a JSON value."""
    inside = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else inside:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def damaged_json(draw, pristine):
    """A JSON value with one to three values replaced, removed, added, doubled or swapped."""
    value = copy.deepcopy(pristine)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        everywhere = list(places(value))
        if not everywhere:
            break
        *path, last = draw(st.sampled_from(everywhere))
        inside = value
        for key in path:
            inside = inside[key]
        kind = draw(st.sampled_from(["replace"] * 5 + ["remove", "add", "double", "swap", "many"]))
        if kind == "replace":
            inside[last] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        elif kind == "remove":
            del inside[last]
        elif kind == "add" and isinstance(inside, dict):
            inside[draw(st.sampled_from(["later", "", "\ud800", "a\nb", last.upper()]))] = 1
        elif kind == "double" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        elif kind == "swap":
            *path, other = draw(st.sampled_from(everywhere))
            there = value
            for key in path:
                there = there[key]
            inside[last], there[other] = copy.deepcopy(there[other]), copy.deepcopy(inside[last])
        elif kind == "many" and isinstance(inside, list):
            inside[last:last] = [copy.deepcopy(inside[last]) for _ in range(100)]
    return value


def test_hostile_values_in_the_manifest(store):
    pristine = json.loads(store.files.files[MANIFEST])
    fuzz(
        "manifest values",
        damaged_json(pristine),
        lambda value: store.run({MANIFEST: json.dumps(value).encode()}),
    )


def test_hostile_values_in_a_commit(store):
    """Sealed. A commit may state anything, but what it states and what lies there must agree."""
    strategy = st.sampled_from(store.files.commits).flatmap(
        lambda path: st.tuples(st.just(path), damaged_json(json.loads(store.files.files[path])))
    )
    assert any(
        fuzz(
            "commit values",
            strategy,
            lambda case: store.run({case[0]: sealed(case[1])}, seal=False),
        )
    )


# Parquet

EXTREMES = {
    "int": [0, 1, -1, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)],
    "float": [0.0, -1.0, 1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")],
    "string": ["", "x", "a\nb", "\0", "../../etc/passwd", "/etc", "x" * 100_000, "\x1b[2J"],
    "binary": [bytes(16), b"\xff" * 16],
    "bool": [True, False],
}
OTHER_TYPES = [
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.binary(3),
    pa.bool_(),
    pa.null(),
    pa.date64(),
    pa.duration("ns"),
    pa.decimal128(38, 2),
    pa.list_(pa.int64()),
    pa.large_list(pa.string()),
    pa.list_(pa.list_(pa.int8())),
    pa.struct([("x", pa.int8())]),
    pa.map_(pa.string(), pa.int8()),
    pa.dictionary(pa.int8(), pa.string()),
]
WRITE_OPTIONS = [
    {},
    {"row_group_size": 1},
    {"compression": "none", "use_dictionary": False},
    {"compression": "gzip", "data_page_version": "2.0"},
    {"compression": "brotli", "store_schema": False},
    {"compression": "lz4", "write_statistics": False, "version": "1.0"},
]


def kind_of(type_):
    if pa.types.is_integer(type_):
        return "int"
    if pa.types.is_floating(type_):
        return "float"
    if pa.types.is_boolean(type_):
        return "bool"
    return "string" if pa.types.is_string(type_) else "binary"


def extreme(draw, field_type, old):
    """Return a hostile value of a column's own type."""
    if pa.types.is_map(field_type):
        return draw(st.sampled_from([[], [("k", None)], [("k", "a"), ("k", "b")], [("", "x\n")]]))
    if pa.types.is_list(field_type):
        values = [*EXTREMES[kind_of(field_type.value_type)], None, *(old or ())]
        value = draw(st.sampled_from(values))
        many = 2 if isinstance(value, str) and len(value) > 100 else 5000
        length = draw(st.sampled_from([0, 1, 2, len(old or ()), many]))
        return [fitting(value, field_type.value_type)] * length
    if pa.types.is_fixed_size_binary(field_type) and field_type.byte_width != 16:
        return bytes(field_type.byte_width)
    return fitting(draw(st.sampled_from(EXTREMES[kind_of(field_type)])), field_type)


def fitting(value, type_):
    """Return an integer cut to the width of its column."""
    if not pa.types.is_integer(type_) or value is None:
        return value
    low = 0 if pa.types.is_unsigned_integer(type_) else -(2 ** (type_.bit_width - 1))
    return min(max(value, low), low + 2**type_.bit_width - 1)


def converted(array, type_):
    """Return a column with another type, its values kept as far as they can be."""
    for make in (
        lambda: array.cast(type_),
        lambda: pa.array([str(value) for value in array.to_pylist()]).cast(type_),
        lambda: pa.array([0] * len(array)).cast(type_),
    ):
        try:
            return make()
        except (pa.ArrowException, ValueError):
            continue
    return pa.nulls(len(array), type_)


@st.composite
def damaged_table(draw, pristine):
    """A table of index rows with one to three hostile changes, as the bytes of a Parquet file."""
    table = pristine
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        kind = draw(
            st.sampled_from(
                ["value"] * 5 + ["type"] * 2 + ["null", "drop", "rename", "rows", "swap"]
            )
        )
        position = draw(st.integers(0, table.num_columns - 1))
        name, column = table.column_names[position], table.column(position)
        field = table.schema.field(position).with_nullable(True)
        if kind == "value" and table.num_rows and name in pristine.column_names:
            values = column.to_pylist()
            row = draw(st.integers(0, len(values) - 1))
            if not pristine.schema.field(name).type.equals(field.type):
                continue
            values[row] = extreme(draw, field.type, values[row])
            table = table.set_column(position, field, pa.array(values, field.type))
        elif kind == "type":
            other = converted(column, draw(st.sampled_from(OTHER_TYPES)))
            table = table.set_column(position, name, other)
        elif kind == "null" and table.num_rows:
            values = column.to_pylist()
            values[draw(st.integers(0, len(values) - 1))] = None
            table = table.set_column(position, field, pa.array(values, field.type))
        elif kind == "drop" and table.num_columns > 1:
            table = table.remove_column(position)
        elif kind == "rename":
            other = draw(st.sampled_from(table.column_names))
            names = [other if n == name else name if n == other else n for n in table.column_names]
            table = table.rename_columns(names)
        elif kind == "rows":
            rows = st.lists(st.integers(0, max(0, table.num_rows - 1)), max_size=5)
            table = table.take(pa.array(draw(rows), pa.int64())) if table.num_rows else table
        elif kind == "swap" and table.num_rows:
            values = column.to_pylist()
            one, two = (draw(st.integers(0, len(values) - 1)) for _ in range(2))
            values[one], values[two] = values[two], values[one]
            table = table.set_column(position, field, pa.array(values, field.type))
    return table, draw(st.sampled_from(WRITE_OPTIONS))


def parquet_of(table, options):
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table, sink, **{"compression": "zstd", **options})
    except (pa.ArrowException, ValueError):  # a type that Parquet does not have
        return None
    return sink.getvalue().to_pybytes()


@st.composite
def damaged_segment(draw, store):
    """A segment of a commit with another table in it; the commit states its rows, or other ones."""
    path = draw(st.sampled_from(sorted(store.files.named(".parquet"))))
    table, options = draw(damaged_table(pq.read_table(io.BytesIO(store.files.files[path]))))
    rows = draw(st.sampled_from([table.num_rows] * 8 + [0, 2**31, 2**39]))
    return path, parquet_of(table, options), rows


def test_hostile_tables_in_a_segment(store):
    def case(value):
        path, data, rows = value
        if data is None:
            return False
        commit_path, kind = path.split(".")[0] + ".json", path.split(".")[1]
        body = json.loads(restate(store.files.files[commit_path], {path: data}))
        body["segments"][kind]["rows"] = rows
        return store.run({path: data, commit_path: sealed(body)})

    assert any(fuzz("segment tables", damaged_segment(store), case))


# Headers of shards


def with_checksum(header):
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


TAR_FIELDS = {
    "name": (0, 100, [b"", b"/etc/passwd", b"../x", b"a/../../b", b"x", b"\xff" * 100, b"k.json"]),
    "mode": (100, 8, [b"0000777\0", b"0004755\0", b"\xff" * 8, b"junk\0"]),
    "uid": (108, 8, [b"0000001\0", b"\x80" + b"\xff" * 7, b""]),
    "size": (
        124,
        12,
        [
            b"00000000000\0",
            b"77777777777\0",
            b"00000001000\0",
            b"\x80" + b"\x00" * 3 + b"\xff" * 8,
            b"\xff" * 12,
            b"junk",
            b"",
        ],
    ),
    "mtime": (136, 12, [b"77777777777\0", b"\xff" * 12, b"00000000001\0"]),
    "type": (156, 1, [bytes([c]) for c in b"\x00123456789xgLKSDVZ"]),
    "link": (157, 100, [b"/etc/passwd", b"../../x"]),
    "magic": (257, 8, [b"ustar  \0", b"", b"ustar\x0011"]),
    "user": (265, 32, [b"root", b"\xff" * 32]),
    "prefix": (345, 155, [b"/etc", b"..", b"a" * 155]),
}
NPY_TEXTS = [
    "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }",
    "{'descr': '<f2', 'fortran_order': True, 'shape': (2, 3), }",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (3, 2), }",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999, 9), }",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }",
    "{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (2, 3), }",
    "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }",
    "__import__('os').abort()",
    "(" * 100,
    "",
]


@st.composite
def damaged_tar(draw, pristine):
    """A tar with a field of a header, an npy header, or the order of its members made hostile."""
    data = bytearray(pristine)
    with tarfile.open(fileobj=io.BytesIO(pristine)) as tar:
        members = tar.getmembers()
    member = draw(st.sampled_from(members))
    kind = draw(st.sampled_from(["field"] * 4 + ["npy", "npy", "extra", "order", "end", "pad"]))
    start = member.offset
    if kind == "field":
        at, length, values = TAR_FIELDS[draw(st.sampled_from(sorted(TAR_FIELDS)))]
        value = draw(st.sampled_from(values)).ljust(length, b"\0")[:length]
        header = data[start : start + 512]
        header[at : at + length] = value
        data[start : start + 512] = with_checksum(header)
    elif kind == "npy" and member.name.endswith(".npy"):
        text = draw(st.sampled_from(NPY_TEXTS)).encode().ljust(117)[:117] + b"\n"
        data[member.offset_data + 10 : member.offset_data + 128] = text
        if draw(st.booleans()):
            data[member.offset_data + 6 : member.offset_data + 10] = draw(
                st.sampled_from([b"\x02\x00\x76\x00", b"\x01\x00\xff\xff", b"\x01\x00\x00\x00"])
            )
    elif kind == "extra":
        info = tarfile.TarInfo(draw(st.sampled_from(["evil", "../evil", "/evil", member.name])))
        info.type = draw(st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE]))
        info.linkname = "/etc/passwd" if info.type == tarfile.SYMTYPE else ""
        formats = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
        if draw(st.booleans()):
            info.name = info.name * 40  # takes an extension
        form = draw(st.sampled_from(formats[1:] if len(info.name) > 100 else formats))
        data[start:start] = info.tobuf(form)
    elif kind == "order":
        other = draw(st.sampled_from(members))
        one, two = sorted([member, other], key=lambda m: m.offset)
        ends = [m.offset_data + m.size + -m.size % 512 for m in (one, two)]
        if one is not two:
            data[one.offset : ends[1]] = (
                data[two.offset : ends[1]] + data[ends[0] : two.offset] + data[one.offset : ends[0]]
            )
    elif kind == "end":
        more = draw(st.sampled_from([b"", b"\0" * 512, b"\0" * 9216, b"x" * 512, b"x"]))
        data[len(data) - draw(st.sampled_from([0, 512, 1024])) :] = more
    elif kind == "pad":
        end = member.offset_data + member.size
        data[end : end + -end % 512] = b"x" * (-end % 512)
    return bytes(data)


@st.composite
def damaged_zarr(draw, files, path):
    """A file of a Zarr shard made hostile: values of its metadata, or its shard index."""
    data = files[path]
    if path.endswith(".json"):
        return json.dumps(draw(damaged_json(json.loads(data)))).encode()
    changed = bytearray(data)
    at = len(data) - 1 - draw(st.integers(0, min(len(data) - 1, 60)))
    changed[at : at + 8] = draw(
        st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x01" + b"\0" * 7, b"\xff" * 7 + b"\x7f"])
    )[: len(data) - at]
    return bytes(changed)


def test_hostile_headers_in_a_shard(store):
    """Sealed, so that a plain reader's checks are all there is: `verify --full` must make them."""

    def damaged(path):
        if path.endswith(".tar"):
            return damaged_tar(store.files.files[path])
        return damaged_zarr(store.files.files, path)

    strategy = st.sampled_from(sorted(shard_files(store))).flatmap(
        lambda path: st.tuples(st.just(path), damaged(path))
    )
    found = fuzz("shard headers", strategy, lambda case: store.run([case], always_true=True))
    assert sum(found) > len(found) // 3


# Whole files


def test_lost_emptied_and_swapped_files(store):
    paths = st.sampled_from(sorted(store.files.files))

    def case(value):
        path, other, kind = value
        files = {path: {"lost": None, "empty": b""}.get(kind, store.files.files[other])}
        if kind == "swapped":
            files[other] = store.files.files[path]
        return store.run(files, seal=False, always_true=True)

    kinds = st.sampled_from(["lost", "empty", "swapped", "doubled"])
    fuzz("lost and swapped files", st.tuples(paths, paths, kinds), case)
