"""Tokens that hold characters of spans."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from streampack.spans import MergedTokens, PlainEncoding, mask_of, trailing_specials

from .tiny_tokenizers import byte_tokenizer


def letters(*merges: str) -> Tokenizer:
    """Each letter is a token, but for merges: "a b" makes one token of ab."""
    tokens = [*"abcdexyz !\n", *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))


def shown(tokenizer: Tokenizer, text: str, *spans: tuple[int, int]) -> str:
    """The tokens, targets in capitals."""
    encoding = tokenizer.encode(text)
    mask = mask_of(encoding, spans)
    tokens = [text[first:last] for first, last in encoding.offsets]
    return "|".join(token.upper() if target else token for token, target in zip(tokens, mask, strict=True))


def test_the_tokens_of_a_span_are_targets() -> None:
    assert shown(letters(), "abcde", (1, 3), (4, 5)) == "a|B|C|d|E"
    assert shown(letters("b c"), "abcde", (1, 3)) == "a|BC|d|e"
    assert shown(letters(), "abc", (0, 3)) == "A|B|C"


def test_a_token_that_merges_over_a_border_is_a_target_at_both_ends() -> None:
    assert shown(letters("a b"), "xabx", (2, 4)) == "x|AB|X"
    assert shown(letters("a b"), "xabx", (0, 2)) == "X|AB|x"
    assert shown(letters("a b", "ab c"), "xabcx", (2, 3)) == "x|ABC|x"


def test_an_empty_span_has_no_targets_not_even_inside_of_a_token() -> None:
    assert shown(letters("a b"), "xabx", (2, 2), (4, 4)) == "x|ab|x"
    assert shown(letters(), "abc") == "a|b|c"


def test_all_tokens_of_a_character_at_a_border_are_on_its_side() -> None:
    tokenizer = byte_tokenizer()
    text = "a🙂é🙂b"
    assert [chars for _, chars in tokens_at(tokenizer, text)] == [(0, 1)] + 4 * [(1, 2)] + 2 * [(2, 3)] + 4 * [
        (3, 4)
    ] + [(4, 5)]
    encoding = tokenizer(text).encodings[0]
    assert mask_of(encoding, [(2, 3)]).astype(int).tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert mask_of(encoding, [(1, 2), (3, 4)]).astype(int).tolist() == [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]


def tokens_at(tokenizer: Any, text: str) -> list[tuple[str, tuple[int, int]]]:
    encoding = tokenizer(text).encodings[0]
    return list(zip(encoding.tokens, encoding.offsets, strict=True))


def test_white_space_that_no_token_holds_moves_no_border() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert shown(words, "a b c", (1, 3)) == "a|B|c"
    assert shown(words, "a b c", (2, 4)) == "a|B|c"
    assert shown(words, "a  b ", (2, 5)) == "a|B"
    assert shown(words, "a  ", (1, 3)) == "a"


def test_a_tokenizer_that_leaves_the_space_out_of_a_words_place_gives_the_word_to_the_span_that_holds_it() -> None:
    tokenizer = byte_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    text = "the then\n there"
    assert tokens_at(tokenizer, text) == [("the", (0, 3)), ("Ġthen", (4, 8)), ("Ċ", (8, 9)), ("Ġthere", (10, 15))]
    encoding = tokenizer(text).encodings[0]
    assert mask_of(encoding, [(3, 9)]).astype(int).tolist() == [0, 1, 1, 0]
    assert mask_of(encoding, [(8, 15)]).astype(int).tolist() == [0, 0, 1, 1]


def test_tokens_that_the_tokenizer_adds_are_in_no_span() -> None:
    tokenizer = letters()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s> </s>", pair=None, special_tokens=[("<s>", 11), ("</s>", 12)]
    )
    encoding = tokenizer.encode("abc")
    assert encoding.ids == [11, 0, 1, 2, 12, 12]
    assert mask_of(encoding, [(0, 3)]).astype(int).tolist() == [0, 1, 1, 1, 0, 0]
    assert mask_of(encoding, [(1, 2)]).astype(int).tolist() == [0, 0, 1, 0, 0, 0]
    assert trailing_specials(encoding) == 2
    assert trailing_specials(tokenizer.encode("abc", add_special_tokens=False)) == 0
    assert mask_of(tokenizer.encode(""), [(0, 1)]).tolist() == [False] * 3


TEXT = st.text(st.sampled_from("ab the🙂é \n"), min_size=1, max_size=20)
BYTES = byte_tokenizer()


@given(TEXT, st.data())
def test_a_token_is_a_target_if_and_only_if_it_holds_a_character_of_a_span(text: str, data: Any) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    encoding = BYTES(text).encodings[0]
    expected = [
        any(start < end and first < end and last > start for start, end in spans) for first, last in encoding.offsets
    ]
    assert mask_of(encoding, spans).tolist() == expected


def plain(text: str, ids: list[int], alone: dict[str, list[int]], *, special: list[int]) -> PlainEncoding:
    return PlainEncoding(text=text, ids=ids, special_tokens_mask=special, tokenize=alone.__getitem__)


def test_without_places_of_tokens_a_border_is_after_the_tokens_of_the_text_before_it() -> None:
    encoding = plain("abcd", [9, 1, 2, 3, 8], {"": [], "ab": [1], "abc": [1, 2]}, special=[1, 0, 0, 0, 1])
    assert mask_of(encoding, [(2, 3)]).astype(int).tolist() == [0, 0, 1, 0, 0]
    assert mask_of(encoding, [(0, 2)]).astype(int).tolist() == [0, 1, 0, 0, 0]
    assert trailing_specials(encoding) == 1


def test_without_places_of_tokens_a_merge_over_the_border_is_refused() -> None:
    encoding = plain("abcd", [1, 5, 4], {"ab": [1, 2], "abcd": [1, 5, 4]}, special=[0, 0, 0])
    with pytest.raises(MergedTokens, match=r"a token may merge over the border after 'ab'.* use the fast one"):
        mask_of(encoding, [(2, 4)])


class Watched:
    """An encoding that counts the tokens it is asked for, and has no list of all places."""

    def __init__(self, encoding: Any) -> None:
        self.ids, self.char_to_token = encoding.ids, encoding.char_to_token
        self.encoding = encoding
        self.asked = 0

    def __len__(self) -> int:
        return len(self.encoding)

    def token_to_chars(self, token: int) -> Any:
        self.asked += 1
        return self.encoding.token_to_chars(token)


def test_single_tokens_are_asked_for_and_no_list_of_all_places() -> None:
    watched = Watched(BYTES("the then there " * 50).encodings[0])
    assert mask_of(watched, [(15, 30)]).sum() == 4
    assert 0 < watched.asked < 15
