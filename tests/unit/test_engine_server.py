"""The HTTP door: shapes, streams, tools, sessions, errors. A tiny model with a byte tokenizer; the official client."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from kvstore_engine.api import ChatRequest, parse
from kvstore_engine.chat import ContentStream, parse_tool_calls, plain_messages, render
from kvstore_engine.engine import Engine
from kvstore_engine.server import ChatServer, end_with_tools
from kvstore_engine.testing import ByteTokenizer, MemoryStore, tiny_config, tiny_model
from kvstore_engine.text import TextStream

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


class Running:
    """An engine behind a real socket."""

    def __init__(self) -> None:
        config = tiny_config(pool_bytes=256 * 4096, max_tokens_default=8)
        self.store = MemoryStore()
        self.engine = Engine(config, tiny_model(config, tokenizer=ByteTokenizer()), self.store)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(ChatServer(self.engine).app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self.engine.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_official_client_gets_an_answer(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="tiny", messages=user("hello"), max_tokens=6, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": user("stream me"), "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_the_next_turn_of_a_session_is_cached(client: openai.OpenAI, running: Running) -> None:
    history = user("a long enough beginning of a conversation")
    first = client.chat.completions.create(model="tiny", messages=history, max_tokens=4, user="agent-1")
    history += [{"role": "assistant", "content": first.choices[0].message.content or ""}, *user("and on")]
    second = client.chat.completions.create(
        model="tiny", messages=history, max_tokens=4, extra_headers={"x-session-id": "agent-1"}
    )
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 32
    running.engine.wait_quiet(10)
    assert [k for s, k, _ in running.store.signals if s == "agent-1"] == ["TURN_START", "TURN_END"] * 2
    assert httpx.post(f"{running.url}/v1/sessions/agent-1/fork", json={"session_id": "agent-2"}).status_code == 200
    for name in ("agent-1", "agent-2"):
        assert httpx.post(f"{running.url}/v1/sessions/{name}/end").json()["ended"] is True
    assert httpx.post(f"{running.url}/v1/sessions/agent-1/end").status_code == 404


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": user("x"),
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 0.9,
    }
    said = [client.chat.completions.create(**options, seed=seed).choices[0].message.content for seed in (3, 3)]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
        ({"colour": "red"}, 400, "colour"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1_000_000}, 400, "messages"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ],
)
def test_bad_fields_are_named(running: Running, change: dict[str, Any], status: int, param: str) -> None:
    body = {"model": "tiny", "messages": user("x"), "max_tokens": 2} | change
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert "Traceback" not in answer.text and "\n" not in error["message"]


def test_what_is_no_json_and_no_path(running: Running) -> None:
    assert httpx.post(f"{running.url}/v1/chat/completions", content=b"{").json()["error"]["param"] == "body"
    assert httpx.get(f"{running.url}/v2").status_code == 404
    assert httpx.get(f"{running.url}/v1/chat/completions").status_code == 405


def test_health_and_metrics(running: Running) -> None:
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{running.url}/metrics").text
    assert 'kvstore_engine_prompt_tokens_total{tier="hbm"}' in text
    assert "kvstore_engine_up 1.0" in text


def test_a_client_that_hangs_up_leaves_no_request(running: Running) -> None:
    body = {"model": "tiny", "messages": user("x"), "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_bytes())
    assert running.engine.wait_quiet(20)


# ---- tools and texts, without a server


def test_tool_calls_are_parsed() -> None:
    content, calls = parse_tool_calls('Look:\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>')
    assert content == "Look:"
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("bash", {"cmd": "ls"})]
    assert end_with_tools('<tool_call>{"name": "ls"}').tool == "ls"


@pytest.mark.parametrize("text", ["<tool_call>{bad}</tool_call>", "<tool_call>[1]</tool_call>", "no call"])
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


def test_streamed_content_never_shows_a_call() -> None:
    stream = ContentStream(tools=True)
    text = 'a < b <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    shown = "".join(stream.push(ch) for ch in text)
    assert shown == "a < b "
    rest, calls = stream.finish()
    assert (rest, [c.name for c in calls]) == ("", ["f"])


def test_templates_without_tools_get_them_as_text() -> None:
    history: list[Any] = [
        {"role": "system", "content": "be brief"},
        *user("list"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "1"},
    ]
    body = parse(ChatRequest, {"model": "tiny", "messages": history, "tools": [TOOL]})
    shown = plain_messages([m.as_template() for m in body.messages], body.template_tools())
    assert "bash" in shown[0]["content"] and shown[0]["content"].startswith("be brief")
    assert '"cmd": "ls"' in shown[2]["content"]
    assert shown[3] == {"role": "tool", "content": "a.txt"}
    assert render(ByteTokenizer(), [m.as_template() for m in body.messages], body.template_tools())


def test_stop_texts_are_found_across_tokens() -> None:
    stream = TextStream(ByteTokenizer(), ["END"])
    shown = "".join(stream.push(b) for b in b"some text EN")
    assert shown == "some text "
    assert stream.push(ord("D")) == ""
    assert stream.stopped
    assert stream.text == "some text "


def test_half_characters_wait() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(b) for b in "aé€".encode()] == ["a", "", "é", "", "", "€"]
