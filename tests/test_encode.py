import array
import io
import logging
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from streampack import PackedDataset
from streampack.encode import Encoder, Policies
from streampack.sources import Fault, SequenceSource
from streampack.tables import Block, Position
from streampack.token_ids import Encoded

from .tiny_tokenizers import byte_tokenizer, word_tokenizer

ADDS = {"nothing": "$A", "BOS": "<s> $A", "EOS": "$A </s>", "BOS and EOS": "<s> $A </s>"}


def block_of(data):
    """Examples (a list of dicts, or a table) as a block; example i is shard 0, index 10 + i."""
    return Block(
        source=SequenceSource([], name="src"),
        position=Position(0, 0, 0, 0),
        shards=np.zeros(len(data), dtype=np.int64),
        indices=np.arange(10, 10 + len(data)),
        data=data,
    )


def encoder_of(tokenizer=None, *, limit=8, append_eos="auto", cuts_any=False, own=None, **policies):
    return Encoder(
        tokenizer,
        **(own or {}),
        text_column="text",
        append_eos=append_eos,
        limit=limit,
        policies=Policies(**policies),
        cuts_any=cuts_any,
    )


def encode(data, tokenizer=None, *, picks=None, **settings):
    """Of each example its ids, (ids, targets as 0 and 1), or the reason why it is left out."""
    encoder = encoder_of(tokenizer, **settings)
    found = []
    for one in encoder.encode(block_of(data), range(len(data)) if picks is None else picks):
        if isinstance(one, str | Fault):
            found.append("bad" if isinstance(one, Fault) else one)
            continue
        if isinstance(one, np.ndarray):  # all of its tokens are targets
            one = Encoded(one, None)
        assert one.ids.dtype == np.int32
        if one.targets is None:
            found.append(one.ids.tolist())
        else:
            assert one.targets.dtype == np.bool_
            assert len(one.targets) == len(one.ids)
            found.append((one.ids.tolist(), one.targets.astype(int).tolist()))
    return found


def encode_texts(*texts, tokenizer, **settings):
    return encode([{"text": text} for text in texts], tokenizer, **settings)


def refusal(data, tokenizer=None, **settings):
    with pytest.raises(ValueError, match="source 'src', shard 0, index 1") as error:
        encode(data, tokenizer, **settings)
    return str(error.value)


# ---- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adds", "expected"),
    [
        ("nothing", [[3, 4, 2], [5, 2]]),
        ("BOS", [[1, 3, 4, 2], [1, 5, 2]]),
        ("EOS", [[3, 4, 2], [5, 2]]),
        ("BOS and EOS", [[1, 3, 4, 2], [1, 5, 2]]),
    ],
)
def test_each_text_ends_with_exactly_one_eos_whatever_the_tokenizer_adds(adds, expected):
    tokenizer = word_tokenizer(adds=ADDS[adds])
    assert encode_texts("a b", "c", tokenizer=tokenizer) == expected
    assert encode_texts("a b", "c", tokenizer=tokenizer, append_eos=True) == expected


@pytest.mark.parametrize("adds", ADDS)
def test_without_append_eos_the_ids_are_those_of_the_tokenizer(adds):
    tokenizer = word_tokenizer(adds=ADDS[adds])
    texts = ["a b", "c", "d d d"]
    assert encode_texts(*texts, tokenizer=tokenizer, append_eos=False) == tokenizer(texts)["input_ids"]


def test_a_text_that_ends_with_the_eos_token_gets_no_second_one():
    assert encode_texts("a </s>", "</s>", tokenizer=word_tokenizer()) == [[3, 2], [2]]
    assert encode_texts("a </s>", "</s>", "a", tokenizer=word_tokenizer(adds=ADDS["BOS and EOS"])) == [
        [1, 3, 2],
        [1, 2],
        [1, 3, 2],
    ]


def test_eos_tokens_that_a_text_has_several_of_stay():
    assert encode_texts("a </s> </s>", tokenizer=word_tokenizer()) == [[3, 2, 2]]


def test_an_eos_token_inside_of_a_text_stays():
    assert encode_texts("a </s> b", tokenizer=word_tokenizer()) == [[3, 2, 4, 2]]


def test_a_chat_that_was_rendered_with_its_bos_gets_no_second_one():
    assert encode_texts("<s> a b", "a b", tokenizer=word_tokenizer(adds="<s> $A")) == [[1, 3, 4, 2], [1, 3, 4, 2]]


def test_a_tokenizer_without_eos_adds_none_by_default_and_is_refused_if_asked_to():
    tokenizer = word_tokenizer(eos_token=None)
    assert encode_texts("a b", tokenizer=tokenizer) == [[3, 4]]
    with pytest.raises(
        ValueError, match=r"append_eos=True, but the tokenizer has no eos_token_id; set tokenizer\.eos_token"
    ):
        encoder_of(tokenizer, append_eos=True)


def test_each_text_is_tokenized_alone():
    tokenizer = byte_tokenizer("then then then the the")
    assert tokenizer("the")["input_ids"] + tokenizer("n")["input_ids"] != tokenizer("then")["input_ids"]
    texts = ["the", "n", "then", " there", "one", "none\n", "é\x00🙂", "x" * 300]
    found = encode_texts(*texts, tokenizer=tokenizer, limit=None)
    assert found == [[*tokenizer(text)["input_ids"], 0] for text in texts]


def test_a_tokenizer_written_in_python_works_too():
    tokenizer = ByT5Tokenizer()
    found = encode_texts("ab", "", "é" * 20, tokenizer=tokenizer, limit=None)
    assert found == [tokenizer("ab")["input_ids"], "empty", tokenizer("é" * 20)["input_ids"]]
    assert found[0] == [100, 101, 1]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
BYTES = byte_tokenizer()


@given(st.lists(TEXTS, max_size=8))
def test_the_ids_of_a_text_are_those_of_the_tokenizer_and_eos(texts):
    found = encode_texts(*texts, tokenizer=BYTES, limit=None)
    assert found == [[*BYTES(text)["input_ids"], 0] if text else "empty" for text in texts]


@given(st.lists(TEXTS | st.none() | st.integers(), max_size=8), st.data())
def test_any_batching_and_any_order_give_the_same_tokens(texts, data):
    rows = [{"text": text} for text in texts]
    together = encode(rows, BYTES, bad="drop", overlong="drop")
    picks = data.draw(st.permutations(range(len(rows))))
    assert [encode(rows, BYTES, picks=[pick], bad="drop", overlong="drop")[0] for pick in range(len(rows))] == together
    assert encode(rows, BYTES, picks=picks, bad="drop", overlong="drop") == [together[pick] for pick in picks]


@pytest.fixture
def told():
    """What Transformers logs during a test."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("transformers").addHandler(handler)
    yield lines
    logging.getLogger("transformers").removeHandler(handler)


def test_a_text_longer_than_the_model_is_whole_and_nothing_is_warned_of_or_changed(told):
    tokenizer = word_tokenizer(model_max_length=8)
    text = " ".join("abcd" * 5)
    assert encode_texts(text, tokenizer=tokenizer, overlong="split") == [[3, 4, 5, 6] * 5 + [2]]
    assert told.getvalue() == ""
    assert tokenizer.model_max_length == 8
    tokenizer(text)
    assert "Token indices sequence length is longer" in told.getvalue()  # as it does when the user calls it


def test_a_tokenizer_that_was_set_to_truncate_and_pad_does_neither():
    tokenizer = word_tokenizer(pad_token="<unk>")
    tokenizer(["a", "b c d"], truncation=True, max_length=2, padding="max_length")
    assert encode_texts("a b c d", "a", tokenizer=tokenizer) == [[3, 4, 5, 6, 2], [3, 2]]


@pytest.mark.parametrize("adds", ADDS)
def test_an_empty_text_is_left_out_and_is_not_an_eos_alone(adds):
    tokenizer = word_tokenizer(adds=ADDS[adds])
    assert encode_texts("", "a", "", tokenizer=tokenizer)[::2] == ["empty", "empty"]
    assert encode_texts("", tokenizer=tokenizer, append_eos=False) == ["empty"]


@pytest.mark.parametrize("adds", ADDS)
def test_a_text_of_which_the_tokenizer_makes_nothing_is_empty(adds):
    assert encode_texts("  ", "\n", tokenizer=word_tokenizer(adds=ADDS[adds])) == ["empty", "empty"]


def test_an_empty_text_is_an_error_if_asked_for():
    assert refusal([{"text": "a"}, {"text": ""}], word_tokenizer(), empty="error") == (
        "source 'src', shard 0, index 11: the example has no tokens; pass empty='drop' to leave it out"
    )


NOT_TEXTS = [
    (None, "NoneType None"),
    (5, "int 5"),
    (0.5, "float 0.5"),
    (b"a", "bytes b'a'"),
    (["a"], "list ['a']"),
    ({"a": 1}, "dict {'a': 1}"),
]


@pytest.mark.parametrize(("value", "shown"), NOT_TEXTS)
def test_what_is_not_text_is_refused_with_its_place_and_value(value, shown):
    rows = [{"text": "a"}, {"text": value}]
    assert refusal(rows, word_tokenizer()) == (
        f"source 'src', shard 0, index 11: 'text' is {shown}, not text; mend the data, or pass bad='drop' to leave it "
        "out"
    )
    assert encode(rows, word_tokenizer(), bad="drop") == [[3, 2], "bad"]


def test_a_long_value_is_shortened_in_the_message():
    message = refusal([{"text": "a"}, {"text": list(range(1000))}], word_tokenizer())
    assert "'text' is list [0, 1, 2, 3" in message
    assert len(message) < 200


def test_a_text_that_is_not_unicode_is_bad():
    rows = [{"text": "a"}, {"text": "a \ud800"}]  # what json.loads makes of a lone surrogate
    assert encode(rows, word_tokenizer(), bad="drop") == [[3, 2], "bad"]
    assert "mend the data, or pass bad='drop'" in refusal(rows, word_tokenizer())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_comes_from_any_arrow_type_of_text(kind):
    table = pa.table({"text": pa.array(["a", None, "", "b"]).cast(kind)})
    assert encode(table, word_tokenizer(), bad="drop") == [[3, 2], "bad", "empty", [4, 2]]


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_a_missing_column_is_refused_and_those_there_are_listed(form):
    with pytest.raises(ValueError, match="no column 'text'") as error:
        encode(form([{"content": "a", "id": 1}]), word_tokenizer())
    assert str(error.value) == (
        "source 'src', shard 0, index 10: no column 'text' (there are: content, id); pass text_column='...'; "
        "where only some lack it, "
        "mend the data, or pass bad='drop' to leave it out"
    )


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_text_without_a_tokenizer_is_refused(form):
    with pytest.raises(ValueError, match="no column 'input_ids'") as error:
        encode(form([{"text": "a"}]))
    assert str(error.value) == (
        "source 'src', shard 0, index 10: no column 'input_ids' (there are: text); pass a tokenizer for examples of "
        "text; where only some lack it, mend the data, or pass bad='drop' to leave it out"
    )


def test_an_example_that_is_not_a_dict_is_refused():
    for example, kind in ((["a"], "list"), ("a", "str"), (5, "int")):
        with pytest.raises(ValueError, match=f"index 11: the example is {kind}, not a dict of columns"):
            encode([{"text": "a"}, example], word_tokenizer())


def test_other_columns_beside_text_do_not_matter():
    assert encode([{"text": "a", "labels": [1], "x": [2]}], word_tokenizer()) == [[3, 2]]


# ---- token ids --------------------------------------------------------------------------------------------------


def test_token_ids_are_taken_as_they_are():
    assert encode([{"input_ids": [5, 6, 7]}, {"input_ids": [0]}, {"input_ids": [2**31 - 1, 1]}]) == [
        [5, 6, 7],
        [0],
        [2**31 - 1, 1],
    ]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_token_ids_come_in_any_integer_type(dtype):
    ids, labels = [5, 6, 100], [-100, 6, 100]
    expected = [(ids, [0, 1, 1])]
    assert encode([{"input_ids": np.array(ids, dtype), "labels": np.array(labels)}]) == expected
    assert encode([{"input_ids": torch.tensor(ids, dtype=getattr(torch, dtype)), "labels": labels}]) == expected
    arrow = pa.array([ids], pa.list_(pa.type_for_alias(dtype)))
    assert encode(pa.table({"input_ids": arrow, "labels": [labels]})) == expected
    assert encode(pa.table({"input_ids": arrow})) == [ids]


@pytest.mark.parametrize(
    "ids", [(1, 2), range(1, 3), array.array("H", [1, 2]), np.array([0, 1, 2, 9])[1:3], np.array([1, 9, 2, 9])[::2]]
)
def test_token_ids_come_as_any_sequence_of_integers(ids):
    assert encode([{"input_ids": ids}]) == [[1, 2]]


ARROW_LISTS = {
    "list": lambda inner: pa.list_(inner),
    "large_list": lambda inner: pa.large_list(inner),
    "fixed_size_list": lambda inner: pa.list_(inner, 2),
}


@pytest.mark.parametrize("inner", [pa.int8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()])
@pytest.mark.parametrize("kind", ARROW_LISTS)
def test_token_ids_come_from_any_arrow_type_of_list_sliced_and_chunked(kind, inner):
    table = pa.table({"input_ids": pa.array([[1, 2], None, [3, 4], [5, 6]], ARROW_LISTS[kind](inner))})
    expected = [[1, 2], "bad", [3, 4], [5, 6]]
    assert encode(table, bad="drop") == expected
    assert encode(table.slice(1), bad="drop") == expected[1:]
    assert encode(table.slice(2, 1)) == [[3, 4]]
    assert encode(pa.concat_tables([table.slice(2), table.slice(0, 2)]), bad="drop") == expected[2:] + expected[:2]
    assert encode(table, picks=[3, 0]) == [[5, 6], [1, 2]]


def test_what_a_tokenizer_returns_is_an_example():
    tokenizer = word_tokenizer()
    assert encode([tokenizer("a b"), tokenizer("c")]) == [[3, 4], [5]]
    assert encode([tokenizer(["a b"], return_tensors="pt")], bad="drop") == ["bad"]  # a batch of one


def test_a_read_only_array_is_fine():
    ids = np.array([1, 2], dtype=np.int32)
    ids.flags.writeable = False
    assert encode([{"input_ids": ids, "loss_mask": [0, 1]}]) == [([1, 2], [0, 1])]


def test_an_example_without_token_ids_is_empty():
    rows = [{"input_ids": [1]}, {"input_ids": []}]
    assert encode(rows) == encode(pa.Table.from_pylist(rows)) == [[1], "empty"]
    assert encode([{"input_ids": np.zeros(0)}, {"input_ids": torch.zeros(0)}]) == ["empty", "empty"]
    for form in (list, pa.Table.from_pylist):
        assert refusal(form(rows), empty="error") == (
            "source 'src', shard 0, index 11: the example has no tokens; pass empty='drop' to leave it out"
        )


BAD_IDS = [
    (None, "'input_ids' is null"),
    (5, "'input_ids' is ndarray 5, not one list of integers"),
    ("ab", "'input_ids' is str 'ab', not one list of integers"),
    (b"ab", "'input_ids' is bytes b'ab', not one list of integers"),
    ([1.0, 2.0], "'input_ids' is ndarray [1.0, 2.0], not one list of integers"),
    ([True, False], "'input_ids' is ndarray [True, False], not one list of integers"),
    (["1", "2"], "'input_ids' is ndarray ['1', '2'], not one list of integers"),
    ([1, None], "'input_ids' is ndarray [1, None], not one list of integers"),
    ([[1, 2], [3, 4]], "'input_ids' is ndarray [[1, 2], [3, 4]], not one list of integers"),
    ([[1, 2]], "'input_ids' is ndarray [[1, 2]], not one list of integers"),
    ([[1, 2], [3]], "'input_ids' is list [[1, 2], [3]], not one list of integers"),
    ([3, -1], "'input_ids' holds -1 .. 3, outside 0 .. 2147483647"),
    ([2**31, 1], "'input_ids' holds 1 .. 2147483648, outside 0 .. 2147483647"),
    ([2**63], "'input_ids' holds 9223372036854775808 .. 9223372036854775808, outside 0 .. 2147483647"),
    ([2**70], "'input_ids' is ndarray [1180591620717411303424], not one list of integers"),
]


@pytest.mark.parametrize(("value", "fault"), BAD_IDS, ids=[str(value) for value, _ in BAD_IDS])
def test_token_ids_that_cannot_be_used_are_refused_with_their_place_and_value(value, fault):
    rows = [{"input_ids": [1, 2]}, {"input_ids": value}, {"input_ids": [3]}]
    assert refusal(rows) == (
        f"source 'src', shard 0, index 11: {fault}; mend the data, or pass bad='drop' to leave it out"
    )
    assert encode(rows, bad="drop") == [[1, 2], "bad", [3]]


ARROW_BAD_IDS = [
    (pa.list_(pa.int64()), None),
    (pa.list_(pa.int64()), [1, None]),
    (pa.list_(pa.int64()), [-1, 1]),
    (pa.list_(pa.int64()), [2**31]),
    (pa.list_(pa.int64()), [2**32 + 5]),
    (pa.list_(pa.int64()), [5 - 2**32]),
    (pa.list_(pa.uint64()), [2**63]),
    (pa.large_list(pa.int32()), [None]),
]


@pytest.mark.parametrize(("kind", "value"), ARROW_BAD_IDS, ids=str)
def test_one_bad_example_in_a_table_does_not_spoil_the_others(kind, value):
    table = pa.table({"input_ids": pa.array([[1, 2], value, [3]], kind)})
    assert encode(table, bad="drop") == [[1, 2], "bad", [3]]
    assert "mend the data, or pass bad='drop' to leave it out" in refusal(table)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1.0, 2.0]]),
        pa.array([["1"]]),
        pa.array([[True]]),
        pa.array([[[1, 2], [3, 4]]]),
        pa.array([[[1], [2, 3]]]),
        pa.array([5]),
        pa.array(["ab"]),
        pa.nulls(1),
    ],
    ids=lambda column: str(column.to_pylist()[0]),
)
def test_a_column_of_another_type_is_bad(column):
    with pytest.raises(ValueError, match=r"source 'src', shard 0, index 10: 'input_ids' is .*; mend the data"):
        encode(pa.table({"input_ids": column}))
    assert encode(pa.table({"input_ids": column}), bad="drop") == ["bad"]


def test_a_tensor_that_numpy_cannot_take_is_refused_with_its_place():
    rows = [{"input_ids": [1]}, {"input_ids": torch.tensor([1.0, 2.0], requires_grad=True)}]
    assert "mend the data" in refusal(rows)
    assert encode(rows, bad="drop") == [[1], "bad"]


def test_nothing_to_encode_is_nothing():
    assert encode([]) == []
    assert encode([], word_tokenizer()) == []


def test_a_transform_may_leave_out_all_examples_of_a_block():
    rows = [{"input_ids": [number, 1]} for number in range(6)]
    dataset = PackedDataset(
        rows,
        seq_len=4,
        lanes=1,
        shuffle=False,
        shuffle_block=2,
        transform=lambda row: row if row["input_ids"][0] > 3 else None,
    )
    assert [row["input_ids"].tolist() for row in dataset] == [[4, 1, 5, 1]]


# ---- targets ----------------------------------------------------------------------------------------------------


def test_labels_say_what_is_a_target():
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, {"input_ids": [4, 5, 6], "labels": [-100, 5, 6]}]
    expected = [([1, 2, 3], [0, 0, 1]), ([4, 5, 6], [0, 1, 1])]
    assert encode(rows) == encode(pa.Table.from_pylist(rows)) == expected


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize(
    "mask", [[0, 1, 1], [False, True, True], np.array([0, 1, 1], np.int8), torch.tensor([0, 1, 1])]
)
def test_masks_say_what_is_a_target(name, mask):
    assert encode([{"input_ids": [1, 2, 3], name: mask}]) == [([1, 2, 3], [0, 1, 1])]


@pytest.mark.parametrize("inner", [pa.bool_(), pa.int8(), pa.uint8(), pa.int64()])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_masks_come_from_any_arrow_type(kind, inner):
    mask = pa.array([[0, 1, 1], [1, 1, 0]]).cast(kind(inner))
    table = pa.table({"input_ids": [[1, 2, 3], [4, 5, 6]], "loss_mask": mask})
    assert encode(table) == [([1, 2, 3], [0, 1, 1]), ([4, 5, 6], [1, 1, 0])]


BAD_TARGETS = [
    ("labels", [2], "'labels' has 1 entries for 2 input_ids"),
    ("labels", [-100, 2, 3], "'labels' has 3 entries for 2 input_ids"),
    ("labels", None, "'labels' is null"),
    ("labels", [-100.0, 2.0], "'labels' is ndarray [-100.0, 2.0], not one list of integers"),
    ("labels", [[-100, 2]], "'labels' is ndarray [[-100, 2]], not one list of integers"),
    ("labels", [[-100], [2, 3]], "'labels' is list [[-100], [2, 3]], not one list of integers"),
    (
        "labels",
        [2, -100],
        "'labels' holds 2 at token 0, where input_ids holds 1: labels are not shifted here, each is the id at its own "
        "place or -100",
    ),
    (
        "labels",
        [-100, 0],
        "'labels' holds 0 at token 1, where input_ids holds 2: labels are not shifted here, each is the id at its own "
        "place or -100",
    ),
    ("completion_mask", [1], "'completion_mask' has 1 entries for 2 input_ids"),
    ("completion_mask", [0, 2], "'completion_mask' holds 0 .. 2, not 0 and 1"),
    ("loss_mask", [-100, 1], "'loss_mask' holds -100 .. 1, not 0 and 1"),
    ("loss_mask", [0.0, 0.5], "'loss_mask' is ndarray [0.0, 0.5], not one list of integers"),
    ("attention_mask", [1, 0], "attention_mask has zeros: the example is padded; tokenize without padding"),
]


@pytest.mark.parametrize(("name", "value", "fault"), BAD_TARGETS)
def test_targets_that_cannot_be_used_are_refused_with_their_place_and_value(name, value, fault):
    good = {"labels": [-100, 2]}.get(name, [1, 1])
    rows = [{"input_ids": [1, 2], name: good}, {"input_ids": [1, 2], name: value}]
    assert refusal(rows) == (
        f"source 'src', shard 0, index 11: {fault}; mend the data, or pass bad='drop' to leave it out"
    )
    assert encode(rows, bad="drop")[1] == "bad"
    assert encode(rows[::-1], bad="drop")[0] == "bad"


def test_labels_that_were_shifted_are_refused():
    assert "labels are not shifted here" in refusal(
        [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}]
    )


MIXED_ROWS = {
    "labels null": [{"input_ids": [1, 2], "labels": None}, {"input_ids": [1, 2], "labels": [-100, 2]}],
    "mask null": [{"input_ids": [1, 2], "loss_mask": None}, {"input_ids": [1, 2], "loss_mask": [0, 1]}],
    "mask null inside": [{"input_ids": [1, 2], "loss_mask": [0, None]}, {"input_ids": [1, 2], "loss_mask": [0, 1]}],
}


@pytest.mark.parametrize("kind", MIXED_ROWS)
@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
@pytest.mark.parametrize("turned", [False, True])
def test_an_example_without_targets_among_others_is_bad_and_those_of_the_others_count(kind, form, turned):
    rows, expected = MIXED_ROWS[kind], ["bad", ([1, 2], [0, 1])]
    if turned:
        rows, expected = rows[::-1], expected[::-1]
    table = pa.schema([("input_ids", pa.list_(pa.int64())), (list(MIXED_ROWS[kind][1])[1], pa.list_(pa.int64()))])
    assert encode(pa.Table.from_pylist(rows, table) if form is not list else rows, bad="drop") == expected


@pytest.mark.parametrize("turned", [False, True])
def test_examples_with_labels_among_such_without_are_refused(turned):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    with pytest.raises(ValueError, match=r"index 11: targets are given by .*, those of earlier examples by"):
        encode(rows[::-1] if turned else rows, bad="drop")


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_labels_that_are_all_null_are_not_taken_for_none_at_all(form):
    rows = [{"input_ids": [1, 2], "labels": None}, {"input_ids": [3, 4], "labels": None}]
    assert encode(form(rows), bad="drop") == ["bad", "bad"]


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_another_column_of_nulls_alone_is_no_list(form):
    assert encode(form([{"input_ids": [1, 2], "meta": None}, {"input_ids": [3], "meta": None}])) == [[1, 2], [3]]


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_a_number_for_the_whole_example_is_no_mask(form):
    assert encode(form([{"input_ids": [1, 2], "labels": 3, "id": 7, "name": "x"}])) == [[1, 2]]


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_two_columns_that_say_what_is_a_target_are_refused(form):
    rows = [{"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [0, 1]}]
    with pytest.raises(ValueError, match="say what is a target") as error:
        encode(form(rows), bad="drop")
    assert str(error.value) == (
        "source 'src', shard 0, index 10: both 'labels' and 'loss_mask' say what is a target; keep one"
    )


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
@pytest.mark.parametrize("value", [[0.5, 1.0], [1, 2], ["a", "b"], []])
def test_a_column_of_lists_that_packing_would_drop_is_refused(form, value):
    with pytest.raises(ValueError, match="'weights'") as error:
        encode(form([{"input_ids": [1, 2], "weights": value}]), bad="drop")
    assert str(error.value) == (
        "source 'src', shard 0, index 10: the column 'weights' holds a list for each example, which packing would "
        "drop; remove it, or, if it marks targets, name it one of: labels, completion_mask, assistant_masks, loss_mask"
    )


def test_a_column_of_lists_that_comes_later_is_refused_too():
    with pytest.raises(ValueError, match="the column 'weights' holds a list for each example"):
        encode([{"input_ids": [1, 2], "weights": None}, {"input_ids": [1, 2], "weights": [1, 2]}])
    with pytest.raises(ValueError, match="the column 'weights' holds a list for each example"):
        encode([{"input_ids": [1, 2]}, {"input_ids": [1, 2], "weights": [1, 2]}])


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_columns_that_tokenizers_make_and_packing_replaces_are_fine(form):
    rows = [
        {
            "input_ids": [1, 2],
            "attention_mask": [1, 1],
            "token_type_ids": [0, 0],
            "special_tokens_mask": [1, 0],
            "offset_mapping": [[0, 1], [1, 2]],
        }
    ]
    assert encode(form(rows)) == [[1, 2]]


# ---- policies ---------------------------------------------------------------------------------------------------

LONG, MASK = list(range(1, 11)), [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("auto", LONG), ("split", LONG), ("truncate", LONG[:8]), ("drop", "overlong")],
)
def test_an_overlong_example_of_targets_alone_is_split_later_truncated_or_dropped(policy, expected):
    assert encode([{"input_ids": LONG}, {"input_ids": LONG[:8]}], overlong=policy) == [expected, LONG[:8]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("split", (LONG, MASK)), ("truncate", (LONG[:8], MASK[:8])), ("drop", "overlong")],
)
def test_an_overlong_example_with_a_mask_is_cut_only_if_asked_for(policy, expected):
    row = {"input_ids": LONG, "completion_mask": MASK}
    assert encode([row], overlong=policy) == [expected]


def test_an_overlong_example_names_its_place_length_and_what_can_be_done():
    rows = [{"input_ids": [1]}, {"input_ids": LONG}]
    assert refusal(rows, overlong="error") == (
        "source 'src', shard 0, index 11: 10 tokens do not fit into 8; pass overlong='truncate', 'drop' or 'split', or "
        "a larger seq_len"
    )
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": LONG, "loss_mask": MASK}]
    for policy in ("auto", "error"):
        message = refusal(rows, overlong=policy)
        assert message.startswith("source 'src', shard 0, index 11: 10 tokens do not fit into 8")
        assert message.endswith("; pass overlong='truncate', 'drop' or 'split', or a larger seq_len")
    assert "and it has targets that cutting would part from their prompt" in refusal(rows, overlong="auto")


def test_eos_counts_to_the_length_of_a_text():
    tokenizer = word_tokenizer()
    assert encode_texts("a b c", "a b c d", tokenizer=tokenizer, limit=4, overlong="drop") == [[3, 4, 5, 2], "overlong"]


def test_without_a_limit_nothing_is_overlong():
    assert encode([{"input_ids": list(range(1000))}], limit=None, overlong="error") == [list(range(1000))]


def test_tokens_cut_off_are_counted():
    block = block_of([{"input_ids": LONG}, {"input_ids": LONG[:3]}])
    cut, whole = encoder_of(overlong="truncate").encode(block, [0, 1])
    assert (cut.ids.tolist(), cut.truncated) == (LONG[: len(LONG) - 2], 2)
    assert whole.tolist() == LONG[:3]


@pytest.mark.parametrize("name", ["labels", "loss_mask"])
def test_an_example_without_any_target_is_left_out_or_kept_if_asked_for(name):
    row = {"input_ids": [1, 2, 3], name: [-100, -100, -100] if name == "labels" else [0, 0, 0]}
    assert encode([row]) == ["no_target"]
    assert encode([row], no_target="keep") == [([1, 2, 3], [0, 0, 0])]
    good = {"input_ids": [1, 2], name: [-100, 2] if name == "labels" else [0, 1]}
    assert refusal([good, row], no_target="error") == (
        "source 'src', shard 0, index 11: none of the 3 tokens is a target; pass no_target='drop' to leave such "
        "examples out, or no_target='keep'"
    )


def test_a_target_in_the_first_place_alone_is_none_since_nothing_predicts_it():
    assert encode([{"input_ids": [1, 2], "loss_mask": [1, 0]}]) == ["no_target"]


def test_truncation_that_leaves_no_target_is_no_target():
    row = {"input_ids": LONG, "loss_mask": [0] * 8 + [1, 1]}
    assert encode([row], overlong="truncate") == ["no_target"]
    assert encode([row], overlong="truncate", no_target="keep") == [(LONG[:8], [0] * 8)]
    assert refusal([{"input_ids": [1, 2], "loss_mask": [0, 1]}, row], overlong="truncate", no_target="error") == (
        "source 'src', shard 0, index 11: none of the 8 tokens is a target after 2 were cut off; pass no_target='drop' "
        "to leave such examples out, or no_target='keep'"
    )


def test_cutting_anywhere_is_refused_for_examples_with_a_mask_unless_asked_for():
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}]
    with pytest.raises(ValueError, match="packing='wrapped' cuts examples at row ends") as error:
        encode(rows, cuts_any=True)
    assert str(error.value).startswith("source 'src', shard 0, index 10: ")
    assert encode(rows, cuts_any=True, overlong="split") == [([1, 2], [0, 1])]
    assert encode([{"input_ids": [1, 2]}], cuts_any=True) == [[1, 2]]


# ---- lists and tables -------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
ROWS = st.lists(
    st.builds(
        lambda ids, targets: {
            "input_ids": ids,
            "labels": None
            if ids is None
            else [id if target else -100 for id, target in zip(ids, targets, strict=False)],
        },
        IDS | st.none() | st.lists(st.integers(-5, 5) | st.none(), max_size=5),
        st.lists(st.booleans(), min_size=10, max_size=12),  # sometimes too few for the ids
    ),
    min_size=1,
    max_size=6,
)
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64()))])


@given(ROWS, st.sampled_from([["input_ids"], ["input_ids", "labels"]]), st.sampled_from(["truncate", "drop", "split"]))
def test_lists_and_tables_of_the_same_data_give_the_same_tokens(rows, columns, overlong):
    table = pa.Table.from_pylist(rows, SCHEMA).select(columns)
    chosen = [{name: row[name] for name in columns} for row in rows]
    assert encode(table, bad="drop", overlong=overlong) == encode(chosen, bad="drop", overlong=overlong)


@given(ROWS, st.data())
def test_examples_of_token_ids_do_not_depend_on_those_encoded_with_them(rows, data):
    table = pa.Table.from_pylist(rows, SCHEMA)
    together = encode(table, bad="drop", overlong="truncate")
    alone = [encode(table.slice(row, 1), bad="drop", overlong="truncate")[0] for row in range(len(rows))]
    assert alone == together
    picks = data.draw(st.permutations(range(len(rows))))
    assert encode(rows, bad="drop", overlong="truncate", picks=picks) == [together[pick] for pick in picks]


# ---- identity ---------------------------------------------------------------------------------------------------


def fingerprint(tokenizer, **settings):
    return encoder_of(tokenizer, **settings).fingerprint()


def test_a_tokenizer_loaded_twice_has_the_same_fingerprint(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    used = word_tokenizer()
    used(["a", "b c"], truncation=True, max_length=1)
    expected = fingerprint(tokenizer)
    assert expected.startswith("7 tokens, ")
    for same in (
        word_tokenizer(),
        loaded,
        used,
        pickle.loads(pickle.dumps(tokenizer)),
        word_tokenizer(model_max_length=5),
    ):
        assert fingerprint(same) == expected


def test_another_tokenizer_has_another_fingerprint():
    prints = [
        fingerprint(word_tokenizer()),
        fingerprint(word_tokenizer("a b c e")),
        fingerprint(word_tokenizer("b a c d")),
        fingerprint(word_tokenizer("a b c d e")),
        fingerprint(word_tokenizer(adds="<s> $A")),
        fingerprint(word_tokenizer(eos_token="<s>")),
        fingerprint(byte_tokenizer()),
        fingerprint(None),
    ]
    assert len(set(prints)) == len(prints)


def test_a_vocabulary_with_holes_is_named_by_its_tokens_in_the_order_of_their_ids():
    def tokenizer_of(**vocabulary):
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **vocabulary}, unk_token="<unk>"))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")

    named = fingerprint(tokenizer_of(a=3, b=7))
    assert named.startswith("3 tokens, ")
    assert named == fingerprint(tokenizer_of(b=7, a=3))
    assert named != fingerprint(tokenizer_of(a=7, b=3))
    assert named != fingerprint(tokenizer_of(a=3, b=8))


class Rewriting(PreTrainedTokenizerFast):
    """A tokenizer of one's own, which does something before the Rust one is called: d is a."""

    def __call__(self, text, **settings):
        texts = text.replace("d", "a") if isinstance(text, str) else [one.replace("d", "a") for one in text]
        return super().__call__(texts, **settings)


def test_what_a_tokenizer_class_of_ones_own_does_is_done_to_each_text():
    tokenizer = Rewriting(tokenizer_object=word_tokenizer().backend_tokenizer, unk_token="<unk>", eos_token="</s>")
    encoder = encoder_of(tokenizer)
    for texts, expected in ((["a b c"] * 20 + ["d"], [[3, 4, 5, 2]] * 20 + [[3, 2]]), (["d d"], [[3, 3, 2]])):
        found = encoder.encode(block_of([{"text": text} for text in texts]), list(range(len(texts))))
        assert [one.tolist() for one in found] == expected


class OnlyPython:
    """A tokenizer whose vocabulary can only be had as a dict."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.get_vocab = tokenizer.get_vocab

    def __call__(self, text, **settings):
        return self.tokenizer(text, **settings)


def with_tokens(*tokens, added=()):
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(["<unk>", *tokens])}, "<unk>"))
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def with_ids(vocabulary):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "u")), unk_token="u")


@pytest.mark.parametrize(
    "tokenizer",
    [
        word_tokenizer(),
        byte_tokenizer(),
        with_tokens("a", "b", added=["<new>", "b", "of two words", "a\nb"]),
        with_tokens("a", "of two words", "b", added=["<new>"]),
        with_tokens("a", "a\nb", "b", added=["<new>"]),
        with_tokens("a", "", "b"),
        with_tokens(),
        with_ids({"u": 0, "a b": 1, "c": 3}),
        with_ids({"u": 0, "a b": 1, "c": 3, "d": 4}),
        with_ids({"u": 0, "c": 3, "a": 2}),
    ],
    ids=["words", "bytes", "added", "spaces", "lines", "empty", "one", "hole", "hidden hole", "plain hole"],
)
def test_the_fingerprint_does_not_depend_on_how_the_vocabulary_was_had(tokenizer):
    assert fingerprint(tokenizer) == fingerprint(OnlyPython(tokenizer))


def test_each_token_counts_in_the_fingerprint():
    tokens = [f"t{number}" for number in range(300)]
    prints = {fingerprint(with_tokens(*tokens, added=["<x>", "<y>"]))}
    prints |= {fingerprint(with_tokens(*tokens, added=added)) for added in (["<x>", "<z>"], ["<y>", "<x>"], ["<x>"])}
    prints |= {fingerprint(with_tokens(*tokens[:n], "new", *tokens[n + 1 :], added=["<x>", "<y>"])) for n in range(300)}
    assert len(prints) == 304


def test_a_tokenizer_that_prepares_text_otherwise_has_another_fingerprint():
    plain, lower = word_tokenizer(), word_tokenizer(lowercase=True)
    assert plain("A")["input_ids"] != lower("A")["input_ids"]
    assert fingerprint(plain) != fingerprint(lower)


def test_an_encoder_survives_pickling():
    encoder = pickle.loads(pickle.dumps(encoder_of(word_tokenizer())))
    assert [one.tolist() for one in encoder.encode(block_of([{"text": "a b"}]), [0])] == [[3, 4, 2]]
