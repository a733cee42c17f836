"""Fetching the service's descriptors: the arena, and segment files (see `kvstore_server/descriptors.py`)."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import dataclass

from kvstore.errors import TransferError, Unavailable
from kvstore.tiers.arena import Arena
from kvstore.tiers.files import OpenFile

TIMEOUT_S = 5.0
LINE_MAX = 4096


@dataclass
class _Connection:
    socket: socket.socket

    def ask(self, request: dict[str, object]) -> tuple[dict[str, int], int | None]:
        """One request, one answer with at most one descriptor."""
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        body, fds, _, _ = socket.recv_fds(self.socket, LINE_MAX, 1)
        while body and not body.endswith(b"\n"):
            more = self.socket.recv(LINE_MAX)
            if not more:
                break
            body += more
        for extra in fds[1:]:
            os.close(extra)
        if not body.endswith(b"\n"):
            raise Unavailable("descriptors: the service closed the connection")
        return json.loads(body), fds[0] if fds else None


class Descriptors:
    """Arena and segments of one life of a service. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, OpenFile] = {}
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            self._connection = _Connection(connection)
            answer, fd = self._connection.ask({"want": "arena"})
        except (FileNotFoundError, ConnectionRefusedError):
            socket_path = path.removesuffix(".fd")
            raise Unavailable(f"service: none answers at unix:{socket_path}; start one, or name its socket") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"descriptors: {path}: {error}") from None
        if fd is None:
            raise Unavailable("descriptors: the service passed no arena")
        self.segment_bytes = answer["segment_bytes"]
        self.boot_epoch = answer["boot_epoch"]
        self.arena = Arena.map(fd, answer["size"])

    def segment(self, slot: int) -> tuple[OpenFile, int]:
        """File and offset of an NVMe slot. Raises Unavailable, or TransferError when the service has no such file.

        A segment may have been dropped and made anew since it was opened; an unlinked file is opened again.
        """
        index, offset = divmod(slot, self.segment_bytes)
        with self._lock:
            file = self._segments.get(index)
            if file is not None and os.fstat(file.fd).st_nlink == 0:
                file = None  # closes with the last transfer that reads it
            if file is None:
                file = self._segments[index] = self._fetch(index)
        return file, offset

    def _fetch(self, index: int) -> OpenFile:
        try:
            _, fd = self._connection.ask({"want": "segment", "index": index})
        except (OSError, ValueError) as error:
            raise Unavailable(f"descriptors: {error}") from None
        if fd is None:
            raise TransferError(f"segment {index} isn't there any more")
        return OpenFile.adopt(fd, f"segment {index}")

    def close(self) -> None:
        """Close everything; memory and files still in use by a transfer stay until that ends."""
        with self._lock:
            self._connection.socket.close()
            self._segments.clear()
        self.arena.close()
