"""Steps of a run, read ahead by processes of their own."""

import gc
import multiprocessing
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from store_format.errors import PrebakeError
from train.handover import Places, Span
from train.loader import MicroBatch, Request, StepDataset

STEPS_AHEAD = 4  # of each process
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
        workers: list[_Worker] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            not_its_own = [*(connection for _, connection in workers), ours]
            arguments = (dataset, self._places, theirs, not_its_own)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        self.close = weakref.finalize(self, _end, workers)
        self._next_worker = cycle(workers)
        self._asked = deque[tuple[_Worker, int]]()

    def __next__(self) -> list[MicroBatch]:
        if len(self._asked) <= self._max_asked // 2:  # several at once: it costs less each
            self._ask()
        if not self._asked:
            raise StopIteration
        (process, connection), place = self._asked.popleft()
        try:
            answer: list[_Left] | Exception = connection.recv()
        except (EOFError, OSError):
            process.join(_END_WITHIN_S)
            raise PrebakeError(
                f"a process that reads the store has ended (exit code {process.exitcode}), killed "
                "perhaps for lack of memory. --num-workers 0 does without such processes."
            ) from None
        if isinstance(answer, Exception):
            raise answer
        spans = [span for left in answer for span in left.spans.values()]
        tensors = iter(self._places.take(place, spans))
        return [left.micro_batch(tensors) for left in answer]

    def _ask(self) -> None:
        """Ask for as many steps as there are places for, of each process in turn."""
        while len(self._asked) < self._max_asked and self._places.free:
            request = next(self._requests, None)
            if request is None:
                return
            step, samples = request
            worker, place = next(self._next_worker), self._places.free.pop()
            # Left in the place too: so that messages this way never fill a pipe, on which both
            # sides would wait.
            self._places.view(place, samples.shape)[:] = samples
            with suppress(OSError):  # it has ended, which is found when its answer is missed
                worker[1].send((place, step, samples.shape))
            self._asked.append((worker, place))


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


def _serve(
    dataset: StepDataset, places: Places, connection: Connection, not_its_own: list[Connection]
) -> None:
    """Read what the training process asks for, until it closes the connection or ends."""
    for inherited in not_its_own:  # by which a connection would outlive the training process
        inherited.close()
    # Garbage collection would write to every object of before the fork, and so copy it.
    gc.freeze()
    # Ctrl-C and job managers signal this process too, and a run whose workers died cannot finish
    # its step: signals are for the training process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            place, step, shape = connection.recv()
            samples = places.view(place, shape).copy()
            connection.send(_read(dataset, places, place, (step, samples)))


def _read(
    dataset: StepDataset, places: Places, place: int, request: Request
) -> list[_Left] | Exception:
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
    for _, connection in workers:
        connection.close()
    for process, _ in workers:
        process.join(_END_WITHIN_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
