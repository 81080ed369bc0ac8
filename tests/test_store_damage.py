"""Damage is named, never read as data: in tensors, in the index, in the manifest."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass

import pytest
from hostile_stores import StoreFiles, Truth, use
from store_builders import (
    LAYOUTS,
    SDXL_TENSORS,
    Sample,
    bring_to,
    build_store,
    make_manifest,
    variant_tensors,
    write_samples,
)

from store_format import Store, open_store
from store_format.errors import DamagedStoreError, NotAStoreError
from store_format.index import LiveIndex
from store_format.places import file_of
from store_format.verify import (
    Finding,
    damaged_rows,
    find_damage,
    is_finite,
    name_samples,
    verify_store,
)
from store_format.writer import StoreWriter

SAMPLES = [Sample("a.png", ["x", "y"]), Sample("b.png", ["x"]), Sample("c.png", ["z"])]


@pytest.fixture(params=LAYOUTS)
def root(request, tmp_path):
    build_store(tmp_path / "s", request.param, SAMPLES)
    return tmp_path / "s"


def read_all(store):
    """Read every tensor of a store: whether it raised, and all that it gave."""
    raised, given = [], []
    for row in range(len(store)):
        for text in range(-1, store.num_texts(row)):
            try:
                given.append(
                    (row, text, {k: v.copy() for k, v in store.read([row], [text]).items()})
                )
            except DamagedStoreError as error:
                raised.append(str(error))
    return raised, given


def tensor_files(root):
    """Return the file of each tensor of each shard."""
    store = open_store(root)
    return sorted(
        {
            root / file_of(store.manifest, shard.name, spec)
            for shard in store.index.shards.values()
            for spec in store.manifest.tensors
            if (root / file_of(store.manifest, shard.name, spec)).exists()
        }
    )


def same(given, expected):
    return all(
        (given[name] == expected[name]).all() and given[name].dtype == expected[name].dtype
        for name in expected
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_flipped_byte_of_a_tensor_raises_and_is_never_read(tmp_path, layout):
    tensors = (("latents", "variant", (1, "h", "w")), ("encoder_hidden_states", "text", (2, 3)))
    store = build_store(tmp_path / "s", layout, [Sample("a.png", bucket_px=(24, 16))], tensors)
    truth = store.read([0]), store.read_empty_text()
    raised = []
    num_flipped = 0
    for path in tensor_files(tmp_path / "s"):
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(path.read_bytes()):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << (position % 8)]), position)
                num_flipped += 1
                try:
                    found = store.read([0]), store.read_empty_text()
                    # it was in padding, a header or the shard index, which a read does not use
                    assert same(found[0], truth[0])
                    assert same(found[1], truth[1])
                except DamagedStoreError as error:
                    raised.append((path, str(error)))
                os.pwrite(file.fileno(), bytes([byte]), position)
    row_bytes = (
        1 * 2 * 3 * 2 + 2 * 3 * 2 + 2 * 3 * 2
    )  # latents, the sample's text, the empty prompt
    assert len(raised) == row_bytes
    assert num_flipped > row_bytes
    for path, message in raised:
        assert re.match(rf"{path}: crc32c of the \w+ at byte \d+ differs", message)


def test_full_verify_names_the_shard_of_every_flipped_byte(root):
    store = open_store(root)
    for shard in store.index.shards.values():
        for entry in shard.files:
            path = root / entry.path
            whole = path.read_bytes()
            for position in {0, len(whole) // 2, len(whole) - 1}:
                path.write_bytes(
                    whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :]
                )
                [finding] = verify_store(root, full=True)
                assert finding.where == shard.name
                assert finding.what.startswith(f"{entry.path}: sha256 differs from the index")
                in_it = shard.kind == "samples" or store.manifest.layout == "zarr"
                assert finding.num_samples == (3 if in_it else 0)
            path.write_bytes(whole)
    assert verify_store(root, full=True) == []


def test_a_missing_file_raises_and_is_never_read_as_zeros(root):
    for path in tensor_files(root):
        aside = path.rename(path.with_suffix(".aside"))
        raised, _ = read_all(open_store(root))
        assert raised
        for message in raised:
            assert message.startswith(f"{path}: it cannot be read (No such file or directory).")
            assert f"run 'prebake store verify {root}'" in message
        for full in (False, True):
            [finding] = verify_store(root, full=full)
            assert finding.what == f"{path.relative_to(root)} is missing"
        aside.rename(path)


def test_a_truncated_file_raises_wherever_the_cut_is(root):
    for path in tensor_files(root):
        whole = path.read_bytes()
        truth = read_all(open_store(root))[1]
        for length in [0, 1, len(whole) // 2, len(whole) - 1]:
            path.write_bytes(whole[:length])
            raised, given = read_all(open_store(root))
            for row, text, tensors in given:
                assert same(tensors, next(t for r, x, t in truth if (r, x) == (row, text)))
            for message in raised:
                assert message.startswith(f"{path}: it ends before the end of the ")
            assert raised or length > 1
            [finding] = verify_store(root, full=False)
            assert finding.what.endswith(f"has {length} bytes, expected {len(whole)}")
        path.write_bytes(whole)


def test_a_file_that_is_cut_while_a_reader_has_it_open_raises(root):
    """A memory map would end the process here."""
    store = open_store(root)
    raised, _ = read_all(store)
    assert not raised
    for path in tensor_files(root):
        with path.open("r+b") as file:
            file.truncate(0)
    raised, given = read_all(store)
    assert len(raised) == 7
    assert not given


def test_a_folder_in_place_of_a_file_raises(root):
    path = tensor_files(root)[0]
    path.unlink()
    path.mkdir()
    raised, _ = read_all(open_store(root))
    assert raised[0].startswith(f"{path}: it cannot be read (Is a directory)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_not_finite_values_are_found(tmp_path, layout):
    manifest = make_manifest(layout)
    with StoreWriter(tmp_path / "s", manifest) as writer:
        write_samples(writer, SAMPLES)
        row = Sample("bad.png", ["x"]).row()
        latents = variant_tensors(manifest, row)[0].copy()
        latents[1, 2, 3] = float("inf")
        states = list(open_store(tmp_path / "s").read_empty_text().values())
        draft = writer.new_sample_shard((64, 64))
        place = draft.append(row, [latents, *(states if manifest.texts_inline else [])])
        writer.commit([draft], [row.placed(place)])
        writer.refresh_views()
    assert verify_store(tmp_path / "s", full=False) == []
    [finding] = verify_store(tmp_path / "s", full=True)
    assert finding.what == f"latents of sample {row.sample_id} is not finite"


def test_finite_is_told_by_the_exponent():
    import numpy as np

    assert is_finite(np.array([0x7F7F, 0xFF7F, 0x0001], np.uint16), "bfloat16")
    for not_finite in (0x7F80, 0xFF80, 0x7FC0, 0x7F81):
        assert not is_finite(np.array([0, not_finite], np.uint16), "bfloat16")
    assert is_finite(np.array([[65504, -65504, 6e-8]], np.float16), "float16")
    for not_finite in (np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([1, not_finite], np.float16), "float16")
        assert not is_finite(np.array([1, not_finite], np.float32), "float32")
    assert is_finite(np.array([255], np.uint8), "uint8")


def test_a_crc_that_does_not_fit_the_bytes_is_found_by_full_verify(root):
    """As a broken writer would leave it: every file has its stated sha256."""
    store = open_store(root)
    row = store.sample(0)
    crcs = (row.place.crc32c[0] ^ 1, *row.place.crc32c[1:])
    place = type(row.place)(row.place.shard, row.place.row, row.place.offsets, crcs)
    with StoreWriter(root, store.manifest) as writer:
        writer.commit(samples=[row.placed(place)])
        writer.refresh_views()
    assert verify_store(root, full=False) == []
    [finding] = verify_store(root, full=True)
    assert "crc32c of the latents at byte" in finding.what


# The index


def index_files(root, suffix):
    return sorted(root.glob(f"index/*{suffix}"))


@pytest.mark.parametrize("suffix", [".json", ".samples.parquet", ".texts.parquet"])
def test_a_damaged_or_truncated_or_absent_index_file_is_named(root, suffix):
    bring_to(root, open_store(root).manifest, [*SAMPLES, Sample("d.png", ["new"])])
    path = index_files(root, suffix)[0]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (b"", whole[:-2], whole[: len(whole) // 2], whole + b"\0", bytes(flipped), None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(DamagedStoreError, match=re.escape(str(path))):
            open_store(root)
        for full in (False, True):
            [finding] = verify_store(root, full=full)
            assert finding.where == str(root / "index")
            assert str(path) in finding.what
        with pytest.raises(DamagedStoreError, match=re.escape(str(path))):
            StoreWriter(root, json_manifest(root))
    path.write_bytes(whole)
    assert verify_store(root, full=True) == []


def json_manifest(root):
    from store_format.manifest import read_manifest

    return read_manifest(root)


def test_every_flipped_byte_of_a_commit_is_found(root):
    [path] = index_files(root, ".json")
    whole = path.read_bytes()
    truth = LiveIndex(root)
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            found = LiveIndex(root)
        except (DamagedStoreError, NotAStoreError):
            continue
        # white space between tokens, or another spelling of the same characters, changes nothing
        assert found.commits == truth.commits, (position, whole[position - 9 : position + 9])


def test_a_lost_index_folder_is_no_empty_store(root):
    shutil.rmtree(root / "index")
    with pytest.raises(DamagedStoreError, match="has lost its index"):
        open_store(root)


def test_the_index_of_a_folder_that_is_no_store_is_empty(tmp_path):
    assert len(LiveIndex(tmp_path / "nothing")) == 0


def test_a_commit_under_another_name_is_refused(root):
    [path] = index_files(root, ".json")
    path.rename(root / "index/00000002-00000000.json")
    with pytest.raises(DamagedStoreError, match=f"its content is that of {path.stem}"):
        open_store(root)


def test_other_files_beside_the_index_are_ignored(root):
    [path] = index_files(root, ".json")
    for name in ("._" + path.name, path.name + "~", "notes.json", path.name + ".part"):
        (root / "index" / name).write_text("not a commit")
    assert verify_store(root, full=True) == []


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 2, "new_key": [1]}])
def test_a_later_version_is_refused_by_name(root, change):
    path = root / "prebake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    expected = re.escape(f"{root} has format version 2; this prebake reads version 1. Use the")
    with pytest.raises(NotAStoreError, match=expected):
        open_store(root)
    with pytest.raises(NotAStoreError, match=expected):
        StoreWriter(root, make_manifest("zarr"))
    with pytest.raises(NotAStoreError, match=expected):
        verify_store(root, full=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", 'does not say "format": "prebake-store"'),
        (b'{"format": "other", "version": 1}', 'does not say "format": "prebake-store"'),
        (b'{"format": "prebake-store", "version": 1}', "layout: Field required"),
        (b'{"format": "prebake-store"}', "format version None"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_manifest_is_refused(root, content, message):
    (root / "prebake.json").write_bytes(content)
    with pytest.raises(NotAStoreError, match=message):
        open_store(root)


def test_a_folder_without_a_manifest_is_no_store(tmp_path):
    with pytest.raises(NotAStoreError, match=r"is not a prebake store \(prebake.json is missing"):
        open_store(tmp_path)


def test_damage_of_one_shard_does_not_hide_that_of_another(tmp_path):
    samples = [Sample(f"{i}.png", [f"{i}"]) for i in range(6)]
    for layout in LAYOUTS:
        root = tmp_path / layout
        store = build_store(root, layout, samples, SDXL_TENSORS, rows_per_shard=2)
        names = sorted(name for name, shard in store.index.shards.items())
        for name in names:
            path = root / store.index.shards[name].files[0].path
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert sorted(finding.where for finding in verify_store(root, full=True)) == names


def test_progress_counts_the_bytes_of_all_live_shards(root):
    counted = []
    verify_store(root, full=True, progress=counted.append)
    shards = open_store(root).index.shards.values()
    assert sum(counted) == sum(file.bytes for shard in shards for file in shard.files)
    assert len(counted) == len(shards)


# Every kind of damage to every kind of file

PAIRS = [
    *(Sample(f"{i}.png", [f"text {i}"], (16, 24)) for i in range(4)),
    Sample("wide.png", ["text 0", "text 3"], (24, 16), num_variants=2),
]
SMALL = (("latents", "variant", (2, "h", "w")), ("encoder_hidden_states", "text", (2, 3)))


@dataclass
class Shards:
    """A small store, and what each of its shards holds, worked out from how it was written."""

    files: StoreFiles
    truth: Truth
    store: Store  # as it is whole; it holds places, not bytes
    shard_of_file: dict[str, str]
    samples_of_shard: dict[str, set[str]]

    def spans(self, path):
        """Yield (sample or None, is_text, row, start, stop) for each live tensor in a file."""
        manifest = self.store.manifest
        index = self.store.index
        for is_text, rows, specs in (
            (False, list(index.iter_samples()), manifest.variant_tensors),
            (True, list(index.iter_texts()), manifest.text_tensors),
        ):
            for number, row in enumerate(rows):
                every = list(specs)
                if not is_text and manifest.texts_inline:
                    every += list(manifest.text_tensors) * len(row.texts)
                for spec, offset in zip(every, row.place.offsets, strict=True):
                    if file_of(manifest, row.place.shard, spec) == path:
                        cells = None if spec.kind == "text" else manifest.cells(row.bucket_px)
                        yield is_text, number, offset, offset + spec.row_bytes(cells)

    def unreadable(self, path, data):
        """Return the sample rows and text rows that changed bytes of a file make unreadable."""
        whole = self.files.files[path]
        found = (set(), set())
        for is_text, number, start, stop in self.spans(path):
            if data is None or data[start:stop] != whole[start:stop]:
                found[is_text].add(number)
        return found


@pytest.fixture(scope="module", params=LAYOUTS)
def shards(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("matrix") / "s"
    store = build_store(root, request.param, PAIRS, SMALL, rows_per_shard=2)
    samples_of_shard = {name: set() for name in store.index.shards}
    for row in store.index.iter_samples():
        samples_of_shard[row.place.shard].add(row.path)
        for text in row.texts if request.param == "zarr" else ():
            samples_of_shard[store.text_row(text.text_key).place.shard].add(row.path)
    return Shards(
        StoreFiles(root),
        Truth(root, PAIRS),
        store,
        {f.path: shard.name for shard in store.index.shards.values() for f in shard.files},
        samples_of_shard,
    )


def damages(files, path, shard_of_file):
    """Yield (what was done, {path: bytes or None}) for one file of a shard."""
    whole = files[path]
    for position in sorted({0, len(whole) // 2, len(whole) - 1}):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        yield f"byte {position} flipped", {path: bytes(flipped)}
    for length in sorted({0, len(whole) - 1}):
        yield f"cut to {length}", {path: whole[:length]}
    yield "extended", {path: whole + b"\0"}
    yield "deleted", {path: None}
    for other in files:
        same_size = len(files[other]) == len(whole) and files[other] != whole
        if same_size and other in shard_of_file and shard_of_file[other] != shard_of_file[path]:
            yield f"replaced by {other}", {path: files[other]}
            yield f"swapped with {other}", {path: files[other], other: whole}
            break


def test_every_damage_to_a_file_of_a_shard_is_named_with_its_samples(shards):
    seen = Counter()
    for path in shards.shard_of_file:
        for what, changes in damages(shards.files.files, path, shards.shard_of_file):
            seen[what.split()[0]] += 1
            with shards.files.changed(changes, seal=False):
                check_damage(shards, changes, (path, what))
    assert verify_store(shards.files.root, full=True) == []
    assert seen.keys() == {"byte", "cut", "extended", "deleted", "replaced", "swapped"}
    assert seen.total() > 30


def check_damage(shards, changes, case):
    store = open_store(shards.files.root)
    files = shards.files.files
    damaged = {shards.shard_of_file[path] for path in changes}
    findings = verify_store(store, full=True)
    assert {finding.where for finding in findings} == damaged, case
    for finding in findings:
        named = name_samples(store, finding, all_of_them=True)
        expected = shards.samples_of_shard[finding.where]
        assert set(named.partition(": ")[2].split(", ")) - {""} == expected, case
        assert finding.num_samples == len(expected), case
    resized = {p for p, data in changes.items() if data is None or len(data) != len(files[p])}
    quick = verify_store(store, full=False)
    assert {finding.where for finding in quick} == {shards.shard_of_file[p] for p in resized}, case
    lost = [shards.unreadable(path, data) for path, data in changes.items()]
    samples, texts = (set().union(*(found[kind] for found in lost)) for kind in (0, 1))
    found = damaged_rows(store, [finding.where for finding in findings])
    assert [rows.tolist() for rows in found] == [sorted(samples), sorted(texts)], case
    check_reads(shards, store, samples, texts, case)


def check_reads(shards, store, samples, texts, case):
    """Reading raises for every row that is lost, and gives the truth of every other one."""
    keys = [row.text_key for row in shards.store.index.iter_texts()]
    lost_keys = {keys[row] for row in texts}
    for number, row in enumerate(shards.store.index.iter_samples()):
        for text in range(-1, len(row.texts)):
            key = row.texts[text].text_key if text >= 0 else store.manifest.empty_text_key
            if number in samples or (text < 0 or not store.manifest.texts_inline) & (
                key in lost_keys
            ):
                with pytest.raises(DamagedStoreError):
                    _ = [store.read([number], [t]) for t in range(-1, len(row.texts))]
                continue
            latents, states = (array.tobytes() for array in store.read([number], [text]).values())
            assert [latents] == shards.truth.variants[row.sample_id, row.variant], case
            caption = row.texts[text].caption if text >= 0 else ""
            assert [states] == shards.truth.texts[caption], case


def test_every_damage_to_a_view_or_group_is_named_and_hides_nothing(shards):
    own = set(shards.shard_of_file) | {"prebake.json"}
    views = [p for p in shards.files.files if p not in own and not p.startswith("index/")]
    assert views
    for path in views:
        for what, changes in damages(shards.files.files, path, {}):
            with shards.files.changed(changes, seal=False):
                findings = verify_store(shards.files.root, full=True)
                harmless = what.startswith("byte") and path.endswith(".json") and not findings
                assert harmless or all(path in finding.what for finding in findings), (path, what)
                assert findings or harmless, (path, what)
                assert verify_store(shards.files.root, full=False) == []
                check_reads(shards, open_store(shards.files.root), set(), set(), (path, what))


def test_every_damage_to_the_index_is_named_with_its_file(shards):
    for path in [p for p in shards.files.files if p.startswith("index/")]:
        for what, changes in damages(shards.files.files, path, {}):
            if what == "deleted" and path in shards.files.commits:
                continue  # the last commit: nothing tells that it ever was
            with shards.files.changed(changes, seal=False):
                for full in (False, True):
                    findings = verify_store(shards.files.root, full=full)
                    if findings == [] and path.endswith(".json"):  # white space
                        assert json.loads(changes[path]) == json.loads(shards.files.files[path])
                        continue
                    [finding] = findings
                    assert finding.where == str(shards.files.root / "index")
                    assert str(shards.files.root / path) in finding.what, (path, what)


def test_several_damaged_files_of_the_index_are_all_named(shards):
    paths = [p for p in shards.files.files if p.endswith(".parquet")]
    with shards.files.changed(dict.fromkeys(paths, b"PAR1"), seal=False):
        findings = verify_store(shards.files.root, full=False)
    assert len(findings) == len(paths) == 2
    for path in paths:
        assert any(str(shards.files.root / path) in finding.what for finding in findings)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_single_flipped_byte_of_a_store_is_found(tmp_path, layout):
    tensors = (("latents", "variant", (1, "h", "w")), ("encoder_hidden_states", "text", (1, 3)))
    samples = [Sample("a.png", bucket_px=(16, 8))]
    store = build_store(tmp_path / "s", layout, samples, tensors)
    shard_of_file = {f.path: s.name for s in store.index.shards.values() for f in s.files}
    files, truth = StoreFiles(tmp_path / "s"), Truth(tmp_path / "s", samples)
    unseen = Counter()
    for path, whole in files.files.items():
        for position in range(len(whole)):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << position % 8
            with files.changed({path: bytes(flipped)}, seal=False):
                try:
                    findings = verify_store(files.root, full=True)
                except NotAStoreError:
                    assert path == "prebake.json"
                    continue
                if path in shard_of_file:
                    assert [finding.where for finding in findings] == [shard_of_file[path]]
                if not findings:
                    assert json.loads(flipped) == json.loads(whole), (path, position)
                    unseen[path] += 1
                use(files.root, truth, always_true=True)
    # white space of commits and of groups, which no hash covers
    assert all(path.startswith("index/") or path.endswith("zarr.json") for path in unseen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finding_names_its_first_samples_or_all(tmp_path, layout):
    samples = [Sample(f"cats/{i}.png", ["x"], (16, 24), num_variants=2) for i in range(5)]
    store = build_store(tmp_path / "s", layout, samples, SMALL, rows_per_shard=100)
    [shard] = [shard for shard in store.index.shards.values() if shard.kind == "samples"]
    (tmp_path / "s" / shard.files[0].path).unlink()
    [finding] = verify_store(store, full=False)
    assert finding.num_samples == 5
    assert len(finding.rows) == 10
    paths = [sample.path for sample in sorted(samples, key=lambda sample: sample.sample_id)]
    assert name_samples(store, finding) == f"5 samples: {', '.join(paths[:3])} and 2 more"
    everything = name_samples(store, finding, all_of_them=True)
    assert everything == f"5 samples: {', '.join(paths)}"
    assert name_samples(store, Finding("index", "is lost")) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_not_finite_are_among_the_damaged(tmp_path, layout):
    root = tmp_path / "s"
    samples = [Sample("a.png", ["x"]), Sample("b.png", ["x"])]
    manifest = make_manifest(layout)
    with StoreWriter(root, manifest) as writer:
        write_samples(writer, [Sample("other.png", ["x"])])
        states = list(open_store(root).read_empty_text().values())
        draft = writer.new_sample_shard((64, 64))
        placed = []
        for number, sample in enumerate(samples):
            row = sample.row()
            latents = variant_tensors(manifest, row)[0].copy()
            latents[0, 0, 0] = float("nan") if number == 1 else 0
            tensors = [latents, *(states if manifest.texts_inline else [])]
            placed.append(row.placed(draft.append(row, tensors)))
        writer.commit([draft], placed)
        writer.refresh_views()
    store = open_store(root)
    damage = find_damage(store)
    assert damage.shards == {placed[1].place.shard}
    assert damage.sample_rows.tolist() == [store.row_of(samples[1].sample_id)]
    assert damage.text_rows.tolist() == []


def test_a_lost_text_shard_names_the_samples_that_have_a_text_there(tmp_path):
    samples = [Sample("a.png", ["x", "y"]), Sample("b.png", ["y"]), Sample("c.png", ["z"])]
    store = build_store(tmp_path / "s", "zarr", samples, rows_per_shard=1)
    shard_of = {row.caption: row.place.shard for row in store.index.iter_texts()}
    for caption, names in {"x": {"a.png"}, "y": {"a.png", "b.png"}, "": set()}.items():
        damaged = tmp_path / "s" / shard_of[caption]
        aside = damaged.rename(tmp_path / "aside")
        found = [f for f in verify_store(store, full=False) if f.where == shard_of[caption]]
        assert found
        for finding in found:
            assert set(name_samples(store, finding).partition(": ")[2].split(", ")) - {""} == names
        samples_lost, texts_lost = damaged_rows(open_store(tmp_path / "s"), [shard_of[caption]])
        assert len(samples_lost) == 0
        captions = [row.caption for row in store.index.iter_texts()]
        assert [captions[row] for row in texts_lost] == [caption]
        aside.rename(damaged)
