"""Starting and stopping a node service.

Order: configuration -> runtime (locks the data directory, recovers) -> sockets -> health SERVING. Stopping goes the
other way, and ends with everything acknowledged being on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from kvstore.config import ServiceConfig
from kvstore.errors import SetupError
from kvstore.runtime import Runtime
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_server.cache import KVCacheService
from kvstore_server.clients import Clients
from kvstore_server.descriptors import DescriptorServer
from kvstore_server.index import KVIndexService
from kvstore_server.sessions import SessionsService

log = logging.getLogger(__name__)
GC_THRESHOLDS = 100_000, 50, 100
"""The machine makes many objects and hardly a cycle: with its defaults the collector takes a fifth of the time of an
offload of small blocks."""
STOP_GRACE_S = 2.0
SWITCH_S = 1e-4
"""Copy threads and LMDB let go of the interpreter for microseconds; with the default of 5 ms each waits that long."""
MESSAGE_BYTES_MAX = 16 << 20
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


def run(config: ServiceConfig, ready: Callable[[str], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Raises SetupError; returns the exit status.

    `ready(address)` is called once the service answers.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    _check_socket(config.socket)
    runtime = Runtime(config, _log_progress)
    if runtime.arena.advice:
        log.warning("%s", runtime.arena.advice)
    try:
        asyncio.run(_serve(config, runtime, ready))
    finally:
        runtime.close()
    return 0


def _log_progress(done: int, total: int) -> None:
    log.info("recovering: %d of %d records", done, total)


async def _serve(config: ServiceConfig, runtime: Runtime, ready: Callable[[str], None] | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        address = await start(config, runtime, stack)
        log.info("serving on %s", address)
        if ready is not None:
            ready(address)
        await stop.wait()
        log.info("stopping")


async def start(config: ServiceConfig, runtime: Runtime, stack: contextlib.AsyncExitStack) -> str:
    """Bind everything and start; `stack` stops it. Returns the address for clients on this host. Raises SetupError."""
    server = grpc.aio.server(options=OPTIONS)
    address = f"unix:{config.socket}"
    health = HealthServicer()
    rpcs.add_KVCacheServicer_to_server(KVCacheService(runtime, Clients(runtime)), server)
    rpcs.add_KVIndexServicer_to_server(KVIndexService(runtime, address), server)
    rpcs.add_SessionsServicer_to_server(SessionsService(runtime), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name], server)
    _bind(server, config)
    if config.metrics_port:
        _start_metrics(config, runtime, stack)
    descriptors = DescriptorServer(Path(f"{config.socket}.fd"), runtime)
    stack.callback(descriptors.close)
    await server.start()
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    os.chmod(config.socket, 0o600)
    for name in ("", *names):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    stack.push_async_callback(health.enter_graceful_shutdown)
    return address


def _check_socket(path: Path) -> None:
    """Raises SetupError when another service answers on the socket, or its folder can't be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"socket: {path.parent}: {error.strerror}; give a path this user can write") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SetupError(f"socket: {path.parent} is not writable by this user; give another path")
    if path.exists() and not path.is_socket():
        raise SetupError(f"socket: {path} exists and is no socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        raise SetupError(f"socket: {path} is served by another process; stop it or give another path")
    path.unlink(missing_ok=True)


def _bind(server: grpc.aio.Server, config: ServiceConfig) -> None:
    try:
        server.add_insecure_port(f"unix:{config.socket}")
    except RuntimeError:
        raise SetupError(f"socket: can't bind {config.socket}; give another path") from None
    if not config.port:
        return
    _check_port(config.host, config.port, "port")
    try:
        server.add_insecure_port(f"{config.host}:{config.port}")
    except RuntimeError:
        raise SetupError(f"port: can't bind {config.host}:{config.port}; give another") from None


def _check_port(host: str, port: int, field: str) -> None:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        problem = "is taken" if taken else f"can't be used: {error.strerror}"
        raise SetupError(f"{field}: {host}:{port} {problem}; give another port, or 0 to switch it off") from None


def _start_metrics(config: ServiceConfig, runtime: Runtime, stack: contextlib.AsyncExitStack) -> None:
    _check_port(config.host, config.metrics_port, "metrics_port")
    http, _ = start_http_server(config.metrics_port, config.host, runtime.metrics.registry)
    stack.callback(http.shutdown)
