"""Rows as text."""

import pytest

from streampack import PackedDataset, show_row
from streampack.show import Stretch, _shortened, stretches

from .streams import Shards
from .tiny_tokenizers import byte_tokenizer, word_tokenizer


def first_row(rows, tokenizer=None, **settings):
    settings = {"lanes": 1, "shuffle": False, "packing": "next_fit"} | settings
    return next(iter(PackedDataset(Shards([rows]), tokenizer, **settings)))


def test_a_row_shows_its_examples_targets_and_padding():
    row = first_row([{"text": "a b c"}, {"text": "d"}], word_tokenizer(), seq_len=8)
    assert show_row(row, word_tokenizer()) == (
        "2 examples, 6 of 8 tokens, 4 targets\n"
        "[1] 1 lists, shard 0, 0\n"
        "a« b c </s>»\n"
        "[2] 1 lists, shard 0, 1\n"
        "d« </s>»\n"
        "[padding] 2 cells"
    )


def test_without_a_tokenizer_the_token_ids_are_shown_and_prompts_are_no_targets():
    row = first_row([{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 0]}], seq_len=4)
    assert show_row(row) == "1 example, 4 of 4 tokens, 1 target\n[1] 1 lists, shard 0, 0\n5 6 «7 »8"
    assert stretches(row) == [Stretch(0, False, "5 6 ", 2), Stretch(0, True, "7 ", 1), Stretch(0, False, "8", 1)]


def test_text_that_is_cut_between_tokens_and_targets_is_the_text():
    text = "été: 日本 🙂 one on none"
    tokenizer = byte_tokenizer()
    row = first_row([{"text": text}], tokenizer, seq_len=64)
    shown = stretches(row, tokenizer)
    assert [(one.example, one.is_target) for one in shown] == [(0, False), (0, True), (-1, False)]
    assert shown[1].text.endswith("té: 日本 🙂 one on none</s>")


def test_padding_inside_of_a_segment_is_shown_as_padding():
    row = first_row([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], seq_len=8, pad_to_multiple_of=4)
    assert stretches(row) == [
        Stretch(0, False, "5 ", 1),
        Stretch(0, True, "6 7", 2),
        Stretch(-1, False, "", 1),
        Stretch(1, False, "8 ", 1),
        Stretch(1, True, "9", 1),
        Stretch(-1, False, "", 2),
    ]


def test_long_text_loses_its_middle():
    row = first_row([{"input_ids": list(range(10, 40))}], seq_len=32)
    assert stretches(row, characters=11)[1].text == "11 12 [... 76 characters ...] 38 39"
    assert "characters" not in show_row(row, characters=None)


@pytest.mark.parametrize("characters", [1, 2, 3])
def test_a_text_that_would_lose_nothing_stays_whole(characters):
    for text in ("a", "ab", "abc", "abcd"):
        shown = _shortened(text, characters)
        assert shown == text or "[... 0" not in shown
