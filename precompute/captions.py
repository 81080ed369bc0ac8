"""What caption and metadata files say: bytes to one line of text an image.

The rules for a caption: UTF-8, with or without a byte order mark (UTF-16 only with its mark, as
Windows Notepad writes it); any line ending; each line loses the white space around it
and the commas at its end; empty lines are dropped; the rest is joined with ", ".

    b"a cat, \r\n\r\n  on a mat,,\n"  ->  "a cat, on a mat"

The result is the exact text that is encoded and that the text key is made of, so a
change of these rules changes stores.

Metadata is Hugging Face's imagefolder form, JSON lines or CSV: `file_name` relative to the
metadata file's own folder and never out of it; the caption in `text`, else `caption`, where
null means none. The rules for captions hold for it too.
Source: https://huggingface.co/docs/datasets/image_dataset ("ImageFolder").
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from precompute.problems import ImageProblem, Reason

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """One row: a normalised posix path below the metadata file's folder, and its caption."""

    file_name: str
    caption: str | None


def decode_caption(data: bytes) -> str:
    """Return the caption that a caption file holds; an empty file gives "".

    Raises:
        ImageProblem: CAPTION_UNDECODABLE where `data` is not UTF-8 (or UTF-16 with a
            byte order mark), or holds NUL.
    """
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"  # takes the byte order from the mark and drops the mark
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ImageProblem(
            Reason.CAPTION_UNDECODABLE,
            f"byte {error.start} of the caption is not {encoding.removesuffix('-sig').upper()}; "
            "save the caption file as UTF-8",
        ) from error
    return clean_caption(text)


def clean_caption(text: str) -> str:
    """Return `text` as one line, by the rules at the head of this file.

    Raises:
        ImageProblem: CAPTION_UNDECODABLE where `text` holds NUL (UTF-16 or UTF-32 without
            a mark looks like that) or half of a surrogate pair (a broken JSON escape).
    """
    if "\0" in text:
        raise ImageProblem(
            Reason.CAPTION_UNDECODABLE,
            f"the caption holds a NUL character at position {text.index(chr(0))}; "
            "save it as UTF-8 text",
        )
    if _LONE_SURROGATE.search(text):
        raise ImageProblem(
            Reason.CAPTION_UNDECODABLE,
            "the caption holds half of a surrogate pair; write the character itself",
        )
    lines = (_without_end(line.strip()) for line in text.splitlines())
    return ", ".join(line for line in lines if line)


def _without_end(line: str) -> str:
    """Drop commas and white space at the end. (A regular expression takes quadratic time.)"""
    end = len(line)
    while end and (line[end - 1] == "," or line[end - 1].isspace()):
        end -= 1
    return line[:end]


def parse_metadata(data: bytes, *, is_csv: bool) -> Iterator[tuple[int, MetadataRow | str]]:
    """Yield (line number, row) of a metadata file, or (line number, what is wrong there).

    A CSV row over several lines has the number of its last.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield data.count(b"\n", 0, error.start) + 1, "not UTF-8"
        return
    for line, row in (_csv_rows if is_csv else _json_rows)(text):
        yield line, row if isinstance(row, str) else _check_row(row)


def _csv_rows(text: str) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(2**31 - 1)  # its default is 128 KiB; captions may be longer
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            whole = None not in row and None not in row.values()
            yield reader.line_num, row if whole else "more or fewer fields than the header names"
    except csv.Error as error:
        yield reader.reader.line_num, f"not CSV ({error})"


def _json_rows(text: str) -> Iterator[tuple[int, object]]:
    for line, row in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 is legal JSON
        if row.strip():
            try:
                content = json.loads(row)
            except (ValueError, RecursionError) as error:
                # .msg: the whole text would name line 1, as it knows only this row.
                message = error.msg if isinstance(error, json.JSONDecodeError) else error
                yield line, f"not JSON ({message})"
            else:
                yield line, content if isinstance(content, dict) else "not a JSON object"


def _check_row(row: object) -> MetadataRow | str:
    """Return the row, or what is wrong with it."""
    assert isinstance(row, dict)
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        return f"expected a path as file_name, found {name!r:.40}"
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path == ".." or re.match(r"[A-Za-z]:[\\/]", path):
        return f"file_name {name!r} leads out of the metadata file's folder"
    if "text" not in row and "caption" not in row:
        return "neither a text nor a caption column"
    caption = row["text"] if "text" in row else row["caption"]
    if not isinstance(caption, str | None):
        return f"expected a string as caption, found {caption!r:.40}"
    return MetadataRow(path, caption)
