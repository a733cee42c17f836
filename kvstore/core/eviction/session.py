"""Victims by when their session will need them again, learned online.

Every session that isn't running is in a *wait* (see `resume`), described by what a machine can see without being
told: why it stopped, its pace, how much it wrote, how long its context is, how much of it was new; and by what an
agent may tell on top: the tool's name and how long it will take. The index of the wait is the worth of the session's
blocks, and the chance that another session comes to the same context adds to it; prefixes that several sessions have
used add the worth of new arrivals (see `shared`). Branches left behind, by a session that went elsewhere or ended, are
worth what such branches turned out to be (see `left`). Equal worth falls back on recency.

    touch, signal --> wait begins / ends --> index[bin] --> heap of candidates, least (worth, last use) first
                      bin boundary passes ------^            re-keyed when the wait crosses into another octave

A wait crosses at most NUM_BINS bins in a few steps each, and each step re-keys the few leaves of one session: O(log n)
a decision, amortised.

Not for: caches without sessions or prefixes; there it is leaf-first LRU at a higher price.
"""

from __future__ import annotations

from math import log2

from kvstore.core.blocks import Block
from kvstore.core.eviction import learned
from kvstore.core.eviction.curve import INDEX_STEPS, NO_INDEX, add_logs
from kvstore.core.eviction.heap import BlockHeap
from kvstore.core.eviction.left import ENDED, LEFT, Branch, LeftBranches
from kvstore.core.eviction.resume import Key, ResumeModel, Wait
from kvstore.core.eviction.shared import SharedPrefixes
from kvstore.core.eviction.worth import NUM_CONTEXTS, SESSION_CONTEXT, Pace, contexts, priced
from kvstore.core.sessions import Session
from kvstore.core.types import Activity

RUNNING_INDEX = 4 * INDEX_STEPS
"""A running session needs its context at once: above any wait."""


class SessionActivity:
    """Victim: least (worth of the wait, last use)."""

    name = "session"

    def __init__(self) -> None:
        self._model = ResumeModel(NUM_CONTEXTS)
        self._shared = SharedPrefixes()
        self._left = LeftBranches()
        self._heir: tuple[Block, Branch] | None = None
        """Parent of a left leaf that has just been evicted, and its branch."""
        self._heap: BlockHeap[tuple[int, int]] = BlockHeap()
        self._paces: dict[Session, Pace] = {}
        self._stops: dict[Activity | None, dict[Activity, int]] = {}
        """How the last wait of a session began (None: it had none), and how many began how after that."""
        self._waits: dict[Session, Wait] = {}
        self._of: dict[Session, dict[Block, None]] = {}
        self._owner: dict[Block, Session] = {}

    # ---- what happens

    def touch(self, tip: Block, session: Session | None, now_ns: int) -> None:
        self._advance(now_ns)
        self._left.use(tip)
        if session is not None:
            pace = self._pace(session)
            self._leave(session, pace.tip, now_ns)
            pace.tip = tip
            if pace.first:
                pace.first = False
                if not pace.num_waits and session.num_found == tip.depth + 1:
                    self._arrive(tip, session, now_ns)
                    pace.known = tip.depth + 1
            if session.activity != Activity.RUNNING:
                if session.num_requests != pace.num_requests:
                    self._request(session, pace, now_ns)
                self._begin(session, pace, now_ns)
            self._rekey(session, now_ns)
        if tip in self._heap:
            self.add(tip, now_ns)

    def signal(self, session: Session, now_ns: int) -> None:
        self._advance(now_ns)
        if session.activity == Activity.ENDED:
            self._end(session, now_ns)
        else:
            pace = self._pace(session)
            if session.tip is not pace.tip:
                self._leave(session, pace.tip, now_ns)
                pace.tip = session.tip
            if session.activity == Activity.RUNNING:
                self._request(session, pace, now_ns)
                pace.started_ns = now_ns
            else:
                self._begin(session, pace, now_ns)
        self._rekey(session, now_ns)

    def add(self, block: Block, now_ns: int) -> None:
        self._disown(block)
        session, heir = block.last_session, self._heir
        self._heir = None
        if session is not None and (block.num_tips or (block.kids and session.activity != Activity.ENDED)):
            self._owner[block] = session
            self._of.setdefault(session, {})[block] = None
        elif session is not None and block not in self._shared and block not in self._left:
            if heir is not None and heir[0] is block:
                self._left.inherit(block, heir[1])
            if block not in self._left:
                self._left_behind(block, session, now_ns)
        self._shared.watch(block, now_ns)
        self._heap.put(block, self._key(block, now_ns))

    def discard(self, block: Block, now_ns: int) -> None:
        self._disown(block)
        self._left.evicted(block)
        self._heap.remove(block)

    def evicted(self, block: Block, now_ns: int) -> None:
        branch = self._left.evicted(block)
        self._heir = None if branch is None or block.parent is None else (block.parent, branch)
        self.discard(block, now_ns)
        self._shared.forget(block)

    # ---- what is asked

    def victim(self, now_ns: int) -> Block | None:
        self._advance(now_ns)
        return self._heap.first()

    def score(self, block: Block, now_ns: int) -> float:
        """Expected tokens saved per token kept and second, at the best deadline, those deep in a context for more
        where the share says so; 0 for a block nobody holds."""
        worth = self._worth(block, now_ns)
        return 0.0 if worth == NO_INDEX else 2.0 ** (worth / INDEX_STEPS)

    def admits(self, session: Session, now_ns: int) -> bool:
        """Is a new block of the session worth as much as the victim? While it runs, its context counts by the wait to
        come."""
        self._advance(now_ns)
        top = self._heap.peek()
        if top is None:
            return True
        wait = self._waits.get(session)
        if session.activity == Activity.ENDED:
            own = self._left.promise(session.num_blocks)
        elif wait is not None:
            own = add_logs(wait.worth, wait.extra)
        else:
            own = self._promise(session, now_ns)
        return priced(own, session.num_blocks, top[1].share) >= top[0][0]

    def _promise(self, session: Session, now_ns: int) -> int:
        """Worth of the wait to come, over the ways in which waits begin after one like the last; worked out once a
        request."""
        pace = self._pace(session)
        known_by = pace.num_waits, session.num_blocks
        if pace.promise is None or pace.promise[:2] != known_by:
            runs = session.activity == Activity.RUNNING
            stops = self._stops.get(pace.stop, {}) if runs else {session.activity: 1}
            total, own = sum(stops.values()), NO_INDEX
            for stop, count in stops.items():
                worth = self._model.promise(contexts(session, pace, stop, now_ns))
                own = add_logs(own, worth + round(INDEX_STEPS * log2(count / total)))
            pace.promise = *known_by, add_logs(own, self._company(session)) if stops else RUNNING_INDEX
        return pace.promise[2]

    # ---- over a restart

    def dump(self) -> bytes:
        """What was learned of waits and arrivals; a few hundred kilobytes at most."""
        return learned.pack(
            self.name, {"waits": self._model.learned(), "shared": self._shared.learned(), "left": self._left.learned()}
        )

    def load(self, data: bytes) -> None:
        """Start from a dump. Call it before anything else; raises ValueError, and the policy stays as it was, when the
        data is damaged or of another version."""
        content = learned.unpack(self.name, data)
        waits, arrivals = content.get("waits"), content.get("shared")
        if not isinstance(waits, dict) or not isinstance(arrivals, dict):
            raise ValueError("what was learned lacks a part")
        model, shared, left = ResumeModel(NUM_CONTEXTS), SharedPrefixes(), LeftBranches()
        model.adopt(waits)
        shared.adopt(arrivals)
        left.adopt(content.get("left"))
        self._model, self._shared, self._left = model, shared, left

    # ---- waits

    def _pace(self, session: Session) -> Pace:
        pace = self._paces.get(session)
        if pace is None:
            pace = self._paces[session] = Pace()
        return pace

    def _request(self, session: Session, pace: Pace, now_ns: int) -> None:
        """A new request of the session: its wait is over."""
        pace.num_requests = session.num_requests
        wait = self._waits.pop(session, None)
        if wait is not None:
            self._model.end(wait, now_ns)
            pace.note_gap(now_ns - wait.start_ns, now_ns)

    def _begin(self, session: Session, pace: Pace, now_ns: int) -> None:
        """The session waits from now on, or what is known of its wait has changed."""
        old = self._waits.pop(session, None)
        if old is not None:
            self._model.forget(old)
        if not session.num_blocks:  # for nothing
            pace.length = 0
            return
        if old is None:
            counts = self._stops.setdefault(pace.stop, {})
            counts[session.activity] = counts.get(session.activity, 0) + 1
        pace.stop, pace.length = session.activity, session.num_blocks
        keys = contexts(session, pace, session.activity, now_ns)
        alone, extra = self._alone(session), self._company(session)
        self._waits[session] = self._model.begin(session, keys, now_ns, alone, extra)

    def _company(self, session: Session) -> int:
        """What others' use of a context is worth that is new: by what was seen of contexts whose session waits, or of
        those whose session ended, since this one may end at once."""
        return max(self._model.company, self._left.promise(session.num_blocks))

    def _alone(self, session: Session) -> bool:
        """Has nobody else used the end of its context?"""
        tip = session.tip
        return tip is None or tip.depth + 1 < session.num_blocks or tip not in self._shared

    def _end(self, session: Session, now_ns: int) -> None:
        wait = self._waits.pop(session, None)
        if wait is not None:
            self._model.forget(wait)
        pace = self._paces.pop(session, None)
        if pace is not None:
            self._leave(session, pace.tip, now_ns)
            for block in list(self._of.get(session, ())):
                self._leave(session, block, now_ns)
            for key in session_keys(session):
                self._model.drop_context(SESSION_CONTEXT, key)

    def _advance(self, now_ns: int) -> None:
        for wait in self._model.advance(now_ns):
            session = wait.owner
            assert isinstance(session, Session)
            self._rekey(session, now_ns)
        for block in self._shared.advance(now_ns):
            if block in self._heap:
                self._heap.put(block, self._key(block, now_ns))
        for block in self._left.advance(now_ns):
            self._heap.put(block, self._key(block, now_ns))

    def _arrive(self, tip: Block, session: Session, now_ns: int) -> None:
        """The first request of a session. Whoever waits at the block it goes on from has company now."""
        owner = self._owner.get(tip)
        wait = None if owner is None or tip in self._shared else self._waits.get(owner)
        if wait is not None:
            self._model.joined(wait)
        if self._shared.arrive(tip, session, now_ns):
            self._rekey_shared(now_ns)

    def _leave(self, session: Session, tip: Block | None, now_ns: int) -> None:
        """A session's context, which reached to `tip` or to what is left of its path, may have gone elsewhere."""
        while tip is not None and not any(tip.residencies):
            tip = tip.parent
        if tip is None or tip not in self._heap or tip.num_tips or (tip.kids and session.activity != Activity.ENDED):
            return
        if tip not in self._shared and tip not in self._left:
            self._left_behind(tip, session, now_ns)
        self._heap.put(tip, self._key(tip, now_ns))

    def _left_behind(self, leaf: Block, session: Session, now_ns: int) -> None:
        """Nobody holds the leaf: it ends a branch. O(length of the branch)."""
        first = leaf
        above = leaf.parent
        while above is not None and len(above.kids) == 1 and not above.num_tips and above not in self._shared:
            first, above = above, above.parent
        self._left.leave(leaf, ENDED if session.activity == Activity.ENDED else LEFT, first.depth, now_ns)

    # ---- worth

    def _key(self, block: Block, now_ns: int) -> tuple[int, int]:
        return self._worth(block, now_ns), block.last_access_ns

    def _worth(self, block: Block, now_ns: int) -> int:
        arrivals = self._shared.index(block, now_ns)
        own = self._own_worth(block)
        worth = own if arrivals is None else add_logs(own, arrivals)
        return priced(worth, block.depth + 1, block.share)

    def _own_worth(self, block: Block) -> int:
        """By the session that holds it, or by having been left."""
        left = self._left.worth(block)
        if left is not None:
            return left
        session = block.last_session
        if session is None or not held(block):
            return NO_INDEX
        if session.activity == Activity.RUNNING:
            return RUNNING_INDEX
        wait = self._waits.get(session)
        if wait is None:
            return NO_INDEX
        return wait.worth if block in self._shared else add_logs(wait.worth, wait.extra)

    def _rekey(self, session: Session, now_ns: int) -> None:
        for block in list(self._of.get(session, ())):
            if not held(block):
                self._disown(block)
            self._heap.put(block, self._key(block, now_ns))

    def _rekey_shared(self, now_ns: int) -> None:
        for block in self._shared.blocks():
            if block in self._heap:
                self._heap.put(block, self._key(block, now_ns))

    def _disown(self, block: Block) -> None:
        owner = self._owner.pop(block, None)
        if owner is None:
            return
        blocks = self._of[owner]
        del blocks[block]
        if not blocks:
            del self._of[owner]


def held(block: Block) -> bool:
    """Some session's context ends at the block or goes on below it."""
    return bool(block.num_tips or block.kids)


def session_keys(session: Session) -> list[Key]:
    """All keys that the session's own context may have used."""
    return [(activity.value, session.id) for activity in Activity]
