"""Settings: which source wins, what is refused and how it is said, and that defaults have caps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore import sizes
from kvstore.config import ServiceConfig, TenantQuota, default_data_dir, load
from kvstore.errors import InvalidField

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(
        'port = 1\nmax_leases = 11\nio_threads = 3\ndram_bytes = "1GiB"\n[tenants.acme]\nnvme_bytes = "2GiB"\n'
    )
    return path


def refusal(path: Path | None = None, **flags: Any) -> str:
    with pytest.raises(InvalidField) as caught:
        load(path, flags)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text
    return text


def test_flags_over_environment_over_file_over_defaults(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_PORT", "2")
    monkeypatch.setenv("KVSTORE_MAX_LEASES", "12")
    config = load(toml, {"port": "3", "max_sessions": None})
    assert (config.port, config.max_leases, config.io_threads, config.max_sessions) == (3, 12, 3, 100_000)
    assert config.dram_bytes == GIB
    assert config.tenants == {"acme": TenantQuota(nvme_bytes=2 * GIB)}


def test_the_environment_may_name_the_file(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CONFIG", str(toml))
    assert load().io_threads == 3


def test_quotas_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TENANTS", '{"a": {"dram_bytes": "1MiB"}}')
    assert load().tenants == {"a": TenantQuota(dram_bytes=1 << 20)}


def test_made_directly_it_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_PORT", "2")
    assert ServiceConfig().port == 0


def test_it_can_not_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ServiceConfig().port = 3  # type: ignore[misc]


def test_defaults_are_capped_by_what_is_there() -> None:
    config = load()
    assert config.data_dir == default_data_dir()
    assert config.socket == config.data_dir / "kvstore.sock"
    assert config.segment_bytes <= config.dram_bytes <= max(sizes.memory_bytes() // 4, config.segment_bytes)
    free = sizes.disk_bytes(config.data_dir)
    assert config.segment_bytes <= config.nvme_bytes <= max(free // 4 + config.segment_bytes, config.segment_bytes)
    assert config.dram_bytes % config.segment_bytes == config.nvme_bytes % config.segment_bytes == 0


def test_what_we_hold_counts_as_free_so_that_a_restart_keeps_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    (tmp_path / "slab").write_bytes(bytes(8 << 20))
    held = os.stat(tmp_path / "slab").st_blocks * 512

    class After:
        f_frsize, f_bavail = stat.f_frsize, stat.f_bavail - held // stat.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: After)
    assert abs(sizes.disk_bytes(tmp_path) - free) <= stat.f_frsize


def test_every_setting_says_what_it_is() -> None:
    for model in (ServiceConfig, TenantQuota):
        assert [n for n, f in model.model_fields.items() if not f.description] == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"prot": 1}, ["prot", "unknown", "did you mean port?"]),
        ({"dram_byte": 1}, ["dram_byte:", "did you mean dram_bytes?"]),
        ({"qqq": 1}, ["qqq", "known are data_dir"]),
        ({"port": "x"}, ["port: 'x'", "TCP port"]),
        ({"port": 65536}, ["port: 65536", "65535"]),
        ({"dram_bytes": "5 apples"}, ["dram_bytes: '5 apples'", "8GiB"]),
        ({"dram_bytes": -1}, ["dram_bytes: -1"]),
        ({"segment_bytes": 5000}, ["segment_bytes: 5000", "4096"]),
        ({"dram_policy": "mru"}, ["dram_policy: 'mru'", "leaf-lru"]),
        ({"direct_io": "yes"}, ["direct_io: 'yes'", "'auto', 'on' or 'off'"]),
        ({"socket": "/" + "x" * 120}, ["socket:", "100 bytes"]),
        ({"write_behind_watermark": 1.5}, ["write_behind_watermark: 1.5"]),
        ({"lease_ttl_s": 0}, ["lease_ttl_s: 0"]),
        ({"tenants": {"a": {"dram": 1}}}, ["tenants.a.dram", "did you mean dram_bytes?"]),
        ({"tenants": {"a": {"dram_bytes": -1}}}, ["tenants.a.dram_bytes: -1", "DRAM this tenant"]),
        ({"tenants": 3}, ["tenants: 3"]),
    ],
)
def test_refusals_name_the_field_and_the_mend(flags: dict[str, Any], parts: list[str]) -> None:
    text = refusal(**flags)
    assert [p for p in parts if p not in text] == [], text


def test_unknown_keys_in_the_file_and_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.toml"
    path.write_text("metric_port = 1\n")
    assert "did you mean metrics_port?" in refusal(path)
    assert str(path) in refusal(path)
    monkeypatch.setenv("KVSTORE_DRAM_BITES", "1")
    assert "KVSTORE_DRAM_BITES: unknown setting in the environment; did you mean KVSTORE_DRAM_BYTES?" in refusal()


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_DEBUG", "KVSTORE_TEST_SHARED", "KVSTORE_GPU_CACHE", "KVSTORE_ENGINE_PORT"):
        monkeypatch.setenv(name, "1")
    load()


@pytest.mark.parametrize("content", [b"port = \n", b"port = 1\nport = 2\n", b"\xff\xfe", b"[a"])
def test_files_that_are_no_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert str(path) in refusal(path)


def test_a_missing_file_and_damaged_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refusal(tmp_path / "none.toml").lower()
    monkeypatch.setenv("KVSTORE_TENANTS", "{")
    assert "KVSTORE_TENANTS" in refusal()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1k", 1024),
        ("1KB", 1000),
        ("1.5 GiB", 3 << 29),
        (" 2tib ", 2 << 40),
        (7, 7),
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert sizes.parse_bytes(text) == value


@pytest.mark.parametrize("bad", ["", "GiB", "-1", "1e3", "5 apples", "1 GiBs", None, True, 1.5, []])
def test_what_is_no_size(bad: Any) -> None:
    with pytest.raises(ValueError, match="no size"):
        sizes.parse_bytes(bad)


@given(st.integers(0, 1 << 60))
def test_sizes_are_shown_as_they_are_read(value: int) -> None:
    assert sizes.parse_bytes(sizes.format_bytes(value)) == value
