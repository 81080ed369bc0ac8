"""A bake from start to end: scan, plan, encode, store, report.

images -> scan -> plan -> (decode ahead in threads) -> encoders -> sink (a thread) -> store
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from precompute.config import BakeConfig
from precompute.device import choose_compute_dtype, choose_device
from precompute.lazy_encoders import Encoders
from precompute.model import ModelParts, downscale_of, open_model
from precompute.pixels import decode
from precompute.plan import FULL_NAMES, Action, BakeKeys, Plan, Work, make_plan
from precompute.problems import ImageProblem, Problem, Reason
from precompute.sink import ShardSink
from precompute.source import scan_folder
from precompute.summary import REPORT_NAME, Summary, describe_plan
from precompute.texts import TextBank
from store_format.errors import PrebakeError
from store_format.files import replace_file
from store_format.index import LiveIndex
from store_format.manifest import MANIFEST_NAME, Manifest, TensorSpec
from store_format.progress import Progress
from store_format.store import Store
from store_format.writer import StoreWriter, check_target

DECODE_AHEAD_BATCHES = 3


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
) -> Summary:
    """Bring the store at `config.out` up to date with `config.images`.

    Args:
        config: what to bake.
        say: prints one line for the person who waits.
        should_stop: asked between batches; True ends the run early, with all finished work kept.
        dry_run: only make and print the plan.

    Raises:
        PrebakeError: the input, the model or the store is not what it should be.
    """
    start_s = time.monotonic()
    scan = scan_folder(config.images)
    for warning in scan.warnings:
        say(f"warning: {warning}")
    parts, manifest, bake_keys = prepare(config)
    check_target(config.out, manifest)

    def plan_against(index: LiveIndex) -> Plan:
        with Progress(len(scan.images), "files", "planning") as progress:

            def advance(count: int) -> None:
                progress.advance(count)
                if should_stop():
                    raise _Stopped

            plan = make_plan(scan, index, bake_keys, config, advance)
        describe_plan(plan, manifest, config, say)
        _check_drop(plan, config)
        return plan

    encoders = Encoders(config, parts, manifest)
    try:
        if dry_run:
            return Summary(plan_against(LiveIndex(config.out)))
        if not (config.out / MANIFEST_NAME).exists():
            encoders.load()  # so that a model that does not load leaves no store behind
        with StoreWriter(config.out, manifest) as writer:
            plan = plan_against(writer.index)
            summary = _Run(config, encoders, writer, bake_keys, plan, should_stop).run()
            summary.seconds = time.monotonic() - start_s
            _write_report(writer, summary)
    except _Stopped:
        return Summary(Plan(0, [], [], [], 0), interrupted=True)
    expected = len(scan.images) + len(scan.problems)
    accounted = plan.reused + summary.num_stored + len(summary.problems)
    if accounted != expected and not summary.interrupted:
        raise RuntimeError(f"{expected} files were found, {accounted} are accounted for")
    return summary


class _Stopped(Exception):  # noqa: N818 - not an error: the user's wish
    """Planning was asked to stop."""


class _Run:
    """One execution of a plan."""

    def __init__(
        self,
        config: BakeConfig,
        encoders: Encoders,
        writer: StoreWriter,
        bake_keys: BakeKeys,
        plan: Plan,
        should_stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._encoders = encoders
        self._writer = writer
        self._keys = bake_keys
        self._should_stop = should_stop
        self._store = Store(writer.root, writer.manifest, writer.index)
        self._sink = ShardSink(
            writer,
            shard_bytes=config.shard_size_mib << 20,
            shard_max_seconds=config.shard_max_seconds,
        )
        self._texts = TextBank(self._store, lambda: encoders.text, self._sink.reopen)
        self.summary = Summary(plan, problems=list(plan.problems))

    def run(self) -> Summary:
        """Do all that the plan says; leave a valid store however it ends."""
        plan = self.summary.plan
        try:
            empty = self._keys.text("")
            self._sink.put(texts=self._texts.add([empty], as_rows=True))
            with Progress(sum(1 for _ in plan.samples()), "images", "baking") as progress:
                self._progress = progress
                for batch in self._batches(plan.to_write):
                    if self._should_stop():
                        self.summary.interrupted = True
                        break
                    self._store_batch(*batch)
            self._sink.flush()
        finally:
            self._sink.close()
        if not self.summary.interrupted:
            if plan.dropped:
                self._writer.commit(tombstones=plan.dropped)
            self._writer.rewrite_shards_with_dead_rows()
        self._writer.refresh_views()
        self.summary.num_captions_encoded = self._texts.num_encoded
        self.summary.num_captions_cut = self._texts.num_cut
        self.summary.first_caption_cut = self._texts.first_cut
        self.summary.buckets.update((int(w), int(h)) for w, h in self._writer.index.buckets())
        return self.summary

    def _batches(
        self, works: list[Work]
    ) -> Iterator[tuple[list[Work], list[Future[tuple[str, NDArray[np.uint8]]]]]]:
        """Yield works of one bucket, at most a batch, with pixels that are decoded ahead."""
        batches = [
            group[start : start + self._config.batch_size]
            for _, in_bucket in groupby(works, key=lambda w: (w.bucket_px, w.row is None))
            for group in [list(in_bucket)]
            for start in range(0, len(group), self._config.batch_size)
        ]
        with ThreadPoolExecutor(self._config.num_workers, "prebake-decode") as pool:
            ahead: deque[tuple[list[Work], list[Future[tuple[str, NDArray[np.uint8]]]]]] = deque()
            try:
                for batch in batches:
                    futures = [pool.submit(self._decode, w) for w in batch if w.row is None]
                    ahead.append((batch, futures))
                    if len(ahead) > DECODE_AHEAD_BATCHES:
                        yield ahead.popleft()
                while ahead:
                    yield ahead.popleft()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, work: Work) -> tuple[str, NDArray[np.uint8]]:
        """Read an image once; return the hash of its bytes and its pixels [H, W, 3]."""
        data = work.image.file.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        if work.image_sha256 is not None and sha256 != work.image_sha256:
            raise ImageProblem(
                Reason.CHANGED_WHILE_BAKING, "its bytes differ from those that were planned"
            )
        return sha256, decode(data, work.size, work.geometry, self._keys.background)

    def _store_batch(
        self, works: list[Work], futures: list[Future[tuple[str, NDArray[np.uint8]]]]
    ) -> None:
        ready: Sequence[tuple[Work, list[NDArray[np.generic]] | None]]
        ready = self._encode(works, futures) if futures else [(work, None) for work in works]
        shared = not self._writer.manifest.texts_inline
        everyone = [w for work, _ in ready for w in (work, *work.same_pixels)]
        if not everyone:
            return
        texts = [self._keys.text(work.image.caption) for work in everyone]
        text_rows = self._texts.add(texts, as_rows=shared)
        samples, relinked = [], []
        for first, latents in ready:
            for work in (first, *first.same_pixels):
                assert first.image_sha256 is not None
                row = self._keys.sample_row(work, first.image_sha256)
                if shared and work.action is Action.TEXT_ONLY and work.row is not None:
                    relinked.append(replace(row, place=self._store.sample(work.row).place))
                else:
                    if latents is None:
                        latents = self._latents_of(first)
                    inline = [] if shared else self._texts.tensors(row.texts[0])
                    samples.append((row, [*latents, *inline]))
        self._sink.put(samples, text_rows, relinked)
        self.summary.num_stored += len(samples) + len(relinked)
        self._progress.advance(len(everyone))

    def _latents_of(self, work: Work) -> list[NDArray[np.generic]]:
        """Return the tensors of the live row that holds this work's latents already."""
        assert work.row is not None
        return list(self._store.read_variant(work.row).values())

    def _encode(
        self, works: list[Work], futures: list[Future[tuple[str, NDArray[np.uint8]]]]
    ) -> list[tuple[Work, list[NDArray[np.generic]]]]:
        """Return the encodable of `works` with their tensors; the others go to the report."""
        decoded: list[tuple[Work, NDArray[np.uint8]]] = []
        for work, future in zip(works, futures, strict=True):
            try:
                work.image_sha256, pixels = future.result()
                decoded.append((work, pixels))
            except ImageProblem as problem:
                self._report(work, problem.reason, problem.detail)
            except OSError as error:
                self._report(work, Reason.UNREADABLE, error.strerror or str(error))
        if not decoded:
            return []
        keys = [self._keys.latent_key(w.image_sha256 or "", w.geometry) for w, _ in decoded]
        encoder = self._encoders.image
        encoded = encoder.encode([pixels for _, pixels in decoded], keys)
        self.summary.num_images_encoded += len(decoded)
        self.summary.num_images_retried = encoder.num_retried
        while encoder.notes:
            self._note(encoder.notes.pop(0))
        ready = []
        for (work, _), tensors in zip(decoded, encoded, strict=True):
            if tensors is None:
                detail = "its latents are not finite, or too large for --dtype, in float32 too"
                self._report(work, Reason.NON_FINITE, detail)
            else:
                ready.append((work, tensors))
        return ready

    def _report(self, work: Work, reason: Reason, detail: str) -> None:
        for each in (work, *work.same_pixels):
            self.summary.problems.append(Problem(each.image.path, reason, detail))
            self._progress.advance()

    def _note(self, line: str) -> None:
        self.summary.notes.append(line)
        self._progress.say(line)


def _check_drop(plan: Plan, config: BakeConfig) -> None:
    if 2 * len(plan.dropped) > plan.num_of_source_before and not config.allow_drop:
        raise PrebakeError(
            f"{config.images}: {len(plan.dropped)} of the {plan.num_of_source_before} samples of "
            f"source '{config.source}' in {config.out} have no image any more. If that is meant, "
            "add --allow-drop; if not, check IMAGES and --source-name."
        )


def _write_report(writer: StoreWriter, summary: Summary) -> None:
    lines = [asdict(problem) for problem in summary.problems]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    replace_file(writer.root / REPORT_NAME, text.encode("utf-8"), writer.staging)
