"""The engine: one thread that runs the scheduler, and the door to it.

    callers --submit, cancel, ...--> inbox --> scheduler's thread (model, pool, bookkeeping) --events--> callers'
    `on_event`

Everything that touches torch or the pool's bookkeeping happens in that thread. A bug there ends the engine loudly:
every request gets an error, and `health` says so from then on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvstore.core.blocks import doubling_depth
from kvstore.errors import InvalidField, KVStoreError, LimitExceeded, Unavailable
from kvstore_engine.config import EngineConfig
from kvstore_engine.counters import Counters
from kvstore_engine.executor import Executor
from kvstore_engine.hbm import HbmTable
from kvstore_engine.model import LoadedModel, load_model
from kvstore_engine.pool import KVPool
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.scheduler import Scheduler
from kvstore_engine.sequence import EndEvent, FinishReason, Request, RequestEvent, Span, TurnEnd, Usage, idle_after
from kvstore_engine.store import ContextStore, NullStore, PoolStats

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT_S = 0.25
REPORT_EVERY_NS = 10**9
START_TIMEOUT_S = 300.0


class Engine:
    """A model, a pool, a scheduler, a store. Thread-safe.

    Raises SetupError when model, device or pool can't be had. `close` it, or use it as a context manager.
    """

    def __init__(
        self, config: EngineConfig, model: LoadedModel | None = None, store: ContextStore | None = None
    ) -> None:
        self.config = config
        self.model = model or load_model(config)
        self.keyspace = self.model.keyspace
        self.pool = KVPool(self.keyspace, config.pool_bytes, self.model.device)
        self._store: ContextStore = store or NullStore()
        self._failed: BaseException | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._live: dict[str, Request] = {}
        """Requests without an EndEvent yet."""
        self._scheduler: Scheduler | None = None
        self._started: Future[Scheduler] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._started.result(START_TIMEOUT_S)

    # ---- requests

    @property
    def context_tokens_max(self) -> int:
        """Longest context (prompt and output) that model, pool and configuration allow."""
        limits = [self.model.context_tokens_max, self.pool.num_slots * self.keyspace.block_tokens]
        if self.config.context_tokens_max > 0:
            limits.append(self.config.context_tokens_max)
        return min(limits)

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        on_event: Callable[[RequestEvent], None],
        *,
        session: str = "",
        on_end: Callable[[str], TurnEnd] = idle_after,
        timeout_s: float | None = None,
        use_cache: bool = True,
        plan: tuple[Span, ...] | None = None,
    ) -> str:
        """Queue a request and return its id; doesn't wait. `on_event` is called from the engine's thread, at last with
        one EndEvent.

        Raises: InvalidField for a bad prompt, LimitExceeded when the queue is full, Unavailable when the engine is
        gone.
        """
        self._check_prompt(tokens, sampling)
        scheduler = self._alive()
        request_id = uuid.uuid4().hex
        request = Request(
            id=request_id,
            tokens=list(tokens),
            sampling=sampling,
            on_event=self._forgetting(on_event, request_id),
            session=session,
            on_end=on_end,
            timeout_s=timeout_s or self.config.request_timeout_s,
            use_cache=use_cache,
            plan=plan,
        )
        with self._lock:
            if len(self._live) >= self.config.max_queue + self.config.max_batch:
                scheduler.counters.num_refused += 1
                raise LimitExceeded(f"max_queue: {self.config.max_queue} requests wait already; try again later")
            self._live[request.id] = request
        scheduler.post(lambda: accept(scheduler, request))
        return request.id

    def generate(self, tokens: Sequence[int], sampling: SamplingParams, **options: object) -> EndEvent:
        """Submit and wait for the end. Raises Unavailable when the request ends with an error."""
        for event in self.stream(tokens, sampling, **options):
            if isinstance(event, EndEvent):
                if event.error:
                    raise Unavailable(event.error)
                return event
        raise AssertionError("a request ended without an EndEvent")

    def stream(self, tokens: Sequence[int], sampling: SamplingParams, **options: object) -> Iterator[RequestEvent]:
        """Submit and yield events as they come. Closing the iterator cancels the request."""
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        request_id = self.submit(tokens, sampling, events.put, **options)  # type: ignore[arg-type]
        try:
            while True:
                event = events.get()
                yield event
                if isinstance(event, EndEvent):
                    return
        finally:
            self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request; one that is over already is left alone. Doesn't wait."""
        scheduler = self._scheduler
        if scheduler is not None and request_id in self._live:
            scheduler.post(lambda: void(scheduler.cancel(request_id)))

    # ---- sessions

    @property
    def store(self) -> ContextStore:
        """Where contexts are kept beyond the pool."""
        return self._store

    def fork_session(self, parent: str, session: str) -> None:
        """Raises UnknownSession, InvalidField."""
        self.call(lambda scheduler: scheduler.turns.fork(parent, session))

    def end_session(self, session: str) -> None:
        """Raises UnknownSession."""
        self.call(lambda scheduler: scheduler.turns.close(session))

    # ---- state

    @property
    def counters(self) -> Counters:
        """Totals since start."""
        return self._alive().counters

    @property
    def failure(self) -> str:
        """Why the engine stopped; empty while it runs."""
        return "" if self._failed is None else f"engine stopped: {type(self._failed).__name__}: {self._failed}"

    def stats(self) -> dict[str, float]:
        """Gauges for metrics."""
        scheduler = self._alive()
        table = scheduler.hbm
        return {
            "slots": self.pool.num_slots,
            "slots_used": table.num_used,
            "waiting": len(scheduler.waiting),
            "restoring": len(scheduler.restoring),
            "running": len(scheduler.running),
            "saving": len(scheduler.saving),
            "sessions": len(scheduler.contexts),
            "store_failures": scheduler.transfers.num_failed,
            "store_dropped": scheduler.transfers.num_dropped,
        }

    def call(self, what: Callable[[Scheduler], T]) -> T:
        """Run something in the engine's thread and wait for it.

        Passes on what it raises; Unavailable when the engine is gone.
        """
        scheduler = self._alive()
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(what(scheduler))
            except KVStoreError as error:
                result.set_exception(error)

        scheduler.post(run)
        while True:
            try:
                return result.result(IDLE_WAIT_S)
            except TimeoutError:
                self._alive()

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no request and no store transfer is under way."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.call(lambda s: s.quiet):
                return True
            threading.Event().wait(0.01)
        return False

    def close(self) -> None:
        """End all requests, finish offloads, stop. Again is a no-op."""
        self._closing = True
        if self._scheduler is not None:
            self._scheduler.post(lambda: None)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _check_prompt(self, tokens: Sequence[int], sampling: SamplingParams) -> None:
        if not tokens:
            raise InvalidField("prompt", "is empty", "give at least one token")
        most = self.context_tokens_max
        if len(tokens) + sampling.max_tokens > most:
            problem = f"{len(tokens)} prompt tokens and max_tokens {sampling.max_tokens} exceed the context of {most}"
            raise InvalidField("messages", problem, "shorten the messages or lower max_tokens")
        bad = next((i for i, t in enumerate(tokens) if not 0 <= t < self.model.vocab_size), None)
        if bad is not None:
            raise InvalidField(
                "prompt", f"token {tokens[bad]} at {bad} is out of range", f"use 0 to {self.model.vocab_size - 1}"
            )

    def _forgetting(self, on_event: Callable[[RequestEvent], None], request_id: str) -> Callable[[RequestEvent], None]:
        def forward(event: RequestEvent) -> None:
            if isinstance(event, EndEvent):
                self._live.pop(request_id, None)
            on_event(event)

        return forward

    def _alive(self) -> Scheduler:
        if self._scheduler is None or self._failed is not None or not self._thread.is_alive():
            raise Unavailable(self.failure or "engine is closed")
        return self._scheduler

    def _run(self) -> None:
        try:
            scheduler = self._scheduler = self._build()
            self._started.set_result(scheduler)
        except BaseException as error:
            self._started.set_exception(error)
            self.pool.close()
            return
        try:
            self._loop(scheduler)
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._failed = error
            self._fail_requests()
        else:  # after a failure copies may still run into the pool: it goes with the process
            self.pool.close()

    def _build(self) -> Scheduler:
        c = self.config
        executor = Executor(self.model, self.pool, c.max_batch, c.threads, c.attention, c.cuda_graphs)
        doubles_at = doubling_depth(c.recompute_doubles_at, c.block_tokens)
        table = HbmTable(self.pool, c.eviction, time.monotonic_ns, doubles_at=doubles_at)
        tokenizer, eos = self.model.tokenizer, self.model.eos_ids
        return Scheduler(self.config, executor, table, self._store, tokenizer, eos, time.monotonic_ns)

    def _loop(self, scheduler: Scheduler) -> None:
        reported = 0
        while not self._closing:
            scheduler.turn(IDLE_WAIT_S)
            now = time.monotonic_ns()
            if now - reported >= REPORT_EVERY_NS:
                reported = now
                self._store.report(self._pool_stats(scheduler))
        scheduler.close()

    def _pool_stats(self, scheduler: Scheduler) -> PoolStats:
        c = scheduler.counters
        return PoolStats(
            self.pool.size_bytes,
            scheduler.hbm.num_used * self.pool.stride,
            c.prompt_tokens["hbm"],
            c.computed_tokens,
            c.restored_tokens_dram,
            c.restored_tokens_nvme,
        )

    def _fail_requests(self) -> None:
        for request in list(self._live.values()):
            request.on_event(failed_event(self.failure))


def accept(scheduler: Scheduler, request: Request) -> None:
    """Hand a request over; what is wrong with it goes to its owner."""
    try:
        scheduler.submit(request)
    except KVStoreError as error:
        request.on_event(failed_event(str(error)))


def void(_: object) -> None:
    """Drop a value."""


def failed_event(error: str) -> EndEvent:
    """The end of a request that the engine couldn't finish."""
    return EndEvent(FinishReason.ERROR, Usage(), (), "", None, error)
