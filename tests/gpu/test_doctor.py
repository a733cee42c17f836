"""Findings: in plain words, without torch, CuPy or a driver at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstore_gpu.doctor import Finding, filesystem, report, storage_hints

MOUNTS = """\
22 1 0:20 / / rw,relatime - overlay overlay rw,lowerdir=/a
30 22 259:1 / /data rw,noatime shared:5 - ext4 /dev/nvme0n1 rw
31 30 0:30 / /data/scratch rw - tmpfs tmpfs rw
"""


def test_every_path_is_reported_with_a_reason() -> None:
    found = report()
    assert [finding.path for finding in found] == [
        "CUDA driver",
        "CUDA device",
        "kernel sources",
        "device kernels",
        "batched copies",
        "pinned DRAM",
        "CUDA IPC",
        "GPUDirect Storage",
    ]
    assert all(finding.why for finding in found)
    assert len(str(found).splitlines()) == len(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device_each_finding_names_a_mend_or_what_it_stands_on() -> None:
    for finding in report():
        assert finding.available or finding.mend or "needs a CUDA device" in finding.why, finding


def test_a_finding_reads_as_a_line() -> None:
    assert str(Finding("pinned DRAM", False, "memlock is 64 KiB", "raise it")) == (
        "pinned DRAM: not there, memlock is 64 KiB; to mend: raise it"
    )
    assert str(Finding("CUDA IPC", True, "works")) == "CUDA IPC: there, works"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home", "overlay"), ("/data/slabs", "ext4"), ("/data/scratch/a", "tmpfs"), ("/datax", "overlay")],
)
def test_the_file_system_of_a_folder_is_found(folder: str, kind: str) -> None:
    assert filesystem(Path(folder), MOUNTS) == kind


def test_what_stands_in_the_way_of_gpudirect_storage_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    hints = " ".join(storage_hints(Path("/home"), tmp_path))
    assert "nvidia-fs" in hints
    assert "/run/udev" in hints
    assert "overlay" in hints
    (tmp_path / "run/udev").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia-fs/stats").touch()
    assert list(storage_hints(Path("/data"), tmp_path)) == []


def test_the_doctor_can_be_imported_without_torch() -> None:
    script = "import sys; import kvstore_gpu.doctor; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
