"""What can go wrong on the device side, as part of the tree in `kvstore.errors`.

TierError
|-- Unavailable      a path this machine doesn't have; says what is missing and what mends it
|   `-- PinRefused   the driver or the system forbids pinning
|-- DriverError      a CUDA driver call answered with an error code
`-- BuildError       CUDA sources did not compile
RequestError
`-- LayoutError      an engine pool or a copy that doesn't fit what was declared
"""

from __future__ import annotations

from kvstore import errors


class Unavailable(errors.Unavailable):
    """A path that this machine doesn't have."""

    def __init__(self, path: str, why: str, mend: str = "") -> None:
        super().__init__(f"{path}: {why}" + (f" ({mend})" if mend else ""))
        self.path, self.why, self.mend = path, why, mend


class PinRefused(Unavailable):
    """Host memory could not be registered with CUDA."""


class DriverError(errors.TierError):
    """A driver call failed; `code` is the CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} answered {code}: {text}")
        self.call, self.code, self.text = call, code, text


class BuildError(errors.TierError):
    """The compiler's log, as it came."""


class LayoutError(errors.RequestError, ValueError):
    """Shapes, strides or sizes that don't fit together."""
