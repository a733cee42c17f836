"""Run the self-check's device part on a machine without one: torch.cuda, CuPy and libcuda are faked over host memory.

    python fake_cuda.py LIBCUDA FOLDER JSON

Started in a process of its own by test_check.py. Tensors "on the device" lie in host memory, kernels are the host
build, the driver is the compiled stand-in LIBCUDA. So the code that only a device would run is run: arguments,
tables, batches, events asked for. What a device would *do* with them is not shown by this.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import kvstore_gpu.check.verify as verify
from kvstore_engine import graphs
from kvstore_engine.recording import RecordingCapturer
from kvstore_gpu import arena, build, doctor, kernels
from kvstore_gpu.check.__main__ import main
from kvstore_gpu.driver import Driver

CUDA = torch.device("cuda:0")
HOST, BUSY = ctypes.CDLL(str(build.host_library())), threading.Lock()


class Stream:
    """In order, at once."""

    cuda_stream = 7

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority

    def wait_event(self, event: object) -> None:
        """Has happened."""


class Event:
    """Has happened."""

    def __init__(self, blocking: bool = False) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        """At once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class RawModule:
    """Takes a cubin, runs the host build."""

    def __init__(self, path: str) -> None:
        assert Path(path).read_bytes().startswith(b"\x7fELF")

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], args: tuple[np.generic, ...], stream: int) -> None:
            assert stream == Stream.cuda_stream
            typed = [kernels.as_ctypes(a) for a in args]
            with BUSY:  # the engine's thread and the hand's
                for index in range(num := min(grid[0], 64)):
                    HOST.kv_host_block(num, block[0], index)
                    HOST[name](*typed)

        return launch


def on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that forgets the device."""
    return lambda *args, **named: make(*args, **{k: v for k, v in named.items() if k not in ("device", "pin_memory")})


def move(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to`, to a device or a dtype or both: a copy either way, as to a device."""

    def to(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        left = [a for a in (*args, *named.values()) if isinstance(a, torch.dtype)]
        return make(tensor, *left) if left else tensor.clone()

    return to


def take_over(exposed: Any, device: object) -> torch.Tensor:
    """What torch does with the CUDA array interface."""
    del device
    told = exposed.__cuda_array_interface__
    memory = (ctypes.c_uint8 * int(np.prod(told["shape"]))).from_address(told["data"][0])
    return torch.frombuffer(memory, dtype=torch.uint8).view(told["shape"])


def patches(libcuda: str) -> list[Any]:
    """Everything that stands between the package and a device."""
    cuda = types.SimpleNamespace(Device=lambda index: nullcontext(), ExternalStream=lambda pointer, device: pointer)
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(RawModule=RawModule, cuda=cuda)
    driver = Driver(ctypes.CDLL(libcuda))
    load = lambda device: kernels.CudaKernels(CUDA)  # noqa: E731
    torch_cuda = {
        "is_available": lambda: True,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda: "host memory",
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "mem_get_info": lambda device=None: (1 << 30, 2 << 30),
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }
    made = [mock.patch.object(torch.cuda, name, value) for name, value in torch_cuda.items()]
    factories = ("zeros", "empty", "randn", "ones", "tensor", "arange", "full")
    made += [mock.patch.object(torch, name, on_host(getattr(torch, name))) for name in factories]
    made += [mock.patch.object(torch, "as_tensor", take_over), mock.patch.object(torch.version, "cuda", "13.0")]
    made += [mock.patch.object(torch.Tensor, "to", move(torch.Tensor.to))]
    made += [mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)]
    made += [mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor)]
    made += [mock.patch.object(Driver, "load", classmethod(lambda kind: driver))]
    made += [mock.patch.object(arena.Arena, "host_view", lambda pool: None)]
    made += [mock.patch.object(arena, "best_kernels", load), mock.patch.object(verify, "best_kernels", load)]
    made += [mock.patch.object(doctor, "report", lambda folder=None: "faked")]
    capturer = RecordingCapturer(itertools.cycle([2.0, 1.0]))
    made += [mock.patch.dict(graphs.CAPTURERS, cuda=lambda device: capturer)]
    return [mock.patch.dict(sys.modules, {"cupy": cupy}), *made]


if __name__ == "__main__":
    for arch in ("sm_90",):
        build.cubin(arch)  # compiled while CuPy is still the real one
    for patch in patches(sys.argv[1]):
        patch.start()
    main(["--device", "cuda:0", "--small", "--folder", sys.argv[2], "--json", sys.argv[3]])
