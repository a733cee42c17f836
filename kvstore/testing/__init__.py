"""Aids for tests, shipped because engine developers need them too.

oracle.py   payloads derived from a block's identity, and poison for what must be overwritten
faults.py   plans of damage for the file layer
"""
