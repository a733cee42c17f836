"""Traces: readers for what people have, and the one form all of them are brought to."""

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import RawRequest, Stop, Trace

__all__ = ["RawRequest", "Stop", "Trace", "TraceError"]
