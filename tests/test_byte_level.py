"""Places of tokens by the lengths of their bytes: the same as those that the tokenizer keeps account of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from streampack.byte_level import ByteLengths
from streampack.spans import mask_of

from .tiny_tokenizers import byte_tokenizer

WORDS_AND_NUMBERS = r" ?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"


def tokenizer_like(
    *, normalizer: Any = None, before: Any = (), prefix_space: bool = False, special: Any = "<|im_start|>"
) -> Tokenizer:
    """Byte-level BPE, its text split by a pattern first, with a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    parts = [*before, pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the theme then there é été 🙂🙃 one on\n\nnone done"] * 3, trainer)
    tokenizer.add_special_tokens([special])
    return tokenizer


def with_pre_tokenizer(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = tokenizer_like()
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


SPLIT = pre_tokenizers.Split(Regex(WORDS_AND_NUMBERS), "isolated")
TOKENIZERS = {
    "plain": byte_tokenizer().backend_tokenizer,
    "split": tokenizer_like(before=[SPLIT]),
    "split, composed": tokenizer_like(before=[SPLIT], normalizer=normalizers.NFC()),
    "digits": tokenizer_like(before=[pre_tokenizers.Digits(individual_digits=True)]),
}
PIECES = ["the ", "then", "é", "e\u0301", "🙂", "\n", " ", "12", "日本", "\u0344", "<|im_start|>", "none", "\x00"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def lengths_of(tokenizer: Tokenizer) -> ByteLengths:
    lengths = ByteLengths.of(tokenizer)
    assert lengths is not None
    return lengths


def test_a_token_is_where_the_bytes_of_those_before_it_end() -> None:
    tokenizer = byte_tokenizer().backend_tokenizer
    text = "the then🙂 done</s>"
    ids = tokenizer.encode(text).ids
    encoding = lengths_of(tokenizer).encoding(text, ids)
    assert encoding is not None
    assert encoding.ids.tolist() == ids
    assert encoding.ends.tolist() == [3, 8, 9, 10, 11, 12, 17, 21]
    assert [tokenizer.id_to_token(token) for token in ids][-2:] == ["Ġdone", "</s>"]
    assert mask_of(encoding, [(8, 9)]).astype(int).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]  # the four bytes of a smile
    assert mask_of(encoding, [(4, 5), (14, 18)]).astype(int).tolist() == [0, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, data=st.data())
def test_the_targets_are_those_by_the_places_that_the_tokenizer_keeps(name: str, text: str, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    by_places = tokenizer.encode(text)
    by_bytes = lengths_of(tokenizer).encoding(text, by_places.ids)
    if by_bytes is None:
        assert name == "split, composed"
        assert normalizers.NFC().normalize_str(text) != text
    else:
        assert len(by_bytes) == len(by_places)
        assert mask_of(by_bytes, spans).tolist() == mask_of(by_places, spans).tolist()


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_like(normalizer=normalizers.Lowercase()),
        tokenizer_like(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        tokenizer_like(prefix_space=True),
        tokenizer_like(before=[pre_tokenizers.Split(" ", "removed")]),
        tokenizer_like(before=[pre_tokenizers.Metaspace()]),
        tokenizer_like(special=AddedToken("<|end|>", rstrip=True)),
        tokenizer_like(special=AddedToken("e\u0301", normalized=True), normalizer=normalizers.NFC()),
        with_pre_tokenizer(None),
        with_pre_tokenizer(pre_tokenizers.Sequence([])),
        with_pre_tokenizer(pre_tokenizers.PreTokenizer.custom(object())),
        tokenizer_like(normalizer=normalizers.Normalizer.custom(object())),
        Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
        Tokenizer(models.BPE({"a": 0, "b": 1}, [])),
    ],
    ids=[
        *("lowercase", "strip", "prefix space", "removed", "metaspace", "rstrip", "decomposed", "none", "empty"),
        *("custom", "custom normalizer", "words", "letters"),
    ],
)
def test_a_tokenizer_that_may_lose_or_add_bytes_keeps_account_itself(tokenizer: Tokenizer) -> None:
    assert ByteLengths.of(tokenizer) is None


def test_marks_of_the_ends_of_words_are_no_bytes() -> None:
    tokenizer = tokenizer_like()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.model = models.BPE(vocabulary, [], end_of_word_suffix="</w>")
    assert ByteLengths.of(tokenizer) is None


def test_a_vocabulary_without_some_bytes_is_left_to_the_tokenizer() -> None:
    tokenizer = tokenizer_like()
    tokenizer.model = models.BPE({"a": 0, "b": 1}, [])
    assert ByteLengths.of(tokenizer) is None


def test_a_token_that_was_added_since_has_no_length_and_is_left_to_the_tokenizer() -> None:
    tokenizer = tokenizer_like()
    lengths = lengths_of(tokenizer)
    tokenizer.add_tokens(["streampack"])
    ids = tokenizer.encode("the streampack").ids
    assert lengths.encoding("the streampack", ids) is None
    # Nor is the length of one taken for that of another: these two together are as long as twice the last one known.
    tokenizer.add_tokens(["<|a_start|>", "<|_the_end|>"])
    text = "<|a_start|>the<|_the_end|>"
    assert lengths.encoding(text, tokenizer.encode(text).ids) is None
    encoding = lengths_of(tokenizer).encoding("the streampack", ids)
    assert encoding is not None
    assert encoding.ends.tolist()[-1] == 14
