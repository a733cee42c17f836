"""A service's events as a trace: requests without a session, forks, blocks that were never stored."""

from __future__ import annotations

from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_bench.record import Recorder
from kvstore_bench.traces.model import Stop


def block(number: int) -> bytes:
    return (number << 8).to_bytes(16, "little")


def stored(*path: int) -> pb.IndexEvent:
    """A path of blocks from its root on."""
    parents = [bytes(16), *map(block, path[:-1])]
    hashes = b"".join(map(block, path))
    return pb.IndexEvent(kind=pb.IndexEvent.STORED, hashes=hashes, parents=b"".join(parents))


def said(time: int, session: str, detail: str, *ends: int) -> pb.IndexEvent:
    hashes = b"".join(map(block, ends))
    return pb.IndexEvent(kind=pb.IndexEvent.SESSION, time_ns=time, session_id=session, detail=detail, hashes=hashes)


def recorded(*events: pb.IndexEvent) -> Recorder:
    recorder = Recorder()
    for event in events:
        recorder.take(event)
    return recorder


def test_requests_without_a_session_continue_the_context_they_begin_with() -> None:
    trace = recorded(
        said(1, "", "acquire 2 0", 2),
        stored(1, 2),
        said(2, "", "acquire 1 0", 9),
        stored(9),
        said(3, "", "acquire 3 2", 3, 2),
        stored(1, 2, 3),
        said(4, "", "acquire 3 2", 4, 2),  # a branch of the same context
        stored(1, 2, 4),
        said(5, "", "turn_end 7"),  # nobody's
    ).trace("t", 16)
    assert [trace.session_names[s] for s in trace.session] == ["nameless-1", "nameless-2", "nameless-1", "nameless-1"]
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 4]
    assert trace.stop.tolist() == [Stop.UNKNOWN] * 4


def test_a_forks_first_request_names_its_parent() -> None:
    trace = recorded(
        said(1, "a", "acquire 2 0", 2),
        stored(1, 2),
        said(2, "b", "acquire 1 0", 9),
        stored(9),
        said(3, "child", "fork a"),
        said(4, "child", "acquire 3 2", 3, 2),
        stored(1, 2, 3),
        said(5, "named", "fork b"),
        said(6, "named", "acquire 1 1", 9, 9),
        said(7, "child", "acquire 3 3", 3, 3),
        said(8, "named", "tool_start 52 read file"),
    ).trace("t", 16)
    parents = {trace.session_names[s]: trace.session_names[p] for s, p in enumerate(trace.parent) if p >= 0}
    assert parents == {"child": "a", "named": "b"}
    assert trace.output_tokens.tolist() == [0, 0, 0, 52, 0]
    assert trace.tool_names == ["read file"] and trace.stop.tolist()[3] == Stop.TOOL


def test_what_was_never_stored_counts_with_its_length() -> None:
    trace = recorded(
        said(1, "a", "acquire 2 0", 2), stored(1, 2), said(2, "a", "acquire 5 2", 7, 2), said(3, "a", "endsession")
    ).trace("t", 16)
    assert trace.offsets.tolist() == [0, 2, 7] and trace.ids.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert trace.input_tokens.tolist() == [32, 80] and trace.end.tolist() == [False, True]
