"""Which paths this machine has on the device side, what each is missing, and what mends it, in plain words.

Nothing here imports torch, CuPy or kvikio before it is asked to, and nothing opens cuFile's driver on a machine
without a device.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore_gpu.errors import BuildError, DriverError, Unavailable

UNUSABLE_FILESYSTEMS = frozenset({"overlay", "tmpfs", "nfs", "nfs4", "fuse", "9p", "virtiofs"})


@dataclass(frozen=True)
class Finding:
    """One path: whether it is there, why (not), and what would mend it (empty when nothing needs to)."""

    path: str
    available: bool
    why: str
    mend: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: {'there' if self.available else 'not there'}, {self.why}"
        return text + (f"; to mend: {self.mend}" if self.mend else "")


class Report(list[Finding]):
    """Findings in the order in which they depend on each other; as text, one a line."""

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self)


def report(folder: Path | None = None) -> Report:
    """Look at everything. With `folder` (where the slabs lie) and a device, GPUDirect Storage is tried there."""
    found = Report()
    for path, look in _LOOKS.items():
        found.append(_finding(path, look))
    found.append(_storage(found, folder))
    return found


def _finding(path: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(path, True, look())
    except Unavailable as error:
        return Finding(path, False, error.why, error.mend)
    except (BuildError, DriverError) as error:
        return Finding(path, False, str(error).splitlines()[0])


def _driver() -> str:
    from kvstore_gpu.driver import Driver

    version = Driver.load().version
    return f"it serves CUDA up to {version // 1000}.{version % 1000 // 10}"


def _device() -> str:
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("", "PyTorch isn't installed", "pip install torch")
    import torch

    if torch.version.cuda is None:
        raise Unavailable("", f"PyTorch {torch.__version__} is built without CUDA", "install a CUDA build of PyTorch")
    if not torch.cuda.is_available():
        raise Unavailable("", "PyTorch sees no CUDA device", "nvidia-smi must list one inside this container")
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()}, {free >> 30} of {total >> 30} GiB free"


def _nvrtc() -> str:
    from kvstore_gpu.build import ARCHITECTURES, cubin

    for arch in ARCHITECTURES:
        cubin(arch)
    return f"compiled for {', '.join(ARCHITECTURES)}"


def _need_device() -> None:
    try:
        _device()
    except Unavailable as error:
        raise Unavailable("", "needs a CUDA device") from error


def _kernels() -> str:
    _need_device()
    import torch

    from kvstore_gpu.kernels import CudaKernels

    CudaKernels(torch.device("cuda"))
    return "gather, scatter, checksum and fill are loaded"


def _batched() -> str:
    from kvstore_gpu.driver import Driver

    _need_device()
    if not Driver.load().can_batch:
        raise Unavailable(
            "", "the driver lacks cuMemcpyBatchAsync_v2", "a CUDA 13 driver; until then copies go one by one"
        )
    return "many copies go to the driver in one call"


def _pinned() -> str:
    from kvstore_gpu.pinned import memory_limits

    _need_device()
    limits = memory_limits()
    if limits.memlock_bytes is not None and limits.memlock_bytes < 1 << 30:
        return f"{limits.text()}; if registering fails, copies go through a staging ring"
    return limits.text()


def _ipc() -> str:
    _need_device()
    return "a pool can be opened by another process on this machine"


_LOOKS: dict[str, Callable[[], str]] = {
    "CUDA driver": _driver,
    "CUDA device": _device,
    "kernel sources": _nvrtc,
    "device kernels": _kernels,
    "batched copies": _batched,
    "pinned DRAM": _pinned,
    "CUDA IPC": _ipc,
}


def _storage(found: Report, folder: Path | None) -> Finding:
    name = "GPUDirect Storage"
    if importlib.util.find_spec("kvikio") is None:
        from kvstore_gpu.gds import MEND

        return Finding(name, False, "kvikio isn't installed; NVMe reads go through pinned memory", MEND)
    device = next(finding for finding in found if finding.path == "CUDA device")
    if not device.available:
        return Finding(name, False, "kvikio is installed; needs a CUDA device")
    hints = "; ".join(storage_hints(folder))
    if folder is None:
        return Finding(name, False, f"not tried, no folder was named{'; ' if hints else ''}{hints}")
    return _tried(name, folder, hints)


def _tried(name: str, folder: Path, hints: str) -> Finding:
    from kvstore_gpu.arena import PoolSpec
    from kvstore_gpu.probe import probe

    try:
        result = probe(folder, PoolSpec(8, 32, 1 << 16), "cuda")
    except OSError as error:
        return Finding(name, False, str(error), "name a folder on a local NVMe disk")
    words = {"real": "real", "compat": "emulated: bytes go through host memory", "absent": "absent"}[result.mode]
    why = f"{words} ({result.why}); the {result.chosen} path is used"
    return Finding(name, result.mode == "real", why, "" if result.mode == "real" else hints)


def storage_hints(folder: Path | None, root: Path = Path("/")) -> Iterator[str]:
    """What is known to stand in the way of real GPUDirect Storage."""
    if not (root / "proc/driver/nvidia-fs/stats").exists():
        yield "the nvidia-fs kernel module isn't loaded (or give cuFile a kernel and driver with PCI peer-to-peer DMA)"
    if not (root / "run/udev").is_dir():
        yield "/run/udev isn't readable in this container: mount it (--volume /run/udev:/run/udev:ro)"
    if folder is not None:
        kind = filesystem(folder, (root / "proc/self/mountinfo").read_text())
        if kind in UNUSABLE_FILESYSTEMS:
            yield f"{folder} lies on {kind}, which has no block device for cuFile: use ext4 or xfs on a local NVMe disk"


def filesystem(folder: Path, mountinfo: str) -> str:
    """Kind of file system that `folder` lies on: the mount with the longest matching path, the last of equals."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        match = re.match(r"\S+ \S+ \S+ \S+ (\S+) .*? - (\S+) ", line)
        if match and folder.absolute().is_relative_to(match[1]) and len(match[1]) >= best:
            best, kind = len(match[1]), match[2]
    return kind
