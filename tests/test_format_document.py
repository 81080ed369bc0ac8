"""FORMAT.md is true: a reader written only from it reads the golden stores.

Nothing of `store_format` is imported above the last section. Section numbers are FORMAT.md's.
"""

import hashlib
import io
import json
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

DOCUMENT = (Path(__file__).parent.parent / "store_format/FORMAT.md").read_text()
GOLDEN = Path(__file__).parent / "golden"
STORES = sorted(path.name for path in GOLDEN.iterdir() if (path / "prebake.json").exists())
DTYPES = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2", "uint8": "u1"}

# The reader


def canonical_json(value):  # 1
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def hash16(value):  # 1
    return hashlib.sha256(canonical_json(value)).digest()[:16]


def crc32c(data):  # RFC 3720 B.4: polynomial 0x1EDC6F41, reflected
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def read_commits(root):  # 6
    commits = []
    for path in sorted((root / "index").glob("*.json")):
        commit = json.loads(path.read_bytes())
        stated = commit.pop("sha256")
        assert hashlib.sha256(canonical_json(commit)).hexdigest() == stated
        assert (commit["format"], commit["version"]) == ("prebake-commit", 1)
        assert path.stem == f"{commit['sequence']:08d}-{commit['writer']}"
        commits.append(commit)
    replaced = {name for commit in commits for name in commit["replaces"]}
    names = {f"{c['sequence']:08d}-{c['writer']}" for c in commits} | replaced
    assert all(parent in names for commit in commits for parent in commit["parents"])
    return [c for c in commits if f"{c['sequence']:08d}-{c['writer']}" not in replaced]


def read_rows(root, commits):  # 5 and 6
    samples, texts = {}, {}
    for commit in commits:
        of_commit = {}
        for kind in ("samples", "texts"):
            segment = commit["segments"][kind]
            if segment is None:
                continue
            data = (root / segment["path"]).read_bytes()
            assert len(data) == segment["bytes"]
            assert hashlib.sha256(data).hexdigest() == segment["sha256"]
            rows = pq.read_table(root / segment["path"]).to_pylist()
            assert len(rows) == segment["rows"]
            for row in rows:
                if kind == "texts":
                    texts[row["text_key"]] = row
                else:
                    of_commit.setdefault(row["sample_id"], []).append(row)
        samples.update(of_commit)
    live = [r for rows in samples.values() if not any(r["dropped"] for r in rows) for r in rows]
    return sorted(live, key=lambda r: (r["sample_id"], r["variant"])), texts


class DocumentReader:
    def __init__(self, root):
        self.root = root
        self.manifest = json.loads((root / "prebake.json").read_bytes())
        assert (self.manifest["format"], self.manifest["version"]) == ("prebake-store", 1)
        self.layout = self.manifest["layout"]
        self.variant_specs = [t for t in self.manifest["tensors"] if t["kind"] == "variant"]
        self.text_specs = [t for t in self.manifest["tensors"] if t["kind"] == "text"]
        self.commits = read_commits(root)
        self.rows, self.texts = read_rows(root, self.commits)

    def row_shape(self, spec, row):  # 2
        size = {}
        if "bucket_width_px" in row:
            size = {
                "w": row["bucket_width_px"] // self.manifest["downscale"],
                "h": row["bucket_height_px"] // self.manifest["downscale"],
            }
        return [size.get(n, n) for n in spec["shape"]]

    def file_of(self, row, spec):  # 5.3
        if self.layout == "webdataset":
            return self.root / f"{row['shard']}.tar"
        zeros = "/".join("0" for _ in range(len(spec["shape"]) + 1))
        return self.root / row["shard"] / spec["name"] / "c" / zeros

    def tensor(self, row, spec, i):  # 5.3
        shape = self.row_shape(spec, row)
        dtype = np.dtype(DTYPES[spec["dtype"]])
        offset = row["offsets"][i]
        data = self.file_of(row, spec).read_bytes()[offset:][: int(np.prod(shape)) * dtype.itemsize]
        assert crc32c(data) == row["crc32c"][i]
        return np.frombuffer(data, dtype).reshape(shape)

    def variant(self, row):
        return [self.tensor(row, spec, i) for i, spec in enumerate(self.variant_specs)]

    def text(self, row, t):
        if self.layout == "zarr":
            text = self.texts[row["text_keys"][t]]
            return [self.tensor(text, spec, i) for i, spec in enumerate(self.text_specs)]
        first = len(self.variant_specs) + t * len(self.text_specs)
        return [self.tensor(row, spec, first + i) for i, spec in enumerate(self.text_specs)]

    def empty_text(self):
        text = self.texts[bytes.fromhex(self.manifest["empty_text_key"])]
        return [self.tensor(text, spec, i) for i, spec in enumerate(self.text_specs)]

    def store_hash(self):  # 9
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(row["sample_id"] + struct.pack("<H", row["variant"]))
            for array in self.variant(row):
                digest.update(array.tobytes())
            for t, weight in enumerate(row["text_weights"]):
                digest.update(struct.pack("<f", weight))
                for array in self.text(row, t):
                    digest.update(array.tobytes())
        for array in self.empty_text():
            digest.update(array.tobytes())
        return digest.hexdigest()


@pytest.fixture(params=STORES)
def reader(request):
    return DocumentReader(GOLDEN / request.param)


# What the golden stores hold, from the formula of `store_builders.numbers`, written out again


def expected_tensor(key, spec, shape):
    length = int(np.prod(shape))
    raw = hashlib.shake_128(f"{key}/{spec['name']}".encode()).digest(length)
    values = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 256
    if spec["dtype"] == "uint8":
        values = np.frombuffer(raw, np.uint8)
    elif spec["dtype"] == "bfloat16":
        values = (values.view("<u4") >> 16).astype("<u2")
    return values.astype(DTYPES[spec["dtype"]]).reshape(shape)


def expected_samples(name):
    """Return {(source, path): (bucket, image number, captions, weights, variants, weight)}."""
    if name.endswith("-sdxl"):
        return {
            ("pictures", f"{animal}.png"): (
                bucket,
                0,
                [f"{animal} at night", "night"],
                [0.75, 0.25],
                2,
                weight,
            )
            for animal, bucket, weight in [
                ("owl", (64, 64), 1.0),
                ("bat", (96, 64), 2.5),
                ("fox", (96, 64), 0.1),
            ]
        }
    return {
        ("pictures", "cats/a.png"): ((64, 64), 0, ["a black cat"], [1.0], 1, 1.0),
        ("pictures", "cats/a.jpg"): ((96, 64), 1, ["a cat"], [1.0], 1, 1.0),
        ("pictures", "ünïcode.webp"): ((96, 64), 0, ["„ein“ Kätzchen 🐈"], [1.0], 1, 1.0),
        ("others", "cats/a.png"): ((64, 64), 0, ["a cat"], [1.0], 1, 0.5),
    }


def test_the_four_golden_stores_are_there():
    assert STORES == ["v1-webdataset", "v1-webdataset-sdxl", "v1-zarr", "v1-zarr-sdxl"]
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000


def test_a_reader_made_from_the_document_finds_every_sample(reader):
    expected = expected_samples(reader.root.name)
    found = {}
    for row in reader.rows:
        found.setdefault((row["source"], row["path"]), []).append(row)
    assert found.keys() == expected.keys()
    for (source, path), (
        bucket,
        image,
        captions,
        weights,
        num_variants,
        weight,
    ) in expected.items():
        assert [row["variant"] for row in found[source, path]] == list(range(num_variants))
        for row in found[source, path]:
            assert row["sample_id"] == hash16(["prebake.sample", 1, source, path])
            assert (row["bucket_width_px"], row["bucket_height_px"]) == bucket
            assert (row["captions"], row["text_weights"]) == (captions, weights)
            assert row["weight"] == weight
            content = f"{source}/{path}/{image}"
            assert row["image_sha256"] == hashlib.sha256(content.encode()).digest()
            latent_key = hash16(["latent", content, list(bucket), row["variant"]])
            assert row["latent_key"] == latent_key
            for spec, array in zip(reader.variant_specs, reader.variant(row), strict=True):
                shape = reader.row_shape(spec, row)
                expected_array = expected_tensor(latent_key.hex(), spec, shape)
                np.testing.assert_array_equal(array, expected_array, strict=True)
            for t, caption in enumerate(captions):
                key = hash16(["text", caption])
                assert row["text_keys"][t] == key
                for spec, array in zip(reader.text_specs, reader.text(row, t), strict=True):
                    expected_array = expected_tensor(key.hex(), spec, spec["shape"])
                    np.testing.assert_array_equal(array, expected_array, strict=True)
    for spec, array in zip(reader.text_specs, reader.empty_text(), strict=True):
        expected_array = expected_tensor(hash16(["text", ""]).hex(), spec, spec["shape"])
        np.testing.assert_array_equal(array, expected_array, strict=True)


def test_the_sdxl_store_has_tags_and_the_declared_tensors():
    reader = DocumentReader(GOLDEN / "v1-zarr-sdxl")
    assert [spec["name"] for spec in reader.manifest["tensors"]] == [
        "latents",
        "mask",
        "encoder_hidden_states",
        "encoder_hidden_states_2",
        "pooled_prompt_embeds",
    ]
    [bat, _] = [row for row in reader.rows if row["path"] == "bat.png"]
    assert dict(bat["tags"]) == {"artist": "bat", "licence": "CC0"}


def test_both_layouts_of_a_golden_store_have_one_hash():
    for suffix in ("", "-sdxl"):
        hashes = {DocumentReader(GOLDEN / f"v1-{x}{suffix}").store_hash() for x in LAYOUTS}
        assert len(hashes) == 1


LAYOUTS = ("zarr", "webdataset")


def test_every_listed_file_has_its_stated_size_and_hash(reader):  # 6
    listed = set()
    for commit in reader.commits:
        for shard in commit["shards"]:
            for file in shard["files"]:
                data = (reader.root / file["path"]).read_bytes()
                assert len(data) == file["bytes"]
                assert hashlib.sha256(data).hexdigest() == file["sha256"]
                listed.add(file["path"])
    everything = {
        path.relative_to(reader.root).as_posix()
        for folder in ("samples", "texts")
        for path in (reader.root / folder).rglob("*")
        if path.is_file()
    }
    for path in everything - listed:  # groups and views only
        assert re.fullmatch(
            r"(samples|texts)/zarr.json|samples/\d+x\d+/zarr.json"
            r"|samples/\d+x\d+/[^/]+/(live|text_key)/.*",
            path,
        )


def test_zarr_chunks_lie_where_the_document_says():  # 7.1
    for name in ("v1-zarr", "v1-zarr-sdxl"):
        reader = DocumentReader(GOLDEN / name)
        for row in [*reader.rows, *reader.texts.values()]:
            specs = reader.text_specs if "text_key" in row else reader.variant_specs
            for i, spec in enumerate(specs):
                itemsize = np.dtype(DTYPES[spec["dtype"]]).itemsize
                row_bytes = int(np.prod(reader.row_shape(spec, row))) * itemsize
                assert row["offsets"][i] == row["row"] * (row_bytes + 4)
                array = zarr.open_array(reader.root / row["shard"] / spec["name"], mode="r")
                rows = array.shape[0]
                size = reader.file_of(row, spec).stat().st_size
                assert size == rows * (row_bytes + 4) + rows * 16 + 4
                expected = reader.tensor(row, spec, i)
                np.testing.assert_array_equal(array[row["row"]], expected, strict=True)


def test_zarr_views_are_as_the_document_says():  # 7.1
    for name in ("v1-zarr", "v1-zarr-sdxl"):
        reader = DocumentReader(GOLDEN / name)
        for shard in (s for c in reader.commits for s in c["shards"] if s["kind"] == "samples"):
            group = zarr.open_group(reader.root / shard["name"], mode="r")
            rows = [row for row in reader.rows if row["shard"] == shard["name"]]
            expected = np.zeros(shard["rows"], bool)
            expected[[row["row"] for row in rows]] = True
            np.testing.assert_array_equal(group["live"][:], expected, strict=True)
            widest = max([1, *(len(row["text_keys"]) for row in rows)])
            keys = np.zeros((shard["rows"], widest, 16), np.uint8)
            for row in rows:
                for t, key in enumerate(row["text_keys"]):
                    keys[row["row"], t] = np.frombuffer(key, np.uint8)
                assert group["sample_id"][row["row"]].tobytes() == row["sample_id"]
                assert group["variant"][row["row"]] == row["variant"]
            np.testing.assert_array_equal(group["text_key"][:], keys, strict=True)


def test_tar_members_are_as_the_document_says():  # 7.2
    for name in ("v1-webdataset", "v1-webdataset-sdxl"):
        reader = DocumentReader(GOLDEN / name)
        live = {row["shard"] for row in reader.rows}
        listed = (reader.root / "shards.txt").read_text().splitlines()
        assert listed == sorted(f"{shard}.tar" for shard in live)
        for shard in live:
            path = reader.root / f"{shard}.tar"
            wanted = []
            with tarfile.open(path) as tar:
                for row in sorted(reader.rows, key=lambda row: row["row"]):
                    if row["shard"] != shard:
                        continue
                    key = row["sample_id"].hex() + (f"-{row['variant']}" if row["variant"] else "")
                    names = [f"{key}.{spec['name']}.npy" for spec in reader.variant_specs]
                    arrays = reader.variant(row)
                    for t in range(len(row["captions"])):
                        suffix = f".{t}" if t else ""
                        names += [f"{key}.{s['name']}{suffix}.npy" for s in reader.text_specs]
                        arrays += reader.text(row, t)
                    for member, array in zip(names, arrays, strict=True):
                        loaded = np.load(io.BytesIO(tar.extractfile(member).read()))
                        np.testing.assert_array_equal(loaded, array, strict=True)
                    about = json.loads(tar.extractfile(f"{key}.json").read())
                    for column, value in about.items():
                        found = row[column]
                        found = found.hex() if isinstance(found, bytes) else found
                        assert (dict(found) if column == "tags" else found) == value
                    wanted += [*names, f"{key}.json"]
                assert tar.getnames() == wanted  # in order, and tars with dead rows are not listed
            assert path.read_bytes()[-1024:] == bytes(1024)


# The numbers of the document against what the code writes


def documented(pattern):
    [found] = re.findall(pattern, DOCUMENT)
    return [int(number.replace(",", "")) for number in found]


def row_of_512(writer, num_rows, inline):
    from store_builders import Sample

    latents = np.zeros((4, 64, 64), np.float16)
    states = np.zeros((77, 768), np.float16)
    shard, texts = writer.new_sample_shard((512, 512)), writer.new_text_shard()
    for number in range(num_rows):
        row = Sample(f"{number}.png", ["a caption " * 30], (512, 512)).row()
        shard.append(row, [latents, states] if inline else [latents])
        from store_format.rows import TextRow

        texts.append(TextRow(row.texts[0].text_key, "a caption", 4), [states])
    return shard.finish(), texts.finish()


@pytest.fixture
def writer_of(tmp_path):
    from store_builders import make_manifest

    from store_format.writer import StoreWriter

    tensors = (
        ("latents", "variant", (4, "h", "w")),
        ("encoder_hidden_states", "text", (77, 768)),
    )
    return lambda layout: StoreWriter(tmp_path / layout, make_manifest(layout, tensors))


def test_the_worked_byte_count_of_zarr_is_that_of_real_files(writer_of):
    latent_bytes, latent_file = documented(
        r"row_bytes = 4 x 64 x 64 x 2 =\s+([\d,]+); file = [^=]* = ([\d,]+) B"
    )
    text_bytes, text_file = documented(r"77 x 768 x 2 = ([\d,]+); file = [^=]* = ([\d,]+) B")
    assert (latent_bytes, text_bytes) == (4 * 64 * 64 * 2, 77 * 768 * 2)
    with writer_of("zarr") as writer:
        samples, texts = row_of_512(writer, 100, inline=False)
    sizes = {file.path.split("/", 3)[-1]: file.bytes for file in samples.files}
    assert sizes["latents/c/0/0/0/0"] == latent_file
    assert [f.bytes for f in texts.files if "states/c" in f.path] == [text_file]
    beside = sum(file.bytes for file in samples.files) - latent_file
    assert beside < 9_000


def test_the_worked_byte_count_of_webdataset_is_that_of_real_files(writer_of):
    [per_row] = [
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) B a row for", DOCUMENT)
    ]
    [end] = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) B end a file", DOCUMENT)]
    table = re.findall(r"^\| `KEY\.[^|]*\|(.*)\|$", DOCUMENT, re.MULTILINE)
    sums = [int(line.split("|")[-1].replace(",", "")) for line in table]
    assert sum(sums) == per_row
    with writer_of("webdataset") as writer:
        samples, _ = row_of_512(writer, 3, inline=True)
    assert samples.files[0].bytes == 3 * per_row + end


ARROW_NAMES = {"fixed_size_binary[16]": "fixed_size_binary(16)", "bool": "bool"}


def documented_columns(section):
    """Return {column: type} of the table of a section."""
    text = DOCUMENT.split(f"### {section} ")[1].split("###")[0]
    columns = {}
    for line in re.findall(r"^\| (`.*)\|$", text, re.MULTILINE):
        names, types, *_ = [cell.strip() for cell in line.split("|")]
        names = re.findall(r"`(\w+)`", names)
        types = re.findall(r"(?:list<|map<)?[\w()]+(?:, string)?(?:\(\d+\))?>*", types)
        types = types * len(names) if len(types) == 1 else types
        columns.update(zip(names, types, strict=True))
    return columns


def arrow_type(field):
    """Return an Arrow type in the document's spelling."""
    name = str(field.type).replace("double", "float64").replace("float", "float")
    name = re.sub(r"fixed_size_binary\[(\d+)\]", r"fixed_size_binary(\1)", name)
    name = re.sub(r"list<\w+: ([^>]*)>", r"list<\1>", name)
    return re.sub(r"^map<string, string.*>$", "map<string, string>", name)


def test_the_column_tables_are_the_schemas():
    from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA

    documented_types = documented_columns("5.1")
    assert documented_types == {field.name: arrow_type(field) for field in SAMPLE_SCHEMA}
    text = DOCUMENT.split("### 5.2 ")[1].split("###")[0]
    named = re.findall(r"`(\w+)`", text.split("\n", 1)[1])
    assert named == TEXT_SCHEMA.names
    known = {**documented_types, "text_key": "fixed_size_binary(16)"}
    known |= {"caption": "string", "num_tokens": "int32"}
    assert {f.name: arrow_type(f) for f in TEXT_SCHEMA} == {name: known[name] for name in named}


def test_the_manifest_and_commit_tables_name_every_key():
    from store_format.commits import Commit
    from store_format.manifest import Manifest

    manifest = DOCUMENT.split("## 4. ")[1].split("## 5. ")[0]
    commit = DOCUMENT.split("## 6. ")[1].split("## 7. ")[0]
    for text, model, more in ((manifest, Manifest, set()), (commit, Commit, {"sha256"})):
        rows = re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert named - more - {"format", "version"} == model.model_fields.keys() - {
            "format",
            "version",
        }


def test_the_code_gives_the_hash_that_the_document_defines(reader):
    from store_format import open_store
    from store_format.verify import store_hash

    assert store_hash(open_store(reader.root)) == reader.store_hash()


def test_the_documents_crc_is_that_of_rfc_3720():
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4: 32 bytes of zeros
    assert crc32c(bytes(range(32))) == 0x46DD794E
