"""Attached clients: who they are, what their pools report, and taking back what they held once they are gone."""

from __future__ import annotations

from kvstore.errors import InvalidField
from kvstore.metrics import Rows
from kvstore.runtime import Runtime
from kvstore_api.v1 import kvstore_pb2 as pb

CLIENT_ID_MAX = 256


class Clients:
    """Owned by the server's event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._streams: dict[str, int] = {}
        self._reports: dict[str, pb.PoolReport] = {}
        runtime.more_gauges = self._gauges

    def attach(self, client: str) -> str:
        """One more stream of this client. Raises InvalidField."""
        if not 0 < len(client) <= CLIENT_ID_MAX:
            raise InvalidField("client_id", f"{len(client)} characters", f"give 1 to {CLIENT_ID_MAX}")
        self._streams[client] = self._streams.get(client, 0) + 1
        return client

    def report(self, client: str, beat: pb.Heartbeat) -> None:
        """The client's own tier, for metrics."""
        if beat.HasField("pool"):
            self._reports[client] = beat.pool

    def detach(self, client: str) -> None:
        """A stream ended; with the last one the client's leases, borrowed slots and reservations go."""
        self._streams[client] -= 1
        if self._streams[client] == 0:
            del self._streams[client]
            self._reports.pop(client, None)
            self._runtime.detach(client)

    def _gauges(self) -> list[tuple[str, str, Rows]]:
        pools = list(self._reports.values())

        def total(name: str) -> Rows:
            return [({}, float(sum(getattr(p, name) for p in pools)))]

        return [
            ("clients", "Attached clients", [({}, float(len(self._streams)))]),
            ("hbm_capacity_bytes", "HBM pools of attached clients", total("capacity_bytes")),
            ("hbm_used_bytes", "HBM in use by attached clients", total("used_bytes")),
            ("client_hbm_hit_tokens", "Tokens found in HBM", total("hit_tokens")),
            ("client_computed_tokens", "Tokens computed", total("computed_tokens")),
            ("client_restored_tokens_dram", "Tokens restored from DRAM", total("restored_tokens_dram")),
            ("client_restored_tokens_nvme", "Tokens restored from NVMe", total("restored_tokens_nvme")),
        ]
