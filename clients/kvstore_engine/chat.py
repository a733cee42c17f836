"""Chat messages to tokens, and a model's text to content and tool calls.

Templates that know tools get them as they are. Others get the tools described in the system message, calls as
`<tool_call>{"name": ..., "arguments": ...}</tool_call>` (the form that most small models were trained on), and tool
results as messages of role `tool`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidField
from kvstore_engine.text import partial_stop

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)

Message = dict[str, Any]

TOOLS_TEXT = """You can call functions. Their signatures, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asked for. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
    """Tokens of a conversation, ready for the assistant's next turn. Raises InvalidField naming `messages`."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if not template:
        raise InvalidField("model", "has no chat template", "use a chat model")
    native = "tools" in template
    shown = [with_objects(m) for m in messages] if native else plain_messages(messages, tools)
    try:
        text = tokenizer.apply_chat_template(
            shown, tools=list(tools) or None if native else None, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may raise anything, mostly about the order of roles
        raise InvalidField("messages", f"the chat template refuses them: {error}"[:300], "check roles") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidField("messages", "hold half of a surrogate pair", "send whole Unicode characters") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def with_objects(message: Message) -> Message:
    """Arguments of tool calls as objects, which templates expect, instead of JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "content": message.get("content") or "",
        "tool_calls": [{**c, "function": call_json(c)} for c in calls],
    }


def call_json(call: Message) -> Message:
    """`{"name", "arguments"}` of a call in a message, arguments as an object where they are one."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    return {"name": function["name"], "arguments": arguments}


def plain_messages(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """For templates that know only role and content."""
    shown = [{"role": m["role"], "content": plain_content(m)} for m in messages]
    if tools:
        text = TOOLS_TEXT.format(tools="\n".join(json.dumps(t["function"]) for t in tools))
        if shown and shown[0]["role"] == "system":
            shown[0] = {"role": "system", "content": f"{shown[0]['content']}\n\n{text}"}
        else:
            shown.insert(0, {"role": "system", "content": text})
    return shown


def plain_content(message: Message) -> str:
    """Content and calls of a message as one text."""
    calls = [f"{OPEN}\n{json.dumps(call_json(c))}\n{CLOSE}" for c in message.get("tool_calls") or ()]
    return "\n".join(part for part in (message.get("content") or "", *calls) if part)


# ---- what the model said


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Content without its well-formed calls, and the calls. What is no proper call stays in the content."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        found = read_calls(match[1])
        calls.extend(found)
        return "" if found else match[0]

    content = _CALL.sub(take, text)
    return (content.strip() if calls else content), calls


def read_calls(body: str) -> list[ToolCall]:
    """Calls in the JSON between two tags: an object or a list of them; empty when it isn't that."""
    try:
        value = json.loads(body)
    except ValueError:
        return []
    items = value if isinstance(value, list) else [value]
    calls = []
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return []
        arguments = item.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ToolCall(f"call_{uuid.uuid4().hex[:24]}", item["name"], text))
    return calls


class ContentStream:
    """Splits streamed text: what is surely content goes out at once, what may be a tool call waits for the end."""

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that is content for sure and wasn't returned yet."""
        if not self._tools:
            return text
        self._held += text
        at = self._held.find(OPEN)
        cut = at if at >= 0 else len(self._held) - partial_stop(self._held, (OPEN,))
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest: content, and the calls in it."""
        rest, self._held = self._held, ""
        return parse_tool_calls(rest) if self._tools else (rest, [])
