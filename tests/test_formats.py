"""Formats of fine-tuning data: prompts with completions, messages, ShareGPT, to ids, labels and positions."""

import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from streampack import Mixture, PackedDataset, PackedLoader, StateError
from streampack.conversations import ROLES

from . import chat_templates as templates
from .chat_templates import chat_tokenizer
from .test_encode import block_of, encoder_of
from .tiny_tokenizers import byte_tokenizer, word_tokenizer

TEMPLATE = """\
<s> {% for message in messages %}{{ message.role }} {{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}{% endfor %} </s> {% endfor %}
{%- if add_generation_prompt %}assistant {% endif %}"""
WORDS = "user assistant system tool p q r s"
MARKED = TEMPLATE.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}")
USER, ASSISTANT, SYSTEM, TOOL, P, Q, R, S = range(3, 11)
BOS, EOS = 1, 2


def chat_words(template: str | None = TEMPLATE, **settings: Any) -> PreTrainedTokenizerFast:
    """Each word is a token, and the tokenizer adds BOS by itself to what it is not told to leave alone."""
    tokenizer = word_tokenizer(WORDS, adds="<s> $A", **settings)
    tokenizer.chat_template = template
    return tokenizer


def encode(rows: Any, tokenizer: Any = None, **settings: Any) -> list[Any]:
    """Of each example (ids, targets as 0 and 1), ids if all are targets, or the reason why it is left out."""
    policies = {
        name: settings.pop(name)
        for name in [*settings]
        if name in ("bad", "overlong", "truncate_keep", "no_target", "empty")
    }
    own = {name: settings.pop(name) for name in ("format", "targets") if name in settings}
    encoder = encoder_of(tokenizer or chat_words(), limit=settings.pop("limit", 100), own=own, **settings, **policies)
    found: list[Any] = []
    for one in encoder.encode(block_of(rows), range(len(rows))):
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, np.ndarray):  # all of its tokens are targets
            found.append(one.tolist())
        elif hasattr(one, "reason"):
            found.append((one.reason, one.what))
        else:
            ids = one.ids.tolist()
            found.append(ids if one.targets is None else (ids, one.targets.astype(int).tolist()))
    return found


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CHAT = [user("p q"), assistant("r")]
CHAT_IDS = [BOS, USER, P, Q, EOS, ASSISTANT, R, EOS]
CHAT_TARGETS = [0, 0, 0, 0, 0, 0, 1, 1]


# ---- each format ----------------------------------------------------------------------------------------------------


def test_messages_have_the_templates_bos_once_and_its_eos_once_and_the_answer_is_the_target() -> None:
    for append_eos in ("auto", True, False):
        assert encode([{"messages": CHAT}], format="messages", append_eos=append_eos) == [(CHAT_IDS, CHAT_TARGETS)]


def test_several_turns_with_a_system_prompt() -> None:
    messages = [{"role": "system", "content": "s"}, *CHAT, user("q"), assistant("r s")]
    assert encode([{"messages": messages}], format="messages") == [
        (
            [BOS, SYSTEM, S, EOS, USER, P, Q, EOS, ASSISTANT, R, EOS, USER, Q, EOS, ASSISTANT, R, S, EOS],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1],
        )
    ]


def test_targets_choose_all_tokens_the_last_answer_or_all_answers() -> None:
    rows = [{"messages": [*CHAT, user("q"), assistant("s")]}]
    ids = [*CHAT_IDS, USER, Q, EOS, ASSISTANT, S, EOS]
    assert encode(rows, format="messages", targets="all") == [ids]
    assert encode(rows, format="messages", targets="completion") == [(ids, [0] * 12 + [1, 1])]
    assert encode(rows, format="messages", targets="assistant") == [(ids, [*CHAT_TARGETS, 0, 0, 0, 0, 1, 1])]
    assert encode(rows, format="messages") == encode(rows, format="messages", targets="assistant")


def test_sharegpt_is_messages_by_other_names() -> None:
    turns = [("system", "s"), ("human", "p q"), ("gpt", "r"), ("user", "p"), ("assistant", "q")]
    rows = [{"conversations": [{"from": name, "value": value} for name, value in turns]}]
    messages = [{"role": "system", "content": "s"}, *CHAT, user("p"), assistant("q")]
    found = encode(rows, format="sharegpt")
    assert found == encode([{"messages": messages}], format="messages")
    assert found == encode([{"system": "s", "conversations": rows[0]["conversations"][1:]}], format="sharegpt")
    assert found == encode([{"system": "", "tools": "[]", **rows[0]}], format="sharegpt")


def test_sharegpt_has_calls_of_functions_and_what_they_return() -> None:
    turns = [
        ("human", "p"),
        ("function_call", '{"name": "q", "arguments": {"s": 1}}'),
        ("observation", "r"),
        ("gpt", "s"),
    ]
    rows = [{"conversations": [{"from": name, "value": value} for name, value in turns]}]
    assert encode(rows, format="sharegpt") == [
        (
            [BOS, USER, P, EOS, ASSISTANT, Q, EOS, TOOL, R, EOS, ASSISTANT, S, EOS],
            [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1],
        )
    ]
    assert {*ROLES.values()} == {"system", "user", "assistant", "tool"}


def test_prompt_and_completion_are_one_text_with_bos_and_eos_as_a_text_has_them() -> None:
    rows = [{"prompt": "p q ", "completion": "r s"}]
    found = encode(rows, format="prompt_completion")
    assert found == [([BOS, P, Q, R, S, EOS], [0, 0, 0, 1, 1, 1])]
    assert [found[0][0]] == encode([{"text": "p q r s"}]) == encode(rows, format="prompt_completion", targets="all")
    assert encode(rows, format="prompt_completion", append_eos=False) == [([BOS, P, Q, R, S], [0, 0, 0, 1, 1])]


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_the_eos_of_a_completion_is_one_target_whoever_adds_it(adds: str) -> None:
    tokenizer = word_tokenizer(WORDS, adds=adds)
    bos = [BOS] * adds.startswith("<s>")
    rows = [
        {"prompt": "p q", "completion": " r"},
        {"prompt": "p q", "completion": " r </s>"},
        {"prompt": "<s> p q", "completion": " r"},
    ]
    plain = ([*bos, P, Q, R, EOS], [0] * (len(bos) + 2) + [1, 1])
    found = encode(rows, tokenizer, format="prompt_completion")
    assert found[0] == plain
    assert found[2] == ([BOS, P, Q, R, EOS], [0, 0, 0, 1, 1])
    if "</s>" not in adds:
        assert found[1] == plain


def test_an_empty_prompt_or_completion_is_fine_and_both_are_empty() -> None:
    rows = [{"prompt": "", "completion": "p"}, {"prompt": "p", "completion": ""}, {"prompt": "", "completion": ""}]
    assert encode(rows, format="prompt_completion") == [([BOS, P, EOS], [0, 1, 1]), ([BOS, P, EOS], [0, 0, 1]), "empty"]
    assert encode(rows, format="prompt_completion", append_eos=False)[1] == "no_target"
    assert encode([{"messages": []}], format="messages") == ["empty"]


def test_prompt_and_completion_may_be_messages() -> None:
    rows = [
        {"prompt": [user("p q")], "completion": [assistant("r")]},
        {"prompt": [user("p q"), assistant("r"), user("p")], "completion": [assistant("s")]},
        {"prompt": [user("p")], "completion": [assistant("q"), user("r"), assistant("s")]},
        {"prompt": [], "completion": CHAT},
    ]
    two = [BOS, USER, P, Q, EOS, ASSISTANT, R, EOS, USER, P, EOS, ASSISTANT, S, EOS]
    three = [BOS, USER, P, EOS, ASSISTANT, Q, EOS, USER, R, EOS, ASSISTANT, S, EOS]
    assert encode(rows, format="prompt_completion") == [
        (CHAT_IDS, CHAT_TARGETS),
        (two, [0] * 12 + [1, 1]),
        (three, [0] * 5 + [1] * 8),
        (CHAT_IDS, [1] * 8),
    ]
    assert encode(rows, format="prompt_completion", targets="assistant") == [
        (CHAT_IDS, CHAT_TARGETS),
        (two, [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]),
        (three, [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]),
        (CHAT_IDS, CHAT_TARGETS),
    ]


def test_text_and_messages_may_stand_side_by_side_in_prompts_and_completions() -> None:
    rows = [
        {"prompt": "p ", "completion": "q"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": "q ", "completion": "r"},
    ]
    assert encode(rows, format="prompt_completion") == [
        ([BOS, P, Q, EOS], [0, 0, 1, 1]),
        (CHAT_IDS, CHAT_TARGETS),
        ([BOS, Q, R, EOS], [0, 0, 1, 1]),
    ]


def test_prompts_of_text_need_no_chat_template() -> None:
    tokenizer = chat_words(None)
    assert encode([{"prompt": "p ", "completion": "q"}], tokenizer, format="prompt_completion") == [
        ([BOS, P, Q, EOS], [0, 0, 1, 1])
    ]
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        encode([{"prompt": CHAT[:1], "completion": CHAT[1:]}], tokenizer, format="prompt_completion")
    for format in ("messages", "sharegpt"):
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            encode([], tokenizer, format=format)


def test_tools_go_to_the_template_as_lists_or_as_json() -> None:
    tokenizer = chat_words("{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + TEMPLATE)
    expected = ([P, *CHAT_IDS], [0, *CHAT_TARGETS])
    for tools in ([{"name": "p"}], '[{"name": "p"}]'):
        assert encode([{"messages": CHAT, "tools": tools}], tokenizer, format="messages") == [expected]
        rows = [{"prompt": CHAT[:1], "completion": CHAT[1:], "tools": tools}]
        assert encode(rows, tokenizer, format="prompt_completion") == [expected]
    for nothing in ([], "", "[]", None):
        assert encode([{"messages": CHAT, "tools": nothing}], tokenizer, format="messages") == [
            (CHAT_IDS, CHAT_TARGETS)
        ]


def test_tool_calls_and_other_keys_of_messages_go_to_the_template() -> None:
    calls = [{"function": {"name": "q", "arguments": {}}}, {"function": {"name": "r", "arguments": {}}}]
    messages = [
        user("p"),
        assistant("s", tool_calls=calls),
        {"role": "tool", "content": "p", "name": "q"},
        assistant("s"),
    ]
    assert encode([{"messages": messages}], format="messages") == [
        (
            [BOS, USER, P, EOS, ASSISTANT, S, Q, R, EOS, TOOL, P, EOS, ASSISTANT, S, EOS],
            [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1],
        )
    ]


def test_empty_turns() -> None:
    assert encode([{"messages": [user(""), assistant("")]}], format="messages") == [
        ([BOS, USER, EOS, ASSISTANT, EOS], [0, 0, 0, 0, 1])
    ]


def test_a_conversation_without_an_answer_has_no_target() -> None:
    rows = [{"messages": [user("p")]}, {"messages": [*CHAT, user("p")]}]
    assert encode(rows, format="messages") == ["no_target", ([*CHAT_IDS, USER, P, EOS], [*CHAT_TARGETS, 0, 0, 0])]
    assert encode(rows, format="messages", targets="completion") == ["no_target", "no_target"]
    assert encode(rows[:1], format="messages", no_target="keep") == [([BOS, USER, P, EOS], [0, 0, 0, 0])]


# ---- tokens ---------------------------------------------------------------------------------------------------------


def merging(template: str | None = None) -> PreTrainedTokenizerFast:
    """Each character is a token, but "ab" and ";u" are one."""
    tokens = [*"abux:;=", "ab", ";u"]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [("a", "b"), (";", "u")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def test_a_token_that_merges_prompt_and_completion_is_a_target() -> None:
    rows = [{"prompt": "xa", "completion": "bx"}, {"prompt": "xa", "completion": "xb"}]
    assert encode(rows, merging(), format="prompt_completion") == [([3, 7, 3], [0, 1, 1]), ([3, 0, 3, 1], [0, 0, 1, 1])]


def test_tokens_that_merge_at_the_begin_and_the_end_of_an_answer_are_targets() -> None:
    template = "{% for m in messages %}{{ ('u:' if m.role == 'user' else '=a') + m.content + ';' }}{% endfor %}"
    template += "{% if add_generation_prompt %}=a{% endif %}"
    messages = [user("x"), assistant("bb"), user("x"), assistant("x")]  # u:x;=abb;u:x;=ax;
    ids = [2, 4, 3, 5, 6, 7, 1, 8, 4, 3, 5, 6, 0, 3, 5]
    targets = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    tokenizer = merging(template)
    assert encode([{"messages": messages}], tokenizer, format="messages") == [(ids, targets)]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "u:x;=abb;u:x;=ax;"


@pytest.mark.parametrize(
    "name", ["CHATML", "CHATML_MARKED", "QWEN_2_5", "QWEN_3", "LLAMA_3", "GEMMA", "MISTRAL", "PHI_3"]
)
def test_the_ids_are_those_of_apply_chat_template(name: str) -> None:
    tokenizer = chat_tokenizer(getattr(templates, name))
    chats = [
        [user("the theme"), assistant("one é🙂")],
        [{"role": "system", "content": "one"}, user(" then "), assistant("there\n"), user(""), assistant("")],
    ]
    expected = tokenizer.apply_chat_template(chats, return_dict=True)["input_ids"]
    found = encode([{"messages": chat} for chat in chats], tokenizer, format="messages", limit=None)
    assert [ids for ids, _ in found] == expected
    assert (
        encode([{"messages": chat} for chat in chats], tokenizer, format="messages", targets="all", limit=None)
        == expected
    )
    assert all(0 < sum(targets) < len(targets) for _, targets in found)


def test_each_batching_gives_the_same_tokens() -> None:
    rows = [{"messages": [user(" ".join("pqrs"[:count])), assistant("r")]} for count in range(5)]
    rows += [{"messages": None}, {"messages": []}, {"messages": [*CHAT, *CHAT]}]
    together = encode(rows, format="messages", bad="drop")
    assert together == [encode([row], format="messages", bad="drop")[0] for row in rows]


def test_a_tokenizer_written_in_python_has_borders_after_the_tokens_of_what_comes_before() -> None:
    tokenizer = ByT5Tokenizer()
    letters = {letter: tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abc:"}
    a, b, c, colon = letters.values()
    eos = tokenizer.eos_token_id
    assert encode([{"prompt": "ab", "completion": "c"}], tokenizer, format="prompt_completion") == [
        ([a, b, c, eos], [0, 0, 1, 1])
    ]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}:{% endfor %}"
    assert encode([{"messages": [user("a"), assistant("bc")]}], tokenizer, format="messages") == [
        ([a, colon, b, c, colon], [0, 0, 1, 1, 1])
    ]


def test_a_tokenizer_written_in_python_that_merges_over_a_border_is_refused() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["ab"])
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": "ab", "completion": "c"}]
    merged, fine = encode(rows, tokenizer, format="prompt_completion", bad="drop")
    assert merged == (
        "targets",
        "a token may merge over the border after 'a', and this tokenizer does not say which characters a token holds; "
        "use the fast one of the same model, or pass targets='all'",
    )
    assert fine == ([len(tokenizer) - 1, 102, 1], [0, 1, 1])


# ---- columns --------------------------------------------------------------------------------------------------------


def test_nulls_that_arrow_fills_in_are_as_if_they_were_not_there() -> None:
    shows = "{% for m in messages %}{{ m | tojson }};{% endfor %}"
    tokenizer = chat_tokenizer(shows)
    rows = [
        {"messages": [user("a"), assistant("b", tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}])]},
        {"messages": [user("c"), assistant("d", tool_calls=[{"function": {"name": "g", "arguments": {"y": 2}}}])]},
    ]
    table = pa.Table.from_pylist(rows)
    assert "None" in str(table["messages"][1].as_py())
    found = encode(table, tokenizer, format="messages", targets="all", limit=None)
    assert found == encode(rows, tokenizer, format="messages", targets="all", limit=None)
    text = '{"role": "user", "content": "c"};{"role": "assistant", "content": "d", "tool_calls": '
    assert tokenizer.decode(found[1]) == text + '[{"function": {"name": "g", "arguments": {"y": 2}}}]};'


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
@pytest.mark.parametrize(
    ("row", "format", "hint"),
    [
        (
            {"messages": CHAT},
            "text",
            "no column 'text' (there are: messages); pass format='messages', or text_column='...'",
        ),
        ({"prompt": "p", "completion": "q"}, "text", "pass format='prompt_completion', or text_column='...'"),
        ({"input_ids": [1, 2]}, "text", "the examples have token ids: leave the tokenizer out"),
        (
            {"conversations": [{"from": "human", "value": "p"}]},
            "messages",
            "no column 'messages' (there are: conversations); pass format='sharegpt'",
        ),
        ({"messages": CHAT}, "prompt_completion", "no column 'prompt' (there are: messages); pass format='messages'"),
        (
            {"prompt": "p"},
            "prompt_completion",
            "no column 'completion' (there are: prompt); format='prompt_completion' needs 'prompt' and 'completion'; "
            "rename yours with transform=",
        ),
        ({"text": "p"}, "sharegpt", "no column 'conversations' (there are: text); pass format='text'"),
        (
            {"chat": "p"},
            "messages",
            "no column 'messages' (there are: chat); format='messages' needs 'messages'; rename yours",
        ),
    ],
)
def test_a_missing_column_says_which_format_to_pass(form: Any, row: Any, format: str, hint: str) -> None:
    with pytest.raises(ValueError, match="source 'src', shard 0, index 10: no column") as error:
        encode(form([row]), format=format)
    assert hint in str(error.value)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("messages", {"messages": None}, "null", "'messages' is NoneType None, not a list of messages"),
    ("messages", {"messages": "p"}, "type", "'messages' is str 'p', not a list of messages"),
    ("messages", {"messages": {"role": "user"}}, "type", "'messages' is dict {'role': 'user'}, not a list of messages"),
    (
        "messages",
        {"messages": ["p"]},
        "type",
        "messages[0] is str 'p', not a message: a dict with 'role' and 'content'",
    ),
    ("messages", {"messages": [*CHAT, None]}, "type", "messages[2] is NoneType None, not a message"),
    ("messages", {"messages": [{"content": "p"}]}, "null", "the role of messages[0] is NoneType None, not text"),
    ("messages", {"messages": [{"role": 5, "content": "p"}]}, "type", "the role of messages[0] is int 5, not text"),
    ("messages", {"messages": [{"role": "user"}]}, "null", "messages[0], of user, has no content"),
    ("messages", {"messages": [user("p"), assistant(None)]}, "null", "messages[1], of assistant, has no content"),
    ("messages", {"messages": [user(5)]}, "type", "the content of messages[0] is int 5, not text or a list of parts"),
    (
        "messages",
        {"messages": [{"from": "human", "value": "p"}]},
        "missing",
        "no 'role', but a 'from'; pass format='sharegpt'",
    ),
    ("messages", {"messages": CHAT, "tools": "{"}, "malformed", "'tools' is str '{', not JSON"),
    ("messages", {"messages": CHAT, "tools": [5]}, "type", "'tools' is list [5], not a list of schemas"),
    ("messages", {"messages": [user("\ud800"), assistant("p")]}, "malformed", "'messages' is str "),
    ("sharegpt", {"conversations": None}, "null", "'conversations' is NoneType None, not a list of messages"),
    ("sharegpt", {"conversations": [5]}, "type", "conversations[0] is int 5, not a dict with 'from' and 'value'"),
    (
        "sharegpt",
        {"conversations": [{"from": "bob", "value": "p"}]},
        "type",
        "conversations[0] is from 'bob', which is none of human, user",
    ),
    ("sharegpt", {"conversations": [{"from": None, "value": "p"}]}, "null", "conversations[0] is from None"),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": None}]},
        "null",
        "the value of conversations[0] is NoneType None, not text",
    ),
    (
        "sharegpt",
        {"conversations": [user("p")]},
        "missing",
        "conversations[0] has no 'from', but a 'role'; pass format='messages'",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "p"}]},
        "malformed",
        "the value of conversations[0] is str 'p', not JSON",
    ),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "[]"}]}, "type", "not a call with a 'name'"),
    (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "p"}], "system": "q"},
        "type",
        "both 'system' and conversations[0] are a system prompt",
    ),
    ("sharegpt", {"conversations": [], "system": 5}, "type", "'system' is int 5, not text"),
    (
        "prompt_completion",
        {"prompt": None, "completion": None},
        "null",
        "'prompt' is NoneType None, not a list of messages",
    ),
    (
        "prompt_completion",
        {"prompt": "p", "completion": None},
        "null",
        "'completion' is NoneType None, and the other is text",
    ),
    ("prompt_completion", {"prompt": CHAT, "completion": "p"}, "type", "'prompt' is list "),
    ("prompt_completion", {"prompt": "p", "completion": "\ud800"}, "malformed", "not text"),
    (
        "prompt_completion",
        {"prompt": [user("p")], "completion": ["q"]},
        "type",
        "completion[0] is str 'q', not a message",
    ),
]


@pytest.mark.parametrize(("format", "bad", "reason", "what"), BAD)
def test_a_bad_example_is_refused_with_its_place_or_left_out(format: str, bad: Any, reason: str, what: str) -> None:
    good: dict[str, Any] = {
        "messages": {"messages": CHAT},
        "sharegpt": {"conversations": [{"from": "human", "value": "p q"}, {"from": "gpt", "value": "r"}]},
        "prompt_completion": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    }[format]
    with pytest.raises(ValueError, match="source 'src', shard 0, index 11: ") as error:
        encode([good, bad, good], format=format)
    assert what in str(error.value)
    assert "mend the data, or pass bad='drop' to leave it out" in str(error.value)
    first, left_out, last = encode([good, bad, good], format=format, bad="drop")
    assert first == last == (CHAT_IDS, CHAT_TARGETS)
    assert left_out[0] == reason
    assert what in left_out[1]


def test_an_example_on_which_the_template_fails_is_bad_and_others_of_its_batch_are_not() -> None:
    tokenizer = chat_words("{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE)
    rows = [{"messages": CHAT}, {"messages": [{"role": "tool", "content": "p"}, *CHAT]}, {"messages": CHAT}]
    assert encode(rows, tokenizer, format="messages", bad="drop") == [
        (CHAT_IDS, CHAT_TARGETS),
        ("template", "the chat template raised TemplateError: no"),
        (CHAT_IDS, CHAT_TARGETS),
    ]


def test_texts_have_no_turns() -> None:
    rows = [{"prompt": "p", "completion": "q"}]
    assert encode(rows, format="prompt_completion", targets="assistant", bad="drop") == [
        ("targets", "'prompt' and 'completion' are text, which has no turns; pass targets='completion'")
    ]


# ---- what does not fit ----------------------------------------------------------------------------------------------


def test_conversations_stay_whole_unless_splitting_is_asked_for_by_name() -> None:
    rows = [{"messages": CHAT}]
    with pytest.raises(ValueError, match="8 tokens do not fit into 4, and it has targets that cutting would part"):
        encode(rows, format="messages", limit=4)
    with pytest.raises(ValueError, match="8 tokens do not fit into 4, and it is a conversation or a prompt with its"):
        encode(rows, format="messages", targets="all", limit=4)
    assert encode(rows, format="messages", targets="all", limit=8) == [CHAT_IDS]
    assert encode(rows, format="messages", limit=4, overlong="split") == [(CHAT_IDS, CHAT_TARGETS)]
    assert encode(rows, format="messages", limit=4, overlong="drop") == ["overlong"]
    for targets, why in (("auto", "has targets"), ("all", "is a conversation")):
        with pytest.raises(ValueError, match=f"packing='wrapped' cuts examples at row ends, and this one {why}"):
            encode(rows, format="messages", targets=targets, cuts_any=True)


def test_truncation_keeps_the_side_that_was_asked_for() -> None:
    rows = [{"messages": [user("p"), assistant("q r s")]}]
    assert encode(rows, format="messages", overlong="truncate", limit=6) == [
        ([BOS, USER, P, EOS, ASSISTANT, Q], [0] * 5 + [1])
    ]
    assert encode(rows, format="messages", overlong="truncate", truncate_keep="end", limit=6) == [
        ([EOS, ASSISTANT, Q, R, S, EOS], [0, 0, 1, 1, 1, 1])
    ]
    assert encode([{"text": "p q r s"}], overlong="truncate", truncate_keep="end", limit=3) == [[R, S, EOS]]
    assert encode([{"text": "p q r s"}], overlong="truncate", limit=3) == [[BOS, P, Q]]


def test_what_truncation_leaves_without_a_target_is_dropped_and_counted() -> None:
    rows = [{"messages": [user("p q r s"), assistant("q")]}, {"messages": [*CHAT[:1], assistant("p")]}]
    dataset = PackedDataset(
        rows, chat_words(), seq_len=8, lanes=1, shuffle=False, format="messages", max_example_len=7, overlong="truncate"
    )
    loader = PackedLoader(dataset, batch_size=1)
    assert [batch["input_ids"].tolist() for batch in loader] == [[[BOS, USER, P, Q, EOS, ASSISTANT, P, EOS]]]
    assert {name: loader.stats[name] for name in ("examples", "no_target", "truncated_tokens")} == {
        "examples": 1,
        "no_target": 1,
        "truncated_tokens": 1,
    }


# ---- rows, resume, identity -----------------------------------------------------------------------------------------


def packed(rows: Any, tokenizer: Any = None, **settings: Any) -> PackedDataset:
    arguments: dict[str, Any] = {"seq_len": 16, "lanes": 1, "shuffle": False, "format": "messages", **settings}
    return PackedDataset(rows, tokenizer or chat_words(), **arguments)


def test_a_row_of_conversations_has_their_labels_and_positions() -> None:
    rows = [{"messages": CHAT}, {"messages": [user("p"), assistant("")]}]
    (row,) = packed(rows)
    assert row["input_ids"].tolist() == [*CHAT_IDS, BOS, USER, P, EOS, ASSISTANT, EOS, EOS, EOS]
    assert row["labels"].tolist() == [-100] * 6 + [R, EOS] + [-100] * 5 + [EOS] + [-100] * 2
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 0, 1]
    assert row["cu_seqlens"].tolist() == [0, 8, 14, 16]
    assert row["num_loss_tokens"] == 3


MANY = [
    {"messages": [user(" ".join("pqrs"[: 1 + number % 4])), assistant(" ".join("srqp"[: number % 3]))]}
    for number in range(60)
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
def test_conversations_resume_exactly_with_workers(num_workers: int, template: str) -> None:
    def loader(workers: int) -> PackedLoader:
        dataset = packed(MANY, chat_words(template), lanes=2, shuffle=True, buffer_size=4)
        return PackedLoader(dataset, batch_size=2, num_workers=workers)

    def contents(batches: Any) -> list[Any]:
        return [
            (batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist()) for batch in batches
        ]

    whole = contents(loader(0))
    first = loader(num_workers)
    begun = contents(itertools.islice(first, 5))
    assert begun == whole[:5]
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(2 - num_workers)
    second.load_state_dict(state)
    assert contents(second) == whole[5:]
    assert len(whole) > 10


@pytest.mark.parametrize(
    ("name", "saved", "now", "values"),
    [
        ("format", {"format": "text"}, {}, "format='text', this stream has format='messages'"),
        ("targets", {"targets": "all"}, {}, "targets='all', this stream has targets='auto'"),
        ("truncate_keep", {"truncate_keep": "end"}, {}, "truncate_keep='end', this stream has truncate_keep='start'"),
    ],
)
def test_a_state_with_other_settings_is_refused_with_both_values(name: str, saved: Any, now: Any, values: str) -> None:
    rows = [{"messages": CHAT, "text": "p"}]
    state = packed(rows, **saved).state_dict()
    with pytest.raises(StateError, match=f"the state was saved with {name}") as error:
        packed(rows, **now).load_state_dict(state)
    assert values in str(error.value)


def test_a_state_with_another_chat_template_is_refused_with_both_fingerprints() -> None:
    rows = [{"messages": CHAT, "text": "p", "prompt": "p", "completion": "q"}]
    for format in ("messages", "prompt_completion"):
        state = packed(rows, format=format).state_dict()
        packed(rows, format=format).load_state_dict(state)
        with pytest.raises(
            StateError, match=r"saved with chat_template='[0-9a-f]{16}', this stream has chat_template='[0-9a-f]{16}'"
        ):
            packed(rows, chat_words(TEMPLATE + " "), format=format).load_state_dict(state)
    state = packed(rows, format="text").state_dict()
    packed(rows, chat_words(None), format="text").load_state_dict(state)


def test_the_sources_of_a_mixture_have_formats_of_their_own() -> None:
    mixture = Mixture(
        {"web": [{"text": "p q"}], "chat": [{"messages": CHAT}], "ask": [{"prompt": "p ", "completion": "q"}]},
        {"web": 1, "chat": 1, "ask": 1},
        by="examples",
        stop="each_once",
    )
    dataset = packed(mixture, format={"chat": "messages", "ask": "prompt_completion"})
    (row,) = dataset
    names = [name for name, _, _ in row["examples"]]
    rows = {name: number for number, name in enumerate(names)}
    ids, labels, bounds = row["input_ids"].tolist(), row["labels"].tolist(), row["cu_seqlens"].tolist()
    pieces = {
        name: (ids[bounds[at] : bounds[at + 1]], labels[bounds[at] : bounds[at + 1]]) for name, at in rows.items()
    }
    assert pieces == {
        "web": ([BOS, P, Q, EOS], [-100, P, Q, EOS]),
        "chat": (CHAT_IDS, [-100] * 6 + [R, EOS]),
        "ask": ([BOS, P, Q, EOS], [-100, -100, Q, EOS]),
    }
    with pytest.raises(ValueError, match="format names 'wob', the Mixture has web, chat, ask"):
        packed(mixture, format={"wob": "text"})


def test_settings_that_mean_nothing_are_refused() -> None:
    rows = [{"messages": CHAT}]
    with pytest.raises(
        ValueError, match="format='chat': pass one of 'text', 'prompt_completion', 'messages', 'sharegpt'"
    ):
        packed(rows, format="chat")
    with pytest.raises(ValueError, match="targets='answer': pass one of 'auto', 'all', 'completion', 'assistant'"):
        packed(rows, targets="answer")
    with pytest.raises(ValueError, match="truncate_keep='left': pass one of 'start', 'end'"):
        packed(rows, truncate_keep="left")
    with pytest.raises(ValueError, match="targets='assistant' with format='text', of which every token is a target"):
        packed(rows, format="text", targets="assistant")
    with pytest.raises(ValueError, match="format='messages' needs a tokenizer"):
        PackedDataset(rows, seq_len=8, format="messages")
    with pytest.raises(TypeError, match="format is a dict, which is for the sources of a Mixture"):
        packed(rows, format={"a": "messages"})


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-a-sequence"])
def test_white_space_at_the_border_is_on_its_side_also_where_the_tokenizer_leaves_it_out_of_the_places(
    inside: bool,
) -> None:
    plain, trimming = byte_tokenizer(), byte_tokenizer()
    processor = processors.ByteLevel(trim_offsets=True)
    trimming.backend_tokenizer.post_processor = processors.Sequence([processor]) if inside else processor
    rows = [{"prompt": "def f():\n", "completion": "    return 1\n"}, {"prompt": "a", "completion": "  "}]
    wanted = encode(rows, plain, format="prompt_completion")
    assert encode(rows, trimming, format="prompt_completion") == wanted
    assert all(any(mask) and not all(mask) for _, mask in wanted)
