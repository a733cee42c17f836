"""What the core may know, what an import pulls in, and what keeps the rooms small enough to read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted([*(ROOT / "kvstore/core").rglob("*.py"), ROOT / "kvstore/errors.py"])
HOLDERS = ("proto", "gpu", "server", "clients", "bench", "tests", "docs")
PACKAGES = [
    p for p in [ROOT / "kvstore", *(q for h in HOLDERS[:5] for q in (ROOT / h).glob("kvstore_*"))] if p.is_dir()
]
SOURCES = sorted(f for p in PACKAGES for f in p.rglob("*.py") if "_pb2" not in f.name)

IMPURE = frozenset(
    "asyncio concurrent ctypes io logging mmap multiprocessing os pathlib queue random select selectors shutil signal "
    "socket subprocess tempfile threading time urllib uuid".split()
)
ALLOWED_LIBRARIES = {"kvstore", "numpy", "xxhash"}
LINES_MAX, FUNCTION_LINES_MAX = 500, 70


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of all modules that `tree` imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_only_values_and_arithmetic(path: Path) -> None:
    for name in imported(ast.parse(path.read_text())):
        top = name.partition(".")[0]
        assert top not in IMPURE, f"{name}: the core does no I/O and has no clock"
        assert top in ALLOWED_LIBRARIES or top in sys.stdlib_module_names, name
        if top == "kvstore":
            assert name.startswith(("kvstore.core", "kvstore.errors")), name


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_opens_and_prints_nothing_and_draws_from_no_hidden_generator(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "default_rng":
            assert node.args, f"line {node.lineno}: a generator gets its seed from the caller"


def test_importing_the_core_loads_no_heavy_library() -> None:
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in CORE]
    heavy = ("torch", "grpc", "lmdb", "pydantic", "rich", "typer", "prometheus_client", "cupy", "google.protobuf")
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_command_line_starts_without_the_parts_it_can_start() -> None:
    heavy = ("torch", "grpc", "lmdb", "pydantic", "numpy", "transformers", "numba")
    code = f"import sys, kvstore.cli\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_folders_that_hold_packages_are_none_themselves() -> None:
    assert [h for h in HOLDERS if (ROOT / h / "__init__.py").exists()] == []


def compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A numba kernel: one loop over arrays that live in its locals; cut in pieces it would pass them all around."""
    return any(isinstance(d, ast.Name) and d.id == "jit" for d in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_stay_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= LINES_MAX, f"over {LINES_MAX} lines: split it"
    assert not tree.body or ast.get_docstring(tree), "a module opens with what it is for"
    long = [
        f"{node.name} (line {node.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
        and not compiled(node)
    ]
    assert not long, f"over {FUNCTION_LINES_MAX} lines: {', '.join(long)}"
    assert "pickle" not in {name.partition(".")[0] for name in imported(tree)}
