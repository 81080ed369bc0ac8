import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from store_builders import LAYOUTS, Sample, bring_to, build_store

from prebake import cli
from store_format import open_store
from store_format.commands import bytes_by_kind, size
from store_format.verify import store_hash

WIDE = (96, 48)
SAMPLES = [
    Sample("d1/a.png", ["one", "two"], text_weights=[0.75, 0.25], num_variants=2, tags={"k": "v"}),
    Sample("d2/a.png", ["one"], WIDE, weight=0.5),
    Sample("d2/a.png", ["one"], WIDE, source="others"),
    Sample("ü b.jpg", ["three"]),
]


@pytest.fixture(params=LAYOUTS)
def root(request, tmp_path):
    build_store(tmp_path / "s", request.param, SAMPLES)
    return tmp_path / "s"


def prebake(*arguments, code=0):
    """Return what a command prints."""
    result = CliRunner().invoke(cli, ["store", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_inspect_tells_what_a_store_is_and_holds(root):
    bring_to(root, open_store(root).manifest, [*SAMPLES[:3], Sample("ü b.jpg", ["four"])])
    lines = [" ".join(line.split()) for line in prebake("inspect", root).splitlines()]
    layout = open_store(root).manifest.layout
    assert lines[0] == f"{root}: prebake store, version 1, layout {layout}"
    for expected in [
        "made by resolution 64, posterior sample, stored_dtype float16",
        "VAE 5a5a5a5a5a5a, latents scaled by 0.18215",
        "text encoder 7e7e7e7e7e7e, width 6, tokens 707070707070",
        "for training sd1, predicting epsilon, 1000 timesteps",
        "tensor latents: 4 x h x w, float16, one a sample and variant",
        "tensor encoder_hidden_states: 7 x 6, float16, one a text",
        "samples 4, in 5 variants",
        "captions 3 different ones among 7 (43%)",
        "source others: 1 samples",
        "source pictures: 3 samples",
        "64 x 64 3",
        "96 x 48 2",
    ]:
        assert expected in lines


def test_inspect_accounts_for_every_byte_of_the_shards(root):
    store = open_store(root)
    found = bytes_by_kind(store)
    assert found["latents"] == 3 * 4 * 8 * 8 * 2 + 2 * 4 * 6 * 12 * 2
    num_texts = {"zarr": 4, "webdataset": 2 * 2 + 1 + 1 + 1 + 1}[store.manifest.layout]
    assert found["text"] == num_texts * 7 * 6 * 2  # with the empty prompt
    listed = [root / f.path for shard in store.index.shards.values() for f in shard.files]
    on_disk = sum(path.stat().st_size for path in listed)
    assert found["latents"] + found["text"] + found["other in shards"] == on_disk
    assert found["index"] == sum(path.stat().st_size for path in (root / "index").iterdir())


def test_inspect_tells_all_about_a_sample_by_id_or_path(root):
    sample = SAMPLES[0]
    output = prebake("inspect", root, "d1/a.png")
    assert output == prebake("inspect", root, sample.sample_id)
    row = sample.row(1)
    for expected in [
        "d1/a.png, variant 1",
        sample.sample_id,
        f"1000 B, sha256 {row.image_sha256}",
        "138 x 128 px, resized to 69 x 64, cropped from left 1, top 0 to the bucket 64 x 64, mirr",
        "k = v",
        row.latent_key,
        '"two", weight 0.25',
        row.texts[1].text_key,
    ]:
        assert expected in output


def test_inspect_tells_where_the_tensors_of_a_sample_lie(root):
    output = prebake("inspect", root, "ü b.jpg")
    store = open_store(root)
    [row] = [n for n in range(len(store)) if store.sample(n).path == "ü b.jpg"]
    batch = store.read([row])
    found = re.findall(r"byte (\d+) of (\S+), crc32c ([0-9a-f]{8})", output)
    assert len(found) == 2
    for (offset, path, _), array in zip(found, batch.values(), strict=True):
        data = (root / path).read_bytes()[int(offset) :][: array.nbytes]
        assert data == array.tobytes()


def test_inspect_shows_every_source_that_has_the_path(root):
    output = prebake("inspect", root, "d2/a.png")
    assert re.findall(r"source +(\w+)", output) in (["pictures", "others"], ["others", "pictures"])


def test_a_sample_that_is_not_there_is_one_line_with_near_ones(root):
    output = prebake("inspect", root, "d1/b.png", code=1)
    assert (
        output == f"Error: {root} holds no sample d1/b.png. Near to it are: d1/a.png, d2/a.png.\n"
    )


def test_an_empty_store_can_be_inspected(tmp_path):
    for layout in LAYOUTS:
        build_store(tmp_path / layout, layout, [])
        assert "samples         0, in 0 variants" in prebake("inspect", tmp_path / layout)


@pytest.mark.parametrize("full", [[], ["--full"]])
def test_verify_of_a_sound_store_says_what_it_looked_at(root, full):
    output = prebake("verify", root, *full)
    store = open_store(root)
    num_bytes = sum(f.bytes for shard in store.index.shards.values() for f in shard.files)
    how = "read all of" if full else "looked at"
    shards = len(store.index.shards)
    what = f"{shards} shards with 5 samples, {size(num_bytes)}"
    assert re.fullmatch(rf"{how} {what} in \d+\.\d s: nothing is wrong\n", output)


def test_verify_prints_one_line_a_damage_and_fails(root):
    shards = list(open_store(root).index.shards.values())
    first, second = shards[0].files[0], shards[-1].files[0]
    data = bytearray((root / first.path).read_bytes())
    data[0] ^= 1
    (root / first.path).write_bytes(data)
    (root / second.path).unlink()
    quick = prebake("verify", root, code=1).splitlines()
    assert len(quick) == 2
    assert quick[0].startswith(f"{second.path} is missing")
    assert quick[1].endswith("1 damaged")
    full = prebake("verify", root, "--full", code=1).splitlines()
    assert len(full) == 3
    assert any(line.startswith(f"{first.path}: sha256 differs") for line in full)
    assert full[-1].endswith("2 damaged")


def test_verify_names_a_damaged_index(root):
    [path] = (root / "index").glob("*.json")
    path.write_text("{")
    lines = prebake("verify", root, code=1).splitlines()
    assert lines[0].startswith(f"{path} is damaged")
    assert re.fullmatch(r"looked at the index in \d+\.\d s: 1 damaged", lines[1])


def test_hash_prints_the_digest_only(root):
    assert prebake("hash", root) == store_hash(open_store(root)) + "\n"


@pytest.mark.parametrize("command", ["inspect", "verify", "hash"])
def test_a_folder_that_is_no_store_is_one_line(tmp_path, command):
    output = prebake(command, tmp_path, code=1)
    assert output.startswith(f"Error: {tmp_path} is not a prebake store (prebake.json is missing).")
    assert output.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "hash"])
def test_nothing_is_written(root, command):
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    prebake(command, root)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from store_format.commands import store\n"
        "print(CliRunner().invoke(store, ['verify', '--help']).output)\n"
        "print([m for m in ('numpy', 'pyarrow', 'pydantic', 'tqdm', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")
    assert "Check a store" in run.stdout


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (1 << 41, "2.0 TiB")],
)
def test_sizes_are_as_people_read_them(num_bytes, text):
    assert size(num_bytes) == text
