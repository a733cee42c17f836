"""Requests whose blocks are on their way from the store.

    ask -> store says what it has -> plan -> [front computed] -> the rest is read -> both there: join -> RUNNING
                                         '-> nothing, or not worth it: RUNNING as it is
                                             late, cancelled: given up

A restore that is late is given up and the context computed. Its slots stay claimed until the transfer is over, since it
may still write into them: the hold then belongs to the transfer, which releases it.

Blocks that come to a device by layers let the engine compute the chunk behind them meanwhile (`next_ahead`): layer l
waits for layer l only. What it computes is held on the job, unsealed and unseen, until the restore has said that all of
the blocks are right, and is thrown away otherwise: no running sequence ever has to take anything back. Only an engine
with nothing else to compute asks for layers and computes on them: a stream that waits for a layer does nothing else
meanwhile, and blocks that come whole come in fewer copies.

All methods are for the scheduler's thread; the store's calls run in `Transfers` and come back through the inbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore_client.layers import LayerGate
from kvstore_engine.config import EngineConfig
from kvstore_engine.counters import Counters
from kvstore_engine.hbm import Clock, HbmTable, Hold
from kvstore_engine.plans import PlanBook
from kvstore_engine.pool import KVPool
from kvstore_engine.rates import Rates
from kvstore_engine.sequence import Job, State
from kvstore_engine.store import ContextStore, RestoreResult, StoreLease
from kvstore_engine.transfers import Transfers

AHEAD_WAIT_S = 0.25
"""Longest time that the engine's thread waits for layers, for one chunk. On a device the wait for a layer is the
stream's, and the thread's only that for its copies to be enqueued."""


class Owner(Protocol):
    """The scheduler, as far as restores know it."""

    hbm: HbmTable
    plans: PlanBook
    rates: Rates
    counters: Counters
    transfers: Transfers
    running: list[Job]

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run by the scheduler's thread, which wakes up for it. Thread-safe."""

    def run(self, job: Job) -> None:
        """Everything that could be had from caches is in the job's hold: compute the rest."""


class Restores:
    """Owns the jobs that are RESTORING. A transfer that outlives its job keeps a claim."""

    def __init__(self, owner: Owner, config: EngineConfig, pool: KVPool, store: ContextStore, clock: Clock) -> None:
        self._owner = owner
        self._config = config
        self._pool = pool
        self._store = store
        self._clock = clock
        self._size = pool.keyspace.block_tokens
        self._by_layers = config.layerwise_restore == "auto" and pool.arena is not None
        self.jobs: list[Job] = []
        self.num_claims = 0
        """Holds that transfers write into."""

    def ask(self, job: Job, count: int) -> None:
        """Restore what the store has of the job's first `count` blocks, behind those in its hold."""
        job.state = State.RESTORING
        job.restore_began_ns = self._clock()
        job.restore_deadline_ns = job.restore_began_ns + round(self._config.restore_timeout_s * 1e9)
        self.jobs.append(job)
        session, chain, hold = job.request.session, job.chain.copy(), job.hold
        call = lambda: self._store.acquire(session, chain, count)  # noqa: E731
        self._owner.transfers.read(call, lambda lease: self._leased(job, hold, lease, count))

    def give_up_late(self) -> list[Job]:
        """Take out jobs whose restores are late; they have no hold any more."""
        now = self._clock()
        late = [job for job in self.jobs if now >= job.restore_deadline_ns]
        for job in late:
            self._owner.counters.num_restores_late += 1
            if job.hold is not None and job.store_lease is not None:
                num_late = job.restore_end // self._size - max(job.front_end // self._size, job.hold.num_cached)
                self._owner.rates.late(num_late, self._config.restore_timeout_s)
            self.give_up(job)
        return late

    def give_up(self, job: Job) -> None:
        """Leave RESTORING, without a hold. A transfer that runs keeps it and releases it when it ends."""
        self.jobs.remove(job)
        if job.store_lease is None and job.hold is not None:
            self._owner.hbm.release(job.hold)
        self._drop_ahead(job)
        job.hold, job.store_lease, job.tail, job.front_end = None, None, None, 0

    def next_ahead(self) -> Job | None:
        """A job behind whose blocks, which are coming by layers, a chunk can be computed now, if its front is there."""
        return next((job for job in self.jobs if job.gate is not None and job.gate.open), None)

    def join(self, job: Job) -> None:
        """The restored blocks follow those computed meanwhile, once both are there."""
        result, hold = job.tail, job.hold
        if result is None or hold is None or job.num_computed < job.front_end:
            return
        for _ in range(result.num_ok):
            self._owner.hbm.adopt(hold, job.chain)
        if hold.num_sealed * self._size < job.restore_end:
            self._drop_ahead(job)
        if job.ahead is None:
            self._owner.hbm.drop_tail(hold, hold.num_sealed)
        job.gate = None
        job.restored, job.tail, job.front_end = result, None, 0
        self._stop(job)

    def _leased(self, job: Job, hold: Hold | None, lease: StoreLease | None, count: int) -> None:
        """The store said what it has."""
        if job.state != State.RESTORING or job.hold is not hold or hold is None:
            self._release(lease)
            return
        first = len(hold.slots)
        last = min(lease.num_blocks, count) if lease is not None else 0
        plan = self._owner.rates.plan(first, max(first, last), len(job.tokens))
        self._owner.counters.num_restores_declined += first < last and plan.first == plan.last
        if lease is None or plan.first == plan.last or not self._owner.hbm.borrow(hold, last - first):
            self._release(lease)
            self._stop(job)
            return
        if plan.first > first:
            self._start_front(job, hold, plan.first * self._size)
        self._read(job, hold, lease, plan.first, last)

    def _start_front(self, job: Job, hold: Hold, front_end: int) -> None:
        """Compute `[what is there, front_end)` while the blocks behind it are restored."""
        self._owner.counters.num_restores_split += 1
        job.front_end = front_end
        job.num_computed = hold.num_sealed * self._size
        job.spans = self._owner.plans.of([job.chain.hash_at(i) for i in range(hold.num_sealed)])

    def _read(self, job: Job, hold: Hold, lease: StoreLease, first: int, last: int) -> None:
        slots, gate = hold.slots[first:], self._gate(last - first)
        self.num_claims += 1
        job.store_lease, job.restore_end, job.gate = lease, last * self._size, gate

        def call() -> RestoreResult:
            try:
                return self._store.restore(lease, first, last, self._pool, slots, gate)
            finally:
                if gate is not None:
                    gate.close()

        self._owner.transfers.read(call, lambda result: self._restored(job, hold, lease, result))

    def _gate(self, num_blocks: int) -> LayerGate | None:
        if not self._by_layers or self._owner.running:
            return None
        return LayerGate(num_blocks, lambda: self._owner.post(lambda: None), AHEAD_WAIT_S)

    def _drop_ahead(self, job: Job) -> None:
        self._owner.counters.num_ahead_dropped += job.ahead is not None
        job.ahead = job.gate = None

    def _restored(self, job: Job, hold: Hold, lease: StoreLease, result: RestoreResult | None) -> None:
        self.num_claims -= 1
        self._release(lease)
        if job.hold is not hold:  # given up meanwhile: only now may the slots be used again
            self._owner.hbm.release(hold)
            return
        job.store_lease = None
        result = result or RestoreResult(0)
        self._owner.counters.note_restore(result, self._size)
        self._owner.rates.restored(result)
        job.usage.restore_ns += self._clock() - job.restore_began_ns
        job.tail, job.restore_deadline_ns = result, job.deadline_ns
        self.join(job)

    def _stop(self, job: Job) -> None:
        self.jobs.remove(job)
        self._owner.run(job)

    def _release(self, lease: StoreLease | None) -> None:
        if lease is not None:
            self._owner.transfers.read(lambda: self._store.release(lease), lambda _: None)
