"""What a bake says to the person who waits: the plan before it, the summary after it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from precompute.buckets import cropped_fraction
from precompute.config import BakeConfig
from precompute.plan import Plan
from precompute.problems import Problem
from precompute.work import Action
from store_format.errors import one_line
from store_format.folders import folder_of
from store_format.index import LiveIndex
from store_format.manifest import Manifest
from store_format.wording import counted

REPORT_NAME = "report.jsonl"
MUCH_CROPPED = 0.5


@dataclass
class Summary:
    """What a run did."""

    plan: Plan
    num_stored: int = 0
    num_by_others: int = 0
    num_images_encoded: int = 0
    num_captions_encoded: int = 0
    num_captions_taken_over: int = 0
    num_images_retried: int = 0
    captions_cut: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    buckets: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False


def report_name(config: BakeConfig) -> str:
    """Return the name of the report in the store; each of several workers has its own."""
    number, of = config.part
    return REPORT_NAME if of == 1 else f"report.{number}-of-{of}.jsonl"


def describe_plan(
    plan: Plan,
    manifest: Manifest,
    config: BakeConfig,
    index: LiveIndex,
    num_captions_to_encode: int,
    say: Callable[[str], None],
) -> None:
    """Say what the run will do and why, what it will write, and how much room there is.

    Of few files of a kind it names all, of many the first.
    """
    say = _in_lines(say)
    part = "" if config.part == (1, 1) else f", part {config.worker}"
    say(f"plan for {config.out} (source '{config.source}'{part}):")
    if not plan.num_of_source_before and len(index):
        others = Counter(index.sample_details["source"].to_pylist()).most_common(3)
        named = ", ".join(f"'{name}': {count}" for name, count in others)
        say(
            f"  note: this adds a source to those that the store holds ({named}). If these are "
            f"the same images in another folder, give --source-name"
        )
    examples = plan.examples()
    rows = [
        (str(count), action, _with_examples(why, count, examples.get((action, why), [])))
        for (action, why), count in sorted(plan.counts().items())
    ]
    for line in _table([("files", "action", "why"), *rows]):
        say(line)
    cropped = heavily_cropped(plan)
    if cropped:
        say(
            f"  warning: the crop takes over half of {counted(len(cropped), 'image')}, such as "
            f"{cropped[0]}"
        )
    buckets: Counter[tuple[int, int]] = Counter(work.bucket_px for work in plan.samples())
    if not buckets:
        return
    encoded = Counter(work.bucket_px for work in plan.to_write if work.row is None)
    per_bucket = [
        (str(n), f"{w} x {h}", str(encoded[w, h])) for (w, h), n in sorted(buckets.items())
    ]
    for line in _table([("files", "bucket", "to encode"), *per_bucket]):
        say(line)
    num_captions = len({work.image.caption for work in plan.samples()})
    say(
        f"  {counted(num_captions, 'different caption')} for {counted(buckets.total(), 'image')} "
        f"({num_captions / buckets.total():.0%}); to encode: {num_captions_to_encode}"
    )
    num_bytes = bytes_to_write(plan, manifest, index)
    free = folder_of(config.out).free_bytes()
    room = "" if free is None else f"; {free / 2**20:.0f} MiB are free"
    say(f"  writes about {num_bytes / 2**20:.1f} MiB{room}")
    if free is not None and num_bytes > free:
        say("  warning: that is more than is free")


def _in_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """Let names of files neither break a line nor act on a terminal."""
    return lambda line: say(one_line(line))


def _with_examples(why: str, count: int, paths: list[str]) -> str:
    if not paths:
        return why
    if count > len(paths):
        return f"{why}, such as {paths[0]}"
    return f"{why}: {', '.join(paths)}"


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Align three columns: a number, a word, a remark."""
    wide, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"  {a:>{wide}}  {b:<{middle}}  {c}".rstrip() for a, b, c in rows]


def heavily_cropped(plan: Plan) -> list[str]:
    """Return the paths of the images that lose more than MUCH_CROPPED of themselves."""
    return [w.image.path for w in plan.samples() if cropped_fraction(w.geometry) > MUCH_CROPPED]


def bytes_to_write(plan: Plan, manifest: Manifest, index: LiveIndex) -> int:
    """Return the bytes of the tensors that the run will write."""
    text_bytes = sum(spec.row_bytes(None) for spec in manifest.text_tensors)
    as_rows = {""}
    if not manifest.texts_inline:
        as_rows |= {work.image.caption for work in plan.samples()}
    total = text_bytes * len(as_rows - set(index.text_details["caption"].to_pylist()))
    for work in plan.samples():
        if manifest.texts_inline or work.action is not Action.TEXT_ONLY:
            cells = manifest.cells(work.bucket_px)
            total += sum(spec.row_bytes(cells) for spec in manifest.variant_tensors)
        total += text_bytes if manifest.texts_inline else 0
    return total


def average_crop(plan: Plan) -> float:
    """Return the mean cropped fraction of the images that the plan writes."""
    fractions = [float(cropped_fraction(work.geometry)) for work in plan.samples()]
    return sum(fractions) / len(fractions) if fractions else 0.0


def describe_summary(summary: Summary, config: BakeConfig, say: Callable[[str], None]) -> None:
    """Say what was stored, how, and what was not."""
    say = _in_lines(say)
    plan = summary.plan
    if summary.interrupted:
        say("interrupted; what was finished is kept. Run the same command to go on.")
    by_others = f", {summary.num_by_others} by other writers" if summary.num_by_others else ""
    rate = summary.num_images_encoded / summary.seconds if summary.seconds else 0.0
    took = f" in {summary.seconds:.1f} s" if summary.num_images_encoded else ""
    took += f" ({rate:.2f} images/s)" if summary.num_images_encoded > 1 else ""
    say(
        f"{counted(summary.num_stored, 'sample')} written{by_others}, {plan.reused} unchanged, "
        f"{len(plan.dropped)} dropped, {counted(len(summary.problems), 'file')} not stored; "
        f"{counted(summary.num_images_encoded, 'image')} and "
        f"{counted(summary.num_captions_encoded, 'caption')} encoded{took}"
    )
    for note in summary.notes:
        say(note)
    if summary.num_images_retried:
        say(f"{counted(summary.num_images_retried, 'image')} overflowed, encoded again in float32")
    if summary.num_captions_taken_over:
        say(f"{counted(summary.num_captions_taken_over, 'caption')} taken over from {config.reuse}")
    if summary.captions_cut:
        say(
            f"warning: {counted(len(summary.captions_cut), 'caption')} cut, longer than the text "
            f"encoder takes, such as {summary.captions_cut[0][:60]!r}..."
        )
    if summary.num_stored:
        say(f"cropped away on average: {100 * average_crop(plan):.1f} % of an image")
    shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in sorted(summary.buckets.items()))
    if shown or not summary.interrupted:  # planning that was interrupted did not count them
        total = counted(summary.buckets.total(), "sample")
        say(f"{config.out} now holds {total} in buckets {shown or '(none)'}")
    if summary.problems:
        say(f"not stored, see {folder_of(config.out).at(report_name(config))}:")
        for reason, count in sorted(Counter(p.reason.value for p in summary.problems).items()):
            first = next(p for p in summary.problems if p.reason.value == reason)
            say(f"  {count:>9} {reason}, such as {first.path}: {first.detail}")
