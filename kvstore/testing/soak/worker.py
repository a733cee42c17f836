"""One client process of the soak: random work on a service that comes and goes, until somebody kills it.

    python -m kvstore.testing.soak.worker ADDRESS SEED FIRST_SEED LAST_SEED

Prints one JSON line for each promise (after it was made) and now and then its counts, so that whoever reads knows what
this process was told before it died.
"""

from __future__ import annotations

import json
import sys
import time

from kvstore.errors import KVStoreError
from kvstore.testing.soak.tally import Tally
from kvstore.testing.soak.work import Ledger, Promise, Worker
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore_client import Client

REPORT_EVERY = 10


class _Printing(Ledger):
    def offer(self, num_blocks: int) -> None:
        print(json.dumps({"offered": num_blocks}), flush=True)

    def promise(self, p: Promise) -> None:
        print(json.dumps({"promise": [p.seed, p.length, p.branch, p.num_blocks]}), flush=True)


def main(address: str, seed: int, first: int, last: int) -> None:
    """Never returns by itself."""
    tally, ledger = Tally(), _Printing()
    while True:
        try:
            with Client(address, timeout_s=5) as client:
                worker = Worker(StubEngine(client, tiny_keyspace(), 64, seed), tally, ledger, seed, range(first, last))
                while True:
                    for _ in range(REPORT_EVERY):
                        worker.step()
                    print(json.dumps({"counts": dict(tally.counts), "problems": tally.problems}), flush=True)
                    tally.counts.clear()
                    if not client.boot_epoch:
                        time.sleep(0.05)  # away: don't spin
        except KVStoreError:
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], *(int(a) for a in sys.argv[2:5]))
