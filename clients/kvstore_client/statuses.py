"""gRPC statuses back to errors: the mirror of `kvstore_server/statuses.py`."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore import errors

ERROR_KEY = "kvstore-error"
_BY_NAME: dict[str, type[errors.KVStoreError]] = {
    kind.__name__: kind
    for kind in (
        errors.UnknownKeyspace,
        errors.UnknownSession,
        errors.LayoutMismatch,
        errors.LeaseExpired,
        errors.TierFull,
        errors.LimitExceeded,
        errors.ChecksumMismatch,
        errors.Unavailable,
    )
}
_BY_CODE: dict[grpc.StatusCode, type[errors.KVStoreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.RequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
}


def error_of(error: grpc.RpcError) -> errors.KVStoreError:
    """The error that the service meant, or what the transport's failure means to a caller."""
    call: Any = error  # every RpcError that a stub raises is a grpc.Call as well
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    text = (call.details() if hasattr(call, "details") else None) or str(error)
    named = dict(call.trailing_metadata() or ()).get(ERROR_KEY, "") if hasattr(call, "trailing_metadata") else ""
    if named == "InvalidField":
        field, _, rest = text.partition(": ")
        problem, _, mend = rest.partition("; ")
        return errors.InvalidField(field, problem, mend)
    kind = _BY_NAME.get(str(named)) or _BY_CODE.get(code, errors.TierError)
    if kind is errors.Unavailable and not named:
        return errors.Unavailable(f"service: {code.name.lower()}: {text}")
    return kind(text)
