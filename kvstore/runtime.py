"""The one owner of a node's machine: steps it under one lock, and hands its commands out.

    caller threads --event--> [lock: machine.step] --work--> hands (moves, index) --completions--> [lock: machine.step]
                                     |
                                     +--answers--> callers, futures
                                     +--notices--> journal (Watch), metrics

Nothing waits while holding the lock.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvstore.config import ServiceConfig
from kvstore.core import commands, events
from kvstore.core.blocks import Block
from kvstore.core.commands import Command, Location, Removed, ReserveStatus, Stored
from kvstore.core.keyspace import Keyspace
from kvstore.core.machine import Machine
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, Durability, Hashes, HashList, KeyspaceId, LeaseId, OpId, SessionId, Tier
from kvstore.errors import (
    CapacityError,
    InvalidField,
    KVStoreError,
    LayoutMismatch,
    LimitExceeded,
    TierError,
    Unavailable,
)
from kvstore.hands import Hands, Work
from kvstore.journal import Journal
from kvstore.lessons import KEEP_EVERY_S, keep, lessons
from kvstore.metrics import Metrics, Rows
from kvstore.parts import limits_of, open_arena, open_data, start_scrubber, tiers_of
from kvstore.records import Records
from kvstore.recovery import recover, registration, session_rows
from kvstore.retire import older_than, retire
from kvstore.scrubber import Scrubber
from kvstore.tiers.arena import Huge
from kvstore.tiers.files import Faults
from kvstore.tiers.transfer import TransferEngine

log = logging.getLogger(__name__)
TICK_S = 0.1
REVIVE_AFTER_S = 5.0
STARVED_S = 10.0
"""How long after a store found no room the node calls itself degraded."""
_HUGE: dict[str, Huge] = {"auto": "auto", "on": "require", "off": "never"}
_T = TypeVar("_T")


class Runtime:
    """A node: machine, arena, data directory, hands. All methods are thread-safe.

    `faults` damages the files of the NVMe tier, for tests. `close` stops the hands; what was acknowledged as durable is
    on disk by then.
    """

    def __init__(
        self,
        config: ServiceConfig,
        progress: Callable[[int, int], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.journal = Journal()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Command]] = {}
        self._next_request = 1
        self._keyspaces: dict[KeyspaceId, Keyspace] = {}
        self._dirty_sessions: set[SessionId] = set()
        self._unsaved: dict[KeyspaceId, bytes] = {}
        """Keyspaces that the index doesn't have yet."""
        self._starved_until = 0.0
        self._keep_lessons_at = time.monotonic() + KEEP_EVERY_S
        self._closing = threading.Event()
        self._scrubber: Scrubber | None = None
        self.more_gauges: Callable[[], Iterable[tuple[str, str, Rows]]] = tuple
        """What the server adds to the node's gauges."""
        self.data = open_data(config, faults)
        try:
            self.arena = open_arena(config)
        except BaseException:
            if self.data is not None:
                self.data.close()
            raise
        self.boot_epoch = self.data.boot_epoch if self.data is not None else secrets.randbits(63) | 1
        self.machine = Machine(tiers_of(config, self.data), limits_of(config), notices=True)
        self.engine = TransferEngine(config.io_threads)
        self.records = Records(self.machine, self.data.index if self.data is not None else None)
        self.hands = Hands(self.arena, self.data, self.engine, self.records, self.metrics, self._step, self.read)
        if self.data is not None:
            self._keyspaces = recover(self.data, self.machine, self._step, config.recompute_doubles_at, progress)
            self._scrubber = start_scrubber(config, self.data, self.engine, self._step, self.metrics)
        self.metrics.gauges(self._gauges)
        self._ticker = threading.Thread(target=self._tick_loop, name="kvstore-ticker", daemon=True)
        self._ticker.start()

    # ---- stepping

    def _step(self, event: events.Event) -> list[Command]:
        """Step, send work to the hands, give notices to the journal. Returns the answers."""
        with self._lock:
            return self._step_locked(event)

    def _step_locked(self, event: events.Event) -> list[Command]:
        answers: list[Command] = []
        notices: list[Stored | Removed] = []
        work: list[Work] = []
        for command in self.machine.step(event, time.monotonic_ns()):
            if isinstance(command, (Stored, Removed)):
                notices.append(command)
            elif isinstance(command, Work):
                work.append(command)
            elif isinstance(command, commands.Reserved | commands.Persisted):
                self._answer(command)
            elif isinstance(command, commands.LeaseEnded):
                self.metrics.failed("LeaseExpired")
            else:
                if isinstance(command, commands.SessionChanged):
                    self._dirty_sessions.add(command.session.id)
                answers.append(command)
        if notices:
            self._moved(notices)
        for command in work:  # records of lost copies are forgotten by now: a move may bring the block up again
            self.hands.send(command)
        return answers

    def _moved(self, notices: list[Stored | Removed]) -> None:
        self.journal.moved(notices)
        gone = [c for c in notices if isinstance(c, Removed)]
        for (tier, reason), count in Counter([(c.tier, c.reason) for c in gone]).items():
            self.metrics.evicted(tier.label, reason, count)
        for c in gone:
            if c.tier is Tier.DRAM:
                self.records.forget(c.block)

    def _answer(self, command: commands.Reserved | commands.Persisted) -> None:
        if isinstance(command, commands.Reserved) and ReserveStatus.FULL in command.statuses:
            if self.data is not None:  # a node without NVMe may refuse what isn't worth its victim
                self._starved_until = time.monotonic() + STARVED_S
            self.metrics.dropped(command.statuses.count(ReserveStatus.FULL))
        future = self._futures.pop(command.request, None)
        if future is not None:
            future.set_result(command)

    def _deferred(self, make: Callable[[int], events.Event]) -> Future[Command]:
        """Step an event whose answer may come later."""
        future: Future[Command] = Future()
        with self._lock:
            request = self._next_request
            self._next_request += 1
            self._futures[request] = future
            try:
                self._step_locked(make(request))
            except BaseException:
                self._futures.pop(request, None)
                raise
        return future

    # ---- keyspaces

    def register(self, encoding: bytes) -> Keyspace:
        """Make a keyspace known, durably. Raises InvalidField."""
        keyspace = Keyspace.decode(encoding)
        with self._lock:
            known = keyspace.id in self._keyspaces
            if not known:
                self._step_locked(registration(keyspace, self.config.recompute_doubles_at))
                self._keyspaces[keyspace.id] = keyspace
        if not known:
            self._retire_older(keyspace)
            if self.data is not None:
                self._unsaved[keyspace.id] = encoding
                self._save_keyspaces()
        return keyspace

    def _save_keyspaces(self) -> None:
        """Write what isn't written yet. A full disk refuses: then it is tried again at the next tick, and no block of
        the keyspace can become durable before, since the same disk takes no record either."""
        assert self.data is not None
        for keyspace_id, encoding in list(self._unsaved.items()):
            try:
                self.data.index.put_keyspace(keyspace_id, encoding)
            except (TierError, CapacityError) as error:
                log.debug("keyspace isn't stored yet: %s", error)
                self.metrics.failed("keyspace_unsaved")
            else:
                self._unsaved.pop(keyspace_id, None)

    def _retire_older(self, newest: Keyspace) -> None:
        with self._lock:
            older = older_than(newest, self._keyspaces.values())
        for old in older:
            if self.data is not None:
                self.data.index.delete_keyspace(old.id)
            work = functools.partial(retire, old, self._step, self.read, self._closing.is_set)
            threading.Thread(target=work, name="kvstore-retire", daemon=True).start()

    def keyspace(self, keyspace_id: KeyspaceId) -> Keyspace:
        """A registered keyspace. Raises UnknownKeyspace."""
        with self._lock:
            self.machine.space(keyspace_id)
            return self._keyspaces[keyspace_id]

    # ---- reading

    def match(self, keyspace: KeyspaceId, hashes: Hashes) -> int:
        """Longest resident prefix in blocks; no side effect."""
        with self._lock:
            return self.machine.match(keyspace, hashes)

    def acquire(self, event: events.Acquire) -> commands.Acquired:
        """Match and lease."""
        answer = _only(self._step(event), commands.Acquired)
        self.metrics.acquired(len(event.hashes), answer.num_blocks)
        asked, found = len(event.hashes), answer.num_blocks
        ends = b"".join(event.hashes[n - 1] for n in (asked, found) if n)
        self.journal.session(event.session or SessionId(""), f"acquire {asked} {found}", event.keyspace, ends)
        return answer

    def renew(self, leases: tuple[LeaseId, ...], ttl_ns: int) -> tuple[LeaseId, ...]:
        """Prolong; returns those that had expired."""
        return _only(self._step(events.Renew(leases, ttl_ns)), commands.Renewed).expired

    def release(self, leases: tuple[LeaseId, ...]) -> None:
        """Give back; unknown ones are ignored."""
        self._step(events.Release(leases))

    def restore(self, lease: LeaseId, first: int, last: int) -> tuple[OpId, tuple[Location, ...], list[Record]]:
        """Hold and locate blocks [first, last) of a leased path, with their records. The plan is cut at the first block
        whose record is gone."""
        plan = _only(self._step(events.Restore(lease, first, last)), commands.RestorePlan)
        records = self.records.of(plan.places)
        good = next((i for i, r in enumerate(records) if r is None), len(records))
        for place in plan.places[good : good + 1]:
            log.warning("record of %r is missing", place.block)
            self._step(events.Lost(self.machine.space_of(place.block).id, place.block.hash, place.tier))
        for tier, num_blocks in Counter([place.tier for place in plan.places[:good]]).items():
            self.metrics.hits(tier.label, num_blocks)
        return plan.op, plan.places[:good], [r for r in records[:good] if r is not None]

    def restore_done(self, op: OpId, corrupt: tuple[int, ...], moved: dict[Tier, int]) -> None:
        """The client read the blocks; `corrupt` positions failed verification, `moved` are bytes out of each tier."""
        self._step(events.RestoreDone(op, corrupt))
        self.metrics.failed("ChecksumMismatch", len(corrupt))
        for tier, num_bytes in moved.items():
            self.metrics.moved(tier.label, "out", num_bytes)

    def prefetch(self, session: SessionId) -> int:
        """Bring a session's blocks up; returns promotions started."""
        return _only(self._step(events.Prefetch(session)), commands.Prefetching).num_blocks

    # ---- writing

    def reserve(self, event: events.Reserve) -> Future[commands.Reserved]:
        """Slots in the arena. `event.request` is replaced."""
        self._check_length(event.hashes)
        future = self._deferred(
            lambda n: events.Reserve(
                n,
                event.keyspace,
                event.hashes,
                event.first,
                event.owner,
                event.tier,
                event.ttl_ns,
                event.wait_ns,
                event.session,
            )
        )
        return future  # type: ignore[return-value]

    def seal(self, op: OpId, records: Sequence[Record], failed: Sequence[BlockHash]) -> int:
        """Publish filled blocks. Raises LeaseExpired, LayoutMismatch, InvalidField; nothing is published then."""
        with self._lock:
            blocks = self.machine.fill_blocks(op)
            self._check_records(blocks, records)
            for record in records:
                self.records.keep(blocks[record.hash], record)
            try:
                answers = self._step_locked(events.Seal(op, tuple(r.hash for r in records), tuple(failed)))
            except KVStoreError:
                for record in records:
                    self.records.forget(blocks[record.hash])
                raise
            answer = _only(answers, commands.Sealed)
        self.metrics.sealed(answer.num_blocks)
        self.metrics.moved(Tier.DRAM.label, "in", sum(r.payload_bytes for r in records))
        return answer.num_blocks

    def _check_records(self, blocks: dict[BlockHash, Block], records: Sequence[Record]) -> None:
        """All are of blocks of one reservation, and say of them what is so. Raises LayoutMismatch, InvalidField."""
        if not records:
            return
        first = blocks.get(records[0].hash)
        if first is None:
            raise _not_granted(records[0])
        keyspace = self._keyspaces[self.machine.space_of(first).id]
        space, num_slices, slice_bytes = keyspace.id, keyspace.num_layers, keyspace.slice_bytes
        sums_bytes = 8 * num_slices
        for record in records:
            block = blocks.get(record.hash)
            if block is None:
                raise _not_granted(record)
            if record.keyspace != space:
                raise LayoutMismatch(
                    f"records: keyspace {record.keyspace.hex()[:16]} is not that of the reservation; reserve again"
                )
            if len(record.checksums) != sums_bytes or record.slice_bytes != slice_bytes:
                raise LayoutMismatch(
                    f"records: {record.num_slices} slices of {record.slice_bytes} bytes, "
                    f"the keyspace has {num_slices} of {slice_bytes}; use the registered layout"
                )
            parent = block.parent.hash if block.parent is not None else NO_PARENT
            if record.parent != parent or record.depth != block.depth:
                raise InvalidField(
                    "records", f"block {record.hash.hex()} has another parent or position", "send records in path order"
                )

    def persist(
        self, keyspace: KeyspaceId, hashes: Hashes, durability: Durability, wait_ns: int
    ) -> Future[commands.Persisted]:
        """Make a path durable; the answer says how many leading blocks hold the promise."""
        self._check_length(hashes)
        future = self._deferred(lambda n: events.Persist(n, keyspace, hashes, durability, wait_ns))
        return future  # type: ignore[return-value]

    def detach(self, owner: str) -> None:
        """A client is gone."""
        self._step(events.Detach(owner))

    def _check_length(self, hashes: Hashes) -> None:
        limit = self.config.max_request_blocks
        if len(hashes) > limit:
            raise LimitExceeded(
                f"hashes: {len(hashes)} blocks in one request, the limit is {limit}; raise max_request_blocks"
            )

    # ---- sessions

    def session_event(self, event: events.Event) -> commands.SessionChanged:
        """Open, signal, fork, supersede or end."""
        answer = _only(self._step(event), commands.SessionChanged)
        with self._lock:
            keyspace = self.machine.space_at(answer.session.space).id
        detail = type(event).__name__.lower()
        if isinstance(event, events.Signal):
            detail = f"{event.kind.name.lower()} {max(0, event.output_tokens)} {event.tool}".rstrip()
        elif isinstance(event, events.Fork):
            detail = f"fork {event.parent}"
        self.journal.session(answer.session.id, detail, keyspace)
        return answer

    def export_context(self, session: SessionId, name: str) -> tuple[KeyspaceId, bytes]:
        """Give a session's context a name that survives restarts. It isn't pinned: its blocks are evicted like any.

        Returns keyspace and packed hashes of the resident path. Raises Unavailable without an NVMe tier.
        """
        if self.data is None:
            raise Unavailable("name: contexts are kept on NVMe, and nvme_bytes is 0; give the service an NVMe tier")
        with self._lock:
            record = self.machine.session(session)
            space = self.machine.space_at(record.space).id
            path = b"".join(b.hash for b in self.machine.session_path(session))
        self.data.index.put_contexts({name: {"keyspace": space.hex(), "hashes": path.hex()}})
        return space, path

    def resume_context(self, name: str, session: SessionId) -> tuple[KeyspaceId, bytes]:
        """Open `session` at a named context. What of it is still resident, `match` tells."""
        row = self.data.index.contexts().get(name) if self.data is not None else None
        if row is None:
            raise InvalidField("name", f"no context is called {name!r}", "export one under that name first")
        space, path = KeyspaceId(bytes.fromhex(row["keyspace"])), bytes.fromhex(row["hashes"])
        self.session_event(events.OpenSession(session, space))
        self.session_event(events.Supersede(session, HashList(path)))
        return space, path

    def read(self, query: Callable[[Machine], _T]) -> _T:
        """Run a query on the machine; it must not change anything."""
        with self._lock:
            return query(self.machine)

    # ---- time

    def _tick_loop(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self._tick()
            except Exception:
                log.exception("tick failed")

    def _tick(self) -> None:
        with self._lock:
            if self.machine.busy:
                self._step_locked(events.Tick())
            self.hands.retry_deletes(self.machine)
            dead_since = self.hands.dead_since
            if dead_since is not None and time.monotonic() - dead_since > REVIVE_AFTER_S:
                self.hands.dead_since = None
                self._step_locked(events.TierAlive(Tier.NVME, True))
            rows = session_rows(self.machine, self._dirty_sessions)
            self._dirty_sessions.clear()
        if self._unsaved:
            self._save_keyspaces()
        if rows and self.hands.committer is not None:
            self.hands.committer.sessions(rows)
        if time.monotonic() >= self._keep_lessons_at:
            self._keep_lessons()

    def _keep_lessons(self) -> None:
        self._keep_lessons_at = time.monotonic() + KEEP_EVERY_S
        if self.data is not None:
            keep(self.data.index, self.read(lessons))

    @property
    def health(self) -> str:
        """ "serving", or "degraded" while NVMe takes no writes, or stores find no room."""
        degraded = self.hands.dead_since is not None or time.monotonic() < self._starved_until
        return "degraded" if degraded else "serving"

    def _gauges(self) -> Iterable[tuple[str, str, Rows]]:
        with self._lock:
            pools = self.machine.pools()
            yield "capacity_bytes", "Size of a tier", [({"tier": p.tier.label}, p.slots.capacity_bytes) for p in pools]
            yield "used_bytes", "Bytes in used slots", [({"tier": p.tier.label}, p.slots.used_bytes) for p in pools]
            states = [("filling", "num_filling"), ("ready", "num_ready"), ("draining", "num_draining")]
            rows = [
                ({"tier": p.tier.label, "state": name}, float(getattr(p, attr))) for p in pools for name, attr in states
            ]
            yield "residencies", "Copies by state", rows
            yield "dirty_bytes", "Bytes with no copy below", [({"tier": p.tier.label}, p.dirty_bytes) for p in pools]
            counts = self.machine.count_sessions()
            yield "sessions", "Open sessions", [({"state": a.name.lower()}, n) for a, n in counts.items()]
            yield "leases", "Live leases", [({}, self.machine.num_leases)]
            rows = [({"outcome": k}, float(n)) for k, n in self.machine.prefetches.items()]
            yield "prefetched_blocks", "Blocks brought up ahead of need", rows
            yield "operations", "Running operations", [({}, self.machine.num_ops)]
            yield (
                "never_hit",
                "1 when much was stored and asked for, and nothing found",
                [({}, float(self.metrics.never_hit))],
            )
            yield "healthy", "1 when serving", [({}, float(self.health == "serving"))]
        yield from self.more_gauges()

    # ---- start and end

    def close(self) -> None:
        """Stop the hands and write what is queued."""
        if self._closing.is_set():
            return
        self._tick()
        self._closing.set()
        self._ticker.join()
        if self._scrubber is not None:
            self._scrubber.close()
        self.hands.close()
        self._keep_lessons()
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future in waiting.values():
            future.set_exception(Unavailable("service: is stopping; retry later"))
        if self.data is not None:
            self.data.close()
        self.arena.close()


def _not_granted(record: Record) -> InvalidField:
    return InvalidField("records", f"block {record.hash.hex()} was not granted", "seal granted blocks only")


def _only(answers: list[Command], kind: type[_T]) -> _T:
    found = [a for a in answers if isinstance(a, kind)]
    assert len(found) == 1, f"{kind.__name__} expected, got {answers}"
    return found[0]
