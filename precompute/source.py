"""A folder of images and captions to the list of samples, without opening an image.

Files: every folder below the given one; names ending in IMAGE_SUFFIXES, in any letter case.
Hidden files and folders (a leading dot) are skipped, with a warning. A link to a file counts
as a file. A link to a folder is followed, unless it leads back to a folder it lies in, which
is skipped with a warning. Each image-looking file ends up as exactly one image or one
problem; whether its bytes are an image is for `pixels.read_size` to say.

A scan is whole or it fails: a folder that cannot be listed is a PrebakeError, because images
that merely were not seen would otherwise be dropped from the store.

Captions, the first that exists:

1. NAME.txt, then NAME.caption, beside NAME.png (their suffix in any letter case, the name
   exactly). `a.png` and `a.jpg` share `a.txt` and are two samples.
2. The image's row in a `metadata.jsonl` or `metadata.csv` of its own or any higher folder
   (`captions.parse_metadata`); a second row for one image is an error.
3. None: baked with the empty prompt, as with an empty caption; a warning counts them.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from precompute.captions import clean_caption, decode_caption, parse_metadata
from precompute.problems import ImageProblem, Problem, Reason
from store_format.errors import PrebakeError

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif"}
    | {".heic", ".heif"}
)
UNSUPPORTED_SUFFIXES = frozenset(
    {".jxl", ".jp2", ".psd", ".tga", ".svg", ".ico", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
)
CAPTION_SUFFIXES = (".txt", ".caption")  # in order of precedence
METADATA_NAMES = ("metadata.csv", "metadata.jsonl")
_MAX_INT64 = 2**63 - 1
_KOHYA_REPEATS = re.compile(r"\d+_.+")

# Kinds of warning; each is one line with a count and the first three paths.
_HIDDEN = "hidden files and folders are skipped"
_LOOP = "links to a folder that they lie in are skipped"
_NO_CAPTION = "images without a caption, which get the empty prompt if they are baked"
_EMPTY_CAPTION = "images with an empty caption, which get the empty prompt if they are baked"
_SEVERAL = "images with several caption files take the first of .txt, .caption"
_BOTH = "images with a caption file and a metadata row take the caption file"
_REPEATS = "folders named like kohya's repeats: their images are baked, repeats are not applied yet"
_PARQUET = "metadata.parquet is not read; save it as metadata.jsonl"


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One image file with its caption. `path` is posix, relative to the source."""

    path: str
    file: Path
    size_bytes: int
    mtime_ns: int
    caption: str


@dataclass(frozen=True)
class Scan:
    """All that a source holds: images and problems, each sorted by path, and warnings."""

    images: tuple[SourceImage, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Folder:
    """What one folder holds of interest. `prefix` is "" or its posix path with a slash."""

    directory: Path
    prefix: str
    images: list[os.DirEntry[str]] = field(default_factory=list)
    subfolders: list[os.DirEntry[str]] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    captions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    metadata: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    """One metadata row: its caption, and where it stands, for messages."""

    caption: str | None
    where: str


class _Warnings(defaultdict[str, list[str]]):
    """Paths by kind of warning."""

    def lines(self) -> tuple[str, ...]:
        return tuple(f"{kind}: {_count_and_first(paths)}" for kind, paths in sorted(self.items()))


def scan_folder(folder: Path, check: Callable[[], object] = lambda: None) -> Scan:
    """Return every image below `folder` with its caption, every problem, every warning.

    `check` is called between files; what it raises ends the scan.

    Raises:
        PrebakeError: where `folder` is no folder, holds nothing that looks like an image,
            or cannot be listed whole; and for wrong metadata rows, all of them together.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises below a locked folder
        found = "is a file" if os.path.exists(folder) else "does not exist"  # noqa: PTH110
        raise PrebakeError(
            f"{folder}: expected a folder of images, but it {found}. Check the path."
        )
    warnings = _Warnings(list)
    folders = []
    for listing in _walk(folder, warnings):
        folders.append(listing)
        check()
    rows = _read_metadata(folders)
    images: list[SourceImage] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for listing in folders:
        for name in listing.unsupported:
            seen.add(path := listing.prefix + name)
            detail = "prebake does not read this format; save it as PNG or JPEG"
            problems.append(Problem(_shown(path), Reason.UNSUPPORTED_FORMAT, detail))
        for entry in listing.images:
            check()
            seen.add(path := listing.prefix + entry.name)
            try:
                images.append(_source_image(entry, listing, rows.get(path), warnings))
            except ImageProblem as problem:
                problems.append(Problem(_shown(path), problem.reason, problem.detail))
    if not seen:
        raise PrebakeError(
            f"{folder}: no images in it or below (looked for "
            f"{', '.join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))}). Check the path."
        )
    for path in rows.keys() - seen:
        detail = f"{rows[path].where} names it, but no such image is there (or it is hidden)"
        problems.append(Problem(_shown(path), Reason.MISSING_FILE, detail))
    return Scan(
        tuple(sorted(images, key=lambda image: image.path)),
        tuple(sorted(problems, key=lambda problem: problem.path)),
        warnings.lines(),
    )


def _walk(root: Path, warnings: _Warnings) -> Iterator[_Folder]:
    """Yield every folder from `root` down, in an order that depends on names only."""
    pending: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(str(root), "", frozenset())]
    while pending:
        path, prefix, ancestors = pending.pop()
        try:
            status = os.stat(path)  # noqa: PTH116 - strings here: a Path each costs more than this
            with os.scandir(path) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise PrebakeError(
                f"{_shown(path)}: cannot list this folder ({error.strerror}), and a scan must be "
                f"whole. Make it readable or move it out of {root}."
            ) from error
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:
            warnings[_LOOP].append(prefix.rstrip("/"))
            continue
        folder = _sort_in(listed, _Folder(Path(path), prefix), warnings)
        name = prefix.rstrip("/") or root.resolve().name
        if folder.images and _KOHYA_REPEATS.fullmatch(posixpath.basename(name)):
            warnings[_REPEATS].append(name)
        yield folder
        pending += [
            (sub.path, f"{prefix}{sub.name}/", ancestors | {identity})
            for sub in reversed(folder.subfolders)
        ]


def _sort_in(listed: list[os.DirEntry[str]], folder: _Folder, warnings: _Warnings) -> _Folder:
    """Put each entry where it belongs in `folder`, by what its name says; return `folder`."""
    for entry in listed:
        name = entry.name
        suffix = posixpath.splitext(name)[1].lower()
        is_folder = _is_folder(entry)
        if name.startswith("."):
            if is_folder or suffix in IMAGE_SUFFIXES:
                warnings[_HIDDEN].append(folder.prefix + name)
        elif is_folder:
            folder.subfolders.append(entry)
        elif suffix in IMAGE_SUFFIXES:
            folder.images.append(entry)
        elif suffix in UNSUPPORTED_SUFFIXES:
            folder.unsupported.append(name)
        elif suffix in CAPTION_SUFFIXES:
            folder.captions[name[: -len(suffix)]].append(name)
        elif name in METADATA_NAMES:
            folder.metadata.append(name)
        elif name == "metadata.parquet":
            warnings[_PARQUET].append(folder.prefix + name)
    return folder


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()  # follows links
    except OSError:  # a link to itself: named by its suffix, and refused when it is read
        return False


def _source_image(
    entry: os.DirEntry[str], folder: _Folder, row: _Row | None, warnings: _Warnings
) -> SourceImage:
    """Return one image with its caption, or raise the ImageProblem that keeps it out."""
    path = folder.prefix + entry.name
    if path != _shown(path):
        raise ImageProblem(Reason.NAME_NOT_UTF8, "the name is not UTF-8; rename the file")
    try:
        status = entry.stat()  # the only one
    except OSError as error:
        raise ImageProblem(Reason.UNREADABLE, error.strerror or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageProblem(Reason.UNREADABLE, "it is no regular file")
    caption = _caption(path, folder, row, warnings)
    mtime_ns = max(-_MAX_INT64, min(status.st_mtime_ns, _MAX_INT64))  # some clocks are far ahead
    return SourceImage(path, folder.directory / entry.name, status.st_size, mtime_ns, caption)


def _caption(path: str, folder: _Folder, row: _Row | None, warnings: _Warnings) -> str:
    """Return the caption of the image at `path`, by the order at the head of this file."""
    stem = posixpath.splitext(posixpath.basename(path))[0]
    names = folder.captions.get(stem, [])
    if len(names) > 1:
        warnings[_SEVERAL].append(path)
    if names and row:
        warnings[_BOTH].append(path)
    if names:
        name = min(names, key=_precedence)
        try:
            # No pathlib: on a million files it costs more than the reading.
            caption = decode_caption(_read_regular(f"{folder.directory}/{name}"))
        except OSError as error:
            raise ImageProblem(
                Reason.UNREADABLE, f"its caption file {name}: {error.strerror}"
            ) from error
    elif row and row.caption is not None:
        caption = clean_caption(row.caption)
    else:
        warnings[_NO_CAPTION].append(path)
        return ""
    if not caption:
        warnings[_EMPTY_CAPTION].append(path)
    return caption


def _read_regular(path: str) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which would be read without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        return file.read()


def _precedence(caption_file: str) -> tuple[int, str]:
    return CAPTION_SUFFIXES.index(posixpath.splitext(caption_file)[1].lower()), caption_file


def _read_metadata(folders: list[_Folder]) -> dict[str, _Row]:
    """Return the rows of all metadata files by image path relative to the source.

    Raises:
        PrebakeError: naming file and line of every wrong row.
    """
    rows: dict[str, _Row] = {}
    mistakes: list[str] = []
    for folder in folders:
        for name in folder.metadata:
            try:
                data = _read_regular(f"{folder.directory}/{name}")
            except OSError as error:
                mistakes.append(f"{_shown(folder.prefix + name)}: {error.strerror}")
                continue
            for line, row in parse_metadata(data, is_csv=name.endswith(".csv")):
                where = f"{_shown(folder.prefix + name)} line {line}"
                if isinstance(row, str):
                    mistakes.append(f"{where}: {row}")
                    continue
                path = folder.prefix + row.file_name
                if path in rows:
                    mistakes.append(
                        f"{where}: {row.file_name} has a row already, {rows[path].where}"
                    )
                rows[path] = _Row(row.caption, where)
    if mistakes:
        rest = f"; and {len(mistakes) - 5} more" if len(mistakes) > 5 else ""
        raise PrebakeError(f"{'; '.join(mistakes[:5])}{rest}. Mend or remove these rows.")
    return rows


def _shown(path: str) -> str:
    """Return `path` as text that can be printed; bytes that are not UTF-8 as \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _count_and_first(paths: list[str]) -> str:
    """Return "5 (a.png, b.png, c.png, ...)"."""
    first = ", ".join(_shown(path) for path in sorted(paths)[:3])
    return f"{len(paths)} ({first}{', ...' if len(paths) > 3 else ''})"
