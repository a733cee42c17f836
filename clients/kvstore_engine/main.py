"""`kvstore engine`: one engine process behind HTTP."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from kvstore.errors import SetupError
from kvstore_engine.client_store import ServiceStore
from kvstore_engine.config import EngineConfig
from kvstore_engine.engine import Engine
from kvstore_engine.model import LoadedModel, load_model
from kvstore_engine.server import ChatServer
from kvstore_engine.store import ContextStore, NullStore

BACKLOG = 512
SHUTDOWN_S = 10


def bind(config: EngineConfig) -> socket.socket:
    """The listening socket, before the model is loaded, so that a taken port shows at once. Raises SetupError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        where = f"{config.host}:{config.port}"
        raise SetupError(f"port: can't listen on {where} ({error.strerror}); choose another host or port") from None
    return listening


def open_store(config: EngineConfig, model: LoadedModel) -> ContextStore:
    """The store that the configuration names."""
    if not config.store:
        return NullStore()
    return ServiceStore(
        config.store,
        model.keyspace,
        restore_timeout_s=config.restore_timeout_s,
        offload_timeout_s=config.offload_timeout_s,
        device=model.device,
    )


@contextlib.contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """An engine with the model and store of its configuration. Raises SetupError and what the store raises."""
    model = load_model(config)
    with Engine(config, model, open_store(config, model)) as engine:
        yield engine


def serve(config: EngineConfig) -> int:
    """Serve until a signal comes. Raises SetupError when it can't start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listening = bind(config)
    host, port = listening.getsockname()[:2]
    with listening, open_engine(config) as engine:
        settings = uvicorn.Config(
            ChatServer(engine).app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S, lifespan="off"
        )
        away = isinstance(engine.store, ServiceStore) and not engine.store.connected
        store = f"{config.store or 'none'}{' (away: computing, and trying again)' if away else ''}"
        print(f"kvstore engine: {config.name} at http://{host}:{port}/v1, store {store}", flush=True)
        uvicorn.Server(settings).run(sockets=[listening])
    return 0
