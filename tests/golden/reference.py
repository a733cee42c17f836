"""Keyspace ids and block hashes once more, written from the documented formats alone; makes the golden files.

Shares no code with `kvstore`. The vectors are never regenerated to make a test pass: another value means that all that
earlier releases stored is lost. `python tests/golden/reference.py` adds new cases to the files.
"""

import hashlib
import json
import struct
from pathlib import Path

import xxhash

FOLDER = Path(__file__).resolve().parent
FIELDS = (
    "model weights_digest tokenizer_digest kv_dtype num_layers num_kv_heads head_dim rope block_tokens layout "
    "layout_version weights_epoch latent_dim tp_size tp_rank pp_size pp_rank adapter_digest tenant"
).split()
DEFAULTS = {
    "block_tokens": 32,
    "layout": "block-first",
    "layout_version": 1,
    "weights_epoch": 0,
    "latent_dim": 0,
    "tp_size": 1,
    "tp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "adapter_digest": "",
    "tenant": "default",
}
SMALL = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "weights_digest": "00112233445566778899aabbccddeeff" * 2,
    "tokenizer_digest": "ffeeddccbbaa99887766554433221100",
    "kv_dtype": "bfloat16",
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "rope": '{"rope_theta":100000.0,"rope_type":"default"}',
}
LATENT = SMALL | {
    "model": "latent",
    "layout": "block-first-mla",
    "latent_dim": 576,
    "num_kv_heads": 1,
    "num_layers": 61,
    "block_tokens": 64,
    "kv_dtype": "float8_e4m3fn",
}
KEYSPACES = {
    "defaults": SMALL,
    "latent": LATENT,
    "one token a block": SMALL | {"block_tokens": 1, "kv_dtype": "float32"},
    "last rank": SMALL | {"tp_size": 8, "tp_rank": 7, "pp_size": 2, "pp_rank": 1, "weights_epoch": 1 << 62},
    "adapter and tenant": SMALL | {"adapter_digest": "ab" * 32, "tenant": "Zürich-東京"},
}
TOKENS = {
    "none": [],
    "less than a block": [5] * 31,
    "zeros": [0] * 32,
    "largest ids": [0xFFFFFFFF, 0xFFFFFFFE] * 16,
    "counting": list(range(200)),
    "squares": [i * i % 49152 for i in range(1024)],
}
EXTRA_KEYS = {
    "none": [],
    "two images": [(3, "image-a"), (64, "image-b")],
    "two at one place": [(40, "b"), (40, "a")],
    "empty value": [(0, "")],
}


def encode_keyspace(fields: dict) -> bytes:
    out = b"kvstore-keyspace\x01"
    for tag, name in enumerate(FIELDS):
        value = (DEFAULTS | fields)[name]
        if isinstance(value, str):
            raw = value.encode("utf-8")
            out += struct.pack("<BcI", tag, b"s", len(raw)) + raw
        else:
            out += struct.pack("<BcIq", tag, b"i", 8, value)
    return out


def hash_blocks(fields: dict, tokens: list, extra_keys: list) -> list:
    """`[hash, digest]` in hex for each full block."""
    keyspace_id = hashlib.blake2b(encode_keyspace(fields), digest_size=32).digest()
    (seed,) = struct.unpack_from("<Q", keyspace_id, 16)
    parent, size, out = keyspace_id[:16], (DEFAULTS | fields)["block_tokens"], []
    for start in range(0, len(tokens) - size + 1, size):
        body = struct.pack(f"<{size}I", *tokens[start : start + size])
        for position, text in sorted((p, t.encode("utf-8")) for p, t in extra_keys):
            if start <= position < start + size:
                body += struct.pack("<II", position - start, len(text)) + text
        parent = xxhash.xxh3_128_intdigest(parent + body, seed=seed).to_bytes(16, "big")
        out.append([parent.hex(), hashlib.blake2b(body, digest_size=32).hexdigest()])
    return out


def make() -> dict:
    """Content of every golden file, by name. Long chains keep their first, second and last block."""
    spaces = [
        {"name": name, "fields": fields, "encoding": raw.hex(), "id": hashlib.blake2b(raw, digest_size=32).hexdigest()}
        for name, fields in KEYSPACES.items()
        for raw in [encode_keyspace(fields)]
    ]
    chains = [
        {"keyspace": k, "tokens": t, "extra_keys": e, "num_blocks": len(blocks), "blocks": blocks[:2] + blocks[2:][-1:]}
        for k, fields in KEYSPACES.items()
        for t, tokens in TOKENS.items()
        for e, extra in EXTRA_KEYS.items()
        for blocks in [hash_blocks(fields, tokens, extra)]
    ]
    return {
        "keyspaces.json": spaces,
        "block_hashes.json": {"tokens": TOKENS, "extra_keys": EXTRA_KEYS, "chains": chains},
    }


if __name__ == "__main__":
    for name, content in make().items():
        rows = json.dumps(content, ensure_ascii=True, separators=(",", ":")).replace("},{", "},\n{")
        (FOLDER / name).write_text(rows + "\n", encoding="ascii")
