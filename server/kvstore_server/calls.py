"""What every call has in common: its errors become statuses, its time is measured, nothing escapes as a traceback."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc

from kvstore.errors import InvalidField, KVStoreError
from kvstore.runtime import Runtime
from kvstore_server.statuses import ERROR_KEY, code_of

log = logging.getLogger(__name__)


class _HasRuntime(Protocol):
    _runtime: Runtime


S = TypeVar("S", bound=_HasRuntime)
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[S, Any, Context], Awaitable[Any]]


def rpc(method: Method[S]) -> Method[S]:
    """Wrap a unary handler: KVStoreError -> status with the class name in `kvstore-error`; others -> INTERNAL,
    logged."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: S, request: Any, context: Context) -> Any:
        started = time.monotonic()
        try:
            return await method(self, request, context)
        except KVStoreError as error:
            self._runtime.metrics.failed(type(error).__name__)
            await context.abort(code_of(error), str(error), ((ERROR_KEY, type(error).__name__),))
        except (grpc.aio.AbortError, TimeoutError):
            raise
        except Exception:
            log.exception("%s failed unexpectedly", name)
            self._runtime.metrics.failed("bug")
            await context.abort(grpc.StatusCode.INTERNAL, f"{name}: internal error; see the service's log")
        finally:
            self._runtime.metrics.rpc(name, time.monotonic() - started)

    return call


def check_bytes(field: str, value: bytes, size: int) -> bytes:
    """`value` of exactly `size` bytes. Raises InvalidField."""
    if len(value) != size:
        raise InvalidField(field, f"{len(value)} bytes", f"give {size}")
    return value


def seconds_left(context: Context, wanted_s: float, most_s: float) -> float:
    """How long a handler may wait: what was asked for, the server's own bound, and the caller's deadline."""
    remaining = context.time_remaining()
    return max(0.0, min(wanted_s, most_s, remaining * 0.9 if remaining is not None else most_s))
