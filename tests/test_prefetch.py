"""Shards are fetched ahead of the step under way, in order, and within a number of bytes."""

import threading
import time

from train.prefetch import Prefetch


class Source:
    """Ten steps of two files each: one of their own, and one that two steps share."""

    def __init__(self, size=10):
        self.size = size
        self.fetched = []
        self.lock = threading.Lock()

    def files_of_step(self, step):
        return [(f"own-{step}", self.size), (f"shared-{step // 2}", self.size)]

    def fetch(self, path):
        with self.lock:
            self.fetched.append(path)

    def wait_for(self, number):
        deadline_s = time.monotonic() + 10
        while len(set(self.fetched)) < number:
            assert time.monotonic() < deadline_s, self.fetched
            time.sleep(0.005)
        time.sleep(0.05)  # nothing more may come
        return set(self.fetched)


def start(source, limit_bytes):
    prefetch = Prefetch(source.files_of_step, source.fetch, 0, 10, limit_bytes)
    prefetch.start()
    return prefetch


def test_all_is_fetched_where_it_fits():
    source = Source()
    prefetch = start(source, 1000)
    assert len(source.wait_for(15)) == 15
    assert prefetch.window_bytes == 150


def test_the_window_stays_within_its_bytes_and_moves_on():
    source = Source()
    prefetch = start(source, 50)
    first = source.wait_for(5)
    assert first == {"own-0", "shared-0", "own-1", "own-2", "shared-1"}
    prefetch.advance(2)  # own-0, own-1 and shared-0 are needed no more
    assert source.wait_for(8) - first == {"own-3", "own-4", "shared-2"}
    assert prefetch.window_bytes == 50
    prefetch.close()


def test_a_file_larger_than_the_window_is_fetched_when_its_step_comes():
    source = Source(size=100)
    prefetch = start(source, 50)
    assert source.wait_for(2) == {"own-0", "shared-0"}
    prefetch.advance(1)
    assert "own-1" in source.wait_for(3)
    prefetch.close()


def test_an_error_ends_nothing():
    source = Source()

    def fetch(path):
        source.fetch(path)
        raise OSError("down")

    Prefetch(source.files_of_step, fetch, 0, 10, 1000).start()
    assert len(source.wait_for(15)) == 15
