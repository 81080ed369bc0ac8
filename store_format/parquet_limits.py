"""How large a Parquet file gets when it is read, worked out before anything is allocated.

A few kB can say "this string, a million times", or state any number of values in a page. Arrow
believes both: a file of 10 kB was seen to ask for a terabyte. So the headers of all pages are
added up first. They are parsed here, and so is the footer: no library shows page headers, and
pyarrow ends the process where a footer names, say, an unknown codec.

Source: Apache Parquet format 2.11, `parquet.thrift` and Encodings.md; Thrift compact protocol
(thrift-compact-protocol.md). Numbers of fields are those of `parquet.thrift`.
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

MIN_LIMIT_BYTES = 64 << 20  # what any file may take,
MAX_EXPANSION = 512  # plus so many times its own size. Real segments take 2 to 60 times

_LEVEL_BYTES = 4  # of a value in Arrow: its definition and its repetition level
_BYTE_ARRAY, _FIXED_LEN_BYTE_ARRAY = 6, 7
_ITEM_BYTES = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8, _BYTE_ARRAY: 4}  # by physical type
_REPEATED = 2
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _DELTA_LENGTH_BYTE_ARRAY, _RLE_DICTIONARY = 0, 2, 6, 8
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_MAX_DEPTH = 16

# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (
    *range(1, 11),
    12,
)
_INTEGER_BITS = {_I16: 16, _I32: 32, _I64: 64}
Fields = dict[int, Any]  # of a Thrift struct: values by number << 4 | type; of a string, its place


class _MalformedError(ValueError):
    """These are no bytes of Thrift, or not those that were looked for."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A leaf of the schema."""

    top: str  # name of the column of the table that it is part of
    physical_type: int
    item_bytes: int  # of one value, 4 for the length of a string
    is_repeated: bool


@dataclass(frozen=True, slots=True)
class _Page:
    kind: int
    start: int  # of its bytes behind the header
    compressed_bytes: int
    uncompressed_bytes: int
    num_values: int
    encoding: int


@dataclass(slots=True)
class _Strings:
    """Strings that are entries of a dictionary: as large as the longest of them allows."""

    num_values: int
    dictionary: _Page
    codec: int

    def bytes_at_most(self) -> int:
        return self.num_values * self.dictionary.uncompressed_bytes

    def bytes_by_longest(self, data: bytes) -> int:
        """Return the bound after a look at the dictionary."""
        page = self.dictionary
        plain: Any = memoryview(data)[page.start : page.start + page.compressed_bytes]
        if self.codec not in _CODECS:
            return self.bytes_at_most()
        if codec := _CODECS[self.codec]:
            plain = pa.decompress(pa.py_buffer(plain), page.uncompressed_bytes, codec)
        return self.num_values * _longest(memoryview(plain))


def check_expansion(
    data: bytes, columns: Collection[str], row_groups: Sequence[int] | None = None
) -> None:
    """Raise ValueError if reading some columns of a file could take far more memory than the file.

    Args:
        data: the bytes of the file.
        columns: names of top-level columns.
        row_groups: which ones will be read; default: all.
    """
    limit = MIN_LIMIT_BYTES + MAX_EXPANSION * len(data)
    num_bytes = 0
    strings: list[_Strings] = []
    leaves, groups = _footer(data)
    for number in range(len(groups)) if row_groups is None else row_groups:
        chunks = _structs(groups[number], 1)
        if len(chunks) != len(leaves):
            raise ValueError(f"row group {number} has {len(chunks)} columns, not {len(leaves)}")
        num_rows = _integer_of(groups[number], 3, _I64)
        for leaf, chunk in zip(leaves, chunks, strict=True):
            if leaf.top.split(".")[0] in columns:
                num_bytes += _bytes_of_chunk(data, _struct_of(chunk, 3), leaf, num_rows, strings)
    strings.sort(key=_Strings.bytes_at_most)
    total = num_bytes + sum(each.bytes_at_most() for each in strings)
    while total > limit >= num_bytes and strings:
        largest = strings.pop()
        total += largest.bytes_by_longest(data) - largest.bytes_at_most()
    if total > limit:
        raise ValueError(f"{len(data)} bytes that would become {total} in memory")


def _footer(data: bytes) -> tuple[list[_Column], list[Fields]]:
    """Return the leaves of the schema, and the row groups."""
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[-4:] != b"PAR1" or length > len(data) - 12:
        raise ValueError("no Parquet file")
    footer = data[len(data) - 8 - length : len(data) - 8]
    fields, _ = _struct(footer, 0)
    return _leaves(footer, _structs(fields, 2)), _structs(fields, 4)


def _leaves(footer: bytes, elements: list[Fields]) -> list[_Column]:
    """Return the leaves of a schema, whose elements come depth first."""
    leaves: list[_Column] = []
    left = iter(elements)
    root = next(left, {})
    # For each element that is open: how many children are to come, name of its column, repeated?
    stack = [(_integer_of(root, 5, _I32, 0), "", False)]
    for element in left:
        while stack and stack[-1][0] == 0:
            stack.pop()
        if not stack or len(stack) > _MAX_DEPTH:
            raise _MalformedError("a schema that is no tree")
        num_left, top, is_repeated = stack.pop()
        stack.append((num_left - 1, top, is_repeated))
        start, stop = element.get(4 << 4 | _BINARY, (0, 0))  # its name
        top = top or footer[start:stop].decode("utf-8", "replace")
        is_repeated |= _integer_of(element, 3, _I32, 0) == _REPEATED
        if num_children := _integer_of(element, 5, _I32, 0):
            stack.append((num_children, top, is_repeated))
            continue
        kind = _integer_of(element, 1, _I32)
        fixed = kind == _FIXED_LEN_BYTE_ARRAY
        item_bytes = _integer_of(element, 2, _I32) if fixed else _ITEM_BYTES.get(kind, 0)
        if item_bytes <= 0:
            raise _MalformedError("a column without a type")
        leaves.append(_Column(top, kind, item_bytes, is_repeated))
    return leaves


def _bytes_of_chunk(
    data: bytes, chunk: Fields, leaf: _Column, num_rows: int, strings: list[_Strings]
) -> int:
    """Bound the memory of a column in a row group, but for `strings`, to which it may add some."""
    is_string = leaf.physical_type == _BYTE_ARRAY
    codec, stated = _integer_of(chunk, 4, _I32), _integer_of(chunk, 5, _I64)
    total = num_values = 0
    dictionary = None
    for page in _pages(data, chunk) if stated else ():  # of no values, no page is looked for
        total += page.uncompressed_bytes
        if page.kind == _DICTIONARY_PAGE:
            if dictionary or page.num_values * leaf.item_bytes > page.uncompressed_bytes:
                raise ValueError(f"column {leaf.top} has an impossible dictionary")
            dictionary = page
        elif page.kind in (_DATA_PAGE, _DATA_PAGE_V2):
            num_values += page.num_values
            total += page.num_values * (leaf.item_bytes + _LEVEL_BYTES)
            if not is_string or page.encoding in (_PLAIN, _DELTA_LENGTH_BYTE_ARRAY):
                continue
            if page.encoding not in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):  # of prefixes
                total += page.num_values * page.uncompressed_bytes
            elif dictionary is not None:
                strings.append(_Strings(page.num_values, dictionary, codec))
    if num_values != stated:
        raise ValueError(f"column {leaf.top} has {num_values} values, not {stated}")
    if num_values < num_rows or (num_values > num_rows and not leaf.is_repeated):
        raise ValueError(f"column {leaf.top} has {num_values} values in {num_rows} rows")
    return total


def _pages(data: bytes, chunk: Fields) -> Iterator[_Page]:
    """Yield the pages of a column chunk, as Arrow's reader finds them."""
    start = _integer_of(chunk, 9, _I64)
    dictionary = _integer_of(chunk, 11, _I64, 0)
    if 0 < dictionary < start:
        start = dictionary
    stop = start + _integer_of(chunk, 7, _I64)
    if not 0 <= start <= stop <= len(data):
        raise ValueError("a column lies outside of the file")
    while start < stop:
        page = _page(data, start)
        start = page.start + page.compressed_bytes
        if start > stop:
            raise ValueError("a page ends outside of its column")
        yield page


def _page(data: bytes, start: int) -> _Page:
    """Parse the header of the page at `start`."""
    fields, start = _struct(data, start)
    kind = _integer_of(fields, 1, _I32)
    sizes = _integer_of(fields, 3, _I32), _integer_of(fields, 2, _I32)
    num_values, encoding = 0, _PLAIN
    if number := {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}.get(kind):
        about = _struct_of(fields, number)
        num_values = _integer_of(about, 1, _I32)
        encoding = _integer_of(about, 4 if kind == _DATA_PAGE_V2 else 2, _I32)
    if min(*sizes, num_values) < 0:
        raise _MalformedError("a page of a negative size")
    return _Page(kind, start, *sizes, num_values, encoding)


# Thrift. A field is known by number and type: of another type it is none, as for Arrow's parser.
# What the two could read otherwise is refused: fields that do not ascend, numbers too large for
# their type.


def _integer_of(fields: Fields, number: int, kind: int, default: int | None = None) -> int:
    value = fields.get(number << 4 | kind, default)
    if value is None:
        raise _MalformedError(f"field {number} is missing")
    return int(value)


def _struct_of(fields: Fields, number: int) -> Fields:
    value = fields.get(number << 4 | _STRUCT)
    if value is None:
        raise _MalformedError(f"field {number} is missing")
    return dict(value)


def _structs(fields: Fields, number: int) -> list[Fields]:
    """Return a field that is a list of structs."""
    values = fields.get(number << 4 | _LIST)
    if values is None:
        raise _MalformedError(f"field {number} is missing, or no list of structs")
    return list(values)


def _struct(data: bytes, start: int, depth: int = 0) -> tuple[Fields, int]:
    """Parse a struct; return its fields and where it ends."""
    try:
        return _parse_struct(data, start, depth)
    except IndexError:
        raise _MalformedError("a struct that ends early") from None


def _parse_struct(data: bytes, start: int, depth: int) -> tuple[Fields, int]:
    if depth > _MAX_DEPTH:
        raise _MalformedError("a struct that lies too deep")
    fields: Fields = {}
    number = 0
    value: Any
    while header := data[start]:
        start += 1
        kind = header & 15
        if header > 15:
            number += header >> 4
        else:
            before = number
            number, start = _zigzag(data, start)
            if number <= before:
                raise _MalformedError("fields that do not ascend")
        if _I16 <= kind <= _I64:
            value = data[start]
            if value < 128:  # nearly all
                value, start = (value >> 1) ^ -(value & 1), start + 1
            else:
                value, start = _zigzag(data, start)
                if value >> _INTEGER_BITS[kind] - 1 not in (0, -1):
                    raise _MalformedError("a number that is too large for its type")
        elif kind == _BINARY:
            length, start = _varint(data, start)
            value = (start, start + length)
            start += length
        elif kind == _STRUCT:
            value, start = _parse_struct(data, start, depth + 1)
        elif kind in (_LIST, _SET):
            value, start = _parse_list(data, start, depth + 1)
        elif kind in (_TRUE, _FALSE):
            value = kind == _TRUE
        else:
            value, start = None, start + _size_of(kind)
        fields[number << 4 | kind] = value
    if number >> 15:  # Arrow's parser would take them for smaller ones
        raise _MalformedError("fields that do not ascend")
    return fields, start + 1


def _parse_list(data: bytes, start: int, depth: int) -> tuple[list[Fields] | None, int]:
    """Parse a list of structs, or pass over one of other values."""
    kind, length = data[start] & 15, data[start] >> 4
    start += 1
    if length == 15:
        length, start = _varint(data, start)
    if length > len(data):
        raise _MalformedError("a list that ends early")
    if kind == _STRUCT:
        values = []
        for _ in range(length):
            value, start = _parse_struct(data, start, depth)
            values.append(value)
        return values, start
    if kind == _BINARY:
        for _ in range(length):
            num_bytes, start = _varint(data, start)
            start += num_bytes
    elif kind in _INTEGER_BITS:
        for _ in range(length):
            _, start = _varint(data, start)
    elif length:
        start += length * _size_of(kind)
    return None, start


def _size_of(kind: int) -> int:
    """Return the bytes of a value of fixed size; in a list, a truth value has one."""
    if kind in (_TRUE, _FALSE, _BYTE):
        return 1
    if kind == _DOUBLE:
        return 8
    raise _MalformedError(f"type {kind}, which Parquet does not use there")


def _zigzag(data: bytes, start: int) -> tuple[int, int]:
    value, start = _varint(data, start)
    return (value >> 1) ^ -(value & 1), start


def _varint(data: bytes, start: int) -> tuple[int, int]:
    byte = data[start]
    if byte < 128:
        return byte, start + 1
    value = 0
    for shift in range(0, 70, 7):
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
    raise _MalformedError("a number without an end")


def _longest(plain: memoryview) -> int:
    """Return the length of the longest of the strings that lie one after the other."""
    position = longest = 0
    last = len(plain) - 4
    length_at = struct.Struct("<I").unpack_from
    while position <= last:
        [length] = length_at(plain, position)
        if length > longest:
            longest = length
        position += 4 + length
    return longest
