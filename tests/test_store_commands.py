import csv
import io
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
from click.testing import CliRunner
from store_builders import LAYOUTS, Sample, bring_to, build_store, numbers

from prebake import cli
from store_format import open_store
from store_format.describe import bytes_by_kind
from store_format.verify import store_hash
from store_format.wording import size

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
        "source others: 1 sample",
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
    assert quick[1].endswith(f"1 damaged; mend it with 'prebake store repair {root}'")
    full = prebake("verify", root, "--full", code=1).splitlines()
    assert len(full) == 3
    assert any(line.startswith(f"{first.path}: sha256 differs") for line in full)
    assert full[-1].endswith(f"2 damaged; mend it with 'prebake store repair {root}'")


def test_verify_does_not_call_a_view_damaged_that_lags(root):
    layout = open_store(root).manifest.layout
    views = sorted(root.glob("samples/*/*/live/c/0")) if layout == "zarr" else [root / "shards.txt"]
    for view in views:  # as while a bake runs, or after it was killed
        view.write_bytes(bytes(view.stat().st_size))
    lines = prebake("verify", root, "--full").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("zarr and webdataset would not see the last commit in ")
    named = {view.parents[2].name if layout == "zarr" else view.name for view in views}
    assert sum(name in lines[0] for name in named) == min(len(named), 3)
    assert lines[1].endswith("nothing is wrong")


def test_verify_says_that_a_store_has_lost_its_index(root):
    for path in (root / "index").iterdir():
        path.unlink()
    lines = prebake("verify", root).splitlines()
    assert len(lines) == 2
    assert f"{root} has shards but no commit" in lines[0]


def test_verify_names_a_damaged_index(root):
    [path] = (root / "index").glob("*.json")
    path.write_text("{")
    lines = prebake("verify", root, code=1).splitlines()
    assert lines[0].startswith(f"{path} is damaged")
    assert re.fullmatch(r"looked at the index in \d+\.\d s: 1 damaged; mend it with .*", lines[1])


def test_hash_prints_the_digest_only(root):
    assert prebake("hash", root) == store_hash(open_store(root)) + "\n"


@pytest.mark.parametrize("command", ["inspect", "verify", "hash", "ls"])
def test_a_folder_that_is_no_store_is_one_line(tmp_path, command):
    output = prebake(command, tmp_path, code=1)
    assert output.startswith(f"Error: {tmp_path} is not a prebake store (prebake.json is missing).")
    assert output.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "hash", "ls"])
def test_nothing_is_written(root, command):
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    prebake(command, root)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_ls_shows_samples_by_source_and_path(root):
    first, other = SAMPLES[0].sample_id, SAMPLES[2].sample_id
    lines = prebake("ls", root).splitlines()
    assert lines[0].split() == ["sample", "source", "path", "bucket", "captions"]
    assert [line[: line.index(" ")] for line in lines[1:]] == [
        other,
        first,
        f"{first}-1",
        SAMPLES[1].sample_id,
        SAMPLES[3].sample_id,
    ]
    assert lines[2] == f"{first}    pictures  d1/a.png  64x64      one | two"
    starts = [line.index(path) for line, path in zip(lines[1:3], ("d2/a", "d1/a"), strict=True)]
    assert starts == [lines[0].index("path")] * 2


def test_ls_gives_json_objects_and_csv_with_json_captions(root):
    found = [json.loads(line) for line in prebake("ls", root, "--format", "json").splitlines()]
    assert found[1] == {
        "sample_id": SAMPLES[0].sample_id,
        "variant": 0,
        "source": "pictures",
        "path": "d1/a.png",
        "bucket": "64x64",
        "captions": ["one", "two"],
    }
    assert [sample["path"] for sample in found][-1] == "ü b.jpg"
    table = list(csv.DictReader(io.StringIO(prebake("ls", root, "--format", "csv"))))
    assert len(table) == 5
    for row, sample in zip(table, found, strict=True):
        captions = json.loads(row.pop("captions"))
        assert {**row, "variant": int(row["variant"]), "captions": captions} == sample


def test_ls_keeps_any_caption_in_its_line(tmp_path):
    odd = 'a,"b"\n\tc\x1b[31m\u2028 end'
    build_store(tmp_path / "s", "zarr", [Sample("a.png", [odd])])
    assert prebake("ls", tmp_path / "s").endswith('  a,"b"  c [31m  end\n')
    assert json.loads(prebake("ls", tmp_path / "s", "--format", "json"))["captions"] == [odd]
    [row] = csv.DictReader(io.StringIO(prebake("ls", tmp_path / "s", "--format", "csv")))
    assert json.loads(row["captions"]) == [odd]


def test_ls_takes_a_condition(root):
    assert prebake("ls", root, "--where", "bucket = '96x48'").count("d2/a.png") == 2
    assert prebake("ls", root, "--where", "weight > 9", "--format", "json") == ""
    output = prebake("ls", root, "--where", "bucket =", code=1)
    assert output.startswith("Error: --where 'bucket =': Parser Error: syntax error at ")
    assert output.count("\n") == 1


def test_ls_shows_many_samples_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("store_format.commands.LINES_AT_ONCE", 4)
    build_store(tmp_path / "s", "zarr", [Sample(f"{i}.png") for i in range(10)])
    assert len(prebake("ls", tmp_path / "s", "--format", "json").splitlines()) == 10


def test_ls_ends_quietly_when_nobody_reads_on(root):
    command = [sys.executable, "-m", "prebake", "store", "ls", str(root)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_convert_copies_a_store_into_another_layout(root, tmp_path):
    for layout in LAYOUTS:
        out = tmp_path / f"as-{layout}"
        output = prebake("convert", root, "--to", layout, "--out", out)
        assert re.fullmatch(rf"{out}: 4 samples, layout {layout}, in \d+\.\d s\n", output)
        assert prebake("hash", out) == prebake("hash", root)
        assert prebake("convert", root, "--to", layout, "--out", out).endswith(
            " s, 4 of them since before\n"
        )


def test_merge_makes_one_store_of_several(root, tmp_path):
    build_store(tmp_path / "more", "webdataset", [SAMPLES[3], Sample("more.png")])
    output = prebake("merge", root, tmp_path / "more", "--out", tmp_path / "all")
    layout = open_store(root).manifest.layout
    assert output.startswith(f"{tmp_path}/all: 5 samples, layout {layout}, in ")
    assert output.endswith(" s; 1 more were equal to one of these\n")
    assert prebake("ls", tmp_path / "all").count(".png") + 1 == 6


def test_merge_renames_the_source_of_a_store(root, tmp_path):
    more = tmp_path / "more"
    build_store(more, "zarr", [Sample("ü b.jpg", ["no"], image=1), Sample("d1/a.png", ["no"])])
    arguments = ["merge", root, more, "--out", tmp_path / "all", "--to", "webdataset"]
    output = prebake(*arguments, code=1)
    assert output.startswith("Error: the stores differ in 2 samples: pictures/")
    assert output.count("\n") == 1
    output = prebake(*arguments, "--rename", f"{more}=new")
    assert f"{tmp_path}/all: 6 samples, layout webdataset, in " in output
    assert prebake("ls", tmp_path / "all", "--where", "source = 'new'").count("no\n") == 2
    output = prebake("merge", root, "--out", tmp_path / "b", "--rename", f"{root}=x", code=1)
    assert "has the sources others, pictures. Name one" in output
    prebake("merge", root, "--out", tmp_path / "b", "--rename", f"{root}:others=x")
    assert re.findall(r"source +(\w+): (\d)", prebake("inspect", tmp_path / "b")) == [
        ("pictures", "3"),
        ("x", "1"),
    ]


def test_merge_notes_that_one_of_several_states_was_kept(tmp_path):
    build_store(tmp_path / "a", "zarr", [Sample("a.png", ["x"])])
    with mock.patch("store_builders.numbers", lambda *a: numbers(*a) + (a[1].kind == "text")):
        build_store(tmp_path / "b", "webdataset", [Sample("b.png", ["x"])])
    arguments = ["merge", tmp_path / "a", tmp_path / "b", "--out"]
    note = "\nnote: 1 states of captions were left out"
    assert note in prebake(*arguments, tmp_path / "c")
    assert note not in prebake(*arguments, tmp_path / "d", "--to", "webdataset")


def test_one_store_alone_is_not_merged(root, tmp_path):
    output = prebake("merge", root, "--out", tmp_path / "new", code=2)
    assert "Error: name two stores or more to merge." in output


def test_subset_copies_what_a_condition_selects(root, tmp_path):
    where = "bucket == '96x48' and source like 'pict%'"
    output = prebake("subset", root, "--where", where, "--out", tmp_path / "new")
    layout = open_store(root).manifest.layout
    assert re.fullmatch(rf"\S+/new: 1 sample, layout {layout}, in \d+\.\d s\n", output)
    [row] = open_store(tmp_path / "new").index.iter_samples()
    assert (row.source, row.path) == ("pictures", "d2/a.png")
    assert prebake("verify", tmp_path / "new", "--full").endswith("nothing is wrong\n")
    arguments = ["--to", "webdataset", "--out", tmp_path / "variants"]
    prebake("subset", root, "--where", "variant > 0", *arguments)
    assert [row.variant for row in open_store(tmp_path / "variants").index.iter_samples()] == [0, 1]


def test_subset_of_nothing_or_by_a_mistake_writes_nothing(root, tmp_path):
    for where, reason in [("weight > 9", "selects none of the 5 rows"), ("w = 1", "Binder Error")]:
        output = prebake("subset", root, "--where", where, "--out", tmp_path / "new", code=1)
        assert reason in output
        assert output.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["convert"], ["merge"], ["subset", "--where", "true"]])
def test_a_copy_says_where_it_must_not_go(root, arguments):
    options = {"convert": ["--to", "zarr"], "merge": [root], "subset": []}[arguments[0]]
    output = prebake(*arguments, root, *options, "--out", root / "new", code=1)
    assert output.startswith(f"Error: --out {root}/new and the store {root} are the same, or one")
    assert output.count("\n") == 1


def test_shards_have_the_size_that_was_asked_for(tmp_path):
    samples = [Sample(f"{i}.png", bucket_px=(512, 512)) for i in range(40)]  # of 32 KiB
    root = tmp_path / "s"
    build_store(root, "zarr", samples, rows_per_shard=40)
    for size_mib, num_shards in [(1, 2), (64, 1)]:
        out = tmp_path / f"{size_mib}"
        prebake("convert", root, "--to", "webdataset", "--out", out, "--shard-size-mib", size_mib)
        assert len(list(out.glob("samples/*.tar"))) == num_shards
    output = prebake("convert", root, "--to", "zarr", "--out", "x", "--shard-size-mib", 0, code=2)
    assert "0 is not in the range" in output


COMMANDS = ["inspect", "verify", "hash", "ls", "convert", "merge", "subset"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_loads_nothing_heavy(command):
    code = (
        "import sys; from click.testing import CliRunner; from store_format.commands import store\n"
        f"print(CliRunner().invoke(store, ['{command}', '--help']).output)\n"
        "heavy = 'numpy pyarrow pydantic tqdm torch duckdb'.split()\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")
    assert f"\n  prebake store {command} " in run.stdout
