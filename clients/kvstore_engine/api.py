"""What `/v1/chat/completions` accepts, and its errors: OpenAI's shapes.

Fields that we don't serve are refused unless they ask for nothing, so that nobody believes they had an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvstore.errors import (
    CapacityError,
    InvalidField,
    KVStoreError,
    LimitExceeded,
    RequestError,
    UnknownSession,
)
from kvstore_engine.sampling import SamplingParams

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "function_call": ("none",),
    "functions": ([],),
}
"""Fields of the API that we don't serve, and the values that ask for nothing."""
IGNORED = (
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "verbosity",
)


class BadRequest(KVStoreError):
    """An error with an HTTP status and OpenAI's code."""

    def __init__(self, message: str, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class FunctionCall(Strict):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str = "{}"


class CallInMessage(Strict):
    """A call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Strict):
    """A piece of content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message of the history."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallInMessage] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    def as_template(self) -> dict[str, Any]:
        """For chat templates: one text, known roles."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(p.text for p in parts) if parts is not None else self.content
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text or ""}
        if self.tool_calls:
            message["tool_calls"] = [c.model_dump() for c in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class FunctionSpec(BaseModel):
    """A function the model may call; further keys (strict, ...) are passed to the template."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    """A tool in the request."""

    type: Literal["function"]
    function: FunctionSpec


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(Strict):
    """Body of `/v1/chat/completions`."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        kept = dict(body)
        for name in IGNORED:
            kept.pop(name, None)
        for name, neutral in NEUTRAL.items():
            if name in kept and (kept[name] is None or kept[name] in neutral):
                del kept[name]
        return kept

    @field_validator("stream", mode="before")
    @classmethod
    def _null_is_no(cls, value: Any) -> Any:
        return False if value is None else value

    def template_tools(self) -> list[dict[str, Any]]:
        """Tools for the template; none when the request forbids calls."""
        if self.tool_choice == "none":
            return []
        return [t.model_dump(exclude_none=True) for t in self.tools or ()]

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises InvalidField. `max_tokens` counts when the request names none. OpenAI's default temperature is 1."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens or max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(stop),
        )


class ForkRequest(Strict):
    """Body of `/v1/sessions/{id}/fork`."""

    session_id: Annotated[str, Field(min_length=1, max_length=512)]


def parse(kind: type[BaseModel], body: Any) -> Any:
    """Validate a body. Raises InvalidField naming the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"] if not str(part).startswith("list[")) or "body"
        if first["type"] == "extra_forbidden":
            raise InvalidField(name, "is not served here", "leave it out") from None
        raise InvalidField(name, first["msg"][:200], "see the API reference") from None


def error_json(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and OpenAI's error object. Anything that isn't ours is a 500 without details."""
    status, code, param = status_of(error)
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    message = str(error) if isinstance(error, KVStoreError) else "internal error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: BaseException) -> tuple[int, str | None, str | None]:
    """HTTP status, code, and the field it is about."""
    if isinstance(error, BadRequest):
        return error.status, error.code, error.param
    if isinstance(error, InvalidField):
        too_long = error.field == "messages" and "exceed the context" in str(error)
        return 400, "context_length_exceeded" if too_long else "invalid_value", error.field
    if isinstance(error, UnknownSession):
        return 404, "session_not_found", "session_id"
    if isinstance(error, RequestError):
        return 400, "invalid_request", None
    if isinstance(error, LimitExceeded):
        return 429, "queue_full", None
    if isinstance(error, CapacityError):
        return 503, "no_room", None
    return (503, "unavailable", None) if isinstance(error, KVStoreError) else (500, None, None)
