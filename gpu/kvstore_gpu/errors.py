"""What can go wrong on the device side.

GpuError
|-- Unavailable      a path this machine doesn't have; says what is missing and what mends it
|   `-- PinRefused   the driver or the system forbids pinning
|-- DriverError      a CUDA driver call answered with an error code
|-- BuildError       CUDA sources did not compile
|-- LayoutError      an engine pool or a copy that doesn't fit what was declared
`-- TransferError    fewer bytes moved than asked for, or wrong ones
"""

from __future__ import annotations


class GpuError(Exception):
    """Base of everything this package raises on purpose."""


class Unavailable(GpuError):
    """A path that this machine doesn't have."""

    def __init__(self, path: str, why: str, mend: str = "") -> None:
        super().__init__(f"{path}: {why}" + (f" ({mend})" if mend else ""))
        self.path, self.why, self.mend = path, why, mend


class PinRefused(Unavailable):
    """Host memory could not be registered with CUDA."""


class DriverError(GpuError):
    """A driver call failed; `code` is the CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} answered {code}: {text}")
        self.call, self.code, self.text = call, code, text


class BuildError(GpuError):
    """The compiler's log, as it came."""


class LayoutError(GpuError, ValueError):
    """Shapes, strides or sizes that don't fit together."""


class TransferError(GpuError):
    """A transfer that did not do all of what was asked."""
