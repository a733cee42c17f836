"""The one place that imports numba, with a clear error where it is missing.

Numba's on-disk cache notices changes only in the file of the cached function, not in what it calls or the constants
it takes from elsewhere. So the cache lies in a folder named after a digest of all the sources that compiled code may
depend on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from kvstore.core import eviction

F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba
except ImportError as error:  # pragma: no cover - exercised by hand
    raise ImportError("the simulators need numba: pip install 'kvstore[bench]'") from error


def _cache_folder() -> str:
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(eviction.__file__).parent):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "kvstore_bench" / digest.hexdigest()[:16])


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = _cache_folder()  # type: ignore[attr-defined,unused-ignore]


def jit(function: F) -> F:
    """Compile, keep the machine code on disk; runs without the interpreter's lock."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


jit_inline = jit
