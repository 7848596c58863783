"""Byte-level tokenizers (GPT-2, Llama 3, Qwen ...): each token stands for the same bytes wherever it is, so the places
of tokens in a text are sums of their lengths, and the tokenizer need not keep account of them (a fifth of its time).

With tokens "Hel" "lo" " world" the lengths are 3, 2, 6 and the ends 3, 5, 11: the character 5 is in the third token.
"""

import json
import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.spans import ByteEncoding

_UNKNOWN = 1 << 40
"""A length with which no sum is that of a text."""
_PLAIN_PARTS = ("ByteLevel", "Split", "Digits", "Punctuation")


class ByteLengths:
    """How many bytes each token of a byte-level tokenizer stands for."""

    def __init__(self, lengths: npt.NDArray[np.int64], *, composes: bool) -> None:
        self._lengths = lengths
        self._composes = composes

    @staticmethod
    def of(backend: Any) -> "ByteLengths | None":
        """Those of a `tokenizers.Tokenizer`; None if it is not known to keep every byte of a text in its tokens."""
        added = backend.get_added_tokens_decoder()
        normalizer = _settings(backend.normalizer)
        composes = normalizer.get("type") == "NFC"
        if (normalizer and not composes) or not _splits_into_bytes(backend) or _takes_more(backend.model, added):
            return None
        if composes and any(not unicodedata.is_normalized("NFC", token.content) for token in added.values()):
            return None  # they stand for what they become
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if any(char not in vocabulary for char in _alphabet()):
            return None
        lengths = np.zeros(max([*vocabulary.values(), *added]) + 2, dtype=np.int64)
        lengths[-1] = _UNKNOWN
        for token, number in vocabulary.items():
            lengths[number] = len(token)  # one character for each byte
        for number, token in added.items():
            lengths[number] = len(token.content.encode())
        return ByteLengths(lengths, composes=composes)

    def encoding(self, text: str, ids: list[int]) -> ByteEncoding | None:
        """The tokens of a text with their places; None where they do not hold exactly its bytes."""
        is_ascii = text.isascii()
        if self._composes and not is_ascii and not unicodedata.is_normalized("NFC", text):
            return None
        tokens = np.array(ids, dtype=np.int32)
        ends = self._lengths.take(tokens, mode="clip").cumsum()  # of tokens that were added since: _UNKNOWN
        size = len(text) if is_ascii else len(text.encode())
        if (int(ends[-1]) if len(ends) else 0) != size:
            return None
        return ByteEncoding(text=text, ids=tokens, ends=ends, is_ascii=is_ascii)


def _splits_into_bytes(backend: Any) -> bool:
    """Whether the text is cut into bytes, none left out or added before."""
    settings = _settings(backend.pre_tokenizer)
    parts = settings.get("pretokenizers", [settings])
    return (
        all(part.get("type") in _PLAIN_PARTS and part.get("behavior") != "Removed" for part in parts)
        and any(part["type"] == "ByteLevel" for part in parts[-1:])
        and not any(part.get("add_prefix_space") for part in parts)
    )


def _takes_more(model: Any, added: dict[int, Any]) -> bool:
    """Whether tokens stand for other bytes than they show: marks of words, or white space around special tokens."""
    marks = [getattr(model, name, "?") for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    return any(marks) or any(token.lstrip or token.rstrip for token in added.values())


def _settings(part: Any) -> dict[str, Any]:
    """The settings of a normalizer or pre-tokenizer: {} for None."""
    if part is None:
        return {}
    try:
        settings: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # one that is written in Python has none, and says so by a bare Exception
        return {"type": "unknown"}
    return settings


def _alphabet() -> list[str]:
    """The characters that stand for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())
