"""What is to be done with one image: its file compared with what a store holds."""

import hashlib
from collections import Counter
from collections.abc import Collection

import numpy as np

from precompute.bake_keys import BakeKeys
from precompute.buckets import choose_geometry
from precompute.config import BakeConfig
from precompute.pixels import ImageSize, read_size
from precompute.problems import ImageProblem, Problem, Reason
from precompute.source import Scan, SourceImage
from precompute.work import Action, Work
from store_format.index import LiveIndex


class Known:
    """The live samples of a store: all by id and by latent key, and those of one source."""

    def __init__(self, index: LiveIndex, source: str, damaged: Collection[int] = ()) -> None:
        self.index = index
        samples, details = index.samples, index.sample_details
        self.ids: list[bytes] = samples["sample_id"].to_pylist()
        self.paths: list[str] = details["path"].to_pylist()
        self.row_of = {sample_id: row for row, sample_id in enumerate(self.ids)}
        self.sizes: list[int] = details["image_bytes"].to_pylist()
        self.mtimes: list[int] = details["image_mtime_ns"].to_pylist()
        self.sha256: list[bytes] = details["image_sha256"].to_pylist()
        self.latent_keys: list[bytes] = samples["latent_key"].to_pylist()
        self.text_keys: list[list[bytes]] = samples["text_keys"].to_pylist()
        self.damaged = frozenset(damaged)
        self.row_of_latents = {
            key: row for row, key in enumerate(self.latent_keys) if row not in self.damaged
        }
        self.originals = np.stack(
            [index.column("original_width_px"), index.column("original_height_px")], axis=1
        )
        self.file_sizes = set(self.sizes)
        self.of_source = [
            i for i, name in enumerate(details["source"].to_pylist()) if name == source
        ]

    def unchanged(self, sample_id: str, image: SourceImage) -> int | None:
        """Return the row of a sample whose file has the size and time that it had."""
        row = self.row_of.get(bytes.fromhex(sample_id))
        if row is None:
            return None
        same = (self.sizes[row], self.mtimes[row]) == (image.size_bytes, image.mtime_ns)
        return row if same else None


class Examiner:
    """Says of one image what is to be done with it; called by several threads."""

    def __init__(
        self,
        known: Known,
        from_donor: Known | None,
        bake_keys: BakeKeys,
        config: BakeConfig,
        scan: Scan,
    ) -> None:
        self._known, self._donor = known, from_donor
        self._keys, self._config = bake_keys, config
        repeated = {n for n, k in Counter(i.size_bytes for i in scan.images).items() if k > 1}
        self._worth_hashing = known.file_sizes | repeated
        if from_donor is not None:
            self._worth_hashing |= from_donor.file_sizes

    def __call__(self, image: SourceImage) -> Work | Problem:
        """Return the sample's work without what other samples decide, or why there is none."""
        try:
            return self._examine(image)
        except ImageProblem as problem:
            return Problem(image.path, problem.reason, problem.detail)
        except OSError as error:
            return Problem(image.path, Reason.UNREADABLE, error.strerror or str(error))

    def _examine(self, image: SourceImage) -> Work:
        known, config = self._known, self._config
        sample_id = self._keys.sample_id(image.path)
        row = known.row_of.get(bytes.fromhex(sample_id))
        size, sha256 = self._size_and_hash(sample_id, image)
        geometry = choose_geometry(
            size.width_px,
            size.height_px,
            config.resolution,
            config.bucket_step,
            upscale=config.upscale,
        )
        key = bytes.fromhex(self._keys.latent_key(sha256, geometry)) if sha256 else None
        work = Work(image, sample_id, Action.ADD, "new", size, geometry, sha256)
        if row is not None and key == known.latent_keys[row] and row not in known.damaged:
            work.row = row
            if known.text_keys[row] == [bytes.fromhex(self._keys.text(image.caption).text_key)]:
                work.action, work.why = Action.REUSE, "unchanged"
                work.is_touched = known.unchanged(sample_id, image) is None
            else:
                work.action, work.why = Action.TEXT_ONLY, "caption changed"
        elif key is not None and (other := known.row_of_latents.get(key)) is not None:
            work.action, work.why, work.row = Action.COPY, "equal latents are stored", other
        elif (
            key is not None
            and self._donor is not None
            and (other := self._donor.row_of_latents.get(key)) is not None
        ):
            work.action, work.why = Action.COPY, "equal latents are in the store to --reuse"
            work.row, work.is_taken_over = other, True
        elif row is not None:
            work.action, work.why = Action.REENCODE, self._why_again(row, sha256)
        return work

    def _why_again(self, row: int, sha256: str | None) -> str:
        if sha256 != self._known.sha256[row].hex():
            return "image changed"
        damaged = row in self._known.damaged
        return "stored tensors are damaged" if damaged else "decode rules or geometry changed"

    def _size_and_hash(self, sample_id: str, image: SourceImage) -> tuple[ImageSize, str | None]:
        """Return an image's size, and the hash of its bytes where that is known or can help."""
        if not self._config.rehash:
            for known in (self._known, self._donor):
                row = known.unchanged(sample_id, image) if known is not None else None
                if known is not None and row is not None:
                    width_px, height_px = (int(n) for n in known.originals[row])
                    return ImageSize(width_px, height_px), known.sha256[row].hex()
        size = read_size(image.file, self._config.max_megapixels * 1_000_000)
        is_known = bytes.fromhex(sample_id) in self._known.row_of
        if is_known or image.size_bytes in self._worth_hashing:
            return size, _sha256(image)
        return size, None


def _sha256(image: SourceImage) -> str:
    with image.file.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
