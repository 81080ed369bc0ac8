"""What a bake says to the person who waits: the plan before it, the summary after it."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from precompute.buckets import cropped_fraction
from precompute.config import BakeConfig
from precompute.plan import Action, Plan
from precompute.problems import Problem
from store_format.manifest import Manifest

REPORT_NAME = "report.jsonl"
MUCH_CROPPED = 0.5


@dataclass
class Summary:
    """What a run did."""

    plan: Plan
    num_stored: int = 0
    num_images_encoded: int = 0
    num_captions_encoded: int = 0
    num_images_retried: int = 0
    num_captions_cut: int = 0
    first_caption_cut: str = ""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    buckets: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False


def describe_plan(
    plan: Plan, manifest: Manifest, config: BakeConfig, say: Callable[[str], None]
) -> None:
    """Say what the run will do and why, what it will write, and how much room there is."""
    say(f"plan for {config.out} (source '{config.source}'):")
    for (action, why), count in sorted(plan.counts().items()):
        say(f"  {count:>9} {action}: {why}")
    cropped = heavily_cropped(plan)
    if cropped:
        say(
            f"  warning: {len(cropped)} images lose over half of themselves to the crop, such as "
            f"{cropped[0]}"
        )
    buckets: Counter[tuple[int, int]] = Counter(work.bucket_px for work in plan.samples())
    captions = {work.image.caption for work in plan.samples()}
    num_bytes = _bytes_to_write(plan, manifest, len(captions))
    if buckets:
        shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in sorted(buckets.items()))
        say(f"  buckets (width x height): {shown}")
        say(f"  {len(captions)} different captions for {buckets.total()} images")
        existing = next(p for p in (config.out, *config.out.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        say(f"  writes about {num_bytes / 2**20:.1f} MiB; {free / 2**20:.0f} MiB are free")
        if num_bytes > free:
            say("  warning: that is more than is free")


def heavily_cropped(plan: Plan) -> list[str]:
    """Return the paths of the images that lose more than MUCH_CROPPED of themselves."""
    return [w.image.path for w in plan.samples() if cropped_fraction(w.geometry) > MUCH_CROPPED]


def _bytes_to_write(plan: Plan, manifest: Manifest, num_captions: int) -> int:
    text_bytes = sum(spec.row_bytes(None) for spec in manifest.text_tensors)
    total = 0 if manifest.texts_inline else num_captions * text_bytes
    for work in plan.samples():
        cells = manifest.cells(work.bucket_px)
        if manifest.texts_inline or work.action is not Action.TEXT_ONLY:
            total += sum(spec.row_bytes(cells) for spec in manifest.variant_tensors)
        total += text_bytes if manifest.texts_inline else 0
    return total


def average_crop(plan: Plan) -> float:
    """Return the mean cropped fraction of the images that the plan writes."""
    fractions = [float(cropped_fraction(work.geometry)) for work in plan.samples()]
    return sum(fractions) / len(fractions) if fractions else 0.0


def describe_summary(summary: Summary, config: BakeConfig, say: Callable[[str], None]) -> None:
    """Say what was stored, how, and what was not."""
    plan = summary.plan
    if summary.interrupted:
        say("interrupted; what was finished is kept. Run the same command to go on.")
    rate = summary.num_images_encoded / summary.seconds if summary.seconds else 0.0
    say(
        f"{summary.num_stored} samples written, {plan.reused} unchanged, "
        f"{len(plan.dropped)} dropped, {len(summary.problems)} files not stored; "
        f"{summary.num_images_encoded} images and {summary.num_captions_encoded} captions encoded "
        f"in {summary.seconds:.1f} s ({rate:.2f} images/s)"
    )
    for note in summary.notes:
        say(note)
    if summary.num_images_retried:
        say(f"{summary.num_images_retried} images overflowed and were encoded in float32")
    if summary.num_captions_cut:
        say(
            f"warning: {summary.num_captions_cut} captions were longer than the text encoder and "
            f"were cut, such as {summary.first_caption_cut[:60]!r}..."
        )
    if summary.num_stored:
        say(f"cropped away on average: {100 * average_crop(plan):.1f} % of an image")
    shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in sorted(summary.buckets.items()))
    if shown or not summary.interrupted:  # planning that was interrupted did not count them
        total = summary.buckets.total()
        say(f"{config.out} now holds {total} samples in buckets {shown or '(none)'}")
    if summary.problems:
        say(f"not stored, see {config.out / REPORT_NAME}:")
        for reason, count in sorted(Counter(p.reason.value for p in summary.problems).items()):
            first = next(p for p in summary.problems if p.reason.value == reason)
            path = first.path.replace("\n", "\\n")
            say(f"  {count:>9} {reason}, such as {path}: {first.detail}")
