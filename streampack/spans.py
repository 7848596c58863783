"""Spans: which tokens hold characters of the parts of a text that are targets.

A token is a target if it holds at least one character of a span. So a token that merges over the border, holding
characters of the prompt and of the answer, is one: it must be predicted for the answer to begin.

    text     "2+2=" and " 4!", so the span is (4, 7)
    tokens   2  +  2  =_  4!
    targets  0  0  0  1   1
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""The characters from the first number up to, and without, the second."""
Mask = npt.NDArray[np.bool_]


class MergedTokens(ValueError):
    """A token holds characters of both sides of a border, and its tokenizer does not say which one it is."""


def mask_of(encoding: "Any | ByteEncoding | PlainEncoding", spans: Sequence[Span]) -> Mask:
    """The targets among the tokens of a text: bool [tokens].

    Args:
        encoding: of a fast tokenizer (a `tokenizers.Encoding`, which knows the characters of each token), of a
            byte-level one, or plain.
        spans: in order, none overlapping another.

    Raises:
        MergedTokens: only of a plain encoding.
    """
    mask = np.zeros(len(encoding), dtype=np.bool_)
    for start, end in spans:
        if start < end:
            mask[_tokens(encoding, start, end)] = True
    return mask


def _tokens(encoding: "Any | ByteEncoding | PlainEncoding", start: int, end: int) -> slice:
    """The tokens that hold a character of a span: from the first that ends after its start, to the last that begins
    before its end. (The encoding is asked for single tokens: to make a list of all their places takes much longer.)"""
    if isinstance(encoding, PlainEncoding):
        return slice(encoding.border(start), encoding.border(end))
    if isinstance(encoding, ByteEncoding):
        return encoding.tokens(start, end)
    chars = encoding.token_to_chars
    first, after = encoding.char_to_token(start), len(encoding)
    last = chars(after - 1) if after else None
    if first is not None and last is not None and last[0] < end:  # to the end of the text: most often
        return slice(first, after)
    following = encoding.char_to_token(end)
    if first is not None and following is not None and chars(following)[0] == end:  # next often
        return slice(first, following)
    own = _own_tokens(encoding)
    if first is None:  # white space that no token holds
        first = own.start + bisect.bisect_right(own, start, key=lambda token: chars(token)[1])
    return slice(first, own.start + bisect.bisect_left(own, end, key=lambda token: chars(token)[0]))


def _own_tokens(encoding: Any) -> range:
    """The tokens of the text itself: those that the tokenizer added are at no characters."""
    first, after = 0, len(encoding)
    while first < after and encoding.token_to_chars(first) is None:
        first += 1
    while first < after and encoding.token_to_chars(after - 1) is None:
        after -= 1
    return range(first, after)


def trailing_specials(encoding: "Any | PlainEncoding") -> int:
    """How many tokens at the end the tokenizer added to the text, such as EOS."""
    mask: list[int] = encoding.special_tokens_mask
    return next((place for place, special in enumerate(reversed(mask)) if not special), len(mask))


@dataclass(slots=True, kw_only=True)
class ByteEncoding:
    """The tokens of a text by a byte-level tokenizer, without tokens that it adds."""

    text: str
    ids: npt.NDArray[np.int32]
    """int32 [tokens]"""
    ends: npt.NDArray[np.int64]
    """int64 [tokens]: bytes of the text up to the end of each token."""
    is_ascii: bool
    """Each character of the text is one byte."""

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, start: int, end: int) -> slice:
        """The tokens that hold a byte of the characters from `start` up to `end`, which is more than that."""
        if not self.is_ascii:
            start, end = len(self.text[:start].encode()), len(self.text[:end].encode())
        return slice(int(self.ends.searchsorted(start, "right")), 1 + int(self.ends.searchsorted(end, "left")))


@dataclass(slots=True, kw_only=True)
class PlainEncoding:
    """The tokens of a text by a tokenizer that is not a fast one, and does not know the characters of each."""

    text: str
    ids: list[int]
    special_tokens_mask: list[int]
    """1 where the tokenizer added a token to the text."""
    tokenize: Callable[[str], list[int]]
    """The ids of a text alone."""

    def __len__(self) -> int:
        return len(self.ids)

    def border(self, at: int) -> int:
        """How many tokens come before a character, if the text before it has the same tokens when it stands alone."""
        added = next((place for place, special in enumerate(self.special_tokens_mask) if not special), 0)
        before = self.tokenize(self.text[:at])
        if self.ids[added : added + len(before)] != before:
            raise MergedTokens(
                f"a token may merge over the border after {self.text[max(0, at - 20) : at]!r}, and this tokenizer does "
                "not say which characters a token holds; use the fast one of the same model, or pass targets='all'"
            )
        return added + len(before)
