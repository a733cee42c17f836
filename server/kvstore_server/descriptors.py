"""Passing file descriptors to clients on this host: the arena, and segment files for reading.

One JSON line a request, one JSON line and at most one descriptor (SCM_RIGHTS) an answer:

    {"want": "arena"}               -> {"size": ..., "segment_bytes": ..., "boot_epoch": ...} + memfd
    {"want": "segment", "index": n} -> {"ok": true} + read-only descriptor, or {"ok": false}

The socket is `<socket>.fd`, mode 0600: whoever may open it may read and write all KV of this node.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from kvstore.runtime import Runtime

log = logging.getLogger(__name__)
LINE_MAX = 4096
IDLE_S = 3600.0


class DescriptorServer:
    """Threads, one a connection; clients keep one connection each."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self._path = path
        self._runtime = runtime
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(mask)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="kvstore-descriptors", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="kvstore-descriptor", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(IDLE_S)
        try:
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(LINE_MAX):
                    self._answer(connection, json.loads(line))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.debug("descriptor connection ended: %s", error)

    def _answer(self, connection: socket.socket, request: dict[str, object]) -> None:
        if request.get("want") == "arena":
            arena = self._runtime.arena
            config = self._runtime.config
            data = self._runtime.data
            segment_bytes = data.slab.segment_bytes if data is not None else config.segment_bytes
            answer = {"size": arena.size, "segment_bytes": segment_bytes, "boot_epoch": self._runtime.boot_epoch}
            _send(connection, answer, arena.fd)
            return
        fd = self._segment(int(str(request["index"])))
        _send(connection, {"ok": fd is not None}, fd)
        if fd is not None:
            os.close(fd)

    def _segment(self, index: int) -> int | None:
        data = self._runtime.data
        return data.slab.export_fd(index) if data is not None else None

    def close(self) -> None:
        """Stop accepting and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; closing alone doesn't
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _send(connection: socket.socket, answer: Mapping[str, object], fd: int | None) -> None:
    body = json.dumps(answer).encode() + b"\n"
    if fd is None:
        connection.sendall(body)
    else:
        socket.send_fds(connection, [body], [fd])
