"""Caption text rules and metadata rows: bytes in, text or what is wrong out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.captions import MetadataRow, clean_caption, decode_caption, parse_metadata
from precompute.problems import ImageProblem, Reason


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a cat", "a cat"),
        (b"a cat\n", "a cat"),
        (b"\xef\xbb\xbfa cat\r\n", "a cat"),  # UTF-8 with its mark
        (b"  a cat, \r\n\r\n\t on a mat,, ,\n", "a cat, on a mat"),
        (b"a cat\ron a mat", "a cat, on a mat"),
        (b"a, b\nc", "a, b, c"),  # commas inside stay
        (b", a", ", a"),  # so does one in front
        (b"", ""),
        (b"\xef\xbb\xbf", ""),
        (b" ,\r\n,, \n", ""),
        ("日本の猫、座る\n".encode(), "日本の猫、座る"),
        (b"\xff\xfe" + "a cat ü\r\n".encode("utf-16-le"), "a cat ü"),
        (b"\xfe\xff" + "a cat ü\r\n".encode("utf-16-be"), "a cat ü"),
    ],
)
def test_a_caption_file_gives_one_clean_line(data: bytes, expected: str) -> None:
    assert decode_caption(data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("ein Käfer".encode("latin-1"), "byte 5 of the caption is not UTF-8"),
        (b"\xff\xfea", "is not UTF-16"),
        (b"\xff\xfe\x00\xd8", "is not UTF-16"),  # half of a surrogate pair
        ("a cat".encode("utf-16-le"), "NUL character at position 1"),  # without its mark
        ("a cat".encode("utf-32"), "NUL character"),
        (b"\xed\xa0\x80", "is not UTF-8"),  # a surrogate in UTF-8
        (b"a\0cat", "NUL character at position 1"),
    ],
)
def test_what_is_no_text_is_a_caption_problem(data: bytes, message: str) -> None:
    with pytest.raises(ImageProblem, match=message) as caught:
        decode_caption(data)
    assert caught.value.reason is Reason.CAPTION_UNDECODABLE


def test_half_a_surrogate_pair_from_a_json_escape_is_a_caption_problem() -> None:
    with pytest.raises(ImageProblem, match="surrogate"):
        clean_caption("a \ud83d cat")


@given(st.binary(max_size=60))
def test_any_bytes_give_text_or_a_caption_problem(data: bytes) -> None:
    try:
        caption = decode_caption(data)
    except ImageProblem:
        return
    assert len(caption.splitlines()) <= 1
    assert caption.encode() == caption.strip().encode()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean_caption(clean_caption(text)) == clean_caption(text)


def test_json_lines_are_read_with_text_before_caption_and_null_as_none() -> None:
    data = (
        b'\xef\xbb\xbf{"file_name": "a.png", "text": "one", "caption": "x"}\r\n'
        b'\n{"file_name": "./d//b.png", "caption": "two\\nlines", "label": 3}\n'
        b'{"file_name": "c.png", "text": null}\n'
        b'{"file_name": "d/../e.png", "text": "\xe2\x80\xa8"}'
    )
    assert list(parse_metadata(data, is_csv=False)) == [
        (1, MetadataRow("a.png", "one")),
        (3, MetadataRow("d/b.png", "two\nlines")),
        (4, MetadataRow("c.png", None)),
        (5, MetadataRow("e.png", "\u2028")),
    ]


def test_csv_is_read_with_quotes_and_numbered_by_line() -> None:
    data = b'file_name,text\r\na.png,"a ""big"" cat, sitting"\r\nb.png,"two\nlines"\r\nc.png,\r\n'
    assert list(parse_metadata(data, is_csv=True)) == [
        (2, MetadataRow("a.png", 'a "big" cat, sitting')),
        (4, MetadataRow("b.png", "two\nlines")),
        (5, MetadataRow("c.png", "")),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"file_name": "a.png", "text": ', "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "a"}', "expected a path as file_name, found None"),
        (b'{"file_name": 7, "text": "a"}', "expected a path as file_name, found 7"),
        (b'{"file_name": "", "text": "a"}', "expected a path as file_name, found ''"),
        (b'{"file_name": "a.png"}', "neither a text nor a caption column"),
        (b'{"file_name": "a.png", "text": ["a"]}', "expected a string as caption"),
        (b'{"file_name": "../a.png", "text": "a"}', "leads out of"),
        (b'{"file_name": "d/../../a.png", "text": "a"}', "leads out of"),
        (b'{"file_name": "..", "text": "a"}', "leads out of"),
        (b'{"file_name": "/etc/a.png", "text": "a"}', "leads out of"),
        (b'{"file_name": "//a.png", "text": "a"}', "leads out of"),
        (b'{"file_name": "C:\\\\a.png", "text": "a"}', "leads out of"),
        (b'{"file_name": "\xff"}', "not UTF-8"),
    ],
)
def test_a_wrong_json_row_is_named_with_its_line(row: bytes, message: str) -> None:
    data = b'{"file_name": "ok.png", "text": "fine"}\n' + row + b"\n"
    line, mistake = list(parse_metadata(data, is_csv=False))[-1]
    assert line == 2
    assert isinstance(mistake, str)
    assert message in mistake


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"file_name,text\na.png,one,two\n", 2, "more or fewer fields"),
        (b"file_name,text\na.png\n", 2, "more or fewer fields"),
        (b"name,text\na.png,one\n", 2, "expected a path as file_name"),
        (b"file_name,label\na.png,one\n", 2, "neither a text nor a caption"),
        (b'file_name,text\na.png,"one\n', 2, "not CSV"),
        (b"file_name,text\na.png,\xff\n", 2, "not UTF-8"),
    ],
)
def test_a_wrong_csv_row_is_named_with_its_line(data: bytes, line: int, message: str) -> None:
    ((found_line, mistake),) = parse_metadata(data, is_csv=True)
    assert found_line == line
    assert isinstance(mistake, str)
    assert message in mistake


def test_a_long_run_of_commas_takes_no_time() -> None:
    caption = "a" + ", " * 500_000 + "b"
    start_s = time.process_time()
    assert clean_caption(f"{caption}{', ' * 500_000}") == caption
    assert time.process_time() - start_s < 5


def test_a_csv_field_may_be_as_long_as_a_caption_file() -> None:
    text = "word " * 100_000
    rows = list(parse_metadata(f"file_name,text\na.png,{text}\n".encode(), is_csv=True))
    assert rows == [(2, MetadataRow("a.png", text))]
