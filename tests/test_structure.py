"""What plain readers would meet is checked by `verify --full`, whatever the hashes say.

Each test changes a shard as a hostile or a broken writer would: size and sha256 are stated right.
"""

import hashlib
import io
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hostile_stores import StoreFiles, Truth, sealed, use
from store_builders import (
    LAYOUTS,
    Sample,
    bring_to,
    build_store,
    make_manifest,
    write_samples,
)

from store_format import open_store
from store_format.structure import WrongStructureError, check_metadata
from store_format.verify import find_damage, verify_store
from store_format.writer import StoreWriter

SAMPLES = [Sample("a.png", ["x", "y"], (16, 24)), Sample("b.png", ["x"], (16, 24), num_variants=2)]
GOLDEN = Path(__file__).parent / "golden"


def files_of(tmp_path, layout):
    build_store(tmp_path / "s", layout, SAMPLES)
    return StoreFiles(tmp_path / "s")


@pytest.fixture
def tars(tmp_path):
    return files_of(tmp_path, "webdataset")


@pytest.fixture
def arrays(tmp_path):
    return files_of(tmp_path, "zarr")


def only_finding(files, changes):
    """Return what `verify --full` says of changed shards; quick sees nothing, reads are true."""
    truth = Truth(files.root, SAMPLES)
    with files.changed(changes):
        assert verify_store(files.root, full=False) == []
        error, [finding] = use(files.root, truth, always_true=True)
        assert error is None
        damage = find_damage(open_store(files.root))
        assert (damage.findings, damage.shards) == ([finding], {finding.where})
        assert (len(damage.sample_rows), len(damage.text_rows)) == (0, 0)  # all can be copied
        assert finding.num_samples == (2 if finding.where.startswith("samples") else 0)
    return finding.what


# Tars


def sample_tar(files):
    [path] = [path for path in files.named(".tar") if path.startswith("samples/")]
    return path


def members_of(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar]


def with_header(data, member, **changes):
    """Return a tar in which one header is another one of equal length."""
    info = tarfile.TarInfo(member.name)
    info.size = member.size
    for name, value in changes.items():
        setattr(info, name, value)
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return data[: member.offset] + header + data[member.offset + 512 :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is a symbolic link, no regular"),
        ({"type": tarfile.LNKTYPE, "linkname": "x"}, "is a hard link, no regular file"),
        ({"type": tarfile.CHRTYPE}, "is a device, no regular file"),
        ({"type": tarfile.BLKTYPE}, "is a device, no regular file"),
        ({"type": tarfile.FIFOTYPE}, "is a named pipe, no regular file"),
        ({"type": tarfile.DIRTYPE}, "is a folder, no regular file"),
        ({"type": tarfile.XHDTYPE}, "is a pax extension, no regular file"),
        ({"type": tarfile.XGLTYPE}, "is a pax extension, no regular file"),
        ({"type": tarfile.GNUTYPE_LONGNAME}, "is a GNU extension, no regular file"),
        ({"type": tarfile.GNUTYPE_SPARSE}, "is a GNU extension, no regular file"),
        ({"type": b"7"}, "is of type b'7', no regular file"),
        ({"name": "/etc/passwd"}, r"member '/etc/passwd' at byte 0, expected '[0-9a-f]{32}\.lat"),
        ({"name": "../../x"}, r"member '../../x' at byte 0, expected"),
        ({"name": "a/../x"}, r"member 'a/../x' at byte 0, expected"),
        ({"mode": 0o4755}, "has mode, time, owner"),
        ({"mtime": 1}, "has mode, time, owner"),
        ({"uid": 1000}, "has mode, time, owner"),
        ({"uname": "somebody"}, "has mode, time, owner"),
        ({"linkname": "x"}, "has mode, time, owner"),
        ({"size": 0}, "is no npy file|is cut short"),
        ({"size": 8**10}, "ends outside of the tar"),
    ],
)
def test_a_member_that_is_no_plain_file_of_its_row_is_named(tars, changes, message):
    path = sample_tar(tars)
    data = tars.files[path]
    member = members_of(data)[0][0]
    found = only_finding(tars, {path: with_header(data, member, **changes)})
    assert found.startswith(f"{path}: ")
    assert re.search(message, found), found


def test_a_header_without_a_checksum_is_named(tars):
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    data[148] ^= 1
    assert "at byte 0 is no tar header (bad checksum)" in only_finding(tars, {path: bytes(data)})


def test_a_member_in_gnu_format_is_named(tars):
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    data[257:265] = b"ustar  \0"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert "is not in ustar format" in only_finding(tars, {path: bytes(data)})


def test_a_header_that_another_tar_program_writes_passes(tars):
    """Equal in meaning: numbers ended by a space, as some do."""
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    data[100:124] = b"000644 \0" + b"000000 \0" * 2
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    with tars.changed({path: bytes(data)}):
        assert verify_store(tars.root, full=True) == []


NPY = {
    "object": (
        "{'descr': '|O', 'fortran_order': False, 'shape': (4, 3, 2), }",
        "expected dtype <f2",
    ),
    "F order": ("{'descr': '<f2', 'fortran_order': True, 'shape': (4, 3, 2), }", "C order"),
    "shape": ("{'descr': '<f2', 'fortran_order': False, 'shape': (4, 2, 3), }", r"shape \(4, 3, 2"),
    "size": ("{'descr': '<f2', 'fortran_order': False, 'shape': (9999999999,), }", r"shape \(4, 3"),
    "dtype": ("{'descr': '>f2', 'fortran_order': False, 'shape': (4, 3, 2), }", "dtype <f2"),
    "code": ("__import__('os').abort()", "is an npy of b"),
    "deep": ("(" * 100, "is an npy of b"),
}


@pytest.mark.parametrize("name", NPY)
def test_an_npy_header_that_declares_something_else_is_named_and_never_evaluated(tars, name):
    text, message = NPY[name]
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    data[522:640] = text.encode().ljust(117) + b"\n"
    assert re.search(message, only_finding(tars, {path: bytes(data)}))


@pytest.mark.parametrize("version", [b"\x02\x00", b"\x03\x00", b"\x01\x01"])
def test_an_npy_of_another_version_is_named(tars, version):
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    data[518:520] = version
    assert "is no npy file of version 1.0" in only_finding(tars, {path: bytes(data)})


def test_an_npy_header_of_another_spacing_passes(tars):
    path = sample_tar(tars)
    data = bytearray(tars.files[path])
    text = "{'descr': '<f2', 'fortran_order': False, 'shape': (4,3, 2), }"
    data[522:640] = text.encode().ljust(117) + b"\n"
    with tars.changed({path: bytes(data)}):
        assert verify_store(tars.root, full=True) == []


def test_a_pickled_array_is_refused_by_name_and_nothing_is_executed(tars, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    path = sample_tar(tars)
    data = tars.files[path]
    sink = io.BytesIO()
    np.save(sink, np.array([Evil()], object), allow_pickle=True)
    member = members_of(data)[0][0]
    content = sink.getvalue()[: member.size].ljust(member.size, b"\0")
    changed = data[: member.offset_data] + content + data[member.offset_data + member.size :]
    with tars.changed({path: changed}):
        [finding] = verify_store(tars.root, full=True)
        assert finding.what.startswith(f"{tars.root / path}: crc32c of the latents")
    # with numbers where the index says that they are, only the header is a pickle's
    changed = data[: member.offset_data] + content[:128] + data[member.offset_data + 128 :]
    found = only_finding(tars, {path: changed})
    assert "is an npy of b\"{'descr': '|O'" in found
    assert not (tmp_path / "executed").exists()


def rebuilt(members):
    """Return a tar of (TarInfo, content)."""
    sink = io.BytesIO()
    for info, content in members:
        sink.write(info.tobuf(tarfile.USTAR_FORMAT))
        sink.write(content + bytes(-len(content) % 512))
    return sink.getvalue() + bytes(1024)


def plain(name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def test_a_member_too_many_too_few_or_in_another_order_is_named(tars):
    path = sample_tar(tars)
    members = [plain(m.name, content) for m, content in members_of(tars.files[path])]
    size = len(tars.files[path])

    def verify(changed):
        data = rebuilt(changed)
        with tars.changed({path: data.ljust(size, b"\0")}):
            return verify_store(tars.root, full=True)[0].what

    extra = plain("evil.sh", b"#!/bin/sh")
    assert "at byte" in verify([*members, extra])
    assert re.search("crc32c|ends before", verify([extra, *members]))
    assert "crc32c" in verify(members[1:])
    # only the json may move without that the tensors do
    [first] = [i for i, (info, _) in enumerate(members) if info.name.endswith(".json")][:1]
    found = verify([*members[:first], *members[first + 1 :], members[first]])
    assert "crc32c" in found or "expected" in found


def test_a_member_behind_the_last_row_is_named(tars):
    path = sample_tar(tars)
    members = [plain(m.name, content) for m, content in members_of(tars.files[path])]
    found = only_finding(tars, {path: rebuilt([*members, plain("evil.sh", b"#!/bin/sh")])})
    assert "it does not end with two blocks of zeros" in found
    found = only_finding(tars, {path: tars.files[path] + bytes(512)})
    assert "it does not end with two blocks of zeros" in found


def replace_json(tars, change):
    """Change the text of the last json, whose length nothing depends on."""
    path = sample_tar(tars)
    members = [plain(m.name, content) for m, content in members_of(tars.files[path])]
    info, content = members[-1]
    members[-1] = plain(info.name, change(content))
    return {path: rebuilt(members)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"x"', b'"z"'), "does not say what the index says"),
        (lambda text: text.replace(b'"flipped": true', b'"flipped": 1'), "does not say what the"),
        (lambda text: text.replace(b'"weight": 1.0', b'"weight": NaN'), "NaN is no number of JSON"),
        (lambda text: text[:-1] + b', "path": "other.png"}', "names the key 'path' twice"),
        (lambda text: text[:-1] + b', "later": 1}', "does not say what the index says"),
        (lambda text: b"[" * 100_000, "nests too deep"),
        (lambda text: text[:-1], "is not valid JSON"),
        (lambda text: b"\xff" + text, "is not valid JSON"),
        (lambda text: b"", "is not valid JSON"),
        (lambda text: b" " * (17 << 20), "bytes, too many for a row"),
    ],
)
def test_a_json_that_says_something_else_is_named(tars, change, message):
    found = only_finding(tars, replace_json(tars, change))
    assert re.search(message, found), found


def test_a_json_of_another_spelling_passes(tars):
    changes = replace_json(tars, lambda text: json.dumps(json.loads(text), indent=2).encode())
    with tars.changed(changes):
        assert verify_store(tars.root, full=True) == []


def test_dead_rows_of_a_tar_are_checked_too(tmp_path):
    """Between an update and its tidying a tar holds rows that the index no longer knows."""
    root = tmp_path / "s"
    build_store(root, "webdataset", SAMPLES)
    with StoreWriter(root, make_manifest("webdataset")) as writer:
        write_samples(writer, [Sample("a.png", ["new"], (16, 24))])
    files = StoreFiles(root)
    dirty = next(p for p in files.named(".tar") if b'["x", "y"]' in files.files[p])
    dead = next(
        m
        for m, text in members_of(files.files[dirty])
        if text.endswith(b"}") and b'["x", "y"]' in text
    )
    [shard_list] = verify_store(root, full=True)
    assert shard_list.where == "shards.txt"
    data = files.files[dirty]
    for changed, message in [
        (with_header(data, dead, type=tarfile.SYMTYPE, linkname="/etc"), "is a symbolic link"),
        (data.replace(b'["x", "y"]', b'["x", "y]]'), "is not valid JSON"),
        (data.replace(b'"variant": 0', b'"variant": 5', 1), "is of another row|does not say"),
    ]:
        with files.changed({dirty: changed}):
            finding, _ = verify_store(root, full=True)
            assert re.search(message, finding.what), finding.what
    bring_to(root, make_manifest("webdataset"), [Sample("a.png", ["new"], (16, 24)), SAMPLES[1]])
    assert verify_store(root, full=True) == []


# Zarr


def of_samples(files, ending):
    [path] = [p for p in files.named(ending) if p.startswith("samples/16x24/") and "/" in p[14:]]
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2**40, 4, 3, 2]}, r"shape is \[1099511627776,4,3,2\], expected \[3,4,3,2\]"),
        ({"data_type": "float32"}, 'data_type is "float32", expected "float16"'),
        ({"data_type": "bytes"}, 'data_type is "bytes"'),
        ({"fill_value": 0.0}, 'fill_value is 0.0, expected "NaN"'),
        ({"codecs": [{"name": "pickle"}]}, r'codecs is \[{"name":"pickle"}\], expected'),
        ({"codecs": [{"name": "vlen-bytes"}]}, "codecs is"),
        ({"codecs": []}, r"codecs is \[\]"),
        ({"zarr_format": 2}, "zarr_format is 2"),
        ({"node_type": "group"}, "node_type is"),
        ({"chunk_key_encoding": {"name": "v2"}}, "chunk_key_encoding is"),
        ({"storage_transformers": [{"name": "evil"}]}, "storage_transformers is"),
        ({"attributes": []}, "attributes is"),
        ({"must_understand": True}, "'must_understand' is unknown"),
    ],
)
def test_metadata_that_declares_something_else_is_named(arrays, change, message):
    path = of_samples(arrays, "latents/zarr.json")
    body = json.loads(arrays.files[path]) | change
    found = only_finding(arrays, {path: json.dumps(body).encode()})
    assert found.startswith(f"{path}: ")
    assert re.search(message, found), found


def test_metadata_is_compared_by_its_meaning():
    check_metadata(b'{"b": [1, 2], "a": "NaN"}', b'{"a":"NaN","b":[1,2]}')
    check_metadata(b'{"a": 1, "attributes": {"units": "px"}}', b'{"a":1,"attributes":{}}')
    for other in (b'{"a": true}', b'{"a": 1.0}', b'{"a": 1, "a": 1}', b"{}", b"[]", b"", b"\xff"):
        with pytest.raises(WrongStructureError):
            check_metadata(other, b'{"a": 1}')


@pytest.mark.parametrize("position", [-68, -60, -52, -20, -12, -4, -1])
def test_an_irregular_shard_index_is_named(arrays, position):
    """Where Zarr readers find rows; prebake itself does not need it."""
    path = of_samples(arrays, "latents/c/0/0/0/0")
    data = bytearray(arrays.files[path])
    data[position] ^= 0x10
    if position < -4:
        data[-4:] = google_crc32c.value(bytes(data[-52:-4])).to_bytes(4, "little")
    if position < -52:  # the crc32c that Zarr readers check behind the last row
        data = bytearray(arrays.files[path])
        data[-56] ^= 0x10
    found = only_finding(arrays, {path: bytes(data)})
    assert re.search("its shard index does not say|stored after row 2 is wrong", found), found


@pytest.mark.parametrize("name", ["sample_id", "variant"])
def test_ids_that_are_not_those_of_the_index_are_named(arrays, name):
    path = of_samples(arrays, f"{name}/c/0{'/0' if name == 'sample_id' else ''}")
    data = arrays.files[path]
    row_bytes = len(data) // 3
    found = only_finding(arrays, {path: data[row_bytes:] + data[:row_bytes]})
    assert re.search(f"row [012] is of another {name} than the index says", found), found


def test_text_keys_that_are_not_those_of_the_index_are_named(arrays):
    [path] = [p for p in arrays.named("text_key/c/0/0") if p.startswith("texts/")]
    data = arrays.files[path]
    with arrays.changed({path: data[16:] + data[:16]}):
        [finding] = verify_store(arrays.root, full=True)
    assert re.search("row 0 is of another text_key than the index says", finding.what)
    assert finding.num_samples == 2  # those that have a text there


def test_dead_rows_of_a_zarr_shard_are_checked_too(tmp_path):
    """Plain readers that take a whole shard read them as well."""
    root = tmp_path / "s"
    build_store(root, "zarr", SAMPLES)
    dead = (
        open_store(root).sample(0 if SAMPLES[0].sample_id < SAMPLES[1].sample_id else 2).place.row
    )
    bring_to(root, make_manifest("zarr"), [SAMPLES[1]])
    files = StoreFiles(root)
    [path] = files.named("latents/c/0/0/0/0")
    data = bytearray(files.files[path])
    data[dead * (4 * 3 * 2 * 2 + 4)] ^= 1
    with files.changed({path: bytes(data)}):
        [finding] = verify_store(root, full=True)
    assert f"the crc32c that is stored after row {dead} is wrong" in finding.what


def test_a_lost_or_altered_group_is_found(arrays):
    for path in ("zarr.json", "samples/zarr.json", "samples/16x24/zarr.json", "texts/zarr.json"):
        with arrays.changed({path: None}):
            [finding] = verify_store(arrays.root, full=True)
            assert finding.what == f"{path} is missing, so plain readers find no group there"
        with arrays.changed({path: b'{"zarr_format": 3, "node_type": "array"}'}):
            [finding] = verify_store(arrays.root, full=True)
            assert finding.what == f'{path}: node_type is "array", expected "group"'
            assert finding.where == path


# What the commits and the index say


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_bytes_of_another_row_are_not_the_rows_own(tmp_path, layout):
    """No read can tell, until the other row is rewritten or a plain reader looks."""
    root, manifest = tmp_path / "s", make_manifest(layout)
    rows = [Sample(f"{name}.png", ["x"], (16, 24)).row() for name in "ab"]
    latents = np.zeros((4, 3, 2), np.float16)
    with StoreWriter(root, manifest) as writer:
        write_samples(writer, [Sample("c.png", ["x"], (24, 16))])
        states = list(open_store(root).read_empty_text().values())
        draft = writer.new_sample_shard((16, 24))
        tensors = [latents, *(states if manifest.texts_inline else [])]
        places = [draft.append(row, tensors) for row in rows]
        swapped = [
            replace(place, offsets=(other.offsets[0], *place.offsets[1:]))
            for place, other in zip(places, places[::-1], strict=True)
        ]
        writer.commit([draft], [r.placed(p) for r, p in zip(rows, swapped, strict=True)])
        writer.refresh_views()
    store = open_store(root)
    assert not any(store.read_variant(store.row_of(row.sample_id))["latents"].any() for row in rows)
    [finding] = verify_store(root, full=True)
    assert re.search("begin at bytes|elsewhere than Zarr readers do", finding.what), finding.what
    assert finding.num_samples == 2


def one_row_more(shard):
    shard["rows"] += 1


def millions_of_rows(shard):
    shard["rows"] = 1 << 24


def one_file_more(shard):
    path = f"{shard['name']}/evil"
    shard["files"].append({"path": path, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [one_row_more, millions_of_rows, one_file_more])
def test_a_commit_that_states_other_rows_or_files_is_found(tmp_path, layout, change):
    files = files_of(tmp_path, layout)
    [commit] = files.commits
    body = json.loads(files.files[commit])
    for shard in body["shards"]:
        change(shard)
    names = {shard["name"] for shard in body["shards"]}
    with files.changed({commit: sealed(body), **{f"{name}/evil": b"" for name in names}}):
        found = verify_store(files.root, full=True)
        assert {finding.where for finding in found} >= names
        assert all(
            re.search(
                "stated, but|lists|ends early|no tar header|not what the index says", finding.what
            )
            for finding in found
            if finding.where in names
        )
        if layout == "zarr" or change is not one_row_more:
            assert {finding.where for finding in verify_store(files.root, full=False)} == names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_stores_are_as_the_format_says(layout):
    for root in GOLDEN.glob(f"v1-{layout}*"):
        assert verify_store(root, full=True) == []
