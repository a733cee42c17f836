"""One thread that commits to the durable index, in order, in groups.

Producers queue puts, deletes and session rows; the thread takes all that is there and commits it as one transaction. Of
several changes to one key the last one counts, which is what carrying them out one by one would leave.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvstore.errors import KVStoreError, TransferError, Unavailable
from kvstore.tiers.index_lmdb import BlockIndex, Entry

log = logging.getLogger(__name__)
Rows = dict[str, dict[str, Any] | None]


class Committer:
    """`done(tokens, error)` is called on the committing thread after each group, with the tokens of its producers."""

    def __init__(self, index: BlockIndex, done: Callable[[list[object], KVStoreError | None], None]) -> None:
        self._index = index
        self._done = done
        self._condition = threading.Condition()
        self._changes: dict[bytes, Entry | None] = {}
        self._rows: Rows = {}
        self._tokens: list[object] = []
        self._sync = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="kvstore-committer", daemon=True)
        self._thread.start()

    def put(self, entries: Sequence[Entry], token: object) -> None:
        """Store records whose payloads are written."""
        with self._condition:
            for entry in entries:
                key = entry.key
                self._changes.pop(key, None)
                self._changes[key] = entry
            self._queue(token)

    def delete(self, keys: Sequence[bytes], token: object) -> None:
        """Delete records; their slots may be used again once `done` was called."""
        with self._condition:
            for key in keys:
                self._changes.pop(key, None)
                self._changes[key] = None
            self._queue(token)

    def sessions(self, rows: Rows) -> None:
        """Store or (None) delete session rows."""
        with self._condition:
            self._rows.update(rows)
            self._queue(None)

    def flush(self, sync: bool = False) -> None:
        """Wait until everything queued before is committed (and on stable storage). Raises the error of its group."""
        waiting: Future[None] = Future()
        with self._condition:
            if self._closed:
                raise Unavailable("index: is closing; retry later")
            self._sync = self._sync or sync
            self._queue(waiting)
        waiting.result()

    def _queue(self, token: object) -> None:
        self._tokens.append(token)
        self._condition.notify_all()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._tokens or self._closed)
                if not self._tokens:
                    return
                changes, rows, tokens, sync = self._changes, self._rows, self._tokens, self._sync
                self._changes, self._rows, self._tokens, self._sync = {}, {}, [], False
            self._carry_out(changes, rows, tokens, sync)

    def _carry_out(self, changes: dict[bytes, Entry | None], rows: Rows, tokens: list[object], sync: bool) -> None:
        """Blocks first, and their producers hear of nothing but them: what is committed must never be called failed,
        or its slot would be given away with the record still there."""
        puts = [e for e in changes.values() if e is not None]
        gone = [k for k, e in changes.items() if e is None]
        error = _try(lambda: self._index.commit(puts, gone)) if changes else None
        late = _try(lambda: self._index.put_sessions(rows)) if rows else None
        if sync:
            late = _try(self._index.sync) or late
        try:
            self._done([t for t in tokens if t is not None and not isinstance(t, Future)], error)
        except Exception:
            log.exception("completion of a commit failed")
        for token in tokens:
            if isinstance(token, Future):
                _settle(token, error or late)

    def close(self) -> None:
        """Commit what is queued and stop."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()


def _try(work: Callable[[], None]) -> KVStoreError | None:
    try:
        work()
    except KVStoreError as error:
        log.warning("%s", error)
        return error
    except Exception as error:
        log.exception("commit failed unexpectedly")
        return TransferError(f"index: commit failed: {error}")
    return None


def _settle(waiting: Future[None], error: KVStoreError | None) -> None:
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
