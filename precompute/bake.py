"""A bake from start to end: scan, plan, run, report.

images -> scan -> plan -> run -> store
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from precompute.bake_keys import FULL_NAMES, BakeKeys
from precompute.config import BakeConfig
from precompute.device import choose_compute_dtype, choose_device
from precompute.lazy_encoders import Encoders
from precompute.model import ModelParts, downscale_of, open_model
from precompute.plan import Plan, Repair, make_plan
from precompute.run import Run
from precompute.source import Scan, scan_folder
from precompute.summary import Summary, describe_plan, report_name
from precompute.texts import StoredTexts
from store_format.errors import PrebakeError, one_line
from store_format.folders import folder_of
from store_format.index import LiveIndex
from store_format.manifest import MANIFEST_NAME, Manifest, TensorSpec
from store_format.progress import Progress
from store_format.store import Store, open_store
from store_format.writer import StoreWriter, check_target


def prepare(config: BakeConfig) -> tuple[ModelParts, Manifest, BakeKeys]:
    """Identify the model and say what store a bake makes; loads no weights onto a device."""
    parts = open_model(config.model)
    if config.clip_skip > parts.num_text_layers:
        raise PrebakeError(
            f"--clip-skip {config.clip_skip}: the text encoder has {parts.num_text_layers} layers."
        )
    compute_dtype = choose_compute_dtype(config.compute_dtype, choose_device(config.device))
    bake_keys = BakeKeys(config, parts.encoders, compute_dtype, parts.max_token_length)
    stored = FULL_NAMES[config.dtype]
    names = ("latents_mean", "latents_std") if config.posterior == "moments" else ("latents",)
    channels = parts.encoders.vae.latent_channels
    latents = [
        TensorSpec(name=name, kind="variant", dtype=stored, shape=(channels, "h", "w"))
        for name in names
    ]
    states = TensorSpec(
        name="encoder_hidden_states",
        kind="text",
        dtype=stored,
        shape=(parts.max_token_length, parts.encoders.text[0].width),
    )
    manifest = Manifest(
        layout=config.format,
        config={
            "resolution": config.resolution,
            "bucket_step": config.bucket_step,
            "background": list(bake_keys.background),
            "upscale": config.upscale,
            "posterior": config.posterior,
            "clip_skip": config.clip_skip,
            "max_token_length": parts.max_token_length,
            "compute_dtype": FULL_NAMES[compute_dtype],
            "stored_dtype": stored,
        },
        encoders=parts.encoders,
        base=parts.base,
        downscale=downscale_of(parts.folder),
        tensors=(*latents, states),
        empty_text_key=bake_keys.text("").text_key,
    )
    if config.bucket_step % manifest.downscale:
        raise PrebakeError(
            f"--bucket-step {config.bucket_step}: must be a multiple of the VAE's "
            f"{manifest.downscale} px a latent cell."
        )
    return parts, manifest, bake_keys


def bake(
    config: BakeConfig,
    *,
    say: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
    repair: Repair | None = None,
) -> Summary:
    """Bring the store at `config.out` up to date with `config.images`.

    Args:
        config: what to bake.
        say: prints one line for the person who waits.
        should_stop: asked between batches; True ends the run early, with all finished work kept.
        dry_run: only make and print the plan.
        repair: write only what this allows.

    Raises:
        PrebakeError: the input, the model or the store is not what it should be.
    """
    parts, manifest, bake_keys = prepare(config)
    check_target(config.out, manifest)
    donor = open_store(config.reuse) if config.reuse else None

    def check() -> None:
        if should_stop():
            raise _Stopped

    try:
        scan = _part_of(scan_folder(config.images, check), config, bake_keys)
    except _Stopped:
        return Summary(Plan(), interrupted=True)
    for warning in scan.warnings:
        say(one_line(f"warning: {warning}"))

    def plan_against(index: LiveIndex) -> Plan:
        with Progress(len(scan.images), "files", "planning") as progress:

            def advance(count: int) -> None:
                progress.advance(count)
                check()

            plan = make_plan(
                scan,
                index,
                bake_keys,
                config,
                advance,
                donor=donor.index if donor is not None else None,
                repair=repair,
            )
        lost = repair or Repair()
        stored = Store(folder_of(config.out), manifest, index)
        held = [StoredTexts(stored, lost.sample_rows, lost.text_keys)]
        held += [StoredTexts(donor)] if donor is not None else []
        captions = {work.image.caption for work in plan.samples()} | {""}
        texts = {bake_keys.text(caption).text_key for caption in captions} | lost.text_keys
        to_encode = sum(not any(text in store for store in held) for text in texts)
        describe_plan(plan, manifest, config, index, to_encode, say)
        _check_drop(plan, config)
        return plan

    encoders = Encoders(config, parts, manifest)
    try:
        if dry_run:
            return Summary(plan_against(LiveIndex(config.out)))
        if not folder_of(config.out).sizes([MANIFEST_NAME]):
            encoders.load()  # so that a model that does not load leaves no store behind
        with StoreWriter(config.out, manifest) as writer:
            plan = plan_against(writer.index)
            run = Run(
                config,
                encoders,
                writer,
                bake_keys,
                plan,
                should_stop,
                donor=donor,
                repair=repair,
            )
            start_s = time.monotonic() - encoders.loading_s  # of which some may be over
            summary = run.run()
            summary.seconds = time.monotonic() - start_s - encoders.loading_s
            _write_report(writer, summary, config)
    except _Stopped:
        return Summary(Plan(), interrupted=True)
    expected = len(scan.images) + len(scan.problems)
    accounted = plan.reused + summary.num_stored + summary.num_by_others + len(summary.problems)
    if accounted != expected and not summary.interrupted and repair is None:
        raise RuntimeError(f"{expected} files were found, {accounted} are accounted for")
    return summary


class _Stopped(Exception):  # noqa: N818 - not an error: the user's wish
    """Scanning or planning was asked to stop."""


def _part_of(scan: Scan, config: BakeConfig, bake_keys: BakeKeys) -> Scan:
    """Return this worker's part of a scan: every n-th by the hash of its path."""
    number, of = config.part

    def is_mine(path: str) -> bool:
        return int(bake_keys.sample_id(path)[:8], 16) % of == number - 1

    return Scan(
        tuple(image for image in scan.images if is_mine(image.path)),
        tuple(problem for problem in scan.problems if is_mine(problem.path)),
        scan.warnings,
    )


def _check_drop(plan: Plan, config: BakeConfig) -> None:
    if 2 * len(plan.dropped) > plan.num_of_source_before and not config.allow_drop:
        raise PrebakeError(
            f"{config.images}: {len(plan.dropped)} of the {plan.num_of_source_before} samples of "
            f"source '{config.source}' in {config.out} have no image any more. If that is meant, "
            "add --allow-drop; if not, check IMAGES and --source-name."
        )


def _write_report(writer: StoreWriter, summary: Summary, config: BakeConfig) -> None:
    lines = [asdict(problem) for problem in summary.problems]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    writer.root.replace(report_name(config), text.encode("utf-8"), writer.staging)
