"""Keyspaces: one encoding a field set, the golden ids, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keyspace import ITEM_BYTES, Keyspace
from kvstore.core.types import SLOT_ALIGN
from kvstore.errors import InvalidField

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden/keyspaces.json").read_text())
BASE = Keyspace(
    model="m",
    weights_digest="0" * 32,
    tokenizer_digest="1" * 32,
    kv_dtype="bfloat16",
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    rope="{}",
    tp_size=64,
    pp_size=64,
)
OPTIONAL = [f.name for f in fields(Keyspace) if f.default is not MISSING]
KINDS = {f.name: f.type for f in fields(Keyspace)}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(lambda t: t != "auto")
digests = st.text("0123456789abcdef", min_size=32, max_size=64)
small = st.integers(1, 64)


@st.composite
def keyspaces(draw: st.DrawFn) -> Keyspace:
    """Any valid keyspace."""
    latent = draw(st.sampled_from([0, 576]))
    tp, pp = draw(small), draw(small)
    return Keyspace(
        model=draw(texts),
        weights_digest=draw(digests),
        tokenizer_digest=draw(digests),
        kv_dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        num_layers=draw(small),
        num_kv_heads=draw(small),
        head_dim=draw(small),
        rope=draw(texts),
        block_tokens=draw(small),
        layout="block-first-mla" if latent else "block-first",
        weights_epoch=draw(st.integers(0, 1 << 62)),
        latent_dim=latent,
        tp_size=tp,
        tp_rank=draw(st.integers(0, tp - 1)),
        pp_size=pp,
        pp_rank=draw(st.integers(0, pp - 1)),
        adapter_digest=draw(st.just("") | digests),
        tenant=draw(texts),
    )


def with_field(name: str, value: int | str) -> Keyspace | None:
    """`BASE` with one field set, or None where that value can't be."""
    layout = {"layout": "block-first-mla"} if name == "latent_dim" and value else {}
    try:
        return replace(BASE, **layout, **{name: value})
    except InvalidField:
        return None


@given(keyspaces())
def test_encoding_is_read_back(keyspace: Keyspace) -> None:
    assert Keyspace.decode(keyspace.encode()) == keyspace


@given(keyspaces(), keyspaces())
def test_equal_encodings_mean_equal_fields(a: Keyspace, b: Keyspace) -> None:
    assert (a.encode() == b.encode()) == (a == b)
    assert (a.id == b.id) == (a == b)


@given(keyspaces(), st.sampled_from([f.name for f in fields(Keyspace)]), keyspaces())
def test_changing_any_one_field_changes_the_id(a: Keyspace, name: str, other: Keyspace) -> None:
    value = getattr(other, name)
    try:
        b = replace(a, **{name: value})
    except InvalidField:
        return
    assert (a.id == b.id) == (getattr(a, name) == value)


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(OPTIONAL, 2)))
@given(number=st.integers(0, 4096), text=st.sampled_from(["block-first", "block-first-mla"]) | digests)
def test_a_value_in_one_optional_field_or_in_another(one: str, two: str, number: int, text: str) -> None:
    a = with_field(one, number if KINDS[one] == "int" else text)
    b = with_field(two, number if KINDS[two] == "int" else text)
    if a is not None and b is not None and a != b:
        assert a.encode() != b.encode()
        assert a.id != b.id


@given(keyspaces(), st.data())
def test_text_can_not_slip_from_one_field_into_the_next(keyspace: Keyspace, data: st.DataObject) -> None:
    names = data.draw(st.permutations(["model", "rope", "tenant"]))
    whole = data.draw(texts.filter(lambda t: len(t) > 2))
    first, second = data.draw(st.integers(1, len(whole) - 1)), data.draw(st.integers(1, len(whole) - 1))
    ends = {whole[:first], whole[first:], whole[:second], whole[second:]}
    if first == second or "auto" in ends:
        return
    a = replace(keyspace, **{names[0]: whole[:first], names[1]: whole[first:]})
    b = replace(keyspace, **{names[0]: whole[:second], names[1]: whole[second:]})
    assert a.encode() != b.encode()


def read_as(raw: bytes) -> bytes | None:
    """The encoding of what `raw` was read as; None when it was refused."""
    try:
        return Keyspace.decode(raw).encode()
    except InvalidField:
        return None


def test_a_torn_encoding_is_refused_wherever_it_was_torn() -> None:
    whole = BASE.encode()
    assert [n for n in range(len(whole)) if read_as(whole[:n]) is not None] == []


@pytest.mark.parametrize("flip", [1, 2, 0x20, 0x80, 0xFF])
def test_a_flipped_byte_is_refused_or_another_keyspace(flip: int) -> None:
    whole = BASE.encode()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
        assert read_as(damaged) in (None, damaged), at


@given(keyspaces())
def test_sizes_follow_from_the_shape(keyspace: Keyspace) -> None:
    width = keyspace.latent_dim or 2 * keyspace.num_kv_heads * keyspace.head_dim
    assert keyspace.slice_bytes == keyspace.block_tokens * width * ITEM_BYTES[keyspace.kv_dtype]
    assert keyspace.block_bytes == keyspace.num_layers * keyspace.slice_bytes
    assert 0 <= keyspace.slot_bytes - keyspace.block_bytes < SLOT_ALIGN
    assert keyspace.slot_bytes % SLOT_ALIGN == 0


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
def test_golden_ids(case: dict[str, Any]) -> None:
    keyspace = Keyspace(**case["fields"])
    assert keyspace.encode().hex() == case["encoding"]
    assert keyspace.id.hex() == case["id"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_dtype", "auto"),
        ("kv_dtype", "fp8"),
        ("model", ""),
        ("model", "auto"),
        ("rope", "auto"),
        ("tenant", ""),
        ("tenant", "x" * 4097),
        ("weights_digest", ""),
        ("weights_digest", "ABCDEF" * 8),
        ("tokenizer_digest", "12"),
        ("adapter_digest", "lora-1"),
        ("layout", "layer-first"),
        ("layout_version", 2),
        ("layout_version", 0),
        ("latent_dim", 576),
        ("block_tokens", 0),
        ("block_tokens", True),
        ("block_tokens", "32"),
        ("block_tokens", 32.0),
        ("num_layers", -1),
        ("head_dim", 4097),
        ("weights_epoch", 1 << 63),
        ("tp_rank", 64),
        ("pp_size", 0),
    ],
)
def test_unknown_and_unresolved_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        replace(BASE, **{name: value})
    assert caught.value.field in (name, "pp_rank")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"", b"kvstore-keyspace\x02", BASE.encode()[:-1], BASE.encode() + b"\0", BASE.encode() * 2]
)
def test_other_versions_and_torn_encodings_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidField, match="keyspace"):
        Keyspace.decode(raw)
