"""Errors to gRPC statuses: the only place where this is decided. `kvstore_client/statuses.py` is the way back.

The class name travels in the trailing metadata `kvstore-error`, since several classes share a code.
"""

from __future__ import annotations

from grpc import StatusCode

from kvstore import errors

ERROR_KEY = "kvstore-error"

CODES: tuple[tuple[type[errors.KVStoreError], StatusCode], ...] = (
    (errors.InvalidField, StatusCode.INVALID_ARGUMENT),
    (errors.UnknownKeyspace, StatusCode.NOT_FOUND),
    (errors.UnknownSession, StatusCode.NOT_FOUND),
    (errors.LayoutMismatch, StatusCode.FAILED_PRECONDITION),
    (errors.LeaseExpired, StatusCode.ABORTED),
    (errors.RequestError, StatusCode.INVALID_ARGUMENT),
    (errors.TierFull, StatusCode.RESOURCE_EXHAUSTED),
    (errors.LimitExceeded, StatusCode.RESOURCE_EXHAUSTED),
    (errors.CapacityError, StatusCode.RESOURCE_EXHAUSTED),
    (errors.ChecksumMismatch, StatusCode.DATA_LOSS),
    (errors.Unavailable, StatusCode.UNAVAILABLE),
    (errors.TierError, StatusCode.UNAVAILABLE),
    (errors.SetupError, StatusCode.FAILED_PRECONDITION),
)


def code_of(error: errors.KVStoreError) -> StatusCode:
    """The most specific code."""
    return next((code for kind, code in CODES if isinstance(error, kind)), StatusCode.UNKNOWN)
