"""Texts to tokens: the calls of the tokenizer, one for many texts, and examples with a column of text."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from streampack.arguments import packages_of
from streampack.byte_level import ByteLengths
from streampack.sources import Fault, FaultReason
from streampack.spans import Mask, PlainEncoding
from streampack.tables import Block, Hint
from streampack.token_ids import Encoded, show

_PROBE = "Hello  WORLD,\n\tdon't 12345 été ﬁ 日本 🙂"
_PROBES = [_PROBE, f" {_PROBE.upper()} "]
_T = TypeVar("_T")


class TextTokenizer:
    """A Transformers tokenizer, called for many texts at once, and its special tokens.

    Args:
        tokenizer: of Transformers, fast or not.
        append_eos: "auto": end each text with eos_token_id where the tokenizer has one and the ids do not end with it
            already; True: the same, but a tokenizer without one is an error; False: as the tokenizer makes them.
    """

    def __init__(self, tokenizer: Any, *, append_eos: bool | str) -> None:
        self.tokenizer = tokenizer
        self.eos = getattr(tokenizer, "eos_token_id", None) if append_eos else None
        if append_eos is True and self.eos is None:
            raise ValueError("append_eos=True, but the tokenizer has no eos_token_id; set tokenizer.eos_token")
        self.bos = getattr(tokenizer, "bos_token_id", None)
        self._specials: list[int] | None = None
        # Whether the Rust tokenizer inside, which is about a sixth faster, gives the ids of the Python one around it,
        # as it does for the classes of Transformers. Tried with and without special tokens, on texts that are the same
        # in all processes, so that none decides otherwise than the others.
        self._backend_is_enough: dict[bool, bool] = {}
        self._is_of_transformers = packages_of(tokenizer) <= {"transformers", "builtins"}
        self._untrimmed: Any = None

    def ids(self, texts: list[str], *, specials: bool) -> list[list[int]]:
        """Token ids of texts.

        specials: add the special tokens that the tokenizer adds to a text (not to one that a chat template made).
        """
        if not texts:
            return []
        if self._calls_backend(specials):
            return self._ids_of_backend(texts, specials)
        return list(self._call(texts, specials)["input_ids"])

    def encodings(self, texts: list[str], *, specials: bool) -> list[Any]:
        """The same as `tokenizers.Encoding`s, which know the characters of each token (or `ByteEncoding`s, which are
        quicker to be had, or `PlainEncoding`s)."""
        if not texts:
            return []
        if self._calls_backend(specials):
            return self._by_bytes(texts) if not specials and self._byte_lengths else self._by_places(texts, specials)
        if getattr(self.tokenizer, "is_fast", False) and not _trimming(self.tokenizer.backend_tokenizer)[1]:
            return list(self._call(texts, specials).encodings)
        alone = self.ids(texts, specials=False)
        whole = self.ids(texts, specials=True) if specials else alone
        return [
            PlainEncoding(text=text, ids=ids, special_tokens_mask=_added(ids, own), tokenize=self._tokenize)
            for text, ids, own in zip(texts, whole, alone, strict=True)
        ]

    def _by_places(self, texts: list[str], specials: bool) -> list[Any]:
        if self._untrimmed is None:
            self._untrimmed = untrimmed(self.tokenizer.backend_tokenizer)
        return list(self._untrimmed.encode_batch(texts, add_special_tokens=specials))

    def _by_bytes(self, texts: list[str]) -> list[Any]:
        lengths = self._byte_lengths
        assert lengths is not None
        ids = self._ids_of_backend(texts, specials=False)
        encodings = [lengths.encoding(text, one) for text, one in zip(texts, ids, strict=True)]
        left = [text for text, one in zip(texts, encodings, strict=True) if one is None]
        others = iter(self._by_places(left, specials=False) if left else [])
        return [next(others) if one is None else one for one in encodings]

    @cached_property
    def _byte_lengths(self) -> ByteLengths | None:
        return ByteLengths.of(self.tokenizer.backend_tokenizer)

    def _tokenize(self, text: str) -> list[int]:
        return self.ids([text], specials=False)[0]

    def _calls_backend(self, specials: bool) -> bool:
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if not self._is_of_transformers or not hasattr(backend, "encode_batch_fast"):
            return False
        if backend.truncation is not None or backend.padding is not None:
            return False
        if specials not in self._backend_is_enough:
            called = list(self._call(_PROBES, specials)["input_ids"])
            self._backend_is_enough[specials] = called == self._ids_of_backend(_PROBES, specials)
        return self._backend_is_enough[specials]

    def _ids_of_backend(self, texts: list[str], specials: bool) -> list[list[int]]:
        found = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=specials)
        return [encoding.ids for encoding in found]

    def _call(self, texts: list[str], specials: bool) -> Any:
        """truncation=False: over-long examples are this library's business; verbose=False silences only the warning
        about them."""
        return self.tokenizer(
            texts,
            add_special_tokens=specials,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )

    def framed(self, ids: list[int], targets: Mask | None = None) -> Encoded:
        """The tokens of a text with end-of-sequence once, which is a target, and beginning-of-sequence not twice (where
        the text has it already)."""
        if self._specials is None:
            self._specials = list(self.tokenizer("", verbose=False)["input_ids"])
        if len(ids) <= len(self._specials):  # nothing of the text itself
            return Encoded(np.zeros(0, dtype=np.int32), None)
        if self.eos is not None and self._specials[-1:] == [self.eos] and ids[-2:] == [self.eos, self.eos]:
            ids = ids[:-1]  # the text has it already, and the tokenizer has added it
            targets = None if targets is None else targets[:-1]
        if self.eos is not None and ids[-1] != self.eos:
            ids.append(self.eos)
            targets = None if targets is None else np.append(targets, True)
        if self.bos is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos:
            ids = ids[1:]
            targets = None if targets is None else targets[1:]
        return Encoded(np.array(ids, dtype=np.int32), targets)


class TextReader:
    """Reads examples with a column of text: every token is a target."""

    def __init__(self, tokenizer: TextTokenizer, *, column: str, hint: Hint) -> None:
        self.tokenizer = tokenizer
        self.column = column
        self.hint = hint

    def read(self, block: Block, picks: Sequence[int]) -> Iterable[Encoded | Fault]:
        """The tokens of the picked examples, or what is wrong with them."""
        values = block.take(self.column, picks, hint=self.hint)
        texts = [value if isinstance(value, str) else not_text(self.column, value) for value in values]
        found = for_texts(texts, lambda those: self.tokenizer.ids(those, specials=True), name=self.column)
        return (one if isinstance(one, Fault) else self.tokenizer.framed(one) for one in found)


def not_text(column: str, value: Any) -> Fault:
    """What is wrong with a value that should be text."""
    if isinstance(value, Fault):
        return value
    reason: FaultReason = "null" if value is None else "malformed" if isinstance(value, str) else "type"
    return Fault(reason, f"{column!r} is {show(value)}, not text")


def for_texts(
    texts: Sequence[str | Fault], call: Callable[[list[str]], Iterable[_T]], *, name: str
) -> list[_T | Fault]:
    """What one call gives for all texts, and the faults in their places. Texts that are not Unicode are faults, too.

    name: of their column.
    """
    usable = [text for text in texts if isinstance(text, str)]
    try:
        found = iter(call(usable))
    except (TypeError, UnicodeError):  # lone surrogates, which are no text: find them, and go on without
        texts = [not_text(name, text) if isinstance(text, str) and not _is_unicode(text) else text for text in texts]
        good = [text for text in texts if isinstance(text, str)]
        if len(good) == len(usable):
            raise
        found = iter(call(good))
    return [text if isinstance(text, Fault) else next(found) for text in texts]


def _added(ids: list[int], own: list[int]) -> list[int]:
    """1 for ids that the tokenizer added around those of the text itself, 0 for these."""
    for before in range(len(ids) - len(own) + 1):
        if ids[before : before + len(own)] == own:
            return [1] * before + [0] * len(own) + [1] * (len(ids) - before - len(own))
    return [0] * len(ids)


def untrimmed(backend: Any) -> Any:
    """A `tokenizers.Tokenizer` that gives the same ids, each with all of its characters: some leave the white space at
    a token's ends out (trim_offsets), and would leave the indentation of an answer's first line out with it."""
    processor, trimming = _trimming(backend)
    if not trimming:
        return backend
    for one in trimming:
        one["trim_offsets"] = False
    same = type(backend).from_str(json.dumps({**json.loads(backend.to_str()), "post_processor": processor}))
    same.encode_special_tokens = backend.encode_special_tokens  # which is not saved
    return same


def _trimming(backend: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a post-processor, and the parts of them that trim."""
    if backend.post_processor is None:
        return {}, []
    settings = json.loads(backend.post_processor.__getstate__())
    return settings, [one for one in (settings, *settings.get("processors", [])) if one.get("trim_offsets")]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fingerprint(tokenizer: Any) -> str:
    """Names a tokenizer by what decides the ids: vocabulary, special tokens and what it makes of a probe."""
    found = _vocabulary(tokenizer)
    own = " ".join(f"{token} {token.swapcase()}" for token in found.some)
    framing, *probe = (tokenizer(text, verbose=False)["input_ids"] for text in ("", _PROBE, own))
    eos = getattr(tokenizer, "eos_token_id", None)
    digest = hashlib.sha256(found.lines.encode(errors="surrogatepass"))
    digest.update(repr((framing, probe, eos, found.last)).encode())
    return f"{found.size} tokens, {digest.hexdigest()[:16]}"


class _Vocabulary(NamedTuple):
    lines: str
    """The tokens by their ids, each on a line."""
    size: int
    some: list[str]
    """About 50 of them."""
    last: list[int]
    """The last id, if there is one."""


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "id_to_token"):  # each way takes about half of the time of the next one
        size, token_of = backend.get_vocab_size(), backend.id_to_token
        lines, some = _lines_of_model(getattr(backend, "model", None)), list(map(token_of, _some(size)))
        added = list(map(token_of, range(lines.count("\n") + 1, size)))
        if lines and None not in [*some, *added, token_of(size - 1)]:
            return _Vocabulary("\n".join([lines, *added]), size, some, [size - 1])
        tokens = list(map(token_of, range(size)))
        if tokens and None not in tokens:
            return _Vocabulary("\n".join(tokens), size, some, [size - 1])
    ids = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    tokens = sorted(ids, key=ids.__getitem__)
    last = sorted(ids.values())[-1:]
    return _Vocabulary("\n".join(tokens), len(tokens), [tokens[n] for n in _some(len(tokens))], last)


def _some(size: int) -> range:
    return range(0, size, max(1, size // 50))


def _lines_of_model(model: Any) -> str:
    """The tokens of a model by one call, each on a line; nothing where they hold spaces or line ends, or where its ids
    are not 0, 1, 2, ..."""
    from tokenizers import Tokenizer, models

    if not isinstance(model, models.Model):
        return ""
    bare = Tokenizer(model)  # without a decoder, which would change them
    size = bare.get_vocab_size()
    spaced: str = bare.decode(range(size), skip_special_tokens=False)
    return spaced.replace(" ", "\n") if spaced.count(" ") == size - 1 and "\n" not in spaced else ""
