"""Turns: where the answers are in the text that a chat template made of a conversation, for templates without marks.

An answer is what the template writes for an assistant's turn after the generation prompt, to the end of the turn, its
token and what belongs to it (the newline after `<|im_end|>`) included.

By prefix: the text of the messages before the answer, with the generation prompt, must be the beginning of the whole
text; there the answer begins. The text of the messages up to the answer must be its beginning as well; there it ends.
Where a template writes a turn otherwise once others follow it (Qwen3 strips its thinking), or where its generation
prompt begins an answer in a way that not all have (`<think>`), placeholders in the place of the answer show what the
template writes around any. What holds for nothing of this is refused: a template may do anything with a conversation.

By borders: rendering all the prefixes of a long conversation is slow. Where user and assistant take turns, the text is
searched for each user's turn as the template writes one: end of the turn before, opening, content, closing. Found in
one way only, with the content of an answer after each (a system prompt or tools may change the generation prompt) and
one end of turn in it, they are the same places; else it is done by prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streampack.conversations import Message
from streampack.spans import Span

Render = Callable[[Sequence[Message], bool], str]
"""The text of messages, with the generation prompt (True) or without."""

_MARK = "streampackplaceholder"
_REMEDY = (
    "put {% generation %} marks around the answers in the chat template, or pass targets='completion' (the last "
    "answer) or 'all'"
)


class UnclearTurns(ValueError):
    """Nothing says where the answers are in the text of a conversation."""


# ---- by borders ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Borders:
    """What a template writes around the contents of turns.

    <|im_start|>user\\n 2+2? <|im_end|>\\n<|im_start|>assistant\\n 4 <|im_end|>\\n<|im_start|>user\\n 3+3? ...
                            |----------- closing ------------|   |- ending -||---- opening ----|
    """

    opening: str
    """Before a user's content that follows an answer."""
    closing: str
    """After a user's content, to where the answer begins."""
    thinking: str
    """What the generation prompt has after that, which not all answers begin with: `<think>`."""
    leads: tuple[str, str]
    """What an answer and the last one begin with before their content: nothing, a space, an empty thinking."""
    ending: str
    """After an answer: the end of its turn."""
    last_ending: str
    """After the last one: the same, perhaps with EOS."""


def learn_borders(render: Render, *, eos: str) -> Borders | None:
    """The borders that a template writes; None: they are not the same everywhere, or not to be found."""
    texts = [f"streampackturn{number}" for number in range(4)]
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]
    try:
        asked, text = render(turns[:1], True), render(turns, False)
        (first, end), (second, _) = spans = turns_by_prefix(text, turns, render, eos=eos)
    except Exception:  # a template may raise anything
        return None
    if not all(text.count(one) == 1 for one in texts):
        return None
    ends = [text.index(one) + len(one) for one in texts]
    prompt = asked.partition(texts[0])[2]
    closings = sorted((text[ends[0] : first], text[ends[2] : second]), key=len)
    borders = Borders(
        opening=text[end : text.index(texts[2])],
        closing=closings[0],
        thinking=prompt.removeprefix(closings[0]),
        leads=(text[first : text.index(texts[1])], text[second : text.index(texts[3])]),
        ending=text[ends[1] : end],
        last_ending=text[ends[3] :],
    )
    is_clear = borders.closing.strip() and borders.ending.strip() and borders.last_ending.startswith(borders.ending)
    return borders if is_clear and find_turns(text, turns, borders) == spans else None


def find_turns(text: str, messages: Sequence[Message], borders: Borders) -> list[Span] | None:
    """The answers by borders; None: not found, or in more than one way, or the turns are not of this simple kind."""
    if messages[0]["role"] == "system":
        messages = messages[1:]
    users, answers = messages[::2], messages[1::2]
    if len(users) != len(answers) or not users or not text.endswith(borders.last_ending):
        return None
    contents: list[str] = []
    for user, answer in zip(users, answers, strict=True):
        content = user.get("content")
        if user["role"] != "user" or answer["role"] != "assistant" or not isinstance(content, str):
            return None
        contents.append(content)
    found = _search(text, contents, borders)
    if found is None and any(content != content.strip() for content in contents):
        found = _search(text, [content.strip() for content in contents], borders)  # many templates strip contents
    if found is not None:
        for span, answer in zip(found, answers, strict=True):
            if not _begins_with_content(text, span, answer, borders.leads):
                return None
    return found


def _begins_with_content(text: str, span: Span, answer: Message, leads: tuple[str, str]) -> bool:
    content, (start, end) = _content(answer), span
    if content is not None:
        for lead in leads:
            place = start + len(lead)
            if text.startswith(lead, start, end) and (
                text.startswith(content, place, end) or text.startswith(content.strip(), place, end)
            ):
                return True
    return False


def _search(text: str, contents: Sequence[str], borders: Borders) -> list[Span] | None:
    """The answers between the turns of users, if these are found at the same places from the left and from the right,
    and one ending in each answer."""
    ending, closing, thinking = borders.ending, borders.closing, borders.thinking
    turns = [contents[0] + closing]
    turns += [f"{ending}{borders.opening}{content}{closing}" for content in contents[1:]]
    if text.count(closing) != len(turns):
        return None
    places, start = [], 0
    for turn in turns:
        place = text.find(turn, start)
        if place < 0:
            return None
        places.append(place)
        start = place + len(turn)
    spans, limit, end = [], len(text) - len(borders.last_ending), len(text)
    while turns:
        turn, place = turns.pop(), places.pop()
        start = place + len(turn)
        if thinking and text.startswith(thinking, start):
            start += len(thinking)
        if text.rfind(turn, 0, limit) != place or text.count(ending, start, end) != 1:
            return None
        spans.append((start, end))
        limit, end = place, place + len(ending)
    spans.reverse()
    return spans


# ---- by prefix -----------------------------------------------------------------------------------------------------


def turns_by_prefix(text: str, messages: Sequence[Message], render: Render, *, eos: str) -> list[Span]:
    """The answers by prefix.

    eos: the EOS token, which some templates write after the last message, whatever that is; "" if there is none.

    Raises:
        UnclearTurns: saying which one is not to be found, and the remedy.
    """
    spans: list[Span] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start(text, messages, at, render, eos)
        end = len(text) if at + 1 == len(messages) else _end(text, messages, at, render, eos)
        if not (spans[-1][1] if spans else 0) <= start <= end:
            raise UnclearTurns(f"the chat template writes messages[{at}] elsewhere than in its turn; {_REMEDY}")
        _check_ending(text, messages, at, end, render)
        spans.append((start, end))
    return spans


def last_part(text: str, messages: Sequence[Message], before: int, render: Render, *, eos: str) -> list[Span]:
    """What comes after the first `before` messages, by prefix.

    Raises:
        UnclearTurns: where that is not to be found, with the remedy.
    """
    start = 0
    if before or messages[0]["role"] == "assistant":
        start = _start(text, messages, before, render, eos)
    if messages[-1]["role"] == "assistant":
        _check_ending(text, messages, len(messages) - 1, len(text), render)
    return [(start, len(text))]


def _start(text: str, messages: Sequence[Message], at: int, render: Render, eos: str) -> int:
    if at == 0:
        return _start_of_first(text, messages, render)
    asked = render(messages[:at], True)
    if text.startswith(asked):
        return len(asked)
    before = _beginning(text, render(messages[:at], False), eos)
    if before is not None:
        others = [_with_placeholder(messages, at, len(messages), f"{first}{_MARK}", render) for first in "XY"]
        start = min(_common(asked, others[0]), _common(asked, others[1]), _common(*others))
        if before < start and text.startswith(asked[:start]):
            return start
    raise UnclearTurns(
        f"the chat template writes the messages before messages[{at}] otherwise when that follows, "
        f"{_difference(asked, text)}; {_REMEDY}"
    )


def _start_of_first(text: str, messages: Sequence[Message], render: Render) -> int:
    """Of an answer that nothing comes before: what does not depend on it ends with a generation prompt."""
    user = [{"role": "user", "content": _MARK}]
    without, asked = render(user, False), render(user, True)
    prompt = asked.removeprefix(without)
    other = _with_placeholder(messages, 0, len(messages), _MARK, render)
    place = text[: _common(text, other)].rfind(prompt)
    if not asked.startswith(without) or not prompt or place < 0:
        raise UnclearTurns(
            f"the conversation begins with an answer, which this chat template has no prompt for; {_REMEDY}"
        )
    return place + len(prompt)


def _end(text: str, messages: Sequence[Message], at: int, render: Render, eos: str) -> int:
    so_far = render(messages[: at + 1], False)
    end = _beginning(text, so_far, eos)
    # EOS at the end of a text may come after the end of the turn, or in its place.
    if end == len(so_far) or (end is not None and _after(messages, at, at + 1, render).removesuffix(eos)):
        return end
    following = next((place for place in range(at + 1, len(messages)) if _is_answer(messages[place])), len(messages))
    whole = len(text) if following == len(messages) else _beginning(text, render(messages[:following], False), eos)
    alone, followed = (_after(messages, at, stop, render) for stop in (at + 1, following))
    if eos and not (whole is not None and text.endswith(followed, 0, whole)):
        followed = followed.removesuffix(eos)
    if eos and not followed.startswith(alone):
        alone = alone.removesuffix(eos)
    if whole is None or not alone or not followed.startswith(alone) or not text.endswith(followed, 0, whole):
        raise UnclearTurns(
            f"the chat template writes messages[{at}] otherwise when others follow, {_difference(so_far, text)}, and "
            f"its end is not to be found; {_REMEDY}"
        )
    return whole - len(followed) + len(alone)


def _after(messages: Sequence[Message], at: int, stop: int, render: Render) -> str:
    """What the template writes after an answer in the place of messages[at], of the messages before `stop`."""
    return _with_placeholder(messages, at, stop, _MARK, render).rpartition(_MARK)[2]


def _with_placeholder(messages: Sequence[Message], at: int, stop: int, content: str, render: Render) -> str:
    """The text of the messages before `stop`, with another answer than messages[at] in its place."""
    try:
        return render(
            [*messages[:at], {"role": "assistant", "content": content}, *messages[at + 1 : stop]],
            False,
        )
    except Exception as error:  # a template may raise anything, such as that no tool was called
        raise UnclearTurns(f"the place of messages[{at}] is not to be found ({error}); {_REMEDY}") from error


def _beginning(text: str, part: str, eos: str) -> int | None:
    """The length of a part, perhaps without EOS at its end, if the text begins with it."""
    if not text.startswith(part) and eos:
        part = part.removesuffix(eos)
    return len(part) if text.startswith(part) else None


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _content(message: Message) -> str | None:
    """The text of a message, of several parts that of the last one; None: it has no text."""
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    return content if isinstance(content, str) else None


def _check_ending(text: str, messages: Sequence[Message], at: int, end: int, render: Render) -> None:
    """Refuse answers after which the template writes nothing: a model would not learn to stop."""
    content = _content(messages[at]) or ""
    is_bare = bool(content.strip()) and text.endswith(content.strip(), 0, end)
    # White space at the end may be the answer's own, or the template's end of a turn.
    if content != content.rstrip() and text.endswith(content, 0, end):
        is_bare = not _after(messages, at, at + 1, render)
    if is_bare:
        raise UnclearTurns(
            "the chat template writes nothing after an answer, so that its end cannot be learned; end the turns of "
            f"assistants in the template, or {_REMEDY}"
        )


def _difference(one: str, other: str) -> str:
    """Where two texts part, for a message."""
    at = _common(one, other)
    return f"{one[at : at + 30]!r} instead of {other[at : at + 30]!r} after {one[max(0, at - 20) : at]!r}"


def _common(one: str, other: str) -> int:
    """The length of the beginning that both have."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    return next(at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
