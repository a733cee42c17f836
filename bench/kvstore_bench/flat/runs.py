"""From hits of references to leading runs of requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_bench.flat.compiled import jit


@jit
def leading_runs(hits: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[num_requests] how many of each request's blocks hit before the first that doesn't."""
    runs = np.zeros(len(offsets) - 1, np.int64)
    for r in range(len(offsets) - 1):
        position = offsets[r]
        while position < offsets[r + 1] and hits[position]:
            position += 1
        runs[r] = position - offsets[r]
    return runs
