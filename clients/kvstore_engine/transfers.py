"""Store work, off the scheduler's thread.

    reads   acquire and restore, first come first served
    writes  offloads, signals, forks, ends: in order for each session, sessions side by side

Reads never queue behind writes. Each job ends with exactly one call of its `done`, put into the scheduler's inbox; a
store that fails (KVStoreError, OSError) gives `done(None)`, which the scheduler treats as a miss. Any other exception
is a bug of ours: it goes to `crashed`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)
T = TypeVar("T")

Post = Callable[[Callable[[], None]], None]
"""Puts a call into the scheduler's inbox."""

WRITES_MAX = 10_000
"""Queued writes; beyond it new ones are dropped (and counted), as a store that slow is no store."""


class Transfers:
    """Runs store calls on a few threads."""

    def __init__(self, post: Post, crashed: Callable[[BaseException], None], workers: int) -> None:
        self._post = post
        self._crashed = crashed
        self._reads = ThreadPoolExecutor(workers, thread_name_prefix="store-read")
        self._writes = ThreadPoolExecutor(workers, thread_name_prefix="store-write")
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Callable[[], None]]] = {}
        self._num_writes = 0
        self.num_pending = 0
        """Jobs whose `done` hasn't run yet; changed by the scheduler's thread only."""
        self.num_failed = 0
        self.num_dropped = 0

    def read(self, call: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run a read; `done` gets its result, or None when the store failed."""
        self.num_pending += 1
        self._reads.submit(self._run, call, done)

    def write(self, session: str, call: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run a write after all earlier ones of the same session."""
        self.num_pending += 1
        with self._lock:
            if self._num_writes >= WRITES_MAX:
                self.num_dropped += 1
                self._finish(done, None)
                return
            self._num_writes += 1
            queue = self._queues.get(session)
            if queue is not None:
                queue.append(lambda: self._run(call, done))
                return
            self._queues[session] = deque([lambda: self._run(call, done)])
        self._writes.submit(self._drain, session)

    def close(self) -> None:
        """Finish running jobs, drop queued reads, finish queued writes."""
        self._reads.shutdown(wait=True, cancel_futures=True)
        self._writes.shutdown(wait=True)

    def _drain(self, session: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[session]
                if not queue:
                    del self._queues[session]
                    return
                job = queue.popleft()
            job()
            with self._lock:
                self._num_writes -= 1

    def _run(self, call: Callable[[], T], done: Callable[[T | None], None]) -> None:
        result: T | None = None
        try:
            result = call()
        except (KVStoreError, OSError) as error:
            with self._lock:
                self.num_failed += 1
            log.warning("store: %s", error)
        except BaseException as error:
            self._crashed(error)
        self._finish(done, result)

    def _finish(self, done: Callable[[T | None], None], result: T | None) -> None:
        def finish() -> None:
            self.num_pending -= 1
            done(result)

        self._post(finish)
