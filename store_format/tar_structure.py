"""The members of a tar, compared with FORMAT.md, section 7.2, and with the index.

Of each member the headers are read, never its tensor. What prebake wrote is recognized byte for
byte; what another writer may have written otherwise is parsed.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import Any

from store_format.index import Ints
from store_format.keys import canonical_json
from store_format.manifest import NUMPY_DTYPES, TensorSpec
from store_format.rows import SampleRow, TextRow
from store_format.strict_json import parse_json
from store_format.structure import ShardFacts, WrongStructureError, open_file, read_exactly
from store_format.webdataset_layout import (
    BLOCK_BYTES,
    describe,
    member_header,
    npy_header,
    row_json,
)

MAX_JSON_BYTES = 16 << 20  # of one row
# Fields of a header. Source: POSIX.1-2017, pax, "ustar Interchange Format".
_MAGIC = slice(257, 265)
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.XHDTYPE: "a pax extension",
    tarfile.XGLTYPE: "a pax extension",
    tarfile.GNUTYPE_LONGNAME: "a GNU extension",
    tarfile.GNUTYPE_LONGLINK: "a GNU extension",
    tarfile.GNUTYPE_SPARSE: "a GNU extension",
}
# As numpy writes it. A parser of Python literals would let other spellings pass, which no writer
# of the format has.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([^']*)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\), \} *\n"
)
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_SAMPLE_KEY = re.compile(r"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?")
_TEXT_KEY = re.compile(r"[0-9a-f]{32}")


def tar_problems(facts: ShardFacts) -> Iterator[str]:
    """Yield the first thing that tar readers would not find as it should be."""
    [entry] = facts.entry.files
    try:
        with open_file(facts.store, entry) as descriptor:
            _Tar(descriptor, entry.bytes, facts).check()
    except WrongStructureError as error:
        yield str(error)


class _Tensor:
    """What the members of one tensor of a row have in common."""

    def __init__(self, spec: TensorSpec, text: int, cells: tuple[int, int] | None) -> None:
        self.suffix = f".{spec.name}.{text}.npy" if text else f".{spec.name}.npy"
        self.dtype = NUMPY_DTYPES[spec.dtype]
        self.shape = spec.row_shape(cells)
        self.row_bytes = spec.row_bytes(cells)
        self.npy_header = npy_header(self.dtype, self.shape)
        self.header = member_header(self.suffix, len(self.npy_header) + self.row_bytes)


class _Tar:
    """A tar that is walked from its first member to its end."""

    def __init__(self, descriptor: int, num_bytes: int, facts: ShardFacts) -> None:
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        self._facts = facts
        self._position = 0
        self._variant = [_Tensor(spec, 0, facts.cells) for spec in facts.specs]
        inline = facts.store.manifest.text_tensors if facts.entry.kind == "samples" else ()
        self._text_specs = inline
        self._texts: list[list[_Tensor]] = []  # for each text of a row

    def check(self) -> None:
        """Raise WrongStructureError at the first member that is not as it should be."""
        starts, offsets, _ = self._facts.spots
        places = self._facts.places.tolist()
        live: Iterator[tuple[int, SampleRow | TextRow | None]]
        live = zip(places, self._facts.described(), strict=True)
        place, row = next(live, (-1, None))
        number = 0
        for r in range(self._facts.entry.rows):
            if r == place and row is not None:
                self._check_live(row, offsets[starts[number] : starts[number + 1]])
                place, row = next(live, (-1, None))
                number += 1
            else:
                self._check_dead()
        end = read_exactly(self._descriptor, self._num_bytes - self._position, self._position)
        if end != bytes(2 * BLOCK_BYTES):
            raise WrongStructureError(
                f"after {self._facts.entry.rows} rows, at byte {self._position}, it does not end "
                f"with two blocks of zeros"
            )

    def _check_live(self, row: SampleRow | TextRow, offsets: Ints) -> None:
        key, about, num_texts = describe(row, bool(self._text_specs))
        found = [self._pass_tensor(key, tensor) for tensor in self._variant]
        for text in range(num_texts):
            found += [self._pass_tensor(key, tensor) for tensor in self._tensors_of_text(text)]
        if found != offsets.tolist():
            raise WrongStructureError(
                f"the tensors of {key} begin at bytes {found}, in the index at {offsets.tolist()}"
            )
        expected = row_json(about)
        data = self._pass_json(key, len(expected))
        if data != expected and canonical_json(_parse(key, data)) != canonical_json(about):
            raise WrongStructureError(f"{key}.json does not say what the index says")

    def _check_dead(self) -> None:
        """Check a row that the index no longer knows: its form, and that its json is its own."""
        name = self._next_name()
        key = name.partition(".")[0]
        of_samples = self._facts.entry.kind == "samples"
        if not (parts := (_SAMPLE_KEY if of_samples else _TEXT_KEY).fullmatch(key)):
            raise WrongStructureError(f"member {name!r} has a key that is no id")
        for tensor in self._variant:
            self._pass_tensor(key, tensor)
        text = 0
        while self._text_specs and self._next_name() != f"{key}.json":
            for tensor in self._tensors_of_text(text):
                self._pass_tensor(key, tensor)
            text += 1
        about = _parse(key, self._pass_json(key, 0))
        own = {"sample_id": parts[1], "variant": int(parts[2] or 0)} if of_samples else {}
        own = own or {"text_key": key}
        if not isinstance(about, dict) or any(about.get(name) != own[name] for name in own):
            raise WrongStructureError(f"{key}.json is of another row")

    def _tensors_of_text(self, text: int) -> list[_Tensor]:
        if text == len(self._texts):
            self._texts.append([_Tensor(spec, text, None) for spec in self._text_specs])
        return self._texts[text]

    def _pass_tensor(self, key: str, tensor: _Tensor) -> int:
        """Check a member that holds a tensor; return where its data begin."""
        expected = tensor.header.of(key) + tensor.npy_header
        start, head_bytes = self._position + BLOCK_BYTES, len(tensor.npy_header)
        size = head_bytes + tensor.row_bytes
        if read_exactly(self._descriptor, len(expected), self._position) != expected:
            name = f"{key}{tensor.suffix}"
            size = self._size_of(name)
            head_bytes = self._check_npy_header(name, tensor, start, size)
            if size != head_bytes + tensor.row_bytes:
                raise WrongStructureError(
                    f"member {name} holds {size - head_bytes} bytes of numbers, expected "
                    f"{tensor.row_bytes}"
                )
        self._move_behind(start + size)
        return start + head_bytes

    def _check_npy_header(self, name: str, tensor: _Tensor, start: int, size: int) -> int:
        """Parse the npy header at `start` in a member of `size` bytes; return its length."""
        head = read_exactly(self._descriptor, len(_NPY_MAGIC) + 2, start)
        if not head.startswith(_NPY_MAGIC):
            raise WrongStructureError(f"member {name} is no npy file of version 1.0")
        length = len(head) + int.from_bytes(head[len(_NPY_MAGIC) :], "little")
        if length > size:
            raise WrongStructureError(f"the npy header of member {name} is cut short")
        text = read_exactly(self._descriptor, length - len(head), start + len(head))
        match = _NPY_HEADER.fullmatch(text)
        found = (
            [part.decode("latin-1").replace(" ", "") for part in match.groups()] if match else []
        )
        shape = str(tensor.shape)
        if found != [tensor.dtype.str, "False", shape[1:-1].replace(" ", "")]:
            raise WrongStructureError(
                f"member {name} is an npy of {text[:200].strip()!r}, expected dtype "
                f"{tensor.dtype.str}, shape {shape}, C order"
            )
        return length

    def _pass_json(self, key: str, expected_bytes: int) -> bytes:
        """Check the member that ends a row, of `expected_bytes` perhaps; return its content."""
        expected = member_header(".json", expected_bytes).of(key)
        start, size = self._position + BLOCK_BYTES, expected_bytes
        data = read_exactly(self._descriptor, BLOCK_BYTES + size, self._position)
        if data.startswith(expected):
            self._move_behind(start + size)
            return data[BLOCK_BYTES:]
        size = self._size_of(f"{key}.json")
        if size > MAX_JSON_BYTES:
            raise WrongStructureError(f"member {key}.json has {size} bytes, too many for a row")
        self._move_behind(start + size)
        return read_exactly(self._descriptor, size, start)

    def _size_of(self, name: str) -> int:
        """Return the size of the next member, which must have a name."""
        found, num_bytes = self._next_member()
        if found != name:
            raise WrongStructureError(
                f"member {found!r} at byte {self._position}, expected {name!r}"
            )
        return num_bytes

    def _next_name(self) -> str:
        return self._next_member()[0]

    def _next_member(self) -> tuple[str, int]:
        """Return name and size of the next member, which must be a plain regular file."""
        block = read_exactly(self._descriptor, BLOCK_BYTES, self._position)
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            what = f"at byte {self._position} is no tar header ({error})"
            raise WrongStructureError(what) from None
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            kind = _KINDS.get(info.type, f"of type {info.type!r}")
            raise WrongStructureError(f"member {info.name!r} is {kind}, no regular file")
        if block[_MAGIC] != b"ustar\x0000":
            raise WrongStructureError(f"member {info.name!r} is not in ustar format")
        owner = (info.mode, info.mtime, info.uid, info.gid, info.uname, info.gname, info.linkname)
        if owner != (0o644, 0, 0, 0, "", "", ""):
            raise WrongStructureError(f"member {info.name!r} has mode, time, owner {owner}")
        if not 0 <= info.size <= self._num_bytes - self._position:
            raise WrongStructureError(f"member {info.name!r} ends outside of the tar")
        return info.name, info.size

    def _move_behind(self, stop: int) -> None:
        """Go on at the block behind a member that ends at `stop`."""
        self._position = stop + -stop % BLOCK_BYTES
        if self._position > self._num_bytes:
            raise WrongStructureError("its last member ends outside of it")


def _parse(key: str, data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise WrongStructureError(f"{key}.json is not valid JSON ({error})") from None
