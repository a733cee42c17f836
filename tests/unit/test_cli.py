"""The command line: what starts what, and what a person sees when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc
import pytest
import typer
from pydantic import BaseModel, Field

from kvstore import cli, errors, flags
from kvstore.config import ServiceConfig
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1.kvstore_pb2_grpc import (
    KVIndexServicer,
    SessionsServicer,
    add_KVIndexServicer_to_server,
    add_SessionsServicer_to_server,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.strip()


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `kvstore ARGS` in this process."""
    for name in [n for n in os.environ if n.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)

    def call(*args: str) -> Outcome:
        status = cli.guarded(lambda: cli.app(list(args), prog_name="kvstore"))
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module in the place of a part."""

    def put(name: str, **content: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))

    return put


def fails_with(error: BaseException) -> Callable[..., int]:
    def part(*_: Any, **__: Any) -> int:
        raise error

    return part


# ---- serve -----------------------------------------------------------------------------------------------------------


def test_serve_hands_over_one_configuration(run: Run, stand_in: Callable[..., None], tmp_path: Path) -> None:
    seen: list[ServiceConfig] = []
    stand_in("kvstore_server.main", run=lambda config: seen.append(config) or 5)
    (tmp_path / "c.toml").write_text('port = 7\nmax_leases = 9\ndram_bytes = "64MiB"\n')
    file, data = str(tmp_path / "c.toml"), str(tmp_path / "d")
    done = run(
        "serve", "--config", file, "--port", "8", "--nvme-bytes", "1GiB", "--data-dir", data, "--tenants", '{"a": {}}'
    )
    assert (done.status, done.err) == (5, "")
    config = seen[0]
    assert (config.port, config.max_leases, config.dram_bytes, config.nvme_bytes) == (8, 9, 64 << 20, 1 << 30)
    assert config.data_dir == tmp_path / "d"
    assert list(config.tenants) == ["a"]


def test_serve_offers_every_setting(run: Run) -> None:
    done = run("serve", "--help")
    assert done.status == 0
    assert [n for n in ServiceConfig.model_fields if f"--{n.replace('_', '-')}" not in done.out] == []


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--port", "x"], ["port: 'x'"]),
        (["--dram-bytes", "lots"], ["dram_bytes: 'lots'", "8GiB"]),
        (["--tenants", "{"], ["tenants: no JSON"]),
        (["--config", "/nowhere.toml"], ["config: can't read /nowhere.toml"]),
    ],
)
def test_wrong_settings_are_one_line(run: Run, args: list[str], parts: list[str]) -> None:
    done = run("serve", *args)
    assert done.status == 2
    assert [p for p in parts if p not in done.line] == [], done.err


def test_an_unknown_flag_names_the_close_one(run: Run) -> None:
    done = run("serve", "--prot", "3")
    assert done.status == 2
    assert "No such option: --prot" in done.err
    assert "--port" in done.err


# ---- what a person sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        errors.SetupError("port 80 is taken; give another --port"),
        errors.InvalidField("port", "is taken", "give another"),
        errors.TransferError("two\nlines", [1]),
    ],
)
def test_errors_for_people_are_one_line(
    run: Run, stand_in: Callable[..., None], error: Exception, tmp_path: Path
) -> None:
    stand_in("kvstore_server.main", run=fails_with(error))
    done = run("serve", "--data-dir", str(tmp_path))
    assert done.status == cli.EXIT_USER
    assert done.line == "kvstore: " + str(error).replace("\n", " ")


def test_errors_of_other_parts_count_when_their_module_says_so(run: Run, stand_in: Callable[..., None]) -> None:
    class Refused(Exception):
        __module__ = "kvstore_bench.traces.errors"

    stand_in("kvstore_bench.demo", run=fails_with(Refused("trace.jsonl:3: no such field")))
    done = run("demo")
    assert (done.status, done.line) == (cli.EXIT_USER, "kvstore: trace.jsonl:3: no such field")


def test_system_errors_name_the_file(run: Run, stand_in: Callable[..., None]) -> None:
    stand_in("kvstore_bench.demo", run=fails_with(PermissionError(13, "Permission denied", "/root/x")))
    done = run("demo")
    assert (done.status, done.line) == (cli.EXIT_USER, "kvstore: /root/x: permission denied")


def test_a_bug_says_so_in_one_line(run: Run, stand_in: Callable[..., None]) -> None:
    stand_in("kvstore_bench.demo", run=fails_with(ZeroDivisionError("division by zero")))
    done = run("demo")
    assert done.status == cli.EXIT_BUG
    assert "ZeroDivisionError: division by zero; this is a bug" in done.line


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debug_shows_the_traceback(
    run: Run, stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    stand_in("kvstore_bench.demo", run=fails_with(ZeroDivisionError("x")))
    monkeypatch.setenv("KVSTORE_DEBUG", "1" if how == "environment" else "0")
    done = run(*(["--debug"] if how == "flag" else []), "demo")
    assert done.status == cli.EXIT_BUG
    assert "Traceback" in done.err


def test_an_interrupt_is_quiet(run: Run, stand_in: Callable[..., None]) -> None:
    stand_in("kvstore_bench.demo", run=fails_with(KeyboardInterrupt()))
    done = run("demo")
    assert (done.status, done.err) == (cli.EXIT_INTERRUPTED, "")


@pytest.mark.parametrize(
    ("name", "extra"), [("kvstore_bench.demo", "kvstore[bench]"), ("kvstore_engine.x", "kvstore[engine]")]
)
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", fails_with(ModuleNotFoundError("no torch", name="torch")))
    with pytest.raises(errors.SetupError, match="torch isn't installed") as caught:
        cli.part(name)
    assert f"pip install '{extra}'" in str(caught.value)


def test_a_missing_module_of_ours_is_our_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli.importlib, "import_module", fails_with(ModuleNotFoundError("gone", name="kvstore_bench.demo"))
    )
    assert run("demo").status == cli.EXIT_BUG


# ---- commands made from functions and models -------------------------------------------------------------------------


def test_a_function_becomes_a_command(run: Run, stand_in: Callable[..., None]) -> None:
    seen = {}

    def measure(
        json_file: Path | None = None, rounds: int = 5, size: Annotated[str, typer.Option(help="x")] = "1MiB"
    ) -> int:
        """Measure something."""
        seen.update(json_file=json_file, rounds=rounds, size=size)
        return 1

    stand_in("kvstore_bench.measure_io", run=measure)
    done = run("bench", "io", "--rounds", "3", "--json-file", "x.json")
    assert done.status == 1
    assert seen == {"json_file": Path("x.json"), "rounds": 3, "size": "1MiB"}


def test_bench_lists_measurements_beside_the_commands_for_traces(run: Run, stand_in: Callable[..., None]) -> None:
    traces = flags.new_app()
    seen: list[int] = []
    traces.command("hitrate")(lambda capacity: seen.append(int(capacity)))
    stand_in("kvstore_bench.cli", app=traces)
    done = run("bench", "--help")
    assert [n for n in ("hitrate", *cli.MEASUREMENTS) if n not in done.out] == []


def test_engine_flags_come_from_its_configuration(run: Run, stand_in: Callable[..., None], tmp_path: Path) -> None:
    class EngineConfig(BaseModel):
        pool_bytes: int = Field(default=1 << 20, description="pool")
        device: Literal["cpu", "cuda"] = "cpu"

    seen: list[EngineConfig] = []
    stand_in(
        "kvstore_engine.config", EngineConfig=EngineConfig, engine_config=lambda **v: EngineConfig.model_validate(v)
    )
    stand_in("kvstore_engine.main", serve=seen.append)
    (tmp_path / "e.toml").write_text('device = "cuda"\n')
    assert run("engine", "--config", str(tmp_path / "e.toml"), "--pool-bytes", "2GiB").status == 0
    assert (seen[0].pool_bytes, seen[0].device) == (2 << 30, "cuda")


# ---- a running service -----------------------------------------------------------------------------------------------


class Index(KVIndexServicer):
    def Explain(self, request: pb.ExplainRequest, context: grpc.ServicerContext) -> pb.ExplainReply:
        return pb.ExplainReply(num_blocks=3, num_requested=8, reason="block 3: evicted", session="idle for 4 s")


class Sessions(SessionsServicer):
    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        info = pb.SessionInfo(session_id="a-1", activity="tool_wait", tool="bash", num_blocks=7, seconds_in_state=90)
        return pb.ListReply(sessions=[info] if request.activity in ("", "tool_wait") else [])

    def End(self, request: pb.EndRequest, context: grpc.ServicerContext) -> pb.EndReply:
        if request.session_id != "a-1":
            context.abort(grpc.StatusCode.NOT_FOUND, "session b: not open here")
        return pb.EndReply(num_blocks=7)

    def Export(self, request: pb.ExportRequest, context: grpc.ServicerContext) -> pb.NamedContext:
        return pb.NamedContext(name=request.name, hashes=bytes(32), keyspace_id=b"k" * 32)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.NamedContext:
        return pb.NamedContext(name=request.name, hashes=bytes(48))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """Address of a service that knows one session."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_KVIndexServicer_to_server(Index(), server)
    add_SessionsServicer_to_server(Sessions(), server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["sessions", "list"], ["a-1", "tool_wait", "1.5 min", "bash", "7"]),
        (["sessions", "list", "--activity", "idle"], ["no sessions"]),
        (["sessions", "end", "a-1"], ["ended a-1: 7 blocks"]),
        (["sessions", "export", "a-1", "base"], ["base: 2 blocks"]),
        (["sessions", "resume", "base", "a-2"], ["a-2 stands at base: 3 blocks"]),
        (["explain", "a-1"], ["3 of 8 blocks resident", "block 3: evicted", "idle for 4 s"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_questions_to_a_service(run: Run, service: str, args: list[str], parts: list[str]) -> None:
    done = run(*args, "--address", service)
    assert (done.status, done.err) == (0, "")
    assert [p for p in parts if p not in done.out] == [], done.out


def test_what_the_service_refuses_is_one_line(run: Run, service: str) -> None:
    done = run("sessions", "end", "b", "--address", service)
    assert done.status == cli.EXIT_USER
    assert "session b: not open here" in done.line


def test_a_service_that_is_away_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run("sessions", "list", "--address", f"unix:{tmp_path}/none")
    assert done.status == cli.EXIT_USER
    assert "unavailable" in done.line


def test_an_unknown_state_names_the_known_ones(run: Run) -> None:
    assert "tool_wait" in run("sessions", "list", "--activity", "asleep").line


# ---- as a process ----------------------------------------------------------------------------------------------------


def test_as_a_module_and_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("kvstore")


def test_control_c_in_a_real_process() -> None:
    code = (
        "import signal, sys, types, time, kvstore.cli as cli\n"
        # a shell's background job inherits SIGINT ignored: the child listens whoever started the tests
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def run():\n    print('up', flush=True)\n    time.sleep(60)\n"
        "for name in ('kvstore_bench', 'kvstore_bench.demo'): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['kvstore_bench.demo'].run = run\n"
        "sys.argv = ['kvstore', 'demo']\ncli.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "")


def test_doctor_answers_on_any_machine(run: Run, tmp_path: Path) -> None:
    done = run("doctor", "--data-dir", str(tmp_path / "new"))
    assert done.status == 0
    assert [w for w in ("memory", "arena", "nvme", "direct i/o") if w not in done.out] == []
    assert not (tmp_path / "new").exists()


def test_fsck_refuses_what_is_no_data_directory(run: Run, tmp_path: Path) -> None:
    done = run("fsck", "--data-dir", str(tmp_path))
    assert done.status == cli.EXIT_USER
    assert str(tmp_path) in done.line


def test_quota_example_in_the_error_is_json(run: Run) -> None:
    text = run("serve", "--tenants", "{").line
    assert json.loads(text.partition("such as '")[2].rstrip("'"))
