"""Aids for tests, shipped because engine developers need them too.

    oracle.py      payloads derived from a block's identity, and poison for what must be overwritten
    stub.py        a stub engine on them: offload, restore, judge
    faults.py      plans of damage for the file layer
    node.py        a node in this process whose NVMe files obey such a plan
    service.py     a real service process: start, kill, restart, read its metrics
    processes.py   client processes to be killed or stopped; what a process still holds
    volumes.py     small file systems, to fill a disk for real
    soak/          random work under faults for as long as asked

To test how *your* engine meets a failing cache, let its stub model write the oracle's bytes as KV, and judge what comes
back before attention would read it:

    from kvstore.testing import oracle
    from kvstore.testing.faults import Fault, FaultPlan
    from kvstore.testing.node import FaultyNode
    from kvstore.testing.stub import identity_of

    plan = FaultPlan(seed=1, writes={Fault.TORN: 0.1}, reads={Fault.EIO: 0.05})
    with FaultyNode(tmp_path, plan) as node:
        engine = MyEngine(cache=node.address)
        engine.prefill(tokens)                      # its stub: oracle.fill(identity_of(chain, i), kv_of_block(i))
        engine.forget(), engine.prefill(tokens)     # restores; poison your pool before: oracle.poison(pool)
        for i in range(engine.num_restored_blocks):
            assert oracle.verify(identity_of(chain, i), kv_of_block(i)) is None
        node.check()                                # conservation of everything the node's machine owns

`FaultPlan.next_faults("read", [Fault.STALL])` holds a call until `release()`, and `plan.stalled.acquire()` meets it, so
a test orders events without sleeping. Faults that are scripted or drawn are the same for the same seed; `plan.counts`
says what was done.
"""
