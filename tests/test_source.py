"""Scanning a folder: what is found, what is reported, which caption goes with which image."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from precompute.problems import Reason
from precompute.source import Scan, scan_folder
from store_format.errors import PrebakeError

EMPTY = "which get the empty prompt if they are baked"


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def captions(scan: Scan) -> dict[str, str]:
    return {image.path: image.caption for image in scan.images}


def reasons(scan: Scan) -> dict[str, Reason]:
    return {problem.path: problem.reason for problem in scan.problems}


def test_a_sample_is_found_with_its_caption_size_and_time(tmp_path: Path) -> None:
    write(tmp_path, {"d1/cat.png": b"12345", "d1/cat.txt": "a cat\n"})
    os.utime(tmp_path / "d1/cat.png", ns=(0, 1_700_000_000_123_456_789))
    (image,) = scan_folder(tmp_path).images
    assert image.path == "d1/cat.png"
    assert image.file == tmp_path / "d1/cat.png"
    assert image.size_bytes == 5
    assert image.mtime_ns == 1_700_000_000_123_456_789
    assert image.caption == "a cat"


def test_images_are_found_by_suffix_in_any_case_and_sorted_by_path(tmp_path: Path) -> None:
    names = [
        "B.JPG", "a.avif", "a.bmp", "a.gif", "a.heic", "a.heif", "a.jfif", "a.jpeg", "a.jpg",
        "a.png", "a.tif", "a.tiff", "a.webp", "b/c/x.png", "b1.png", "img1.png", "img10.png",
    ]  # fmt: skip
    others = ["notes.md", "a.npz", "png", "a.png.part", "clip.mp4"]
    write(tmp_path, dict.fromkeys([*names[::-1], *others], b""))
    assert [image.path for image in scan_folder(tmp_path).images] == sorted(names)


def test_an_image_format_that_is_not_read_is_reported(tmp_path: Path) -> None:
    write(tmp_path, {"a.PSD": b"", "a.jxl": b"", "d/a.svg": b"", "a.png": b""})
    scan = scan_folder(tmp_path)
    assert reasons(scan) == dict.fromkeys(["a.PSD", "a.jxl", "d/a.svg"], Reason.UNSUPPORTED_FORMAT)
    assert [image.path for image in scan.images] == ["a.png"]


def test_two_images_of_one_stem_share_the_caption_and_are_two_samples(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "a.jpg": b"", "a.txt": "one", "d/a.png": b"", "d/a.txt": "two"})
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"a.jpg": "one", "a.png": "one", "d/a.png": "two"}
    assert scan.warnings == ()


def test_only_the_exact_stem_is_the_caption(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"img1.png": b"", "img10.png": b"", "img10.txt": "ten", "Img1.txt": "no",
         "a.b.png": b"", "a.b.txt": "dots", "a.txt": "no", "x.PNG": b"", "x.TXT": "upper"},
    )  # fmt: skip
    assert captions(scan_folder(tmp_path)) == {
        "img1.png": "", "img10.png": "ten", "a.b.png": "dots", "x.PNG": "upper",
    }  # fmt: skip


def test_txt_goes_before_caption_with_a_warning(tmp_path: Path) -> None:
    write(
        tmp_path, {"a.png": b"", "a.caption": "no", "a.txt": "yes", "b.png": b"", "b.caption": "b"}
    )
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"a.png": "yes", "b.png": "b"}
    assert scan.warnings == (
        "images with several caption files take the first of .txt, .caption: 1 (a.png)",
    )


def test_missing_and_empty_captions_give_one_warning_each_with_count_and_three_names(
    tmp_path: Path,
) -> None:
    write(tmp_path, {f"{i}.png": b"" for i in range(5)})
    write(tmp_path, {"x.png": b"", "x.txt": " ,\n", "y.png": b"", "y.caption": b""})
    scan = scan_folder(tmp_path)
    assert set(captions(scan).values()) == {""}
    assert scan.warnings == (
        f"images with an empty caption, {EMPTY}: 2 (x.png, y.png)",
        f"images without a caption, {EMPTY}: 5 (0.png, 1.png, 2.png, ...)",
    )


def test_an_image_whose_caption_is_no_text_is_not_baked(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "a.txt": b"K\xe4fer", "b.png": b"", "b.txt": b"a\0b"})
    write(tmp_path, {"c.png": b"", "metadata.jsonl": '{"file_name":"c.png","text":"\\ud800"}'})
    scan = scan_folder(tmp_path)
    assert scan.images == ()
    assert reasons(scan) == dict.fromkeys(["a.png", "b.png", "c.png"], Reason.CAPTION_UNDECODABLE)


def test_metadata_files_caption_the_images_below_their_own_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.png": b"", "d/b.png": b"", "d/e/c.png": b"", "f/d.png": b"", "f/e.png": b"",
            "metadata.jsonl": '{"file_name": "a.png", "text": "one\\n, two,"}\n'
                              '{"file_name": "./d/b.png", "text": ""}\n',
            "d/metadata.csv": "file_name,caption\ne/c.png,three\n",
            "f/metadata.jsonl": '{"file_name": "d.png", "text": null}',
        },
    )  # fmt: skip
    scan = scan_folder(tmp_path)
    assert captions(scan) == {
        "a.png": "one, , two", "d/b.png": "", "d/e/c.png": "three", "f/d.png": "", "f/e.png": "",
    }  # fmt: skip
    assert scan.problems == ()
    assert scan.warnings == (
        f"images with an empty caption, {EMPTY}: 1 (d/b.png)",
        f"images without a caption, {EMPTY}: 2 (f/d.png, f/e.png)",
    )


def test_a_caption_file_goes_before_metadata_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "a.txt": "file", "metadata.csv": "file_name,text\na.png,row\n"})
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"a.png": "file"}
    assert scan.warnings == (
        "images with a caption file and a metadata row take the caption file: 1 (a.png)",
    )


def test_a_row_whose_image_is_missing_is_reported_with_its_line(tmp_path: Path) -> None:
    rows = [{"file_name": name, "text": "x"} for name in ("a.png", "gone.png", "a.psd", ".h.png")]
    write(tmp_path, {"d/a.png": b"", "d/a.psd": b"", "d/.h.png": b""})
    write(tmp_path, {"d/metadata.jsonl": "\n".join(map(json.dumps, rows))})
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"d/a.png": "x"}
    assert reasons(scan) == {
        "d/gone.png": Reason.MISSING_FILE,
        "d/a.psd": Reason.UNSUPPORTED_FORMAT,
        "d/.h.png": Reason.MISSING_FILE,
    }
    assert "d/metadata.jsonl line 2 names it" in scan.problems[-1].detail


def test_wrong_rows_are_all_named_in_one_error_with_file_and_line(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.png": b"", "d/b.png": b"",
            "metadata.jsonl": '{"file_name": "a.png", "text": "x"}\n'
                              '{"file_name": "d/b.png", "text": "x"}\n'
                              '{"file_name": "a.png", "text": "y"}\n'
                              "nonsense\n",
            "d/metadata.csv": "file_name,text\nb.png,z\n../a.png,z\n",
        },
    )  # fmt: skip
    with pytest.raises(PrebakeError) as caught:
        scan_folder(tmp_path)
    assert str(caught.value) == (
        "metadata.jsonl line 3: a.png has a row already, metadata.jsonl line 1; "
        "metadata.jsonl line 4: not JSON (Expecting value); "
        "d/metadata.csv line 2: b.png has a row already, metadata.jsonl line 2; "
        "d/metadata.csv line 3: file_name '../a.png' leads out of the metadata file's folder. "
        "Mend or remove these rows."
    )


def test_many_wrong_rows_stay_one_readable_line(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "metadata.jsonl": "x\n" * 1000})
    with pytest.raises(PrebakeError, match=r"line 5: .*; and 995 more. Mend"):
        scan_folder(tmp_path)


def test_parquet_metadata_is_warned_of(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "a.txt": "x", "metadata.parquet": b""})
    assert scan_folder(tmp_path).warnings == (
        "metadata.parquet is not read; save it as metadata.jsonl: 1 (metadata.parquet)",
    )


def test_kohya_repeat_folders_are_baked_with_a_warning_that_names_them(tmp_path: Path) -> None:
    names = ["10_cat/a.png", "10_cat/a.txt", "3_dog/a.png", "3_dog/a.txt", "cat_10/a.png"]
    write(
        tmp_path,
        dict.fromkeys([*names, "cat_10/a.txt", "7_empty/x/a.png", "7_empty/x/a.txt"], "x"),
    )
    scan = scan_folder(tmp_path)
    assert len(scan.images) == 4
    assert scan.warnings == (
        "folders named like kohya's repeats: their images are baked, repeats are not applied "
        "yet: 2 (10_cat, 3_dog)",
    )
    assert "1 (10_cat)" in scan_folder(tmp_path / "10_cat").warnings[0]


def test_hidden_files_and_folders_are_skipped_with_a_warning(tmp_path: Path) -> None:
    write(
        tmp_path, {"a.png": b"", "a.txt": "x", "._a.png": b"", ".git/b.png": b"", ".DS_Store": b""}
    )
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"a.png": "x"}
    assert scan.warnings == ("hidden files and folders are skipped: 2 (._a.png, .git)",)


def test_links_are_followed_but_never_round_in_circles(tmp_path: Path) -> None:
    real = write(
        tmp_path / "elsewhere", {"a.png": b"1", "a.txt": "x", "sub/b.png": b"", "sub/b.txt": "y"}
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "folder").symlink_to(real)
    (source / "twice").symlink_to(real)
    (source / "file.png").symlink_to(real / "a.png")
    (source / "file.txt").symlink_to(real / "a.txt")
    (real / "sub" / "up").symlink_to(real)
    (source / "self").symlink_to(source)
    scan = scan_folder(source)
    assert captions(scan) == {
        "file.png": "x", "folder/a.png": "x", "folder/sub/b.png": "y",
        "twice/a.png": "x", "twice/sub/b.png": "y",
    }  # fmt: skip
    assert scan.images[0].size_bytes == 1
    assert scan.warnings == (
        "links to a folder that they lie in are skipped: 3 (folder/sub/up, self, twice/sub/up)",
    )


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {"ok.png": b"", "ok.txt": "x", "c.png": b""})
    (tmp_path / "broken.png").symlink_to("nowhere.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "c.txt").symlink_to("nowhere.txt")
    os.mkfifo(tmp_path / "pipe.png")
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"ok.png": "x"}
    assert reasons(scan) == dict.fromkeys(
        ["broken.png", "c.png", "loop.png", "pipe.png"], Reason.UNREADABLE
    )
    assert "its caption file c.txt" in scan.problems[1].detail


def test_a_name_that_is_not_utf8_is_reported_printably(tmp_path: Path) -> None:
    write(tmp_path, {"ok.png": b"", "ok.txt": "x"})
    for name in (b"d\xff/a.png", b"d\xff/\xe4.jpg", b"d\xff/\xe4.psd"):
        write(tmp_path, {os.fsdecode(name): b""})
    scan = scan_folder(tmp_path)
    assert captions(scan) == {"ok.png": "x"}
    assert reasons(scan) == {
        "d\\xff/a.png": Reason.NAME_NOT_UTF8,
        "d\\xff/\\xe4.jpg": Reason.NAME_NOT_UTF8,
        "d\\xff/\\xe4.psd": Reason.UNSUPPORTED_FORMAT,
    }


@pytest.mark.parametrize("name", ["cat [1].png", "a%20b.png", "köln 猫.png", "a\nb.png", "-x.png"])
def test_odd_but_legal_names_are_samples(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: b"", name.replace(".png", ".txt"): "x"})
    assert captions(scan_folder(tmp_path)) == {name: "x"}


def test_a_folder_named_like_an_image_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"a.png/b.png": b"", "a.png/b.txt": "x", "c.png": b"", "c.txt/d.png": b""})
    assert captions(scan_folder(tmp_path)) == {"a.png/b.png": "x", "c.png": "", "c.txt/d.png": ""}


def test_only_problems_are_a_scan_and_not_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "a.txt": b"\xff"})
    assert reasons(scan_folder(tmp_path)) == {"a.png": Reason.CAPTION_UNDECODABLE}


def test_no_folder_a_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    write(tmp_path, {"empty/notes.md": "", "empty/.hidden.png": b""})
    with pytest.raises(PrebakeError, match=r"gone: expected a folder of images, .*does not exist"):
        scan_folder(tmp_path / "gone")
    with pytest.raises(PrebakeError, match=r"notes.md: expected a folder of images, .*is a file"):
        scan_folder(tmp_path / "empty/notes.md")
    with pytest.raises(PrebakeError, match=r"empty: no images in it or below \(looked for avif"):
        scan_folder(tmp_path / "empty")


def test_a_folder_that_cannot_be_listed_stops_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.png": b"", "locked/b.png": b""})
    scandir = os.scandir

    def refuse(path: str) -> object:  # tests may run as root, whom no mode bit stops
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PrebakeError, match=r"locked: cannot list this folder .Permission denied"):
        scan_folder(tmp_path)


def test_the_scan_does_not_depend_on_the_order_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"d{i}/{j}.png": b"" for i in range(3) for j in range(3)})
    write(tmp_path, {"d1/1.txt": "a", "d1/1.caption": "b", "d1/1.TXT": "c", "d2/2.txt": b"\xff"})
    forwards = scan_folder(tmp_path)
    assert captions(forwards)["d1/1.png"] == "c"  # of two spellings the first by code point
    scandir = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name)[::-1]

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    assert scan_folder(tmp_path) == forwards


def test_a_caption_or_metadata_file_that_never_ends_is_no_hang(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "b.png": b""})
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").symlink_to("/dev/zero")
    scan = scan_folder(tmp_path)
    assert reasons(scan) == dict.fromkeys(["a.png", "b.png"], Reason.UNREADABLE)
    assert {problem.detail for problem in scan.problems} == {
        "its caption file a.txt: it is no regular file",
        "its caption file b.txt: it is no regular file",
    }
    os.mkfifo(tmp_path / "metadata.jsonl")
    with pytest.raises(PrebakeError, match=r"metadata\.jsonl: it is no regular file"):
        scan_folder(tmp_path)


@pytest.mark.parametrize("mtime_s", [15_000_000_000, -15_000_000_000])
def test_a_time_that_no_index_can_hold_is_brought_within(tmp_path: Path, mtime_s: int) -> None:
    write(tmp_path, {"a.png": b""})
    os.utime(tmp_path / "a.png", ns=(0, mtime_s * 10**9))
    (image,) = scan_folder(tmp_path).images
    assert abs(image.mtime_ns) < 2**63


def test_a_scan_can_be_stopped(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"", "b.png": b""})

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        scan_folder(tmp_path, stop)
