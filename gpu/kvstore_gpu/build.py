"""From `.cu` sources to something that runs.

For a device, NVRTC makes a cubin per architecture; that needs the NVRTC library and CuPy's low-level bindings, but
neither driver nor device. For the host, a C++ compiler makes a shared object from the same sources (see
cuda/host_shim.h). Both results are kept in a cache folder, named by the digest of everything that went in.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvstore_gpu.errors import BuildError, Unavailable

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_HOST_FLAGS = ("-O2", "-ffp-contract=off", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-x", "c++")
_DEVICE_FLAGS = ("--std=c++17",)


def cache_dir() -> Path:
    """`$KVSTORE_GPU_CACHE`, or a folder under the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(os.environ.get("KVSTORE_GPU_CACHE") or Path(base) / "kvstore_gpu")
    path.mkdir(parents=True, exist_ok=True)
    return path


def cubin(arch: str) -> Path:
    """File with the kernels for one architecture, such as `sm_90`: shipped beside the sources, cached, or compiled now.

    Raises: Unavailable without NVRTC; BuildError with the compiler's log.
    """
    name = f"kernels-{arch}-{_digest(arch, *_DEVICE_FLAGS)}.cubin"
    for folder in (SOURCES / "cubin", cache_dir()):
        if (folder / name).exists():
            return folder / name
    return _store(cache_dir() / name, compile_cubin(arch))


def compile_cubin(arch: str) -> bytes:
    """Compile with NVRTC, cache or not. Needs no device. Raises: as `cubin`."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram((SOURCES / "kernels.cu").read_text(), "kernels.cu", (), ())
    options = (f"--gpu-architecture={arch}", f"-I{SOURCES}", *_DEVICE_FLAGS)
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise BuildError(f"{arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def host_library() -> Path:
    """The kernels as a host shared object. Raises: Unavailable without a C++ compiler; BuildError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("host kernels", "no C++ compiler found", "install g++")
    target = cache_dir() / f"kernels-host-{_digest(compiler, *_HOST_FLAGS)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        made = Path(folder) / "kernels.so"
        command = [compiler, *_HOST_FLAGS, str(SOURCES / "kernels.cu"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(done.stderr)
        return made.replace(target)


def ship(folder: Path = SOURCES / "cubin") -> list[Path]:
    """Compile for every named architecture into a folder that `cubin` looks into first."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {arch: f"kernels-{arch}-{_digest(arch, *_DEVICE_FLAGS)}.cubin" for arch in ARCHITECTURES}
    return [_store(folder / name, compile_cubin(arch)) for arch, name in names.items()]


def _nvrtc() -> Any:
    try:
        module = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        module.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        mend = "pip install --no-deps cupy-cuda13x cuda-pathfinder nvidia-cuda-nvrtc"
        raise Unavailable("NVRTC", f"cupy's bindings don't load: {error}", mend) from error
    return module


def _digest(*flags: str) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for path in sorted(SOURCES.glob("*.*")):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    hashed.update("\0".join(flags).encode())
    return hashed.hexdigest()


def _store(path: Path, content: bytes) -> Path:
    """Written beside and renamed, so that a reader never sees half a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    return Path(file.name).replace(path)


if __name__ == "__main__":
    for made in ship():
        print(made)
