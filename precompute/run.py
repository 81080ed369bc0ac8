"""One execution of a plan: what must be encoded is encoded, and all goes to the store.

plan -> (decode ahead in threads) -> encoders -> sink (a thread) -> store
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from precompute.bake_keys import BakeKeys
from precompute.config import BakeConfig
from precompute.lazy_encoders import Encoders
from precompute.pixels import decode
from precompute.plan import Plan, Repair
from precompute.problems import ImageProblem, Problem, Reason
from precompute.sink import ShardSink
from precompute.summary import Summary
from precompute.texts import StoredTexts, TextBank
from precompute.work import Action, Work
from store_format.progress import Progress
from store_format.store import Store
from store_format.writer import StoreWriter

DECODE_AHEAD_BATCHES = 3
RESTATED_AT_ONCE = 10_000


class Run:
    """One execution of a plan."""

    def __init__(
        self,
        config: BakeConfig,
        encoders: Encoders,
        writer: StoreWriter,
        bake_keys: BakeKeys,
        plan: Plan,
        should_stop: Callable[[], bool],
        *,
        donor: Store | None = None,
        repair: Repair | None = None,
    ) -> None:
        self._config = config
        self._encoders = encoders
        self._writer = writer
        self._keys = bake_keys
        self._should_stop = should_stop
        self._store = Store(writer.root, writer.manifest, writer.index)
        self._donor = donor
        self._repair = repair or Repair()
        self._sink = ShardSink(
            writer,
            shard_bytes=config.shard_size_mib << 20,
            shard_max_seconds=config.shard_max_seconds,
        )
        self._texts = TextBank(
            StoredTexts(
                self._store,
                self._repair.sample_rows,
                self._repair.text_keys,
            ),
            lambda: encoders.text,
            self._sink.reopen,
            inline=writer.manifest.texts_inline,
            donor=StoredTexts(donor) if donor is not None else None,
            others=writer.others_texts,
        )
        self.summary = Summary(plan, problems=list(plan.problems))

    def run(self) -> Summary:
        """Do all that the plan says; leave a valid store however it ends."""
        plan, summary = self.summary.plan, self.summary
        try:
            self._sink.put(
                texts=self._texts.add([self._keys.text(""), *self._repair.texts], as_rows=True)
            )
            with Progress(sum(1 for _ in plan.samples()), "images", "baking") as progress:
                self._progress = progress
                for batch in self._batches(plan.to_write):
                    if self._should_stop():
                        summary.interrupted = True
                        break
                    self._store_batch(*batch)
            self._sink.flush()
        finally:
            self._sink.close()
        if not summary.interrupted:
            self._note_touched()
            if plan.dropped:
                self._writer.commit(tombstones=plan.dropped)
        for error in self._writer.tidy(finished=not summary.interrupted):
            summary.notes.append(f"warning: {error}")
        summary.num_captions_encoded = self._texts.num_encoded
        summary.num_captions_taken_over = self._texts.num_taken_over
        summary.captions_cut = self._texts.cut
        summary.buckets.update((int(w), int(h)) for w, h in self._writer.index.buckets())
        return summary

    def _note_touched(self) -> None:
        """Put the new times of unchanged images into the index; their tensors stay in place."""
        index = self._store.index
        for start in range(0, len(self.summary.plan.touched), RESTATED_AT_ONCE):
            works = self.summary.plan.touched[start : start + RESTATED_AT_ONCE]
            by_id = {work.sample_id: work.image for work in works}
            rows = index.rows_of_same_samples(np.array([work.row for work in works]))
            restated = [
                replace(
                    sample,
                    image_bytes=by_id[sample.sample_id].size_bytes,
                    image_mtime_ns=by_id[sample.sample_id].mtime_ns,
                )
                for sample in map(index.sample, rows.tolist())
                if sample.sample_id not in self._writer.others_samples
            ]
            if restated:
                self._writer.commit(samples=restated)

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
        if futures:
            ready = self._encode(works, futures)
        else:
            ready = [(work, None) for work in self._not_by_others(works)]
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

    def _not_by_others(self, works: list[Work]) -> list[Work]:
        """Return the works that other writers have not committed meanwhile, equals included."""
        left = []
        for work in works:
            everyone = [work, *work.same_pixels]
            if all(self._is_by_others(each, work.image_sha256 or "") for each in everyone):
                self.summary.num_by_others += len(everyone)
                self._progress.advance(len(everyone))
            else:
                left.append(work)
        return left

    def _is_by_others(self, work: Work, image_sha256: str) -> bool:
        key = self._keys.latent_key(image_sha256, work.geometry)
        text_keys = (self._keys.text(work.image.caption).text_key,)
        return self._writer.others_samples.get(work.sample_id) == (key, text_keys)

    def _latents_of(self, work: Work) -> list[NDArray[np.generic]]:
        """Return the tensors of the live row that holds this work's latents already."""
        store = self._donor if work.is_taken_over else self._store
        assert work.row is not None
        assert store is not None
        return list(store.read_variant(work.row).values())

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
        left = {id(work) for work in self._not_by_others([work for work, _ in decoded])}
        decoded = [(work, pixels) for work, pixels in decoded if id(work) in left]
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
