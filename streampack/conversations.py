"""Conversations: the columns that fine-tuning data come in, as messages or as a prompt and its completion.

    messages           messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    sharegpt           conversations = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    prompt_completion  prompt = "2+2? ", completion = "4"; or both lists of messages

A column `tools` (a list of schemas, or their JSON) goes to the chat template, as do all keys of a message (tool_calls,
name, reasoning_content ...). A key that is null is as if it were not there, at any depth: that is how Arrow fills the
keys that only other examples have.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from streampack.sources import Fault
from streampack.tables import Block
from streampack.token_ids import show

Format = Literal["text", "prompt_completion", "messages", "sharegpt"]
Message: TypeAlias = dict[str, Any]

COLUMNS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The columns that an example of a format must have."""
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("tools", "system"),
    "prompt_completion": ("tools",),
    "text": (),
}
"""Further columns that are looked at where they are there."""
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "system": "system",
}
"""The names of ShareGPT data and their roles. The value of a `function_call` is the JSON of a tool call."""


@dataclass(slots=True)
class Chat:
    """A conversation."""

    messages: list[Message]
    tools: list[Any] | None = None
    prompt: int | None = None
    """How many of the messages come before the completion; None: all but the last."""


@dataclass(slots=True)
class Prompted:
    """A text of two parts."""

    prompt: str
    completion: str


def hint_of(format: Format, names: Sequence[str]) -> str:
    """What to do where the columns of a format are missing: pass another format, if its columns are there."""
    others = [other for other, columns in COLUMNS.items() if other != format and {*columns} <= {*names}]
    if others:
        return f"pass format={others[0]!r}" + (", or text_column='...'" if format == "text" else "")
    if "input_ids" in names:
        return "the examples have token ids: leave the tokenizer out"
    if format == "text":
        return "pass text_column='...'"
    return f"format={format!r} needs {' and '.join(map(repr, COLUMNS[format]))}; rename yours with transform="


def read(format: Format, block: Block, picks: Sequence[int]) -> list[Chat | Prompted | Fault]:
    """The picked examples of a block, or what is wrong with them."""
    read_one = _READERS[format]
    columns = [block.take(name, picks, hint=lambda names: hint_of(format, names)) for name in COLUMNS[format]] + [
        _optional(block, picks, name) for name in OPTIONAL[format]
    ]
    found: list[Chat | Prompted | Fault] = []
    for values in zip(*columns, strict=True):
        try:
            fault = next((value for value in values if isinstance(value, Fault)), None)
            found.append(fault or read_one(*values))
        except _Bad as bad:
            found.append(bad.fault)
    return found


def _optional(block: Block, picks: Sequence[int], name: str) -> list[Any]:
    if isinstance(block.data, pa.Table):
        return block.take(name, picks) if name in block.data.column_names else [None] * len(picks)
    examples: list[Any] = [block.data[pick] for pick in picks]
    return [example.get(name) if isinstance(example, Mapping) else None for example in examples]


class _Bad(Exception):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


# ---- the formats ---------------------------------------------------------------------------------------------------


def _messages(messages: Any, tools: Any) -> Chat:
    return Chat(_read_messages(messages, "messages"), _read_tools(tools))


def _prompt_completion(prompt: Any, completion: Any, tools: Any) -> Chat | Prompted:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Prompted(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        other = "completion" if isinstance(prompt, str) else "prompt"
        value = completion if isinstance(prompt, str) else prompt
        raise _Bad(Fault("null" if value is None else "type", f"{other!r} is {show(value)}, and the other is text"))
    before, after = _read_messages(prompt, "prompt"), _read_messages(completion, "completion")
    return Chat([*before, *after], _read_tools(tools), len(before))


def _sharegpt(turns: Any, tools: Any, system: Any) -> Chat:
    messages = [_from_turn(turn, f"conversations[{at}]") for at, turn in enumerate(_list(turns, "conversations"))]
    if system is not None and not isinstance(system, str):
        raise _Bad(Fault("type", f"'system' is {show(system)}, not text"))
    if system and messages and messages[0]["role"] == "system":
        raise _Bad(Fault("type", "both 'system' and conversations[0] are a system prompt; keep one"))
    return Chat([{"role": "system", "content": system}, *messages] if system else messages, _read_tools(tools))


def _from_turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _Bad(Fault("type", f"{place} is {show(turn)}, not a dict with 'from' and 'value'"))
    name, value = turn.get("from"), turn.get("value")
    if name is None and "role" in turn:
        raise _Bad(
            Fault("missing", f"{place} has no 'from', but a 'role'; pass format='messages', with a column of that name")
        )
    if not isinstance(name, str) or name not in ROLES:
        raise _Bad(
            Fault("null" if name is None else "type", f"{place} is from {name!r}, which is none of {', '.join(ROLES)}")
        )
    if not isinstance(value, str):
        raise _Bad(Fault("null" if value is None else "type", f"the value of {place} is {show(value)}, not text"))
    if name != "function_call":
        return {"role": ROLES[name], "content": value}
    call = _from_json(value, f"the value of {place}")
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise _Bad(Fault("type", f"the value of {place} is {show(call)}, not a call with a 'name'"))
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


_READERS: dict[Format, Callable[..., Chat | Prompted]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
}


# ---- their parts ---------------------------------------------------------------------------------------------------


def _list(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise _Bad(Fault("null" if value is None else "type", f"{name!r} is {show(value)}, not a list of messages"))


def _read_messages(value: Any, name: str) -> list[Message]:
    return [
        message if _is_plain(message) else _read_message(message, f"{name}[{at}]")
        for at, message in enumerate(_list(value, name))
    ]


def _is_plain(message: Any) -> bool:
    """Whether it is nothing but a role and a text, as most are: there is nothing to check or to leave out."""
    is_pair = type(message) is dict and len(message) == 2
    return is_pair and type(message.get("role")) is str and type(message.get("content")) is str


def _read_message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise _Bad(Fault("type", f"{place} is {show(message)}, not a message: a dict with 'role' and 'content'"))
    found = {
        key: value if isinstance(value, str) else _without_nulls(value)
        for key, value in message.items()
        if value is not None
    }
    role, content = found.get("role"), found.get("content")
    if role is None and "from" in found:
        raise _Bad(
            Fault(
                "missing", f"{place} has no 'role', but a 'from'; pass format='sharegpt', with a column conversations"
            )
        )
    if not isinstance(role, str):
        raise _Bad(Fault("null" if role is None else "type", f"the role of {place} is {show(role)}, not text"))
    if content is None and (role != "assistant" or len(found) < 2):
        raise _Bad(Fault("null", f"{place}, of {role}, has no content"))
    if content is not None and not isinstance(content, str | list):
        raise _Bad(Fault("type", f"the content of {place} is {show(content)}, not text or a list of parts"))
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(one) for one in value]
    return value


def _read_tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _from_json(value, "'tools'") if value.strip() else None
    if value is None or (isinstance(value, list | tuple) and not value):
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise _Bad(Fault("type", f"'tools' is {show(value)}, not a list of schemas"))
    return [_without_nulls(tool) for tool in value]


def _from_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Bad(Fault("malformed", f"{name} is {show(text)}, not JSON ({error})")) from None
