"""The engine as a process: `kvstore engine` over HTTP, killed in the middle of a turn; and what bad set-up gets."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.testing.service import ServiceProcess, wait_for
from kvstore_engine.testing import save_tiny_model

MIB = 1 << 20


class EngineProcess:
    """`kvstore engine` on a free port, with a tiny model."""

    def __init__(self, model: Path, store: str) -> None:
        options = {
            "model": model,
            "store": store,
            "port": 0,
            "block-tokens": 16,
            "chunk-tokens": 32,
            "pool-bytes": "1MiB",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "kvstore", "engine", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.url = self._address()

    def _address(self) -> str:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            found = re.search(r"at (http://\S+)/v1", line)
            if found:
                return found[1]
        raise AssertionError("the engine did not start:\n" + "".join(said))

    def body(self, content: str, **changes: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "tiny", "user": "agent", "max_tokens": 8, "temperature": 0}
        return body | {"messages": [{"role": "user", "content": content}]} | changes

    def chat(self, content: str) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=self.body(content), timeout=60)
        answer.raise_for_status()
        return dict(answer.json())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(directory)
    return directory


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path, dram_bytes=2 * MIB, nvme_bytes=32 * MIB, segment_bytes=MIB // 4, lease_ttl_s=1)
    process.start()
    yield process
    process.stop()


def test_kill_of_the_engine_in_a_turn_loses_no_context(model: Path, service: ServiceProcess) -> None:
    text = "a context that is long enough for a few blocks, " * 5
    engine = EngineProcess(model, service.address)
    said = engine.chat(text)
    wait_for(lambda: service.metrics().get('kvstore_sessions{state="idle"}') == 1, "the turn to be offloaded")
    body = engine.body(text + "and more", max_tokens=700, stream=True)
    with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_bytes())
        engine.kill()
    wait_for(lambda: service.metrics().get("kvstore_leases") == 0, "the old engine's leases to go")
    engine = EngineProcess(model, service.address)
    again = engine.chat(text)
    assert again["choices"][0]["message"] == said["choices"][0]["message"]
    sources = again["usage"]["kvstore"]
    assert sources["dram_tokens"] + sources["nvme_tokens"] >= 240
    assert sources["hbm_tokens"] == 0
    engine.kill()


def run_engine(**options: Any) -> tuple[int, str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "engine", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": "/nowhere", "port": 0}, "model"),
        ({"chunk_tokens": 33}, "chunk_tokens"),
        ({"dtype": "float8"}, "dtype"),
        ({"pool_bytes": "many"}, "pool_bytes"),
        ({"eviction": "oracle"}, "eviction"),
    ],
)
def test_bad_set_up_is_one_line(options: dict[str, Any], field: str) -> None:
    status, said = run_engine(**options)
    assert status != 0
    assert "Traceback" not in said
    assert field in said.strip().splitlines()[-1]


def test_a_taken_port_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = run_engine(model=model, port=taken.getsockname()[1])
    assert status != 0
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].count("port") >= 1
