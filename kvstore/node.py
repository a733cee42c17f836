"""A whole node inside this process: for notebooks, tests, and engines that don't want a second process.

The same runtime, services and client as `kvstore serve` runs; only the process is shared. Bytes still go through the
arena, hashes through a unix socket in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.config import ServiceConfig

if TYPE_CHECKING:
    from kvstore_client import Client

START_S = 60.0


@contextlib.contextmanager
def embedded(**settings: Any) -> Iterator[Client]:
    """Run a node in this process and connect to it.

    `settings` are those of `ServiceConfig`; without `data_dir` everything lies in a temporary folder and goes with it.
    Raises SetupError, InvalidField.
    """
    from kvstore_client import Client

    folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
    try:
        given: dict[str, Any] = {"data_dir": folder / "data", "socket": folder / "kv.sock", "metrics_port": 0}
        config = ServiceConfig(**(given | settings))
        with _Node(config) as address, Client(address) as client:
            yield client
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Node:
    """Runtime and servers on a thread with an event loop of its own."""

    def __init__(self, config: ServiceConfig) -> None:
        from kvstore.runtime import Runtime

        self._config = config
        self._runtime = Runtime(config)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-node", daemon=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        from kvstore_server.main import start

        async with contextlib.AsyncExitStack() as stack:
            await start(self._config, self._runtime, stack)
            self._started.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        self._started.wait(START_S)
        if self._error is not None:
            self._runtime.close()
            raise self._error
        return f"unix:{self._config.socket}"

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        self._runtime.close()
