"""kvikio for real, on host buffers, in a process whose libcuda is one that the test compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_gpu.errors import Unavailable
from kvstore_gpu.testing import build_stub

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("kvikio", "libkvikio", "rapids_logger"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    try:
        return build_stub(HERE / "libcuda_absent.c", tmp_path_factory.mktemp("stub") / "libcuda.so.1")
    except Unavailable as error:
        pytest.skip(str(error))


def run(script: str, *args: str, stub: Path | None) -> str:
    """A fresh process: kvikio keeps what it found out about libcuda for its lifetime."""
    preload = f"import ctypes; ctypes.CDLL({str(stub)!r}, mode=ctypes.RTLD_GLOBAL)\n" if stub else ""
    command = [sys.executable, "-c", preload + script, *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ROUND_TRIP = """
import sys
from pathlib import Path
import numpy as np
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.gds import GdsPath, Settings, load_kvikio
from kvstore_gpu.nvme import random_block
spec = PoolSpec(8, 2, 300_000)
path = Path(sys.argv[1]) / "slab"
path.write_bytes(bytes(8 * spec.stride_bytes))
arena = Arena.create(spec)
gds = GdsPath(arena, path, Settings(num_threads=3, task_bytes=65536))
kvikio = load_kvikio(Settings(num_threads=3, task_bytes=65536))
assert kvikio.defaults.get("num_threads") == 3 and kvikio.defaults.get("task_size") == 65536
assert kvikio.defaults.get("auto_direct_io_read")
for i in range(8):
    arena.tensor[i] = __import__("torch").from_numpy(random_block(spec.stride_bytes, i))
pieces = [(i * spec.stride_bytes, arena.slot(7 - i)) for i in range(8)]
assert gds.write(pieces).wait() == []
assert np.array_equal(np.fromfile(path, dtype=np.uint8)[: spec.stride_bytes], random_block(spec.stride_bytes, 7))
arena.poison([arena.slot(i) for i in range(8)])
batch = gds.read(pieces)
assert batch.wait() == []
for i in range(8):
    assert np.array_equal(arena.tensor[i].numpy(), random_block(spec.stride_bytes, i))
failed = gds.read([(0, arena.slot(0)), (8 * spec.stride_bytes, arena.slot(1))]).wait()
assert [failure.index for failure in failed] == [1], failed
print(failed[0].why)
gds.close()
import os
fd = os.open(path, os.O_RDWR)
by_fd = GdsPath(arena, fd)
os.close(fd)
assert by_fd.read(pieces[:1]).wait() == []
by_fd.close()
"""

PROBE = """
import logging, sys
from pathlib import Path
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.probe import open_path, probe
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
folder = Path(sys.argv[1])
spec = PoolSpec(4, 2, 300_000)
found = probe(folder, spec)
print(found.mode, found.chosen, found.gds_rate is not None)
path = folder / "slab"
path.write_bytes(bytes(4 * spec.stride_bytes))
arena = Arena.create(spec)
way = open_path(found, arena, path)
assert way.read([(0, arena.slot(0))]).wait() == []
way.close()
"""


HAND = """
import os, sys
from pathlib import Path
import numpy as np
from kvstore.tiers.files import OpenFile
from kvstore.tiers.transfer import Copy, File, Memory, Priority, checksums_of
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.hand import DeviceHand
from kvstore_gpu.nvme import random_block
spec = PoolSpec(8, 2, 300_000)
arena = Arena.create(spec)
hand = DeviceHand(arena, use_gds=True, num_buffers=2)
files, blocks = [], [random_block(spec.stride_bytes, i) for i in range(8)]
for name, part in (("a", blocks[:4]), ("b", blocks[4:])):
    path = Path(sys.argv[1]) / name
    path.write_bytes(b"".join(block.tobytes() for block in part))
    files.append(OpenFile.open(path, os.O_RDWR, direct=False))
os.ftruncate(files[1].fd, 3 * spec.stride_bytes)
copies = [
    Copy(
        File(files[i // 4], i % 4 * spec.stride_bytes),
        Memory(arena.flat, (7 - i) * spec.stride_bytes),
        spec.slot_bytes,
        spec.slice_bytes,
        checksums_of(blocks[i][: spec.slot_bytes].data, spec.slice_bytes),
    )
    for i in range(8)
]
results = hand.submit(copies, Priority.READ).wait(30)
assert [result.ok for result in results] == [True] * 7 + [False], results
assert hand.num_gds_fallbacks == 1
for i in range(7):
    assert np.array_equal(arena.tensor[7 - i].numpy(), blocks[i])
os.unlink(Path(sys.argv[1]) / "a")
(Path(sys.argv[1]) / "c").write_bytes(blocks[5].tobytes())
third = OpenFile.open(Path(sys.argv[1]) / "c", os.O_RDWR, direct=False)
copies[5].source = File(third, 0)
assert hand.submit(copies[5:6], Priority.READ).wait(30)[0].ok
assert len(hand._gds) == 2
hand.close()
"""


def test_the_hand_reads_by_kvikio_and_falls_back(stub: Path, tmp_path: Path) -> None:
    run(HAND, str(tmp_path), stub=stub)


def test_slots_go_through_kvikio_and_back(stub: Path, tmp_path: Path) -> None:
    assert "EOF" in run(ROUND_TRIP, str(tmp_path), stub=stub)


def test_the_probe_calls_emulation_by_its_name(stub: Path, tmp_path: Path) -> None:
    out = run(PROBE, str(tmp_path), stub=stub)
    assert "compat" in out
    assert "GPUDirect Storage: compat" in out


def test_without_a_driver_the_probe_says_absent_and_why(stub: Path, tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    out = run(PROBE, str(tmp_path), stub=None)
    assert "absent host False" in out
    assert "libcuda.so.1" in out
