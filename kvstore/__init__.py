"""A tiered KV-cache store for LLM agents. `kvstore.embedded(...)` runs a whole node in this process."""

from __future__ import annotations

from typing import Any

__all__ = ["embedded"]


def __getattr__(name: str) -> Any:
    """`kvstore.embedded`, imported when it is asked for: the library under it must stay light."""
    if name == "embedded":
        from kvstore.node import embedded

        return embedded
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
