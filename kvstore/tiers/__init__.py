"""Where bytes live and how they move, on the host.

files.py        open files with probed O_DIRECT and a place to inject faults
moves.py        what is moved and how it is verified; copies in memory
file_moves.py   copies between memory and files
native.py       the compiled helper that copies and hashes in one pass
transfer.py     the engine: threads, priorities, deadlines
arena.py        the DRAM pool: one shared memory object, huge pages when they can be had
slab.py         the NVMe pool: preallocated segment files seen as one address space
index_lmdb.py   the NVMe index: what the slab holds, sessions and named contexts
datadir.py      one directory of slab and index: lock, version, recovery
fsck.py         check, repair and scrub such a directory; salvage.py reads and replaces a damaged index
"""
