"""OpenAI-compatible HTTP in front of an engine.

    POST /v1/chat/completions          streaming or not; session id from `x-session-id` or `user`
    GET  /v1/models
    POST /v1/sessions/{id}/fork        {"session_id": "new"}
    POST /v1/sessions/{id}/end
    GET  /health  /metrics

What a session's agent does is derived: a request starts its turn (or ends its tool), a finish with tool calls starts
a tool, any other finish ends the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstore.errors import InvalidField, KVStoreError
from kvstore_engine.api import BadRequest, ChatRequest, ForkRequest, error_json, parse
from kvstore_engine.chat import ContentStream, ToolCall, parse_tool_calls, render
from kvstore_engine.engine import Engine
from kvstore_engine.metrics import make_registry
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.sequence import EndEvent, FinishReason, RequestEvent, TurnEnd, Usage

log = logging.getLogger(__name__)
BODY_BYTES_MAX = 32 << 20
SESSION_CHARS_MAX = 512
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Turn:
    """One accepted chat request, ready to be submitted."""

    body: ChatRequest
    tokens: list[int]
    sampling: SamplingParams
    session: str
    has_tools: bool
    id: str
    created: int


class ChatServer:
    """The HTTP application over one engine; `app` is ASGI."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry, self._ttft = make_registry(engine)
        self._created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", guarded(self.chat), methods=["POST"]),
                Route("/v1/models", guarded(self.models)),
                Route("/v1/models/{name:path}", guarded(self.model)),
                Route("/v1/sessions/{session:path}/fork", guarded(self.fork), methods=["POST"]),
                Route("/v1/sessions/{session:path}/end", guarded(self.end), methods=["POST"]),
                Route("/health", guarded(self.health)),
                Route("/metrics", guarded(self.metrics)),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    # ---- small ones

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_json())

    async def health(self, request: Request) -> Response:
        failure = self._engine.failure
        return JSONResponse({"status": failure or "ok"}, status_code=503 if failure else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def fork(self, request: Request) -> Response:
        body: ForkRequest = parse(ForkRequest, await read_json(request))
        parent = request.path_params["session"]
        await asyncio.to_thread(self._engine.fork_session, parent, body.session_id)
        return JSONResponse({"session_id": body.session_id, "parent_id": parent})

    async def end(self, request: Request) -> Response:
        session = request.path_params["session"]
        await asyncio.to_thread(self._engine.end_session, session)
        return JSONResponse({"session_id": session, "ended": True})

    def _model_json(self) -> dict[str, Any]:
        return {
            "id": self._engine.config.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvstore",
            "max_model_len": self._engine.context_tokens_max,
        }

    def _check_model(self, name: str) -> None:
        if name != self._engine.config.name:
            known = self._engine.config.name
            raise BadRequest(f"model: {name!r} is not served here; use {known!r}", 404, "model_not_found", "model")

    # ---- chat

    async def chat(self, request: Request) -> Response:
        body: ChatRequest = parse(ChatRequest, await read_json(request))
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidField("stream_options", "is set without stream", "set stream to true")
        turn = await asyncio.to_thread(self._prepare, body, session_of(request, body))
        events: asyncio.Queue[RequestEvent] = asyncio.Queue()
        request_id = self._submit(turn, events)
        if body.stream:
            return StreamingResponse(self._stream(turn, request_id, events), media_type="text/event-stream")
        return await self._whole(turn, request_id, events, request)

    def _prepare(self, body: ChatRequest, session: str) -> Turn:
        tools = body.template_tools()
        messages = [m.as_template() for m in body.messages]
        tokens = render(self._engine.model.tokenizer, messages, tools)
        room = max(1, self._engine.context_tokens_max - len(tokens))
        sampling = body.sampling(min(self._engine.config.max_tokens_default, room))
        return Turn(body, tokens, sampling, session, bool(tools), f"chatcmpl-{uuid.uuid4().hex}", int(time.time()))

    def _submit(self, turn: Turn, events: asyncio.Queue[RequestEvent]) -> str:
        loop = asyncio.get_running_loop()

        def on_event(event: RequestEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the server's loop is gone
                loop.call_soon_threadsafe(events.put_nowait, event)

        return self._engine.submit(
            turn.tokens,
            turn.sampling,
            on_event,
            session=turn.session,
            on_end=end_with_tools if turn.has_tools else end_plainly,
        )

    async def _whole(
        self, turn: Turn, request_id: str, events: asyncio.Queue[RequestEvent], request: Request
    ) -> Response:
        end = await self._await_end(request_id, events, request)
        check_end(end)
        self._observe(end.usage)
        content, calls = parse_tool_calls(end.text) if turn.has_tools else (end.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = [c.as_json() for c in calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(end, calls)}
        body = self._envelope(turn, "chat.completion") | {"choices": [choice], "usage": usage_json(end.usage)}
        return JSONResponse(body)

    async def _await_end(self, request_id: str, events: asyncio.Queue[RequestEvent], request: Request) -> EndEvent:
        """Wait for the end; a client that hangs up cancels its request."""
        watch = asyncio.ensure_future(hung_up(request))
        try:
            while True:
                get = asyncio.ensure_future(events.get())
                await asyncio.wait({get, watch}, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    if isinstance(event := get.result(), EndEvent):
                        return event
                    continue
                get.cancel()
                raise BadRequest("request: the client hung up", 499, "cancelled")
        finally:
            watch.cancel()
            self._engine.cancel(request_id)

    async def _stream(self, turn: Turn, request_id: str, events: asyncio.Queue[RequestEvent]) -> AsyncIterator[bytes]:
        content = ContentStream(turn.has_tools)
        try:
            yield self._chunk(turn, {"role": "assistant", "content": ""})
            while not isinstance(event := await events.get(), EndEvent):
                if text := content.push(event.text):
                    yield self._chunk(turn, {"content": text})
            for piece in self._stream_end(turn, event, content):
                yield piece
        finally:
            self._engine.cancel(request_id)

    def _stream_end(self, turn: Turn, end: EndEvent, content: ContentStream) -> list[bytes]:
        try:
            check_end(end)
        except KVStoreError as error:
            return [sse(error_json(error)[1]), DONE]
        self._observe(end.usage)
        text, calls = content.finish()
        out = [self._chunk(turn, {"content": text})] if text else []
        for index, call in enumerate(calls):
            out.append(self._chunk(turn, {"tool_calls": [{"index": index, **call.as_json()}]}))
        out.append(self._chunk(turn, {}, finish_reason(end, calls)))
        options = turn.body.stream_options
        if options is not None and options.include_usage:
            envelope = self._envelope(turn, "chat.completion.chunk")
            out.append(sse(envelope | {"choices": [], "usage": usage_json(end.usage)}))
        return [*out, DONE]

    def _chunk(self, turn: Turn, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return sse(self._envelope(turn, "chat.completion.chunk") | {"choices": [choice]})

    def _envelope(self, turn: Turn, kind: str) -> dict[str, Any]:
        return {"id": turn.id, "object": kind, "created": turn.created, "model": turn.body.model}

    def _observe(self, usage: Usage) -> None:
        if usage.first_token_ns:
            self._ttft.labels("yes" if usage.cached_tokens else "no").observe(usage.ttft_s)


DONE = b"data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with ours beside it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "kvstore": {
            "hbm_tokens": usage.hbm_tokens,
            "dram_tokens": usage.dram_tokens,
            "nvme_tokens": usage.nvme_tokens,
            "computed_tokens": usage.computed_tokens,
            "ttft_s": round(usage.ttft_s, 6),
        },
    }


def finish_reason(end: EndEvent, calls: list[ToolCall]) -> str:
    """OpenAI's word for how a turn ended."""
    return "tool_calls" if calls and end.reason == FinishReason.STOP else end.reason


def end_plainly(text: str) -> TurnEnd:
    """A turn without tools ends idle."""
    return TurnEnd()


def end_with_tools(text: str) -> TurnEnd:
    """A turn that asks for tools waits for the first of them."""
    _, calls = parse_tool_calls(text)
    return TurnEnd(tool=calls[0].name) if calls else TurnEnd()


def check_end(end: EndEvent) -> None:
    """Raises BadRequest unless the request ended by itself."""
    if end.reason == FinishReason.TIMEOUT:
        raise BadRequest("request: took longer than request_timeout_s; raise it or send less", 504, "timeout")
    if end.reason == FinishReason.CANCELLED:
        raise BadRequest("request: was cancelled", 503, "cancelled")
    if end.error:
        raise BadRequest(end.error, 503, "unavailable")


def session_of(request: Request, body: ChatRequest) -> str:
    """The session id: the header, else `user`, else none. Raises InvalidField: too long, or not printable."""
    header = request.headers.get("x-session-id", "").encode("latin-1").decode("utf-8", "replace")
    session = header or body.user or ""
    if not session.isprintable():
        raise InvalidField("x-session-id", "holds characters that can't be printed", "use letters, digits, signs")
    if len(session) > SESSION_CHARS_MAX:
        raise InvalidField("x-session-id", "is too long", f"use up to {SESSION_CHARS_MAX} characters")
    return session


async def hung_up(request: Request) -> None:
    """Return once the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json(request: Request) -> Any:
    """The body. Raises InvalidField, BadRequest."""
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > BODY_BYTES_MAX:
            raise BadRequest(f"body: is larger than {BODY_BYTES_MAX} bytes; send less", 413, "too_large")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InvalidField("body", f"is no JSON: {error}"[:200], "send a JSON object") from None


def guarded(handler: Handler) -> Handler:
    """Errors as OpenAI's JSON; what isn't ours is logged and told as "internal error"."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except KVStoreError as error:
            status, body = error_json(error)
        except Exception as error:
            log.exception("request failed")
            status, body = error_json(error)
        return JSONResponse(body, status_code=status)

    return run


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "unknown path", 405: "method not allowed here"}.get(status, "refused")
    message = f"path: {request.url.path} {what}; see /v1/models and /v1/chat/completions"
    status_body = error_json(BadRequest(message, status, "not_found" if status == 404 else "refused"))[1]
    return JSONResponse(status_body, status_code=status)
