"""Fixtures of the GPU side: kernels compiled for the host, and a cache folder that tests share."""

from __future__ import annotations

import pytest
import torch

from kvstore_gpu.errors import Unavailable
from kvstore_gpu.kernels import HostKernels

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=[False, True], ids=["forwards", "backwards"])
def host_kernels(request: pytest.FixtureRequest) -> HostKernels:
    """Kernels on the host, their threads in either order."""
    try:
        kernels = HostKernels()
    except Unavailable as error:
        pytest.skip(str(error))
    kernels.backwards(request.param)
    return kernels
