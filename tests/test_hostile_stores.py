"""Safe with hostile files: nothing is executed, followed out of place, or allocated unseen.

Chosen cases; `test_fuzz` draws thousands, `test_structure` takes shards apart.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_stores import MANIFEST, StoreFiles, Truth, restate, sealed, use
from store_builders import LAYOUTS, Sample, bring_to, build_store, make_manifest

from store_format import PrebakeError, open_store, parquet_limits
from store_format.commits import parse_commit
from store_format.errors import DamagedStoreError, NotAStoreError, one_line
from store_format.folders import MAX_READ_BYTES, LocalFolder
from store_format.garbage import collect_garbage, find_garbage
from store_format.index import LiveIndex
from store_format.manifest import read_manifest
from store_format.parquet_limits import check_expansion
from store_format.rows import TEXT_SCHEMA
from store_format.strict_json import parse_json
from store_format.verify import store_hash, verify_store
from store_format.writer import StoreWriter

ROOT = Path(__file__).parent.parent
PACKAGES = ("store_format", "precompute", "train", "sampling")
SAMPLES = [Sample("a.png", ["x", "y"], (16, 24)), Sample("b.png", ["x"], (16, 24))]


@pytest.fixture(params=LAYOUTS)
def files(request, tmp_path):
    build_store(tmp_path / "s", request.param, SAMPLES)
    return StoreFiles(tmp_path / "s")


@pytest.fixture(params=LAYOUTS)
def two_commits(request, tmp_path):
    manifest = make_manifest(request.param)
    bring_to(tmp_path / "s", manifest, SAMPLES[:1])
    bring_to(tmp_path / "s", manifest, SAMPLES)
    return StoreFiles(tmp_path / "s")


def refusal(files, changes, *, seal=True):
    """Return the error with which a changed store is refused."""
    with files.changed(changes, seal=seal):
        error, _ = use(files.root, Truth.__new__(Truth), always_true=False)
    assert error is not None
    return str(error)


# Nothing is executed


def sources():
    return [
        *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")),
        ROOT / "prebake.py",
    ]


EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EXECUTING_CALLS = {
    *("eval", "exec", "__import__"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "np.fromfile", "os.system"),
    *("tar.extract", "tar.extractall", "tarfile.open", "shutil.unpack_archive"),
}
EXECUTING_KEYWORDS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def executing(source):
    """Yield what in a source file could run code that a file holds, or unpack files from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name for name in modules if name.split(".")[0] in EXECUTING_MODULES)
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in EXECUTING_CALLS:
                yield name
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if EXECUTING_KEYWORDS.get(keyword.arg, ...) == value:
                    yield f"{keyword.arg}={value}"


def test_no_source_file_loads_a_pickle_or_runs_what_a_file_says():
    found = {path.name: list(executing(path.read_text())) for path in sources()}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert len(found) > 60


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from dill import *",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f, Loader=yaml.Loader)",
        "tar.extractall(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_search_for_pickles_finds_them(source):
    assert list(executing(source))


def test_models_are_loaded_from_safetensors_only():
    """`from_pretrained` of a model falls back on a pickle unless it is told not to."""
    seen = 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
                if "Tokenizer" in ast.unparse(node.func):
                    continue
                seen += 1
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("use_safetensors") == "True", path
    assert seen


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_that_is_a_pickle_is_refused_and_not_executed(tmp_path):
    import torch
    from test_checkpoint import save

    from train.checkpoint import _hash_of, read_checkpoint

    executed = tmp_path / "executed"
    sink = io.BytesIO()
    torch.save({"x": Evil(executed)}, sink)
    for content in (pickle.dumps(Evil(executed)), sink.getvalue()):
        for name in ("adapter.safetensors", "optimizer.safetensors", "state.json"):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            folder = save(tmp_path / "run", 1)
            (folder / name).write_bytes(content)
            if name != "state.json":
                state = folder / "state.json"
                body = json.loads(state.read_text())
                sha256 = hashlib.sha256(content).hexdigest()
                body["files"][name] = {"bytes": len(content), "sha256": sha256}
                body["sha256"] = _hash_of(body)
                state.write_text(json.dumps(body))
            with pytest.raises(PrebakeError, match="is damaged"):
                read_checkpoint(folder)
    assert not executed.exists()


# JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "names the key 'a' twice"),
        (b'[{"x": {"y": 1, "y": 1}}]', "names the key 'y' twice"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"[" * 100_000, "nests too deep"),
        (b'{"a":' * 100_000, "nests too deep"),
        (b"1" * 5000, "Exceeds the limit"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff", "codec can't decode"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_parsers_read_differently_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_with_any_character_is_read():
    value = {
        "ünï": ["\U0001f408", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]
    }
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_keys_that_are_there_twice_are_refused_in_the_manifest_and_in_commits(files):
    manifest = files.files[MANIFEST]
    changed = manifest.replace(b"{", b'{"layout": "zarr", ', 1)
    assert "names the key 'layout' twice" in refusal(files, {MANIFEST: changed})
    [commit] = files.commits
    changed = files.files[commit].replace(b"{", b'{"shards": [], ', 1)
    assert "names the key 'shards' twice" in refusal(files, {commit: changed}, seal=False)


def test_a_message_is_one_line_that_a_terminal_can_show():
    assert one_line("a\nb\r\x1b[2J\x00\x9b\u2028\ud800é🐈") == (
        r"a\nb\r\x1b[2J\x00\x9b\u2028\ud800é🐈"
    )
    assert str(DamagedStoreError("a\nb")) == r"a\nb"
    assert str(NotAStoreError("\x1b]0;title\x07")) == r"\x1b]0;title\x07"


# The manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": True}, "format version True"),
        ({"version": 1.0}, "format version 1.0"),
        ({"version": "1"}, "format version '1'"),
        ({"downscale": "8"}, "downscale: Input should be a valid integer"),
        ({"downscale": True}, "downscale: Input should be a valid integer"),
        ({"tensors": []}, "tensors: Tuple should have at least 1 item"),
        ({"config": {"a\nb": {}}}, r"config.a\\nb"),
    ],
)
def test_a_manifest_with_values_of_other_types_is_refused(files, change, message):
    body = json.loads(files.files[MANIFEST]) | change
    found = refusal(files, {MANIFEST: json.dumps(body).encode()})
    assert message.replace("\\\\", "\\") in found


def test_a_manifest_of_very_many_tensors_is_refused(files):
    body = json.loads(files.files[MANIFEST])
    spec = {"kind": "variant", "dtype": "uint8", "shape": [1]}
    body["tensors"] += [{"name": f"t{i}", **spec} for i in range(100_000)]
    found = refusal(files, {MANIFEST: json.dumps(body).encode()})
    assert "tensors: Tuple should have at most 64 items" in found


def test_a_number_that_is_no_number_is_refused(files):
    body = json.loads(files.files[MANIFEST])
    body["encoders"]["vae"]["scaling_factor"] = 1e400
    data = json.dumps(body).replace("Infinity", "1e400").encode()
    assert "scaling_factor: Input should be a finite number" in refusal(files, {MANIFEST: data})


# Commits


def changed_commit(files, path, change):
    body = json.loads(files.files[path])
    change(body)
    return sealed(body)


@pytest.mark.parametrize(
    "path",
    [
        *("../s", "/etc/passwd", "samples/../../x", "samples\\x", "samples//x", "./samples/x", ""),
        *("samples/a\0b", "samples/a\nb", "samples/\x1b[2J", "samples/\u2028", "x" * 300),
    ],
)
def test_a_path_that_is_not_plain_is_refused(files, path):
    [commit] = files.commits

    def name(body):
        body["shards"][0]["name"] = path

    def file(body):
        body["shards"][0]["files"][0]["path"] = path

    for change in (name, file):
        found = refusal(files, {commit: changed_commit(files, commit, change)}, seal=False)
        assert "is not a plain relative path" in found


@pytest.mark.parametrize("path", [MANIFEST, "index", "texts", "texts/x.tar", "samples/16x24.tar"])
def test_a_shard_has_no_files_outside_of_itself(files, path):
    """Or removing a dead shard would remove them."""
    [commit] = files.commits

    def change(body):
        [shard] = [shard for shard in body["shards"] if shard["kind"] == "samples"]
        shard["files"][0]["path"] = path

    found = refusal(files, {commit: changed_commit(files, commit, change)}, seal=False)
    assert "is outside of shard 'samples/" in found


def test_a_shard_lies_in_the_folder_of_its_kind(files):
    [commit] = files.commits

    def change(body):
        for shard in body["shards"]:
            shard["kind"] = {"samples": "texts", "texts": "samples"}[shard["kind"]]

    found = refusal(files, {commit: changed_commit(files, commit, change)}, seal=False)
    assert "does not lie in" in found


def test_a_commit_names_its_own_segments(files):
    [commit] = files.commits

    def change(body):
        segments = body["segments"]
        segments["samples"], segments["texts"] = segments["texts"], segments["samples"]

    found = refusal(files, {commit: changed_commit(files, commit, change)}, seal=False)
    assert "its samples are in 'index/" in found


def test_shards_of_one_name_in_two_commits_are_refused_unless_they_are_equal(two_commits):
    first, second = two_commits.commits
    shards = json.loads(two_commits.files[first])["shards"]
    restated = changed_commit(two_commits, second, lambda body: body["shards"].extend(shards))
    with two_commits.changed({second: restated}, seal=False):
        assert verify_store(two_commits.root, full=True) == []

    def other(body):
        body["shards"].append(shards[0] | {"rows": shards[0]["rows"] + 1})

    found = refusal(two_commits, {second: changed_commit(two_commits, second, other)}, seal=False)
    assert f"it states shard {shards[0]['name']}, as commit {first[6:-5]} does otherwise" in found


def test_a_shard_inside_of_another_one_is_refused(two_commits):
    _, second = two_commits.commits

    def change(body):
        file = {"path": "texts.tar", "bytes": 0, "sha256": "0" * 64}
        outer = {"name": "samples/16x24", "kind": "samples", "rows": 1, "files": [file]}
        outer["files"] = [file | {"path": "samples/16x24.tar"}]
        inner = outer | {
            "name": "samples/16x24/x",
            "files": [file | {"path": "samples/16x24/x.tar"}],
        }
        body["shards"] += [outer, inner]

    found = refusal(two_commits, {second: changed_commit(two_commits, second, change)}, seal=False)
    assert "lies inside of shard samples/16x24" in found


@pytest.mark.parametrize("key", ["replaces", "parents"])
def test_a_commit_that_replaces_itself_or_a_later_one_is_refused(two_commits, key):
    """In a circle, commits would hide each other, and the store would look empty."""
    first, second = two_commits.commits
    for path, other in ((first, first), (first, second)):
        name = other.removeprefix("index/").removesuffix(".json")
        data = changed_commit(two_commits, path, lambda body, name=name: body[key].append(name))
        found = refusal(two_commits, {path: data}, seal=False)
        assert f"it builds on {name} or replaces it, which is not before it" in found


def test_a_commit_that_replaces_an_earlier_one_has_the_last_word(two_commits):
    """As the format says: whoever may write may also drop. Nothing of the earlier one is read."""
    first, second = two_commits.commits
    name = first.removeprefix("index/").removesuffix(".json")
    data = changed_commit(two_commits, second, lambda body: body["replaces"].append(name))
    with two_commits.changed({second: data}, seal=False):
        assert len(LiveIndex(two_commits.root)) == 1


def test_the_last_sequence_number_can_be_read_but_not_followed(files):
    [commit] = files.commits
    last = commit.replace("index/00000001", "index/99999999")
    body = json.loads(files.files[commit]) | {"sequence": 99_999_999}
    moved = {last: None, commit: None}
    for segment in body["segments"].values():
        if segment:
            path = segment["path"].replace("index/00000001", "index/99999999")
            moved |= {path: files.files[segment["path"]], segment["path"]: None}
            segment["path"] = path
    moved[last] = sealed(body)
    with files.changed(moved, seal=False):
        assert use(files.root, Truth(files.root, SAMPLES), always_true=True) == (None, [])
        with (
            StoreWriter(files.root, read_manifest(files.root)) as writer,
            pytest.raises(PrebakeError, match="the last one possible"),
        ):
            writer.commit()


@pytest.mark.parametrize("number", [True, "1", 1.0, 10**30, -1, None])
def test_numbers_of_a_commit_are_integers(files, number):
    [commit] = files.commits

    def rows(body):
        body["shards"][0]["rows"] = number

    def size(body):
        body["shards"][0]["files"][0]["bytes"] = number

    for change in (rows, size):
        data = changed_commit(files, commit, change)
        assert "is damaged (shards" in refusal(files, {commit: data}, seal=False)


def test_a_commit_of_very_many_shards_is_read(tmp_path):
    """A second or two for a hundred thousand, at some kB each: no more than it takes to parse."""
    entry = {"bytes": 0, "sha256": "0" * 64}
    shards = [
        {
            "name": f"texts/{number}",
            "kind": "texts",
            "rows": 1,
            "files": [entry | {"path": f"texts/{number}.tar"}],
        }
        for number in range(20_000)
    ]
    body = {
        "format": "prebake-commit",
        "version": 1,
        "sequence": 1,
        "writer": "0000000a",
        "segments": {"samples": None, "texts": None},
        "shards": shards,
    }
    commit = parse_commit(sealed(body), "index/00000001-0000000a.json")
    assert len(commit.shards) == 20_000


# Segments


def with_segment(files, kind, data, rows=None):
    """Return the changes that put other bytes into a segment; the commit states their hash."""
    [path] = files.named(f".{kind}.parquet")
    [commit] = files.commits
    body = json.loads(restate(files.files[commit], {path: data}))
    if rows is not None:
        body["segments"][kind]["rows"] = rows
    return {path: data, commit: sealed(body)}


def segment_table(files, kind="samples"):
    [path] = files.named(f".{kind}.parquet")
    return pq.read_table(io.BytesIO(files.files[path]))


def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return sink.getvalue()


@pytest.mark.parametrize("rows", [2**40, 2**62, 2**39, 0, 1, -1])
def test_a_segment_that_states_other_rows_is_refused(files, rows):
    [path] = files.named(".samples.parquet")
    found = refusal(files, with_segment(files, "samples", files.files[path], rows), seal=False)
    assert "is damaged" in found


def repeated(value, rows):
    """Return a column that says one thing many times, in few bytes."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def test_a_string_that_is_repeated_into_terabytes_is_refused_unread(files):
    """20 kB that Arrow would unfold to a terabyte."""
    table = segment_table(files)
    table = table.take(pa.array([0] * (1 << 20)))
    position = table.schema.get_field_index("path")
    table = table.set_column(position, "path", repeated("x" * (1 << 20), len(table)))
    changes = with_segment(files, "samples", parquet(table, row_group_size=1 << 20), len(table))
    assert max(len(data) for data in changes.values()) < 1 << 18
    before = pa.total_allocated_bytes()
    with files.changed(changes, seal=False):
        findings = verify_store(files.root, full=True)
    assert all("bytes that would become" in finding.what for finding in findings)
    assert any("would become 1099" in finding.what for finding in findings)  # 2^40
    assert pa.total_allocated_bytes() - before < 1 << 28


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_what_a_file_unfolds_to_is_known_before(codec, version):
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(100_001, dtype=np.int32)), repeated("y" * 100_000, 100_000)
    )
    table = pa.table({"bomb": repeated("x" * 1_000_000, 100_000), "list": lists})
    honest = pa.table({"n": pa.array(range(100_000)), "s": [f"text {i}" for i in range(100_000)]})
    for columns, refused in ((["bomb"], True), (["list"], True), (["n", "s"], False)):
        data = parquet(
            honest if "n" in columns else table, compression=codec, data_page_version=version
        )
        if refused:
            with pytest.raises(ValueError, match="bytes that would become"):
                check_expansion(data, columns)
        check_expansion(data, [] if refused else columns)


@pytest.mark.parametrize(
    "options", [{}, {"compression": "none"}, {"use_dictionary": False}, {"row_group_size": 1}]
)
def test_files_with_few_or_no_rows_pass(options):
    for table in (TEXT_SCHEMA.empty_table(), pa.table({"x": pa.nulls(3), "y": [[], None, [""]]})):
        data = parquet(table, **options)
        check_expansion(data, table.column_names)


def varint(number, num_bytes):
    """Return a zigzag integer of the Thrift compact protocol, filled up to a length."""
    number <<= 1
    parts = [(number >> 7 * i) & 127 | 128 for i in range(num_bytes)]
    parts[-1] &= 127
    return bytes(parts)


def test_the_columns_that_repeat_are_written_with_a_dictionary(files):
    [path] = files.named(".samples.parquet")
    metadata = pq.read_metadata(io.BytesIO(files.files[path]))
    group = metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    plain = {c.path_in_schema for c in chunks if not c.has_dictionary_page}
    booleans = {"dropped", "flipped"}
    assert plain - booleans == {
        *("sample_id", "path", "image_sha256", "image_bytes", "image_mtime_ns", "latent_key"),
        *("captions.list.element", "text_keys.list.element", "crc32c.list.element"),
    }


# Found by the fuzz test: pyarrow's `ColumnChunkMetaData.compression` ends the process.
def test_a_codec_that_nobody_knows_is_refused(files):
    [path] = files.named(".texts.parquet")
    data = files.files[path]
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    codec = b"\x18\x08text_key\x15\x0c"  # path_in_schema, then codec 6: zstd
    assert data[footer:].count(codec) == 1
    for number in (8, 63):
        changed = data[:footer] + data[footer:].replace(codec, codec[:-1] + bytes([2 * number]))
        assert "is damaged" in refusal(files, with_segment(files, "texts", changed), seal=False)


def i64(number, value):
    """Return a field of a Thrift struct: its number in full, type 6."""
    return b"\x06" + varint(number, 1) + varint(value, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends early"),
        (b"\x16", "ends early"),
        (b"\x16\x80", "ends early"),
        (i64(5, 1) + i64(5, 2), "do not ascend"),
        (b"\x06" + varint(65536 + 5, 3) + b"\x02\x00", "do not ascend"),
        (b"\x06\x01\x02\x00", "do not ascend"),
        (b"\x15" + varint(1 << 32, 5) + b"\x00", "too large for its type"),
        (b"\x16" + b"\xff" * 10 + b"\x00", "without an end"),
        (b"\x1b\x00", "type 11"),
        (b"\x50", "type 0"),
        (b"\x18\x05abc", "ends early"),
        (b"\x19\xf7" + varint(1 << 40, 7), "type 7|ends early"),
        (b"\x19\xfc" + varint(1 << 40, 7), "ends early"),
        (b"\x1c" * 100, "too deep"),
        (b"\x19" * 100, "type 9"),
    ],
)
def test_thrift_that_parsers_read_differently_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        parquet_limits._struct(data, 0)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_changed_byte_of_a_footer_ends_in_rows_or_in_an_error(files, step):
    from store_format.commits import Segment, parse_segment
    from store_format.rows import SAMPLE_SCHEMA

    for kind, schema in (("samples", SAMPLE_SCHEMA), ("texts", TEXT_SCHEMA)):
        [path] = files.named(f".{kind}.parquet")
        data = files.files[path]
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        rows = pq.read_metadata(io.BytesIO(data)).num_rows
        for position in range(footer, len(data), step):
            changed = bytearray(data)
            changed[position] ^= [0x01, 0x10, 0x80, 0xFF][position // step % 4]
            sha256 = hashlib.sha256(changed).hexdigest()
            segment = Segment(path="index/x", rows=rows, bytes=len(data), sha256=sha256)
            with contextlib.suppress(DamagedStoreError):
                table = parse_segment(bytes(changed), segment, schema, "index/x")
                assert table.schema.equals(schema)
                assert len(table) == rows


def test_a_footer_that_lies_about_its_pages_is_refused():
    """430 bytes whose footer states 1 value, and whose page holds 16 million."""
    num = (1 << 24) + 12345
    table = pa.table({"x": pa.array([np.zeros(num, np.int64)]), "row": [1]})
    data = parquet(table, write_statistics=False, store_schema=False, data_page_size=1 << 30)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    length = 4
    assert data[footer:].count(varint(num, length))
    lie = data[:footer] + data[footer:].replace(varint(num, length), varint(1, length))
    file = pq.ParquetFile(pa.BufferReader(lie))
    assert file.metadata.row_group(0).column(0).num_values == 1
    with pytest.raises(ValueError, match=f"has {num} values, not 1"):
        check_expansion(lie, ["x"])


def test_real_segments_unfold_to_less_than_a_tenth_of_the_limit():
    ids = np.random.default_rng(0).bytes(16 * 20_000)
    table = pa.table(
        {
            "id": pa.array([ids[i : i + 16] for i in range(0, len(ids), 16)], pa.binary(16)),
            "captions": [[f"a cat, number {i}, " + "and so on " * 20] * 2 for i in range(20_000)],
            "source": ["pictures"] * 20_000,
        }
    )
    data = parquet(table)
    parts = {"MIN_LIMIT_BYTES": 0, "MAX_EXPANSION": parquet_limits.MAX_EXPANSION // 10}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in parts.items():
            patch.setattr(parquet_limits, name, value)
        check_expansion(data, table.column_names)


def test_a_negative_checksum_or_offset_is_refused(files):
    for name, values in (("crc32c", -1), ("offsets", -1), ("offsets", 2**63 - 1)):
        table = segment_table(files)
        position = table.schema.get_field_index(name)
        lists = [[values] * len(row) for row in table[name].to_pylist()]
        column = pa.array(lists, pa.list_(pa.int64()))
        changed = table.set_column(position, name, column)
        found = refusal(files, with_segment(files, "samples", parquet(changed)), seal=False)
        assert "is damaged" in found or "outside of this file" in found


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "samples", "samples/a\nb", ""])
def test_the_shard_of_a_row_is_one_that_commits_list(files, name):
    table = segment_table(files)
    position = table.schema.get_field_index("shard")
    changed = table.set_column(position, "shard", pa.array([name] * len(table)))
    found = refusal(files, with_segment(files, "samples", parquet(changed)), seal=False)
    assert "which no commit lists among the samples" in found


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("variant", -1, "a variant is negative"),
        ("weight", float("nan"), "a weight is no number"),
        ("weight", 1e300, "a weight is no number"),
        ("text_weights", [float("inf")], "a weight is no number"),
        ("tags", [("k", None)], "tags of a live row is null"),
    ],
)
def test_a_row_that_cannot_be_is_refused(files, column, value, message):
    table = segment_table(files)
    values = table[column].to_pylist()
    values[0] = value * len(values[0]) if column == "text_weights" else value
    position = table.schema.get_field_index(column)
    changed = table.set_column(position, column, pa.array(values, table.schema.field(column).type))
    with files.changed(with_segment(files, "samples", parquet(changed)), seal=False):
        [finding] = verify_store(files.root, full=True)
    assert message in finding.what


def test_samples_that_have_changed_names_are_found(files):
    """The id of a sample follows from its source and path; nothing else ties them together."""
    table = segment_table(files)
    position = table.schema.get_field_index("path")
    changed = table.set_column(position, "path", pa.array(table["path"].to_pylist()[::-1]))
    with files.changed(with_segment(files, "samples", parquet(changed)), seal=False):
        findings = verify_store(files.root, full=True)
    assert sum("is not that of 'a.png' of source 'pictures'" in f.what for f in findings) == 1


def test_captions_that_are_not_those_of_their_states_are_found(files):
    table = segment_table(files)
    position = table.schema.get_field_index("captions")
    captions = [["z"] * len(row) for row in table["captions"].to_pylist()]
    changed = table.set_column(position, "captions", pa.array(captions))
    with files.changed(with_segment(files, "samples", parquet(changed)), seal=False):
        findings = verify_store(files.root, full=True)
    assert all(
        "is not that of its text key" in f.what or "does not say what the index says" in f.what
        for f in findings
    )
    assert findings


def test_a_store_that_has_lost_its_empty_prompt_is_found(files):
    """No sample need name it, but training does."""
    table = segment_table(files, "texts")
    kept = table.filter(pa.array([caption != "" for caption in table["caption"].to_pylist()]))
    changes = with_segment(files, "texts", parquet(kept), len(kept))
    with files.changed(changes, seal=False):
        for full in (False, True):
            findings = verify_store(files.root, full=full)
            assert "of the empty prompt, is lost" in findings[0].what
            assert findings[0].where == str(files.root / "index")


# Files that are none


@pytest.mark.parametrize("what", ["pipe", "device", "loop", "folder", "huge"])
@pytest.mark.parametrize("kind", ["manifest", "commit", "segment", "shard"])
def test_what_is_no_file_is_refused_and_never_waited_for(files, what, kind):
    paths = {
        "manifest": MANIFEST,
        "commit": files.commits[0],
        "segment": files.named(".samples.parquet")[0],
        "shard": next(p for p in files.files if p.endswith((".tar", "latents/c/0/0/0/0"))),
    }
    path = files.root / paths[kind]
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    if kind == "manifest":
        with pytest.raises(NotAStoreError, match=r"cannot be read \("):
            open_store(files.root)
    else:
        for full in (False, True):
            assert verify_store(files.root, full=full)
        with pytest.raises(DamagedStoreError):
            store_hash(open_store(files.root))
    path.rmdir() if what == "folder" else path.unlink()


def test_a_file_that_is_read_whole_has_a_limit(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_READ_BYTES + 1)
    tracemalloc.start()
    with pytest.raises(OSError, match="File too large"):
        LocalFolder(tmp_path).read("huge")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# Links


@pytest.fixture(params=LAYOUTS)
def linked(request, tmp_path):
    """A store whose `samples` folder is a link to that of another store."""
    other, mine = tmp_path / "other", tmp_path / "mine"
    build_store(other, request.param, [Sample("o.png", bucket_px=(16, 24))])
    build_store(mine, request.param, SAMPLES)
    shutil.copytree(mine / "samples", other / "samples", dirs_exist_ok=True)
    shutil.rmtree(mine / "samples")
    (mine / "samples").symlink_to(other / "samples")
    return mine, other


def test_links_are_followed_in_reading(linked):
    """Where the parts of a local store lie is the business of whoever put the links there."""
    mine, _ = linked
    assert verify_store(mine, full=True) == []
    assert len(open_store(mine)) == 2


def test_what_lies_behind_a_link_is_never_removed(linked):
    mine, other = linked
    before = sorted(other.rglob("*"))
    assert not find_garbage(mine).stray
    bring_to(mine, read_manifest(mine), SAMPLES[:1])
    collect_garbage(mine)
    assert [path for path in before if not path.exists()] == []
    assert verify_store(other, full=True) == []


@pytest.mark.parametrize("where", ["staging", "staging/0000000c"])
def test_a_writer_removes_nothing_that_lies_behind_a_link_to_other_work(files, tmp_path, where):
    """It removes what dead writers left in `staging/`. A store with this link is a trap."""
    precious = tmp_path / "precious"
    (precious / "folder").mkdir(parents=True)
    for path in (precious / "file", precious / "folder/file"):
        path.write_text("mine")
    link = files.root / where
    shutil.rmtree(files.root / "staging", ignore_errors=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious)
    bring_to(files.root, read_manifest(files.root), SAMPLES[:1])
    collect_garbage(files.root)
    assert (precious / "file").read_text() == (precious / "folder/file").read_text() == "mine"


def test_the_whole_of_a_hostile_store_is_read_in_little_memory(tmp_path):
    """Rows that a commit states but no file has: the views are compared by size first."""
    build_store(tmp_path / "s", "zarr", SAMPLES)
    files = StoreFiles(tmp_path / "s")
    [commit] = files.commits

    def change(body):
        for number in range(20):
            shard = {"name": f"samples/16x24/x{number}", "kind": "samples", "rows": 1 << 24}
            path = f"{shard['name']}/zarr.json"
            body["shards"].append(
                shard | {"files": [{"path": path, "bytes": 2, "sha256": "0" * 64}]}
            )

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    there = {f"samples/16x24/x{number}/zarr.json": b"{}" for number in range(20)}
    changes = {commit: changed_commit(files, commit, change), **there}
    with files.changed(changes, seal=False):
        findings = verify_store(files.root, full=True)
    assert len(findings) == 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
