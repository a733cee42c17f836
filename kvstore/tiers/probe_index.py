"""Reads every row of an index once: `python -m kvstore.tiers.probe_index FOLDER`. Exit status 0 when all can be read.

In a process of its own, since LMDB may end the process that meets a damaged page.
"""

from __future__ import annotations

import sys

import lmdb


def read_all(folder: str) -> None:
    """Raises lmdb.Error on a damaged page."""
    with lmdb.open(folder, max_dbs=8, readonly=True, lock=False) as env, env.begin() as main:
        with main.cursor() as names:
            tables = [bytes(name) for name in names.iternext(keys=True, values=False)]
        for name in tables:
            with main.cursor(env.open_db(name, main, create=False)) as rows:
                for _ in rows:
                    pass


if __name__ == "__main__":
    try:
        read_all(sys.argv[1])
    except lmdb.Error as error:
        sys.exit(str(error))
