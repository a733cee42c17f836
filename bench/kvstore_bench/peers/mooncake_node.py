"""A process that contributes memory to a Mooncake Store: `python -m ... MASTER_PORT SEGMENT_BYTES READY_FILE`.

Lives until its standard input ends, so it goes with the bench that started it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore_bench.peers.mooncake import connect


def main(master_port: int, segment_bytes: int, ready: Path) -> None:
    """Contribute until told to stop."""
    store = connect(master_port, segment_bytes)
    ready.touch()
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
