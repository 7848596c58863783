"""Chat templates: conversations to texts, and where the targets are in them.

A template with `{% generation %}` marks says itself which parts are answers. For others see `turns`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from streampack.conversations import Chat, Message
from streampack.sources import Fault
from streampack.spans import Span
from streampack.turns import Borders, Render, UnclearTurns, find_turns, last_part, learn_borders, turns_by_prefix

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATE = re.compile(r"\bstrftime_now\b")
_FIXED_DATE = re.compile(r"\bmacro\s+strftime_now\b")
_T = TypeVar("_T")


@dataclass(slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: list[Span]
    """The targets, in characters."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        ValueError: for a tokenizer without one, or one that writes today's date.
    """

    def __init__(self, tokenizer: Any) -> None:
        templates = getattr(tokenizer, "chat_template", None)
        if not templates:
            raise ValueError(
                "the tokenizer has no chat template, which conversations need; set tokenizer.chat_template, or take "
                "the tokenizer of an instruction-tuned model"
            )
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            if _DATE.search(template) and not _FIXED_DATE.search(template):
                raise ValueError(
                    "the chat template writes today's date (strftime_now), so the stream would have other tokens "
                    "tomorrow; fix the date: tokenizer.chat_template = '{% macro strftime_now(format) %}26 Jul 2024"
                    "{% endmacro %}' + tokenizer.chat_template"
                )
        self.tokenizer = tokenizer
        self._eos = getattr(tokenizer, "eos_token", None) or ""
        # Whether the function inside of apply_chat_template gives the same texts, as it does unless the tokenizer is
        # special: of messages that are plain dicts, without what is done before for others. Found out on the first.
        self._renders_plainly: bool | None = None
        self._marks: dict[str, bool] = {}
        self._borders: dict[str, Borders | None] = {}

    def texts(self, chats: Sequence[Chat]) -> list[str | Fault]:
        """The texts of conversations."""
        return self._for_all(chats, self._render)

    def with_answers(self, chats: Sequence[Chat], *, only_last: bool) -> list[Rendered | Fault]:
        """The texts of conversations with the answers as targets.

        only_last: the completion instead, or the last message, if it is an answer.
        """
        kinds = {chat.tools is None: chat.tools for chat in chats}  # there may be a template for chats with tools
        if not only_last and any(self._has_marks(tools) for tools in kinds.values()):
            return self._for_all(chats, self._render_answers)
        texts = self.texts(chats)
        return [
            text if isinstance(text, Fault) else self._find(text, chat, only_last=only_last)
            for text, chat in zip(texts, chats, strict=True)
        ]

    def fingerprint(self) -> str:
        """Names the template, and the special tokens that it may write."""
        both = [self.tokenizer.chat_template, dict(self.tokenizer.special_tokens_map)]
        return hashlib.sha256(json.dumps(both, sort_keys=True, default=str).encode()).hexdigest()[:16]

    # ---- rendering -----------------------------------------------------------------------------------------------

    def _for_all(self, chats: Sequence[Chat], render: Callable[[list[Chat]], Sequence[_T | Fault]]) -> list[_T | Fault]:
        """What `render` makes of conversations, called once for all that have the same tools; where the template fails,
        once for each, to find out on which."""
        groups: dict[str, list[int]] = {}
        for place, chat in enumerate(chats):
            groups.setdefault(json.dumps(chat.tools, default=str) if chat.tools else "", []).append(place)
        found: dict[int, _T | Fault] = {}
        for places in groups.values():
            try:
                results = render([chats[place] for place in places])
            except Exception:  # a template may raise anything
                results = [_one(render, chats[place]) for place in places]
            found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(chats))]

    def _render(self, chats: list[Chat]) -> list[str]:
        if self._renders_plainly:
            return self._render_plainly(chats, marks=False)[0]
        texts: list[str] = self.tokenizer.apply_chat_template(
            [chat.messages for chat in chats], tools=chats[0].tools, tokenize=False
        )
        if self._renders_plainly is None:
            self._renders_plainly = texts == self._render_plainly(chats, marks=False)[0]
        return texts

    def _render_plainly(self, chats: list[Chat], *, marks: bool) -> tuple[list[str], list[list[Span]]]:
        """The texts, and the parts that are marked, by the function that apply_chat_template calls."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = chats[0].tools
        found: tuple[list[str], list[list[Span]]] = render_jinja_template(
            conversations=[chat.messages for chat in chats],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=marks,
            **self.tokenizer.special_tokens_map,
        )
        return found

    def _render_answers(self, chats: list[Chat]) -> list[Rendered | Fault]:
        """By the marks of the template that goes with these tools, if it has them."""
        tools = chats[0].tools
        if not self._has_marks(tools):
            return [
                self._find(text, chat, only_last=False) for text, chat in zip(self._render(chats), chats, strict=True)
            ]
        # The mask that apply_chat_template would make of the marks is not used: where a border is at a character that
        # no token holds, Transformers 4.57 takes all that follows for a target, or nothing.
        texts, marked = self._render_plainly(chats, marks=True)
        return [_by_marks(text, list(spans), chat) for text, spans, chat in zip(texts, marked, chats, strict=True)]

    def _has_marks(self, tools: list[Any] | None) -> bool:
        template = self.tokenizer.get_chat_template(tools=tools)
        if template not in self._marks:
            self._marks[template] = bool(_GENERATION.search(template))
        return self._marks[template]

    # ---- answers without marks -----------------------------------------------------------------------------------

    def _find(self, text: str, chat: Chat, *, only_last: bool) -> Rendered | Fault:
        messages = chat.messages
        before = len(messages) - 1 if chat.prompt is None else chat.prompt
        if only_last and chat.prompt is None and messages[-1]["role"] != "assistant":
            return Rendered(text, [])
        render, eos = self._renderer(chat.tools), self._eos
        try:
            borders = self._borders_for(chat.tools)
            spans = find_turns(text, messages, borders) if borders else None
            if only_last and (spans is None or before < len(messages) - 1):
                spans = last_part(text, messages, before, render, eos=eos)
            elif spans is None:
                spans = turns_by_prefix(text, messages, render, eos=eos)
        except UnclearTurns as unclear:
            return Fault("targets", str(unclear))
        except Exception as error:  # the template does not take the beginning of the conversation alone
            return _failure(error)
        return Rendered(text, spans[-1:] if only_last else spans)

    def _borders_for(self, tools: list[Any] | None) -> Borders | None:
        template = self.tokenizer.get_chat_template(tools=tools)
        if template not in self._borders:
            self._borders[template] = learn_borders(self._renderer(None, template), eos=self._eos)
        return self._borders[template]

    def _renderer(self, tools: list[Any] | None, template: str | None = None) -> Render:
        def render(messages: Sequence[Message], prompt: bool) -> str:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
            return text

        return render


def _one(render: Callable[[list[Chat]], Sequence[_T | Fault]], chat: Chat) -> _T | Fault:
    try:
        return render([chat])[0]
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Fault:
    return Fault("template", f"the chat template raised {type(error).__name__}: {error}")


def _by_marks(text: str, spans: list[Span], chat: Chat) -> Rendered | Fault:
    answers = sum(message["role"] == "assistant" for message in chat.messages)
    if answers and not spans:
        return Fault(
            "targets",
            f"the {{% generation %}} marks of the chat template enclose none of the {answers} answers; put them around "
            "all that it writes for an assistant, or pass targets='completion' (the last answer) or 'all'",
        )
    return Rendered(text, spans)
