"""The soak: random work under injected faults, for as long as asked, with every restored byte judged by the oracle.

    machine.py   one machine, seeded random clients and hands, invariants on the way      (pure, millions of operations)
    disk.py      a node in this process whose files obey a plan of faults                 (tens of thousands of faults)
    kills.py     real service and client processes: SIGKILL, SIGSTOP, rot, a full volume  (hundreds of kills)
    worker.py    one client process of `kills`
    work.py      what a client does, and the ledger of what it was promised
    tally.py     counts, and the verdict

    python -m kvstore.testing.soak --minutes 10 --seed 1 [--only disk --faults 10000] [--json FILE]

Exit status 1 when a byte was wrong, a promise broken, or anything leaked.
"""
