"""Command line of the self-check."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore_gpu import doctor
from kvstore_gpu.check import decode, engine, speed, verify
from kvstore_gpu.check.rows import Results, Row
from kvstore_gpu.check.speed import Sizes
from kvstore_gpu.probe import Probe

NO_DEVICE = "no CUDA device"
NEED_A_DEVICE = (
    "copies against busy compute on a device",
    "pool opened by another process",
    "H2D and D2H against one large copy",
    "gather and scatter against a device-to-device copy",
    "XXH3-64 on the device against NVMe and H2D",
    "NVMe to pool by GPUDirect Storage",
    "restore of 32k tokens against recompute",
    "decode slower while restoring",
    decode.READ,
    decode.STEPS,
    engine.GATE,
    engine.TTFT,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything that this machine can. Exit status: see `Results.status`."""
    options = _options(argv)
    logging.basicConfig(level=logging.WARNING)
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    print(doctor.report(options.folder), "\n", sep="")
    results = Results(options.seconds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(results, device, Sizes.small() if options.small else Sizes(), Path(folder))
    print(results.table())
    if options.json:
        results.write(options.json)
    return results.status


def run(results: Results, device: str, sizes: Sizes, folder: Path) -> None:
    """All items on one device; without a CUDA device, the host's, and the rest by name under skipped."""
    torch.set_num_threads(1)
    results.run("kernel sources compile", verify.cubins)
    results.run("kernels against the host's reference", lambda: verify.kernels(device))
    results.run("decode attention against float64", lambda: decode.right(device))
    results.run("copies in and out", lambda: verify.copies(device))
    results.run("layer-wise restore", lambda: verify.layers(device))
    results.run("the client's hand", lambda: verify.hand(device))
    results.run("quantised copies", lambda: verify.quantised(device))
    found = _storage(results, device, sizes, folder)
    if device == "cpu":
        for name in NEED_A_DEVICE:
            results.skip(name, NO_DEVICE)
    else:
        _on_device(results, device, sizes, found)
        _engine(results, device, sizes)


def _storage(results: Results, device: str, sizes: Sizes, folder: Path) -> list[Probe]:
    found = list[Probe]()

    def work() -> list[Row]:
        rows, outcome = speed.storage(device, sizes, folder)
        found.append(outcome)
        return rows

    results.run("NVMe to pool", work)
    if device != "cpu" and found and found[0].mode == "absent":
        results.skip("NVMe to pool by GPUDirect Storage", found[0].why)
    return found


def _on_device(results: Results, device: str, sizes: Sizes, found: list[Probe]) -> None:
    results.run("copies against busy compute", lambda: verify.order(device, sizes.busy_size))
    results.run("pool opened by another process", lambda: verify.ipc(device))
    results.run("H2D and D2H", lambda: speed.transfers(device, sizes))
    large = next((row.limit for row in results.rows if row.name.startswith("H2D, scattered")), None)
    nvme = max((rate for rate in (found[0].gds_rate, found[0].host_rate) if rate), default=None) if found else None
    results.run("gather, scatter and checksum", lambda: speed.kernels(device, sizes, large, nvme))
    results.run("restore of a 32k context", lambda: speed.restore(device, sizes))
    results.run("decode beside a restore", lambda: speed.background(device, sizes))
    results.run(decode.READ, lambda: decode.read(device, sizes))


def _engine(results: Results, device: str, sizes: Sizes) -> None:
    small = sizes == Sizes.small()
    num_skipped = len(results.skipped)
    results.run(engine.GATE, lambda: engine.engine(device, small), 0.0 if small else engine.LASTS_S)
    if len(results.skipped) > num_skipped:  # one run serves both
        results.skip(engine.TTFT, results.skipped[-1][1])
    results.run(decode.STEPS, lambda: decode.steps(device, small), 0.0 if small else decode.LASTS_S)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kvstore_gpu.check", description="Verify and measure the device side.")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure (default: here)")
    parser.add_argument("--device", help="cuda:0 when there is one, else cpu")
    parser.add_argument("--seconds", type=float, default=200, help="no item is begun later than this")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the code, measures nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
