"""Every error a caller can meet, in one small tree.

    KVStoreError
    ├── RequestError            the caller asked for something that can't be
    │   ├── InvalidField        a value is wrong: names the field and the mend
    │   ├── UnknownKeyspace     not registered here
    │   ├── LayoutMismatch      registered, but with another shape of bytes
    │   ├── UnknownSession
    │   └── LeaseExpired        the claim is gone; acquire again
    ├── CapacityError           right request, no room
    │   ├── TierFull
    │   └── LimitExceeded       a configured maximum (leases, sessions, request size)
    ├── TierError               the place where bytes live failed
    │   ├── TransferError       short read, EIO, ENOSPC: names the blocks
    │   ├── ChecksumMismatch    the bytes aren't the ones asked for
    │   └── Unavailable         service away, tier dead, deadline passed
    └── SetupError              can't start: port taken, directory locked or not writable, package missing

Mapped to gRPC codes in `kvstore_server/statuses.py`, and back in `kvstore_client/statuses.py`; nowhere else.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all. `str(error)` is one line for a person: what, which field, how to mend it."""


class RequestError(KVStoreError):
    """The caller asked for something that can't be."""


class InvalidField(RequestError):
    """A value is wrong.

    Args: field: its name as the caller knows it; problem: what is wrong; mend: what to do.
    """

    def __init__(self, field: str, problem: str, mend: str) -> None:
        super().__init__(f"{field}: {problem}; {mend}")
        self.field = field


class UnknownKeyspace(RequestError):
    """Not registered with this service."""


class LayoutMismatch(RequestError):
    """The keyspace, or the bytes, have another shape than was registered."""


class UnknownSession(RequestError):
    """No session of that id."""


class LeaseExpired(RequestError):
    """The claim is gone; acquire again."""


class CapacityError(KVStoreError):
    """A right request that finds no room."""


class TierFull(CapacityError):
    """No slot could be freed."""


class LimitExceeded(CapacityError):
    """A configured maximum was reached; the text names it."""


class TierError(KVStoreError):
    """The place where bytes live failed."""


class TransferError(TierError):
    """Some blocks could not be moved. `failed` holds their positions in the request."""

    def __init__(self, message: str, failed: list[int] | None = None) -> None:
        super().__init__(message)
        self.failed = failed or []


class ChecksumMismatch(TransferError):
    """The bytes aren't the ones asked for."""


class Unavailable(TierError):
    """Service away, tier dead, or the deadline passed."""


class SetupError(KVStoreError):
    """Something can't start; the text says what to change."""
