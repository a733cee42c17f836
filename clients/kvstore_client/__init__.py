"""What an inference engine imports to keep its KV blocks in a kvstore service on the same host.

client = Client("unix:/run/kvstore.sock")
client.register(keyspace)
with client.session("agent-1", keyspace) as session:
    ...
"""

from kvstore_client.aio import AsyncClient, AsyncSession
from kvstore_client.client import Client
from kvstore_client.pool import HostPool
from kvstore_client.session import Session
from kvstore_client.values import Lease, Offloaded, PoolReport, Restored

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "HostPool",
    "Lease",
    "Offloaded",
    "PoolReport",
    "Restored",
    "Session",
]
