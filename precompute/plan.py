"""What a bake has to do and why, worked out before any model is loaded.

Every image of the scan ends in exactly one place: kept as it is, given other texts, copied from
equal latents that are stored already, encoded, or named as a problem.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import nsmallest

from precompute.bake_keys import BakeKeys
from precompute.config import BakeConfig
from precompute.examine import Examiner, Known
from precompute.problems import Problem, Reason
from precompute.source import Scan
from precompute.work import Action, Work
from store_format.index import LiveIndex
from store_format.rows import Text, Tombstone

GONE = "image is gone from the source"
NUM_EXAMPLES = 3
EXAMINE_AT_ONCE = 64  # images for a thread: handing over each by itself costs more than a look


@dataclass(frozen=True)
class Plan:
    """All that a run will do; `to_write` is in the order in which it is done.

    `touched` are unchanged images of another modification time, to be noted in the index so that
    the next run need not hash them.
    """

    reused: int = 0
    touched: list[Work] = field(default_factory=list)
    to_write: list[Work] = field(default_factory=list)
    dropped: list[Tombstone] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_of_source_before: int = 0

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many samples there are of each (action, reason)."""
        counts: Counter[tuple[str, str]] = Counter()
        if self.reused:
            counts["reuse", "unchanged"] = self.reused
        for work in self.samples():
            counts[work.action.value, work.why] += 1
        if self.dropped:
            counts["drop", GONE] = len(self.dropped)
        for problem in self.problems:
            counts["not stored", problem.reason.value] += 1
        return counts

    def examples(self) -> dict[tuple[str, str], list[str]]:
        """Return the first few files of each (action, reason) but of those that are new."""
        found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for work in self.samples():
            if work.action is not Action.ADD:
                found[work.action.value, work.why].append(work.image.path)
        for tombstone in self.dropped:
            found["drop", GONE].append(tombstone.path)
        for problem in self.problems:
            found["not stored", problem.reason.value].append(problem.path)
        return {key: nsmallest(NUM_EXAMPLES, paths) for key, paths in found.items()}

    def samples(self) -> Iterator[Work]:
        """Yield every sample that is written."""
        for work in self.to_write:
            yield work
            yield from work.same_pixels

    def num_to_encode(self) -> int:
        """Return how many images go through the VAE."""
        return sum(work.row is None for work in self.to_write)


@dataclass(frozen=True)
class Repair:
    """What a repair may write: damaged rows of the store anew, and what its index has lost.

    Attributes:
        sample_rows: live rows that cannot be read.
        texts: those whose text rows cannot be read, or are lost.
        is_index_damaged: whether samples may be missing, so that new ones are welcome.
    """

    sample_rows: frozenset[int] = frozenset()
    texts: tuple[Text, ...] = ()
    is_index_damaged: bool = False

    @property
    def text_keys(self) -> frozenset[str]:
        """The keys of `texts`."""
        return frozenset(text.text_key for text in self.texts)


def make_plan(
    scan: Scan,
    index: LiveIndex,
    bake_keys: BakeKeys,
    config: BakeConfig,
    progress: Callable[[int], object] = lambda count: None,
    *,
    donor: LiveIndex | None = None,
    repair: Repair | None = None,
) -> Plan:
    """Compare a scan with a store.

    A file whose size and modification time equal those in the index counts as unchanged; of any
    other only the header is read, and its bytes are hashed where that can save an encoding.

    Args:
        scan: the images, or this worker's part of them.
        index: the store.
        bake_keys: ids and keys of the bake.
        config: the bake.
        progress: is told how many images were examined.
        donor: the store whose equal rows are taken over.
        repair: write only what this allows, and drop nothing.
    """
    known = Known(index, config.source, repair.sample_rows if repair else ())
    from_donor = Known(donor, config.source) if donor is not None else None
    examine = Examiner(known, from_donor, bake_keys, config, scan)
    works: list[Work] = []
    problems = list(scan.problems)
    starts = range(0, len(scan.images), EXAMINE_AT_ONCE)
    parts = (scan.images[start : start + EXAMINE_AT_ONCE] for start in starts)
    with ThreadPoolExecutor(config.num_workers) as pool:
        for part in pool.map(lambda images: [examine(image) for image in images], parts):
            for found in part:
                (works if isinstance(found, Work) else problems).append(found)  # type: ignore[arg-type]
            progress(len(part))
    if repair is not None:
        works = [work for work in works if _is_for_repair(work, known, repair)]
    is_whole = config.part == (1, 1) and repair is None
    return Plan(
        reused=sum(work.action is Action.REUSE for work in works),
        touched=[work for work in works if work.is_touched],
        to_write=_ordered(_group(works, bake_keys)),
        dropped=_gone(scan, known, bake_keys, config) if is_whole else [],
        problems=problems,
        num_of_source_before=len(known.of_source),
    )


def _is_for_repair(work: Work, known: Known, repair: Repair) -> bool:
    row = known.row_of.get(bytes.fromhex(work.sample_id))
    return repair.is_index_damaged if row is None else row in repair.sample_rows


def _gone(scan: Scan, known: Known, bake_keys: BakeKeys, config: BakeConfig) -> list[Tombstone]:
    """Return the samples of the source whose image a whole scan does not find."""
    paths = {image.path for image in scan.images}
    paths |= {p.path for p in scan.problems if p.reason is not Reason.MISSING_FILE}
    present = {bake_keys.sample_id(path) for path in paths}
    return [
        Tombstone(known.ids[row].hex(), config.source, known.paths[row])
        for row in known.of_source
        if known.ids[row].hex() not in present
    ]


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
