"""Set-up that every test shares: Hypothesis profiles, and where the given data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: a test never fails because the machine was busy. CI replays the same examples every time.
_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", **_CALM)
settings.register_profile("ci", **_CALM, derandomize=True, print_blob=True)
settings.register_profile("soak", **_CALM, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# One thread each: two BLAS or OpenMP pools on a small machine spin against each other.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of given traces beside the source tree (KVSTORE_TEST_SHARED elsewhere); skips where it is missing."""
    folder = Path(os.environ.get("KVSTORE_TEST_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: given data is missing")
    return folder
