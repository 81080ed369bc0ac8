"""Steps of a run, read ahead by processes of their own."""

import gc
import mmap
import multiprocessing
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from store_format.errors import PrebakeError
from train.handover import Places, Span
from train.loader import MicroBatch, Request, StepDataset

STEPS_AHEAD = 6  # of each process
_GROUP = 2  # steps in one message, for waking a process costs as much as reading some samples
_SPARE_PLACES = 3  # a step is held while the next is asked for, by frames between too
_END_WITHIN_S = 10.0

_PLAIN = ("step", "sample_ids", "bucket_px", "num_samples")  # of a MicroBatch


def iterate_steps(
    dataset: StepDataset, start: int, stop: int, *, num_workers: int, pin_memory: bool
) -> Generator[list[MicroBatch], None, None]:
    """Yield the micro-batches of steps `start` to `stop` - 1, read ahead by `num_workers`.

    Close the generator to end the workers.

    Raises:
        PrebakeError: the store cannot be read, or a worker was killed.
    """
    requests = map(dataset.request, range(start, stop))
    prefetch = dataset.prefetch(start, stop)
    # Workers start here, before the threads that must not be forked.
    readers = Readers(dataset, requests, num_workers) if num_workers else None
    steps = readers if readers is not None else map(dataset.read, requests)
    try:
        if prefetch is not None:
            prefetch.start()
        for number, micro_batches in enumerate(steps):
            if prefetch is not None:
                prefetch.advance(start + number)
            yield [batch.pin_memory() for batch in micro_batches] if pin_memory else micro_batches
    finally:
        if prefetch is not None:
            prefetch.close()
        if readers is not None:
            readers.close()


class Readers(Iterator[list[MicroBatch]]):
    """Reads steps ahead, in processes that end with it or with this process."""

    def __init__(self, dataset: StepDataset, requests: Iterator[Request], num_workers: int) -> None:
        """Start the processes; a fork, so before other threads are started."""
        self._requests = requests
        self._max_asked = num_workers * STEPS_AHEAD
        self._places = Places(self._max_asked + _SPARE_PLACES, dataset.max_step_bytes)
        context = multiprocessing.get_context("fork")  # so that they share index and places
        # Steps that each was asked for, and those it has read: it counts them in shared memory.
        self._num_asked = np.zeros(num_workers, np.int64)
        self._num_read = np.frombuffer(mmap.mmap(-1, self._num_asked.nbytes), np.int64)
        # Collecting garbage writes to every object that it looks at. After the fork that would
        # copy them, whichever process does it, so these are left out of it until the end.
        gc.collect()
        gc.freeze()
        workers: list[_Worker] = []
        for number in range(num_workers):
            ours, theirs = context.Pipe()
            not_its_own = [*(connection for _, connection in workers), ours]
            num_read = self._num_read[number : number + 1]
            arguments = (dataset, self._places, theirs, num_read, not_its_own)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        self.close = weakref.finalize(self, _end, workers)
        self._workers = workers
        self._asked = deque[tuple[_Worker, list[int]]]()  # with the places that it fills
        self._num_ahead = 0  # steps asked for and not yet handed out
        self._answered = deque[tuple[int, _Answer]]()  # with the place that is filled

    def __next__(self) -> list[MicroBatch]:
        if self._num_ahead <= self._max_asked // 2:  # several at once: it costs less each
            self._ask()
        if not self._num_ahead:
            raise StopIteration
        if not self._answered:
            self._receive()
        self._num_ahead -= 1
        place, answer = self._answered.popleft()
        if isinstance(answer, Exception):
            raise answer
        spans = [span for left in answer for span in left.spans.values()]
        tensors = iter(self._places.take(place, spans))
        return [left.micro_batch(tensors) for left in answer]

    def _ask(self) -> None:
        """Ask for as many steps as there are places for, always of who has least left to read."""
        while (num := min(self._max_asked - self._num_ahead, len(self._places.free), _GROUP)) > 0:
            group = []
            for step, samples in islice(self._requests, num):
                place = self._places.free.pop()
                # Left in the place too: so that messages this way never fill a pipe, on which both
                # sides would wait.
                self._places.view(place, samples.shape)[:] = samples
                group.append((place, step, samples.shape))
            if not group:
                return
            number = int((self._num_asked - self._num_read).argmin())
            worker = self._workers[number]
            with suppress(OSError):  # it has ended, which is found when its answer is missed
                worker[1].send(group)
            self._num_asked[number] += len(group)
            self._num_ahead += len(group)
            self._asked.append((worker, [place for place, _, _ in group]))

    def _receive(self) -> None:
        """Wait for what was asked first."""
        (process, connection), places = self._asked.popleft()
        try:
            answers: list[_Answer] = connection.recv()
        except (EOFError, OSError):
            process.join(_END_WITHIN_S)
            raise PrebakeError(
                f"a process that reads the store has ended (exit code {process.exitcode}), killed "
                "perhaps for lack of memory. --num-workers 0 does without such processes."
            ) from None
        self._answered.extend(zip(places, answers, strict=True))


_Worker = tuple[ForkProcess, Connection]


@dataclass(frozen=True)
class _Left:
    """A micro-batch whose tensors were left in a place."""

    batch: dict[str, Any]  # the other attributes, but for the weights
    weights: list[float]
    spans: dict[str, Span]

    def micro_batch(self, tensors: Iterator[torch.Tensor]) -> MicroBatch:
        """Return it with the next of the tensors that were taken of the place."""
        own = dict(zip(self.spans, tensors, strict=False))
        return MicroBatch(**self.batch, tensors=own, weights=torch.tensor(self.weights))


_Answer = list[_Left] | Exception


def _serve(
    dataset: StepDataset,
    places: Places,
    connection: Connection,
    num_read: NDArray[np.int64],
    not_its_own: list[Connection],
) -> None:
    """Read what the training process asks for, until it closes the connection or ends."""
    for inherited in not_its_own:  # by which a connection would outlive the training process
        inherited.close()
    # Ctrl-C and job managers signal this process too, and a run whose workers died cannot finish
    # its step: signals are for the training process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            group = connection.recv()
            answers = []
            for place, step, shape in group:
                samples = places.view(place, shape).copy()
                answers.append(_read(dataset, places, place, (step, samples)))
                num_read += 1
            connection.send(answers)


def _read(dataset: StepDataset, places: Places, place: int, request: Request) -> _Answer:
    try:
        return [
            _Left(
                {name: getattr(batch, name) for name in _PLAIN},
                batch.weights.tolist(),
                {name: places.span(place, tensor) for name, tensor in batch.tensors.items()},
            )
            for batch in dataset.read(request, places.allocator(place))
        ]
    except PrebakeError as error:
        return error
    except Exception:
        return RuntimeError(f"in a process that reads the store:\n{traceback.format_exc()}")


def _end(workers: list[_Worker]) -> None:
    gc.unfreeze()
    for _, connection in workers:
        connection.close()
    for process, _ in workers:
        process.join(_END_WITHIN_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
