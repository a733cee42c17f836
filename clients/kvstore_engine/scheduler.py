"""Who computes next: continuous batching over the pool.

    WAITING --admit--> RESTORING --blocks are there, or late--> RUNNING --last token--> DONE
                  \\______________nothing to restore___________/   |  ^
                                                        pool short v  | resume through WAITING
                                                                 SAVING (blocks on the way down)

One `turn()` handles the inbox, admits, computes one prefill chunk (of the sequence with least left to do: a resumed
turn isn't kept waiting by a cold one) and one decode step (of all that are ready), so that long prompts don't stop the
others. Nothing here blocks on the store: its work runs in `Transfers` and comes back through the inbox. What becomes of
restores is in `restores`; with nothing else to do a turn may compute the chunk behind one that is still on its way.

When the pool is short the youngest running sequence gives way: its sealed blocks are offloaded (not dropped), and it
resumes through restore. The oldest is never preempted, so something always ends.

All methods are for one thread, but for `post`.
"""

from __future__ import annotations

import queue
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvstore.core.types import Durability
from kvstore.errors import LimitExceeded, Unavailable
from kvstore_engine.config import EngineConfig
from kvstore_engine.contexts import Contexts
from kvstore_engine.counters import Counters
from kvstore_engine.executor import Executor, Work
from kvstore_engine.hbm import Clock, HbmTable, Hold
from kvstore_engine.plans import PlanBook, next_span, planned_span
from kvstore_engine.rates import Rates
from kvstore_engine.restores import Restores
from kvstore_engine.sampling import Sampler
from kvstore_engine.sequence import Ahead, EndEvent, FinishReason, Job, Request, Span, State, TokensEvent, Usage
from kvstore_engine.store import ContextStore, NullStore
from kvstore_engine.text import TextStream
from kvstore_engine.transfers import Transfers
from kvstore_engine.turns import Turns


class Scheduler:
    """Owns the sequences of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        hbm: HbmTable,
        store: ContextStore,
        tokenizer: object,
        eos_ids: frozenset[int],
        clock: Clock,
    ) -> None:
        self._config = config
        self._executor = executor
        self._pool = executor.pool
        self._size = executor.pool.keyspace.block_tokens
        self.hbm = hbm
        self._store = store
        self._has_store = not isinstance(store, NullStore)
        self._tokenizer = tokenizer
        self._eos = eos_ids
        self._clock = clock
        self._durability = Durability[config.durability.upper()]
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.transfers = Transfers(self.post, self._crash, config.store_workers)
        self._crashed: BaseException | None = None
        self.contexts = Contexts(executor.pool.keyspace)
        self.turns = Turns(hbm, self.contexts, store if self._has_store else None, self.transfers)
        self.plans = PlanBook(self._size)
        self.counters = Counters()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.saving: list[Job] = []
        self.rates = Rates(self._size, config.chunk_tokens, config.restore_plan == "always")
        self.restores = Restores(self, config, executor.pool, store, clock)
        self._num_claims = 0
        """Holds that running offloads read."""
        self._computed_something = False

    # ---- the door

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run by the scheduler's thread. Thread-safe."""
        self._inbox.put(call)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises LimitExceeded when the queue is full."""
        if len(self.waiting) >= self._config.max_queue:
            self.counters.num_refused += 1
            raise LimitExceeded(f"max_queue: {self._config.max_queue} requests wait already; try again later")
        now = self._clock()
        chain, kept = self.contexts.chain(request.session, request.tokens)
        usage = Usage(prompt_tokens=len(request.tokens), arrived_ns=now)
        stream = TextStream(self._tokenizer, request.sampling.stop)
        deadline = now + round(request.timeout_s * 1e9)
        job = Job(request, chain, list(request.tokens), Sampler(request.sampling), stream, deadline, usage)
        job.num_new, job.served_ns = len(request.tokens) - kept, now
        self.waiting.append(job)
        self.turns.begin(request.session)

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; False when it isn't here (any more)."""
        for job in self._jobs():
            if job.request.id == request_id:
                self._end(job, FinishReason.CANCELLED)
                return True
        return False

    # ---- the loop

    @property
    def busy(self) -> bool:
        """Is there anything to compute or to admit now? (Sequences that wait for room don't count until a transfer
        ends.)
        """
        return self._computed_something or bool(self.waiting and self._has_room(self._next_waiting()))

    @property
    def restoring(self) -> list[Job]:
        """Sequences whose blocks are on their way."""
        return self.restores.jobs

    @property
    def quiet(self) -> bool:
        """No request, and no store work."""
        return not self.transfers.num_pending and not self._jobs()

    def turn(self, wait_s: float = 0.0) -> None:
        """One round.

        With nothing to compute, waits up to `wait_s` for something to arrive. Raises what a worker crashed with.
        """
        self._drain(0.0 if self.busy else wait_s)
        self._computed_something = False
        if self._crashed is not None:
            raise RuntimeError("a store worker failed; this is a bug") from self._crashed
        self._expire()
        self.hbm.tick()
        self._admit()
        self._prefill_one()
        self._decode_all()
        self._compute_ahead()

    def close(self) -> None:
        """End every request and wait for running transfers. (Queued offloads are finished first.)"""
        for job in list(self._jobs()):
            self._end(job, FinishReason.CANCELLED)
        self.transfers.close()
        self._drain(0.0)
        self._store.close()

    def _jobs(self) -> list[Job]:
        return [*self.running, *self.restoring, *self.saving, *self.waiting]

    def _drain(self, wait_s: float) -> None:
        try:
            call = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                call()
                call = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _crash(self, error: BaseException) -> None:
        self.post(lambda: setattr(self, "_crashed", error))

    def _expire(self) -> None:
        now = self._clock()
        for job in self._jobs():
            if now >= job.deadline_ns:
                self._end(job, FinishReason.TIMEOUT)
        for job in self.restores.give_up_late():
            job.hold = self._acquire(job)
            self.run(job)

    # ---- admission

    def _has_room(self, job: Job) -> bool:
        """Enough slots for the whole context, unless nobody is there who could free some."""
        if len(self.running) + len(self.restoring) >= self._config.max_batch:
            return False
        needed = len(job.tokens) // self._size + 1
        return needed <= self.hbm.num_available or not (self.running or self._others_hold())

    def _next_waiting(self) -> Job:
        """The one with least to compute, unless the first has lost patience."""
        return self._impatient(self.waiting[0]) or min(self.waiting, key=lambda job: job.num_new)

    def _impatient(self, job: Job) -> Job | None:
        return job if self._clock() - job.served_ns > self._config.patience_s * 1e9 else None

    def _admit(self) -> None:
        while self.waiting and self._has_room(job := self._next_waiting()):
            self.waiting.remove(job)
            job.served_ns = self._clock()
            job.hold = self._acquire(job)
            wanted = self._restorable(job) - len(job.hold.slots)
            if self._has_store and job.request.use_cache and wanted >= self._config.restore_blocks_min:
                self.restores.ask(job, self._restorable(job))
            else:
                self.run(job)

    def _restorable(self, job: Job) -> int:
        """Blocks that may come from a cache: all full ones, but the last token must be computed for its logits."""
        return (len(job.tokens) - 1) // self._size if job.request.use_cache else 0

    def _acquire(self, job: Job) -> Hold:
        session = job.request.session
        known = job.request.use_cache and session in self.contexts
        return self.hbm.acquire(job.chain, self._restorable(job), session if known else "")

    def run(self, job: Job) -> None:
        """Everything that could be had from caches is in the hold: compute the rest."""
        hold = job.hold
        assert hold is not None
        job.state = State.RUNNING
        job.num_computed = hold.num_sealed * self._size
        job.spans = self.plans.of([job.chain.hash_at(i) for i in range(hold.num_sealed)])
        if not job.accounted:
            self._account(job, hold)
        insort(self.running, job, key=lambda j: j.usage.arrived_ns)
        ahead, job.ahead = job.ahead, None
        if ahead is not None:
            self._prefilled(job, ahead.span, ahead.logits)

    def _account(self, job: Job, hold: Hold) -> None:
        """Where the prompt's tokens came from; once a request, whatever preemption does later."""
        job.accounted = True
        nvme = min(job.restored.num_nvme, job.restored.num_ok)
        job.usage.nvme_tokens = nvme * self._size
        job.usage.dram_tokens = (job.restored.num_ok - nvme) * self._size
        job.usage.hbm_tokens = hold.num_cached * self._size
        self.counters.note_prompt(job.usage)

    # ---- compute

    def _prefill_one(self) -> None:
        """One chunk of the sequence with least left to do, or of the oldest that lost patience."""
        able = [job for job in (*self.running, *self.restoring) if self._wants_prefill(job)]
        if not able:
            return
        job = next((j for j in able if self._impatient(j)), None) or min(able, key=lambda j: j.num_pending)
        span = self._next_span(job, job.num_computed, job.front_end or len(job.tokens))
        if not self._make_room(job, span[1]):
            return
        began = self._clock()
        logits = self._executor.prefill(self._work(job, span))
        self.rates.compute.sample(*span, (self._clock() - began) / 1e9)
        self._prefilled(job, span, logits)

    def _prefilled(self, job: Job, span: Span, logits: torch.Tensor) -> None:
        self._computed(job, span)
        if job.state == State.RESTORING:
            self.restores.join(job)
        elif job.num_pending == 0:
            self._advance(job, job.sampler.choose(logits))

    def _compute_ahead(self) -> None:
        """With nothing else to compute, fronts included: the chunk behind blocks that are coming by layers.

        It counts only if `restores` finds that they were right.
        """
        if self.running or any(self._wants_prefill(job) for job in self.restoring):
            return
        job = self.restores.next_ahead()
        if job is None or job.hold is None or job.gate is None:
            return
        gate, job.gate = job.gate, None
        span = self._next_span(job, job.restore_end, len(job.tokens))
        if span[0] != job.restore_end:  # a plan that would compute what is being restored
            return
        if not self.hbm.borrow(job.hold, -(-span[1] // self._size) - len(job.hold.slots)):
            return
        self.counters.num_ahead += 1
        try:
            job.ahead = Ahead(span, self._executor.prefill(self._work(job, span), gate.before_layer))
        except Unavailable:  # a layer that didn't come: the restore will say why
            self.counters.num_ahead_dropped += 1

    def _wants_prefill(self, job: Job) -> bool:
        """More than a decode step's one token, a plan to be followed to the prompt's end, or the front of a restore."""
        if job.state == State.RESTORING:
            return job.num_computed < job.front_end
        return job.num_pending > 1 or bool(job.request.plan and job.num_computed < job.num_prompt)

    def _next_span(self, job: Job, start: int, end: int) -> Span:
        planned = planned_span(job.request.plan, start) if job.request.plan else None
        if planned is not None and planned[1] <= len(job.tokens):
            return planned
        return next_span(start, end, self._config.chunk_tokens)

    def _work(self, job: Job, span: Span) -> Work:
        assert job.hold is not None
        return Work(job.tokens[span[0] : span[1]], span[0], job.hold.slots)

    def _decode_all(self) -> None:
        ready: list[Job] = []
        for job in list(self.running):  # oldest first; making room for one may preempt a younger one
            if job.state == State.RUNNING and job.num_pending == 1 and self._make_room(job, len(job.tokens)):
                ready.append(job)
        ready = [job for job in ready if job.state == State.RUNNING]
        if not ready:
            return
        spans = [(job.num_computed, job.num_computed + 1) for job in ready]
        logits = self._executor.decode([self._work(job, span) for job, span in zip(ready, spans, strict=True)])
        for job, span, row in zip(ready, spans, logits, strict=True):
            self._computed(job, span)
            self._advance(job, job.sampler.choose(row))

    def _computed(self, job: Job, span: Span) -> None:
        """KV of `span` is in the pool: remember how it came, seal what became full."""
        hold = job.hold
        assert hold is not None
        self._computed_something = True
        self.counters.computed_tokens += span[1] - span[0]
        job.num_computed = span[1]
        job.served_ns = self._clock()
        if job.spans is not None:
            job.spans.append(span)
        if not job.request.use_cache:
            return
        while (hold.num_sealed + 1) * self._size <= job.num_computed:
            self.plans.note(job.chain.hash_at(hold.num_sealed), hold.num_sealed, job.spans)
            self.hbm.adopt(hold, job.chain)

    def _advance(self, job: Job, token: int) -> None:
        """One more token of output."""
        if not job.usage.first_token_ns:
            job.usage.first_token_ns = self._clock()
            self.counters.note_ttft(job.usage)
        job.tokens.append(token)
        job.chain.extend([token])
        job.usage.completion_tokens += 1
        self.counters.generated_tokens += 1
        sampling = job.request.sampling
        ended = token in self._eos and not sampling.ignore_eos
        text = "" if ended else job.stream.push(token)
        if ended or job.stream.stopped:
            self._end(job, FinishReason.STOP, text, (token,))
        elif job.usage.completion_tokens >= sampling.max_tokens:
            self._end(job, FinishReason.LENGTH, text, (token,))
        else:
            job.request.on_event(TokensEvent(text, (token,)))

    # ---- room

    def _make_room(self, job: Job, num_tokens: int) -> bool:
        """Slots for the first `num_tokens` tokens; False when `job` must wait, or had to give way itself."""
        assert job.hold is not None
        while not self.hbm.borrow(job.hold, -(-num_tokens // self._size) - len(job.hold.slots)):
            if self._others_hold():  # room is on its way
                return False
            youngest = self.running[-1]
            assert len(self.running) > 1, "a request that fits the pool found no room in an empty one"
            self._preempt(youngest)
            if youngest is job:
                return False
        return True

    def _others_hold(self) -> bool:
        return bool(self.restoring or self.saving or self.restores.num_claims or self._num_claims)

    def _preempt(self, job: Job) -> None:
        """Offload, don't drop: the sequence comes back through restore."""
        self.counters.num_preemptions += 1
        job.usage.num_preemptions += 1
        self.running.remove(job)
        hold, job.hold = job.hold, None
        assert hold is not None
        self.hbm.drop_tail(hold, hold.num_sealed)
        job.state = State.SAVING
        self.saving.append(job)
        self._offload(job, hold, lambda: self._saved(job))

    def _saved(self, job: Job) -> None:
        if job.state == State.SAVING:
            self.saving.remove(job)
            job.state = State.WAITING
            job.num_computed = job.num_new = 0
            self.waiting.appendleft(job)

    def _offload(self, job: Job, hold: Hold, then: Callable[[], None]) -> None:
        """Copy the sealed blocks down, then let go of the hold."""
        if not self._has_store or not job.request.use_cache or not hold.num_sealed:
            self.hbm.release(hold)
            then()
            return
        self._num_claims += 1
        session, chain, last, slots = job.request.session, job.chain.copy(), hold.num_sealed, list(hold.slots)

        def done(held: int | None) -> None:
            self._num_claims -= 1
            self.counters.note_offload(held, last)
            self.hbm.release(hold)
            then()

        call = lambda: self._store.offload(session, chain, last, self._pool, slots, self._durability)  # noqa: E731
        self.transfers.write(session or job.request.id, call, done)

    # ---- ends

    def _end(self, job: Job, reason: str, text: str = "", tokens: Sequence[int] = ()) -> None:
        """Take a job out, wherever it is, and tell its owner."""
        self._take_out(job)
        text += "" if job.stream.stopped else job.stream.finish()
        if text or tokens:
            job.request.on_event(TokensEvent(text, tuple(tokens)))
        plan = tuple(job.spans) if job.spans is not None else None
        self.counters.note_end(reason, job.usage)
        turn_end = job.request.on_end(job.stream.text)
        hold, job.hold, job.state = job.hold, None, State.DONE
        # told before the context is copied down: whether it is worth room there depends on what the agent does next
        self.turns.end(job.request.session, job.chain, turn_end, job.usage.completion_tokens)
        if hold is not None:
            self.hbm.drop_tail(hold, hold.num_sealed)
            self._offload(job, hold, lambda: None)
        job.request.on_event(EndEvent(reason, job.usage, tuple(job.output), job.stream.text, plan))

    def _take_out(self, job: Job) -> None:
        if job.state == State.RESTORING:
            self.restores.give_up(job)
        elif job.state == State.RUNNING:
            self.running.remove(job)
        elif job.state == State.SAVING:
            self.saving.remove(job)
        elif job.state == State.WAITING:
            self.waiting.remove(job)
