"""How large a Parquet file gets when it is read, worked out before anything is allocated.

A few kB can say "this string, a million times", or state any number of values in a page. Arrow
believes both: a file of 10 kB was seen to ask for a terabyte. So the headers of all pages are
added up first; they are read here, because no library shows them.

Source: Apache Parquet format 2.11, `parquet.thrift` (PageHeader) and Encodings.md; Thrift compact
protocol (thrift-compact-protocol.md).
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MIN_LIMIT_BYTES = 64 << 20  # what any file may take,
MAX_EXPANSION = 512  # plus so many times its own size. Real segments take 2 to 60 times

_FIXED_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LEVEL_BYTES = 4  # of a value in Arrow: its definition and its repetition level
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _DELTA_LENGTH_BYTE_ARRAY, _RLE_DICTIONARY = 0, 2, 6, 8
_MAX_DEPTH = 8


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
    """A column of strings that are entries of a dictionary: as large as the longest lets them."""

    num_values: int
    dictionary: _Page
    compression: str

    def bytes_at_most(self) -> int:
        return self.num_values * self.dictionary.uncompressed_bytes

    def bytes_by_longest(self, data: memoryview) -> int:
        """Return the bound after a look at the dictionary."""
        page = self.dictionary
        stored = data[page.start : page.start + page.compressed_bytes]
        plain: Any = stored
        if self.compression != "UNCOMPRESSED":
            codec = {"LZ4": "lz4_raw"}.get(self.compression, self.compression.lower())
            plain = pa.decompress(pa.py_buffer(stored), page.uncompressed_bytes, codec)
        return self.num_values * _longest(memoryview(plain))


def check_expansion(
    file: pq.ParquetFile, data: bytes, columns: Collection[str], row_groups: Sequence[int]
) -> None:
    """Raise ValueError if reading some columns of a file could take far more memory than the file.

    Args:
        file: the file, opened.
        data: its bytes.
        columns: names of top-level columns.
        row_groups: which ones will be read.
    """
    view = memoryview(data)
    limit = MIN_LIMIT_BYTES + MAX_EXPANSION * len(data)
    num_bytes = 0
    strings: list[_Strings] = []
    for number in row_groups:
        group = file.metadata.row_group(number)
        for position in range(group.num_columns):
            leaf = file.schema.column(position)
            if leaf.path.split(".")[0] in columns:
                chunk = group.column(position)
                num_bytes += _bytes_of_chunk(view, chunk, leaf, group.num_rows, strings)
    strings.sort(key=_Strings.bytes_at_most)
    total = num_bytes + sum(each.bytes_at_most() for each in strings)
    while total > limit >= num_bytes and strings:
        largest = strings.pop()
        total += largest.bytes_by_longest(view) - largest.bytes_at_most()
    if total > limit:
        raise ValueError(f"{len(data)} bytes that would become {total} in memory")


def _bytes_of_chunk(
    data: memoryview, chunk: Any, leaf: Any, num_rows: int, strings: list[_Strings]
) -> int:
    """Bound the memory of a column in a row group, but for `strings`, to which it may add some."""
    is_string = chunk.physical_type == "BYTE_ARRAY"
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        item_bytes = leaf.length
    else:
        item_bytes = 4 if is_string else _FIXED_BYTES[chunk.physical_type]
    total = num_values = 0
    dictionary = None
    for page in _pages(data, chunk) if chunk.num_values else ():  # of none, no page is looked for
        total += page.uncompressed_bytes
        if page.kind == _DICTIONARY_PAGE:
            if dictionary or page.num_values * item_bytes > page.uncompressed_bytes:
                raise ValueError(f"column {leaf.path} has an impossible dictionary")
            dictionary = page
        elif page.kind in (_DATA_PAGE, _DATA_PAGE_V2):
            num_values += page.num_values
            total += page.num_values * (item_bytes + _LEVEL_BYTES)
            if not is_string or page.encoding in (_PLAIN, _DELTA_LENGTH_BYTE_ARRAY):
                continue
            if page.encoding not in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):  # of prefixes
                total += page.num_values * page.uncompressed_bytes
            elif dictionary is not None:
                strings.append(_Strings(page.num_values, dictionary, chunk.compression))
    if num_values != chunk.num_values:
        raise ValueError(f"column {leaf.path} has {num_values} values, not {chunk.num_values}")
    if num_values < num_rows or (num_values > num_rows and leaf.max_repetition_level == 0):
        raise ValueError(f"column {leaf.path} has {num_values} values in {num_rows} rows")
    return total


def _pages(data: memoryview, chunk: Any) -> Iterator[_Page]:
    """Yield the pages of a column chunk, as Arrow's reader finds them."""
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    stop = start + chunk.total_compressed_size
    if not 0 <= start <= stop <= len(data):
        raise ValueError("a column lies outside of the file")
    while start < stop:
        page = _page(data, start)
        start = page.start + page.compressed_bytes
        if start > stop:
            raise ValueError("a page ends outside of its column")
        yield page


def _page(data: memoryview, start: int) -> _Page:
    """Parse the header of the page at `start`."""
    try:
        fields, start = _struct(data, start, 0)
        kind, uncompressed, compressed = fields[1], fields[2], fields[3]
        about = fields.get({_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}.get(kind, 0), {})
        num_values = about.get(1, 0)
        encoding = about.get(4 if kind == _DATA_PAGE_V2 else 2, _PLAIN)
    except (IndexError, KeyError, AttributeError, TypeError):
        raise ValueError("a page without a header") from None
    if min(uncompressed, compressed, num_values) < 0:
        raise ValueError("a page of a negative size")
    return _Page(kind, start, compressed, uncompressed, num_values, encoding)


def _struct(data: memoryview, start: int, depth: int) -> tuple[dict[int, Any], int]:
    """Parse a Thrift struct: its integers and structs by field number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    if depth > _MAX_DEPTH:
        raise IndexError
    while kind := data[start]:
        start += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, start = _integer(data, start)
        fields[number], start = _value(data, start, kind & 15, depth)
    return fields, start + 1


def _value(data: memoryview, start: int, kind: int, depth: int) -> tuple[Any, int]:
    """Parse a value of a Thrift type, and say where it ends; strings and lists are passed over."""
    if kind in (1, 2):  # true, false
        return kind == 1, start
    if kind == 3:  # one byte
        return data[start], start + 1
    if kind in (4, 5, 6):  # integers of 16, 32, 64 bits
        return _integer(data, start)
    if kind == 7:  # a float
        return None, start + 8
    if kind == 8:  # a string
        length, start = _varint(data, start)
        return None, start + length
    if kind in (9, 10):  # list, set
        header, start = data[start], start + 1
        length = header >> 4
        if length == 15:
            length, start = _varint(data, start)
        for _ in range(length):
            item = header & 15
            # Alone in a list, a truth value has a byte.
            _, start = _value(data, start, 3 if item in (1, 2) else item, depth + 1)
        return None, start
    if kind == 12:
        return _struct(data, start, depth + 1)
    raise IndexError


def _integer(data: memoryview, start: int) -> tuple[int, int]:
    value, start = _varint(data, start)
    return (value >> 1) ^ -(value & 1), start


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
    raise IndexError


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
