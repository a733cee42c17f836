"""Sessions: opening, signals, forks, supersession, end; and where a session's tip is.

Moving a tip away from a branch that no other tip or child holds makes that branch *abandoned*: its leaf has no tip any
more, and so has each ancestor in turn once it is the leaf. Nothing is walked; policies see it in `num_tips`.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.commands import SessionChanged
from kvstore.core.events import (
    EndSession,
    Fork,
    OpenSession,
    RecoveredSession,
    Signal,
    SignalKind,
    Supersede,
)
from kvstore.core.sessions import Session
from kvstore.core.state import Space, State
from kvstore.core.tree import live, match, refresh
from kvstore.core.types import Activity, SessionId
from kvstore.errors import InvalidField, LimitExceeded, UnknownSession

ACTIVITY_OF = {
    SignalKind.TURN_START: Activity.RUNNING,
    SignalKind.TOOL_START: Activity.TOOL_WAIT,
    SignalKind.TOOL_END: Activity.RUNNING,
    SignalKind.TURN_END: Activity.IDLE,
    SignalKind.STOPPED: Activity.OPEN,
}
TOUCH_WALK_MAX = 64


def get_session(s: State, session_id: SessionId) -> Session:
    """Raises UnknownSession."""
    found = s.sessions.get(session_id)
    if found is None:
        raise UnknownSession(f"session_id: {session_id!r} is not open; open it first")
    return found


def still_open(s: State, session: Session | None) -> Session | None:
    """The session, unless it ended (and maybe another took its name) since somebody kept the record."""
    return session if session is not None and s.sessions.get(session.id) is session else None


def _new_session(s: State, session_id: SessionId, space: int, parent: Session | None, now_ns: int) -> Session:
    if not session_id:
        raise InvalidField("session_id", "is empty", "give any non-empty name")
    if len(s.sessions) >= s.limits.num_sessions and not _retire_one(s, now_ns):
        raise LimitExceeded(f"max_sessions: {s.limits.num_sessions} sessions are open; end some or raise max_sessions")
    session = Session(session_id, space, parent, now_ns)
    s.sessions[session_id] = session
    return session


def _retire_one(s: State, now_ns: int) -> bool:
    """Make room in the table: the session longest untouched, if that is long enough."""
    oldest_id = next(iter(s.sessions))
    oldest = s.sessions[oldest_id]
    if now_ns - oldest.touched_ns < s.limits.session_idle_ns and oldest.activity != Activity.IDLE:
        return False
    _finish(s, oldest, now_ns)
    return True


def on_open(s: State, e: OpenSession, now_ns: int) -> None:
    space = s.space(e.keyspace)
    session = s.sessions.get(e.session)
    if session is None:
        session = _new_session(s, e.session, space.index, None, now_ns)
    elif session.space != space.index:
        raise InvalidField(
            "keyspace_id", f"session {e.session!r} is open in another keyspace", "use another session id"
        )
    s.out.append(SessionChanged(session))


def on_signal(s: State, e: Signal, now_ns: int) -> None:
    session = get_session(s, e.session)
    activity = ACTIVITY_OF[e.kind]
    if session.activity == Activity.TOOL_WAIT and activity == Activity.RUNNING:
        s.foresight.wait_ended(session.tool, now_ns - session.since_ns)
    if activity == Activity.RUNNING and session.activity != Activity.RUNNING:
        session.num_requests += 1
    session.activity = activity
    session.since_ns = session.touched_ns = now_ns
    session.tool = e.tool if e.kind == SignalKind.TOOL_START else ""
    session.output_tokens = e.output_tokens
    session.expected_ns = e.expected_ns if e.kind == SignalKind.TOOL_START else -1
    s.sessions[e.session] = s.sessions.pop(e.session)  # keeps the table in order of last touch
    tell_policies(s, session, now_ns)
    waits = activity == Activity.TOOL_WAIT
    predicted = s.foresight.wait_began(session, s.limits.prefetch_lead_ns) if waits else None
    s.out.append(SessionChanged(session, predicted_ns=predicted))


def on_fork(s: State, e: Fork, now_ns: int) -> None:
    parent = get_session(s, e.parent)
    if e.session in s.sessions:
        raise InvalidField("session_id", f"{e.session!r} is already open", "use another session id")
    child = _new_session(s, e.session, parent.space, parent, now_ns)
    child.num_blocks, child.num_found = parent.num_blocks, parent.num_found
    set_tip(s, child, live(parent.tip), now_ns)
    s.out.append(SessionChanged(child))


def on_supersede(s: State, e: Supersede, now_ns: int) -> None:
    session = get_session(s, e.session)
    space = s.space_list[session.space]
    tip = block_at(space, e.hashes, match(space, e.hashes))
    session.num_blocks = len(e.hashes)
    s.out.append(SessionChanged(session, set_tip(s, session, tip, now_ns)))


def on_end(s: State, e: EndSession, now_ns: int) -> None:
    session = get_session(s, e.session)
    s.out.append(SessionChanged(session, _finish(s, session, now_ns)))


def _finish(s: State, session: Session, now_ns: int) -> int:
    session.activity = Activity.ENDED
    session.since_ns = now_ns
    abandoned = set_tip(s, session, None, now_ns)
    tell_policies(s, session, now_ns)
    del s.sessions[session.id]
    session.parent = None
    return abandoned


def on_recovered_session(s: State, e: RecoveredSession, now_ns: int) -> None:
    space = s.space(e.keyspace)
    session = _new_session(s, e.session, space.index, None, now_ns)
    session.activity = Activity(e.activity)
    if session.activity == Activity.RUNNING:
        session.activity = Activity.IDLE  # whoever ran it is gone
    tip = space.blocks.get(e.tip) if e.tip is not None else None
    set_tip(s, session, tip, now_ns)
    if tip is not None:
        session.num_blocks = tip.depth + 1
        touch(s, tip, session, now_ns)  # its wait begins anew: policies know nothing of it yet


def block_at(space: Space, hashes: object, num_blocks: int) -> Block | None:
    """The block at the end of a matched prefix."""
    return space.blocks[hashes[num_blocks - 1]] if num_blocks else None  # type: ignore[index]


def set_tip(s: State, session: Session, tip: Block | None, now_ns: int) -> int:
    """Move a session's tip. Returns how many blocks no session holds any more because of it."""
    old = live(session.tip)
    session.tip = tip
    if tip is not None:
        tip.num_tips += 1
    if old is not None:
        old.num_tips -= 1
    if tip is not None and tip is not old:
        refresh(s, tip, now_ns)
    if old is None or old is tip:
        return 0
    count = _count_abandoned(old, tip)
    refresh(s, old, now_ns)
    return count


def _count_abandoned(block: Block | None, tip: Block | None) -> int:
    count = 0
    below: Block | None = None
    while block is not None and block is not tip and not block.num_tips and len(block.kids) <= (below is not None):
        count += 1
        below = block
        block = block.parent
    return count


def touch(s: State, tip: Block, session: Session | None, now_ns: int) -> None:
    """A request used `tip` and its ancestors."""
    tip.last_access_ns = now_ns
    if session is not None:
        tip.last_session = session
        session.touched_ns = now_ns
    for pool in s.pools.values():
        block: Block | None = tip
        for _ in range(TOUCH_WALK_MAX):
            if block is None or block.residencies[pool.tier] is not None:
                break
            block = block.parent
        if block is not None and block.residencies[pool.tier] is not None:
            block.last_access_ns = now_ns
            block.last_session = tip.last_session
            pool.policy(block.share).touch(block, session, now_ns)


def tell_policies(s: State, session: Session, now_ns: int) -> None:
    """Pass a change of activity to every tier's policy."""
    share = s.space_list[session.space].share
    for pool in s.pools.values():
        policy = pool.policies.get(share)
        if policy is not None:
            policy.signal(session, now_ns)
