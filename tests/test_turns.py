"""Where the answers are in the text that a chat template makes, without marks and with them."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.conversations import Chat, Message
from streampack.sources import Fault
from streampack.templates import ChatTemplate
from streampack.turns import find_turns, turns_by_prefix

from . import chat_templates as templates
from .chat_templates import chat_tokenizer


def talk(*contents: str, system: str | None = None) -> list[Message]:
    """User and assistant in turns."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def answers(template: str, messages: list[Message], *, tools: Any = None, only_last: bool = False) -> str:
    """The text with its targets in «», or what is wrong."""
    found = ChatTemplate(chat_tokenizer(template)).with_answers([Chat(messages, tools)], only_last=only_last)[0]
    if isinstance(found, Fault):
        return f"{found.reason}: {found.what}"
    text = found.text
    for start, end in reversed(found.spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    return text


# ---- templates of models --------------------------------------------------------------------------------------------


def test_chatml() -> None:
    assert answers(templates.CHATML, talk("hi", "ho", "2+2?", "4", system="Be.")) == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>\n»"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>\n»"
    )


def test_a_template_with_marks_says_itself_what_an_answer_is() -> None:
    marked = "{% for message in messages %}{{ message.role }}:{% if message.role == 'assistant' %}"
    marked += "{% generation %}{{ message.content }};{% endgeneration %}{% else %}{{ message.content }};{% endif %}"
    marked += "{% endfor %}"
    assert answers(marked, talk("hi", "ho", "x", "")) == "user:hi;assistant:«ho;»user:x;assistant:«;»"


def test_llama_3_has_bos_and_strips_contents() -> None:
    assert answers(templates.LLAMA_3, talk(" hi\n", " ho ", "x", "y")) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«ho<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«y<|eot_id|>»"
    )


def test_gemma_has_the_system_prompt_in_the_first_turn() -> None:
    assert answers(templates.GEMMA, talk("hi", "ho", "x", "y", system="Be.")) == (
        "<s><start_of_turn>user\nBe.\n\nhi<end_of_turn>\n<start_of_turn>model\n«ho<end_of_turn>\n»"
        "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n«y<end_of_turn>\n»"
    )


def test_mistral_has_no_generation_prompt() -> None:
    assert answers(templates.MISTRAL, talk("hi", "ho", "x", "y", system="Be.")) == (
        "<s>[INST] Be.\n\nhi [/INST]« ho</s>»[INST] x [/INST]« y</s>»"
    )


def test_vicuna_has_plain_text_between_turns() -> None:
    assert answers(templates.VICUNA, talk("hi", "ho", "x", "y", system="Be.")) == (
        "Be. USER: hi ASSISTANT:« ho</s>»USER: x ASSISTANT:« y</s>»"
    )


def test_phi_3_has_eos_at_the_very_end_only() -> None:
    assert answers(templates.PHI_3, talk("hi", "ho", "x", "y")) == (
        "<|user|>\nhi<|end|>\n<|assistant|>\n«ho<|end|>\n»<|user|>\nx<|end|>\n<|assistant|>\n«y<|end|>\n</s>»"
    )
    assert answers(templates.PHI_3, talk("hi", "ho", "x")) == (
        "<|user|>\nhi<|end|>\n<|assistant|>\n«ho<|end|>\n»<|user|>\nx<|end|>\n</s>"
    )


THINKING = talk("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd")


def test_qwen_3_strips_the_thinking_of_earlier_turns_and_adds_an_empty_one_to_the_last() -> None:
    assert answers(templates.QWEN_3, THINKING) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>\n»"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«<think>\nso\n</think>\n\nd<|im_end|>\n»"
    )
    assert answers(templates.QWEN_3, talk("a", "b", "c", "d")) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>\n»"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nd<|im_end|>\n»"
    )


def test_what_the_generation_prompt_begins_with_is_no_target_where_an_answer_begins_so() -> None:
    assert answers(templates.QWEN_3_THINKING, THINKING) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>\n»"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n«so\n</think>\n\nd<|im_end|>\n»"
    )


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}]}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


def test_tool_calls_are_answers_and_tool_results_are_not() -> None:
    messages = [*talk("2+2?"), CALL, tool("4"), tool("four"), {"role": "assistant", "content": "4!"}]
    assert answers(templates.QWEN_2_5, messages, tools=[{"name": "add"}]) == (
        '<|im_start|>system\nBe kind.\n# Tools\n{"name": "add"}<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n'
        '<|im_start|>assistant\n«<tool_call>add{"x": 2}</tool_call><|im_end|>\n»'
        "<|im_start|>user\n<tool_response>4</tool_response>\n<tool_response>four</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«4!<|im_end|>\n»"
    )


def test_the_default_system_prompt_is_no_target() -> None:
    assert answers(templates.QWEN_2_5, talk("hi", "ho")) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n«ho<|im_end|>\n»"
    )


def test_a_conversation_may_begin_with_an_answer_have_two_in_a_row_and_end_with_a_question() -> None:
    messages = [{"role": "assistant", "content": "hello"}, *talk("hi", "ho"), {"role": "assistant", "content": "he"}]
    assert answers(templates.CHATML, [*messages, *talk("x")]) == (
        "<|im_start|>assistant\n«hello<|im_end|>\n»<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«ho<|im_end|>\n»"
        "<|im_start|>assistant\n«he<|im_end|>\n»<|im_start|>user\nx<|im_end|>\n"
    )


def test_empty_turns_are_answers_of_an_end_of_turn() -> None:
    assert answers(templates.CHATML, talk("", "", "", "x")) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n«<|im_end|>\n»"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n«x<|im_end|>\n»"
    )


@pytest.mark.parametrize("template", ["CHATML", "CHATML_MARKED", "QWEN_2_5", "LLAMA_3"])
def test_a_content_may_look_like_turns_itself(template: str) -> None:
    asked = "x<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n<|im_start|>user\nz"
    found = answers(getattr(templates, template), talk(asked, "a", "y", f"b{asked}c", system=asked))
    inside = re.findall("«(.*?)»", found, flags=re.DOTALL)
    assert [one.replace("<|eot_id|>", "<|im_end|>\n") for one in inside] == ["a<|im_end|>\n", f"b{asked}c<|im_end|>\n"]


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_system_prompt_that_moves_to_the_last_turn_is_refused_for_earlier_answers() -> None:
    messages = talk("hi", "ho", "x", "y", system="Be.")
    assert answers(templates.MISTRAL_LAST, messages) == (
        "targets: the chat template writes the messages before messages[2] otherwise when that follows, 'Be.\\n\\nhi "
        "[/INST]' instead of 'hi [/INST] ho</s>[INST] Be.\\n\\nx' after '<s>[INST] '; put {% generation %} marks "
        "around the answers in the chat template, or pass targets='completion' (the last answer) or 'all'"
    )
    assert answers(templates.MISTRAL_LAST, messages, only_last=True) == (
        "<s>[INST] hi [/INST] ho</s>[INST] Be.\n\nx [/INST]« y</s>»"
    )
    assert answers(templates.MISTRAL_LAST, talk("hi", "ho", "x", "y")) == (
        "<s>[INST] hi [/INST]« ho</s>»[INST] x [/INST]« y</s>»"
    )


def test_an_end_of_turn_that_changes_when_others_follow_is_refused_for_earlier_answers() -> None:
    assert answers(templates.HARMONY, talk("hi", "ho")) == (
        "<|start|>user<|message|>hi<|end|><|start|>assistant«<|message|>ho<|return|>»"
    )
    assert answers(templates.HARMONY, talk("hi", "ho", "x", "y")).startswith(
        "targets: the chat template writes messages[1] otherwise when others follow, 'return|>' instead of "
        "'end|><|start|>user<|message|>x' after 'stant<|message|>ho<|', and its end is not to be found; put"
    )
    assert answers(templates.HARMONY, talk("hi", "ho", "x", "y"), only_last=True) == (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|message|>ho<|end|>"
        "<|start|>user<|message|>x<|end|><|start|>assistant«<|message|>y<|return|>»"
    )


@pytest.mark.parametrize("separator", ["{% if not loop.last or message.role == 'user' %}<|im_end|>{% endif %}", ""])
def test_a_template_that_does_not_end_answers_is_refused_since_a_model_would_not_learn_to_stop(separator: str) -> None:
    open_ended = "{% for message in messages %}{{ message.role + ': ' + message.content }}" + separator
    open_ended += "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    for messages in (talk("hi", "ho"), talk("hi", "ho", "x", "y")):
        assert "writes nothing after an answer, so that its end cannot be learned; end the turns of" in answers(
            open_ended, messages
        )


@pytest.mark.parametrize("answer", ["4\n", [{"type": "text", "text": "4"}], [{"type": "text", "text": "4 "}]], ids=str)
def test_white_space_at_the_end_of_an_answer_and_parts_are_no_end_of_a_turn(answer: Any) -> None:
    open_ended = "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is string else m.content[0].text }}"
    open_ended += "{% if not loop.last %};{% endif %}{% endfor %}{% if add_generation_prompt %};assistant: {% endif %}"
    asked = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]
    assert "writes nothing after an answer, so that its end cannot be learned" in answers(open_ended, asked)


def test_white_space_that_a_template_writes_after_an_answer_is_the_end_of_its_turn() -> None:
    lines = "{% for message in messages %}{{ message.role + ': ' + message.content.strip() + '\\n' }}{% endfor %}"
    lines += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert answers(lines, talk("2+2?", "4\n")) == "user: 2+2?\nassistant: «4\n»"


@pytest.mark.parametrize("answer", ["a\n", "", "a"])
def test_eos_in_the_place_of_the_end_of_a_turn_is_not_taken_for_something_after_it(answer: str) -> None:
    ends = "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    ends += "{% if loop.last and message.role == 'assistant' %}{{ eos_token }}{% else %}<end>{% endif %}{% endfor %}"
    ends += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert answers(ends, talk("q", answer, "r", "b")).startswith(
        "targets: the chat template writes messages[1] otherwise when others follow, "
    )
    assert answers(ends, talk("q", answer, "r", "b"), only_last=True).endswith("<user>r<end><assistant>«b</s>»")


def test_a_generation_prompt_that_depends_on_the_system_prompt_or_the_tools_is_no_target() -> None:
    quick = "{% set quick = tools or (messages[0].role == 'system' and '/quick' in messages[0].content) %}"
    quick += "{% for message in messages %}{{ '<' + message.role + '>' }}"
    quick += "{% if message.role == 'assistant' and quick %}<think></think>{% endif %}{{ message.content }}<end>"
    quick += "{% endfor %}{% if add_generation_prompt %}<assistant>{% if quick %}<think></think>{% endif %}{% endif %}"
    assert answers(quick, talk("q", "a")) == "<user>q<end><assistant>«a<end>»"
    assert answers(quick, talk("q", "a", "r", "b", system="/quick")) == (
        "<system>/quick<end><user>q<end><assistant><think></think>«a<end>»"
        "<user>r<end><assistant><think></think>«b<end>»"
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for only_last in (False, True):
        found = answers(quick, talk("q", "a"), tools=tools, only_last=only_last)
        assert found == "<user>q<end><assistant><think></think>«a<end>»"


def test_a_template_that_raises_is_a_fault_with_its_text() -> None:
    raised = "template: the chat template raised TemplateError: Conversation roles must alternate"
    assert answers(templates.GEMMA, talk("hi", "ho")[::-1]).startswith(raised)
    assert answers(templates.CHATML, [{"role": "user"}]).startswith("template: the chat template raised ")


def test_marks_that_hold_no_answer_are_refused() -> None:
    found = answers(templates.CHATML_MARKED.replace("== 'assistant'", "== 'model'"), talk("hi", "ho"))
    assert found.startswith(
        "targets: the {% generation %} marks of the chat template enclose none of the 1 answers; put them around all"
    )


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"has no chat template, which conversations need; set tokenizer\.chat_template"
    ):
        ChatTemplate(chat_tokenizer(None))


def test_a_template_that_writes_the_date_is_refused_until_the_date_is_fixed() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}\n" + templates.CHATML
    with pytest.raises(ValueError, match=r"today's date .* other tokens tomorrow; fix the date") as error:
        ChatTemplate(chat_tokenizer(dated))
    (fix,) = re.findall(r"tokenizer\.chat_template = '(.*)' \+", str(error.value))
    assert answers(fix + dated, talk("hi", "ho")).startswith("26 Jul 2024<|im_start|>user\nhi<|im_end|>\n")


# ---- the two ways, and marks ----------------------------------------------------------------------------------------

CONTENTS = st.one_of(
    st.text(st.sampled_from("ab \n"), max_size=5),
    st.lists(
        st.sampled_from(["<|im_end|>", "\n", "<|im_start|>", "user", "assistant", "a", " ", "<think>", "</think>"]),
        max_size=6,
    ).map("".join),
)


@st.composite
def conversations(draw: Any, *, alternating: bool) -> list[Message]:
    if alternating:
        count = draw(st.integers(1, 4))
        return talk(
            *draw(st.lists(CONTENTS, min_size=2 * count, max_size=2 * count)), system=draw(st.none() | CONTENTS)
        )
    roles = draw(st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=7))
    return [{"role": role, "content": draw(CONTENTS)} for role in roles]


@pytest.mark.parametrize("alternating", [True, False])
@given(st.data())
@settings(deadline=None)
def test_without_marks_the_answers_are_those_of_the_same_template_with_marks(alternating: bool, data: Any) -> None:
    messages = data.draw(conversations(alternating=alternating))
    assert answers(templates.CHATML, messages) == answers(templates.CHATML_MARKED, messages)


FOUND_BY_BORDERS = ["CHATML", "QWEN_2_5", "QWEN_3", "QWEN_3_THINKING", "LLAMA_3", "GEMMA", "MISTRAL", "PHI_3", "VICUNA"]


@pytest.mark.parametrize("name", FOUND_BY_BORDERS)
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_the_borders_and_the_prefixes_find_the_same(name: str, data: Any) -> None:
    messages = data.draw(conversations(alternating=True))
    template = ChatTemplate(chat_tokenizer(getattr(templates, name)))
    text, render, borders = (
        template.texts([Chat(messages)])[0],
        template._renderer(None),
        template._borders_for(None),
    )
    assert borders is not None
    assert isinstance(text, str)
    found = find_turns(text, messages, borders)
    if found is not None:
        assert found == turns_by_prefix(text, messages, render, eos="</s>")


@pytest.mark.parametrize("name", FOUND_BY_BORDERS)
def test_usual_conversations_are_found_by_borders_with_one_rendering_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(getattr(templates, name))
    template = ChatTemplate(tokenizer)
    chats = [Chat(talk("hi", "ho", "x\n", "y", system="Be.")), Chat(talk("a", "b")), Chat(talk(" c", "", "", "d"))]
    first = template.with_answers(chats, only_last=False)
    calls: list[int] = []
    render = tokenizer.apply_chat_template

    def counted(conversation: Any, **arguments: Any) -> Any:
        calls.append(len(conversation))
        return render(conversation, **arguments)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    monkeypatch.setattr(template, "_renders_plainly", False)
    assert template.with_answers(chats, only_last=False) == first
    assert calls == [3]


def test_the_texts_and_marks_are_those_of_apply_chat_template() -> None:
    tokenizer = chat_tokenizer(templates.CHATML_MARKED)
    chats = [Chat(talk("hi", "é🙂", "x", "y", system="Be.")), Chat(talk("a", "b"))]
    for chat, found in zip(chats, ChatTemplate(tokenizer).with_answers(chats, only_last=False), strict=True):
        assert not isinstance(found, Fault)
        assert found.text == tokenizer.apply_chat_template(chat.messages, tokenize=False)
        expected = tokenizer.apply_chat_template(chat.messages, return_dict=True, return_assistant_tokens_mask=True)
        encoding = tokenizer(found.text, add_special_tokens=False).encodings[0]
        inside = [any(start < last and first < end for start, end in found.spans) for first, last in encoding.offsets]
        assert [int(one) for one in inside] == expected["assistant_masks"]


def test_conversations_with_other_tools_are_rendered_apart() -> None:
    tokenizer = chat_tokenizer(templates.QWEN_2_5)
    chats = [Chat(talk("a", "b"), tools) for tools in ([{"name": "x"}], None, [{"name": "y"}], [{"name": "x"}])]
    texts = ChatTemplate(tokenizer).texts(chats)
    assert texts == [tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False) for chat in chats]
    assert len({*texts}) == 3


def test_a_tokenizer_with_several_templates_uses_that_for_tools_where_there_are_tools() -> None:
    tokenizer = chat_tokenizer(None)
    tokenizer.chat_template = {"default": templates.CHATML, "tool_use": templates.CHATML_MARKED + "tools"}
    found = ChatTemplate(tokenizer).with_answers(
        [Chat(talk("a", "b")), Chat(talk("a", "b"), [{"name": "x"}])], only_last=False
    )
    plain = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert [(one.text, one.spans) for one in found if not isinstance(one, Fault)] == [
        (plain, [(51, 63)]),
        (plain + "tools", [(51, 63)]),
    ]
