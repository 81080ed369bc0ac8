"""What a bake has to do and why, worked out before any model is loaded.

Every image of the scan ends in exactly one place: kept as it is, given other texts, copied from
equal latents that the store holds already, encoded, or named as a problem.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from precompute.buckets import Geometry, choose_geometry
from precompute.config import BakeConfig
from precompute.pixels import DECODE_RULES_VERSION, ImageSize, parse_background, read_size
from precompute.problems import ImageProblem, Problem, Reason
from precompute.source import Scan, SourceImage
from store_format import keys
from store_format.errors import PrebakeError
from store_format.index import LiveIndex
from store_format.manifest import Dtype, Encoders
from store_format.rows import SampleRow, Text, Tombstone

EXAMINE_AT_ONCE = 64  # images for a thread: handing over each by itself costs more than a look
FULL_NAMES: dict[str, Dtype] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


class Action(StrEnum):
    """What happens to one sample."""

    REUSE = "reuse"
    """Nothing: image and texts are stored."""
    TEXT_ONLY = "text only"
    """Its texts changed; its latents are kept."""
    COPY = "copy"
    """A new or changed sample whose latents the store (or this run) holds under another name."""
    ADD = "add"
    """A new sample: encode."""
    REENCODE = "re-encode"
    """Its image changed: encode."""


@dataclass(slots=True)
class Work:
    """One sample of the plan. `row` is a live row that holds its latents, where there is one."""

    image: SourceImage
    sample_id: str
    action: Action
    why: str
    size: ImageSize
    geometry: Geometry
    image_sha256: str | None
    row: int | None = None
    same_pixels: "list[Work]" = field(default_factory=list)

    @property
    def bucket_px(self) -> tuple[int, int]:
        """(width, height)."""
        return self.geometry.bucket_width_px, self.geometry.bucket_height_px


class BakeKeys:
    """Ids and keys under one bake's configuration."""

    def __init__(self, config: BakeConfig, encoders: Encoders, compute_dtype: str, length: int):
        self.source = _checked_source(config)
        self.background = parse_background(config.background)
        self._posterior = config.posterior
        self._dtypes = {
            "compute_dtype": FULL_NAMES[compute_dtype],
            "stored_dtype": FULL_NAMES[config.dtype],
        }
        self._encoders = encoders
        self._text_encoders = [(e.identity, e.tokenizer_identity) for e in encoders.text]
        self._clip_skip = config.clip_skip
        self._length = length

    def sample_id(self, path: str) -> str:
        """Return the id of the image at `path` of this source."""
        return keys.sample_id(self.source, path)

    def text(self, caption: str) -> Text:
        """Return a caption with its key."""
        key = keys.text_key(
            caption,
            encoders=self._text_encoders,
            max_token_length=self._length,
            clip_skip=self._clip_skip,
            **self._dtypes,
        )
        return Text(caption, key)

    def latent_key(self, image_sha256: str, geometry: Geometry) -> str:
        """Return the key of an image's latents."""
        vae = self._encoders.vae
        return keys.latent_key(
            image_sha256,
            decode_rules=DECODE_RULES_VERSION,
            bucket=(geometry.bucket_width_px, geometry.bucket_height_px),
            resized=(geometry.resized_width_px, geometry.resized_height_px),
            crop=(geometry.crop_left_px, geometry.crop_top_px),
            flipped=False,
            background=self.background,
            vae=vae.identity,
            scaling_factor=vae.scaling_factor,
            shift_factor=vae.shift_factor,
            posterior=self._posterior,
            **self._dtypes,
        )

    def sample_row(self, work: Work, image_sha256: str) -> SampleRow:
        """Return the index row of a sample, without its place."""
        geometry = work.geometry
        return SampleRow(
            sample_id=work.sample_id,
            source=self.source,
            path=work.image.path,
            image_sha256=image_sha256,
            image_bytes=work.image.size_bytes,
            image_mtime_ns=work.image.mtime_ns,
            latent_key=self.latent_key(image_sha256, geometry),
            original_px=(work.size.width_px, work.size.height_px),
            resized_px=(geometry.resized_width_px, geometry.resized_height_px),
            crop_px=(geometry.crop_left_px, geometry.crop_top_px),
            bucket_px=work.bucket_px,
            texts=(self.text(work.image.caption),),
        )


def _checked_source(config: BakeConfig) -> str:
    """Return the source's name, which is part of ids: some text in UTF-8."""
    name = config.source
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    if not name or shown != name:
        raise PrebakeError(
            f"the folder's name {shown!r} cannot name a source: it must be text in UTF-8. "
            "Give --source-name."
        )
    return name


@dataclass(frozen=True)
class Plan:
    """All that a run will do; `to_write` is in the order in which it is done."""

    reused: int
    to_write: list[Work]
    dropped: list[Tombstone]
    problems: list[Problem]
    num_of_source_before: int

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many samples there are of each (action, reason)."""
        counts: Counter[tuple[str, str]] = Counter()
        if self.reused:
            counts["reuse", "unchanged"] = self.reused
        for work in self.samples():
            counts[work.action.value, work.why] += 1
        if self.dropped:
            counts["drop", "image is gone from the source"] = len(self.dropped)
        for problem in self.problems:
            counts["not stored", problem.reason.value] += 1
        return counts

    def samples(self) -> Iterator[Work]:
        """Yield every sample that is written."""
        for work in self.to_write:
            yield work
            yield from work.same_pixels

    def num_to_encode(self) -> int:
        """Return how many images go through the VAE."""
        return sum(work.row is None for work in self.to_write)


class _Known:
    """The live samples of one source, by id; and all live latents, by key."""

    def __init__(self, index: LiveIndex, source: str) -> None:
        self.index = index
        samples = index.samples
        self.ids: list[bytes] = samples["sample_id"].to_pylist()
        self.paths: list[str] = samples["path"].to_pylist()
        self.row_of = {sample_id: row for row, sample_id in enumerate(self.ids)}
        self.sizes: list[int] = samples["image_bytes"].to_pylist()
        self.mtimes: list[int] = samples["image_mtime_ns"].to_pylist()
        self.sha256: list[bytes] = samples["image_sha256"].to_pylist()
        self.latent_keys: list[bytes] = samples["latent_key"].to_pylist()
        self.text_keys: list[list[bytes]] = samples["text_keys"].to_pylist()
        self.row_of_latents = {key: row for row, key in enumerate(self.latent_keys)}
        self.originals = np.stack(
            [index.column("original_width_px"), index.column("original_height_px")], axis=1
        )
        self.file_sizes = set(self.sizes)
        self.of_source = [
            i for i, name in enumerate(samples["source"].to_pylist()) if name == source
        ]


def make_plan(
    scan: Scan,
    index: LiveIndex,
    bake_keys: BakeKeys,
    config: BakeConfig,
    progress: Callable[[int], object] = lambda count: None,
) -> Plan:
    """Compare a scan with a store.

    A file whose size and modification time equal those in the index counts as unchanged; of any
    other only the header is read, and its bytes are hashed where that can save an encoding.
    """
    known = _Known(index, config.source)
    works: list[Work] = []
    problems = list(scan.problems)
    repeated = {n for n, k in Counter(i.size_bytes for i in scan.images).items() if k > 1}
    worth_hashing = known.file_sizes | repeated

    def examine(image: SourceImage) -> Work | Problem:
        try:
            return _examine(image, known, bake_keys, config, worth_hashing)
        except ImageProblem as problem:
            return Problem(image.path, problem.reason, problem.detail)
        except OSError as error:
            return Problem(image.path, Reason.UNREADABLE, error.strerror or str(error))

    starts = range(0, len(scan.images), EXAMINE_AT_ONCE)
    parts = (scan.images[start : start + EXAMINE_AT_ONCE] for start in starts)
    with ThreadPoolExecutor(config.num_workers) as pool:
        for part in pool.map(lambda images: [examine(image) for image in images], parts):
            for found in part:
                (works if isinstance(found, Work) else problems).append(found)  # type: ignore[arg-type]
            progress(len(part))
    paths = {image.path for image in scan.images}
    paths |= {p.path for p in scan.problems if p.reason is not Reason.MISSING_FILE}
    present = {bake_keys.sample_id(path) for path in paths}
    dropped = [
        Tombstone(known.ids[row].hex(), config.source, known.paths[row])
        for row in known.of_source
        if known.ids[row].hex() not in present
    ]
    return Plan(
        reused=sum(work.action is Action.REUSE for work in works),
        to_write=_ordered(_group(works, bake_keys)),
        dropped=dropped,
        problems=problems,
        num_of_source_before=len(known.of_source),
    )


def _examine(
    image: SourceImage,
    known: _Known,
    bake_keys: BakeKeys,
    config: BakeConfig,
    worth_hashing: set[int],
) -> Work:
    sample_id = bake_keys.sample_id(image.path)
    row = known.row_of.get(bytes.fromhex(sample_id))
    untouched = (
        row is not None
        and known.sizes[row] == image.size_bytes
        and known.mtimes[row] == image.mtime_ns
    )
    sha256: str | None
    if untouched and row is not None:
        width_px, height_px = (int(n) for n in known.originals[row])
        size, sha256 = ImageSize(width_px, height_px), known.sha256[row].hex()
    else:
        size = read_size(image.file)
        sha256 = None
        if row is not None or image.size_bytes in worth_hashing:
            sha256 = _sha256(image)
    geometry = choose_geometry(
        size.width_px,
        size.height_px,
        config.resolution,
        config.bucket_step,
        upscale=config.upscale,
    )
    key = bytes.fromhex(bake_keys.latent_key(sha256, geometry)) if sha256 else None
    work = Work(image, sample_id, Action.ADD, "new", size, geometry, sha256)
    if row is not None and key == known.latent_keys[row]:
        work.row = row
        if known.text_keys[row] == [bytes.fromhex(bake_keys.text(image.caption).text_key)]:
            work.action, work.why = Action.REUSE, "unchanged"
        else:
            work.action, work.why = Action.TEXT_ONLY, "caption changed"
    elif key is not None and (other := known.row_of_latents.get(key)) is not None:
        work.action, work.why, work.row = Action.COPY, "equal latents are stored", other
    elif row is not None:
        same_image = sha256 == known.sha256[row].hex()
        why = "decode rules or geometry changed" if same_image else "image changed"
        work.action, work.why = Action.REENCODE, why
    return work


def _sha256(image: SourceImage) -> str:
    with image.file.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _group(works: Iterable[Work], bake_keys: BakeKeys) -> list[Work]:
    """Hang samples of equal pixels that must be encoded under the first of them."""
    first_of: dict[str, Work] = {}
    grouped = []
    for work in works:
        if work.action is Action.REUSE:
            continue
        if work.row is None and work.image_sha256 is not None:
            key = bake_keys.latent_key(work.image_sha256, work.geometry)
            first = first_of.setdefault(key, work)
            if first is not work:
                work.action, work.why = Action.COPY, "equal image in this run"
                first.same_pixels.append(work)
                continue
        grouped.append(work)
    return grouped


def _ordered(works: list[Work]) -> list[Work]:
    """Order by bucket; in a bucket what needs no encoding first."""
    by_bucket: defaultdict[tuple[int, int], list[Work]] = defaultdict(list)
    for work in works:
        by_bucket[work.bucket_px].append(work)
    return [
        work
        for bucket in sorted(by_bucket)
        for work in sorted(by_bucket[bucket], key=lambda w: (w.row is None, w.image.path))
    ]
