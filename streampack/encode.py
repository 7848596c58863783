"""Encoding: from examples (a text column, or token ids) to ids in int32 and, where not all are targets, a mask.

What cannot be used is left out by a named policy and counted by its reason: `empty` (no tokens), `no_target` (labels or
a mask that leave nothing to learn), `overlong` (more than max_example_len tokens), `bad` (see `sources.FAULTS`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from streampack.sources import Fault, FaultReason
from streampack.tables import Block, Chunk, missing
from streampack.token_ids import IDS_HINT, Encoded, IdReader, needed, show

Overlong = Literal["auto", "split", "truncate", "drop", "error"]
Reason = Literal["empty", "no_target", "overlong"]

TEXT_HINT = "pass text_column='...'"
_PROBE = "Hello  WORLD,\n\tdon't 12345 été ﬁ 日本 🙂"
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What to do with examples that do not go into rows as they are."""

    overlong: Overlong = "auto"
    empty: Literal["drop", "error"] = "drop"
    no_target: Literal["drop", "keep", "error"] = "drop"
    bad: Literal["drop", "error"] = "error"


class Encoder:
    """Encodes examples of a block; pure, example by example, so any batching gives the same tokens.

    Args:
        tokenizer: a Transformers tokenizer, or None for examples that have `input_ids`.
        text_column: the column of text, with a tokenizer.
        append_eos: "auto": append eos_token_id where the tokenizer has one and the ids do not end with it already;
            True: the same, but a tokenizer without one is an error; False: leave the ids as the tokenizer makes them.
        limit: tokens an example may have (before `split` cuts it); None: any number.
        vocab_size: of examples that have `input_ids`: ids from it on are bad; None: any id.
        cuts_any: packing may cut examples of any length (`wrapped`), as well as `split` those over the limit.
        policies: what to do with the rest.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        text_column: str,
        append_eos: bool | Literal["auto"],
        limit: int | None,
        policies: Policies,
        cuts_any: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.text_column = text_column
        self.limit = limit
        self.policies = policies
        self.cuts_any = cuts_any
        self.eos = getattr(tokenizer, "eos_token_id", None) if append_eos else None
        if append_eos is True and self.eos is None:
            raise ValueError("append_eos=True, but the tokenizer has no eos_token_id; set tokenizer.eos_token")
        self.bos = getattr(tokenizer, "bos_token_id", None)
        self.vocab_size = vocab_size
        self._id_reader = IdReader(vocab_size=vocab_size)
        self._specials: int | None = None
        # Whether the Rust tokenizer inside gives the ids of the Python one around it, as it does unless that one is
        # special; it is about a sixth faster. Found out on the first batch.
        self._backend_is_enough: bool | None = None
        self._fingerprint: str | None = None

    @property
    def batch(self) -> int:
        """Examples to encode at a time: enough to keep a tokenizer's threads busy, few enough that the first row after
        a resume does not wait for a whole block. Token ids are only looked up, a block at once."""
        return 128 if self.tokenizer is not None else 1 << 30

    def select(self, table: pa.Table) -> Chunk:
        """A table with the columns that are looked at. Without the one that must be there its examples are faults."""
        must, hint = (self.text_column, TEXT_HINT) if self.tokenizer is not None else ("input_ids", IDS_HINT)
        if must not in table.column_names:
            return [missing(must, table.column_names, hint)] * len(table)
        return table.select([must] if self.tokenizer is not None else needed(table))

    def encode(self, block: Block, picks: Sequence[int]) -> list[Encoded | Reason | Fault]:
        """The tokens of the picked examples of a block, or why one is left out.

        Raises:
            ValueError: where a policy says "error"; names the example and the remedy.
        """
        if not len(picks):
            return []
        raw = self.tokens(block, picks)
        longest = _NO_LIMIT if self.limit is None else self.limit
        return [
            found
            if type(found) is Encoded and found.targets is None and 0 < len(found.ids) <= longest
            else self._judge(found, block, pick)
            for pick, found in zip(picks, raw, strict=True)
        ]

    def tokens(self, block: Block, picks: Sequence[int]) -> list[Encoded | Fault]:
        """The tokens of the picked examples, or what is wrong with them: before any policy."""
        return self._tokenize(block, picks) if self.tokenizer is not None else self._id_reader.read(block, picks)

    def _tokenize(self, block: Block, picks: Sequence[int]) -> list[Encoded | Fault]:
        texts = block.column(self.text_column, hint=TEXT_HINT).take(picks)
        usable = [text for text in texts if isinstance(text, str)]
        bad: set[str] = set()
        try:
            batch = self._ids_of(usable)
        except (TypeError, UnicodeError):  # lone surrogates, which are no text: find them, and go on without
            bad = {text for text in usable if not _is_unicode(text)}
            if not bad:
                raise
            batch = self._ids_of([text for text in usable if text not in bad])
        ids = iter(batch)
        return [
            self._framed(next(ids)) if isinstance(text, str) and not (bad and text in bad) else self._not_text(text)
            for text in texts
        ]

    def _not_text(self, value: Any) -> Fault:
        if isinstance(value, Fault):
            return value
        reason: FaultReason = "null" if value is None else "malformed" if isinstance(value, str) else "type"
        return Fault(reason, f"{self.text_column!r} is {show(value)}, not text")

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        """One call of the tokenizer for all texts; its own rule says which special tokens it adds."""
        if not texts:
            return []
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if self._backend_is_enough is None:
            ids = self._ids_by_call(texts)
            self._backend_is_enough = hasattr(backend, "encode_batch_fast") and ids == _ids_by_backend(backend, texts)
            return ids
        if self._backend_is_enough and backend.truncation is None and backend.padding is None:
            return _ids_by_backend(backend, texts)
        return self._ids_by_call(texts)

    def _ids_by_call(self, texts: list[str]) -> list[list[int]]:
        """truncation=False: over-long examples are this library's business; verbose=False silences only the warning
        about them."""
        ids: list[list[int]] = self.tokenizer(
            texts,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids

    def _framed(self, ids: list[int]) -> Encoded:
        """End-of-sequence once, and beginning-of-sequence not twice (where the text has it already)."""
        if self._specials is None:
            self._specials = len(self.tokenizer("", verbose=False)["input_ids"])
        if len(ids) <= self._specials:  # nothing of the text itself
            ids = []
        elif self.eos is not None and ids[-1] != self.eos:
            ids.append(self.eos)
        if self.bos is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos:
            ids = ids[1:]
        return Encoded(np.array(ids, dtype=np.int32), None)

    # ---- policies ------------------------------------------------------------------------------------------------

    def _judge(self, example: Encoded | Fault, block: Block, pick: int) -> Encoded | Reason | Fault:
        if isinstance(example, Fault):
            if self.policies.bad == "error":
                only = "where only some lack it, " if example.reason == "missing" else ""
                raise ValueError(
                    f"{block.where(pick)}: {example.what}; {only}mend the data, or pass bad='drop' to leave it out"
                )
            return example
        if len(example.ids) == 0:
            return self._empty(block, pick)
        if self.cuts_any and example.targets is not None and self.policies.overlong != "split":
            raise ValueError(
                f"{block.where(pick)}: packing='wrapped' cuts examples at row ends, and this one has targets that "
                "cutting would part from their prompt; use another packing, or pass overlong='split' to cut anyway"
            )
        if self.limit is not None and len(example.ids) > self.limit:
            overlong = self._overlong(example, block, pick)
            if overlong is None:
                return "overlong"
            example = overlong
        if example.targets is not None and not example.targets[1:].any() and self.policies.no_target != "keep":
            if self.policies.no_target == "error":
                raise ValueError(
                    f"{block.where(pick)}: none of the {len(example.ids)} tokens is a target"
                    + (f" after {example.truncated} were cut off" if example.truncated else "")
                    + "; pass no_target='drop' to leave such examples out, or no_target='keep'"
                )
            return "no_target"
        return example

    def _overlong(self, example: Encoded, block: Block, pick: int) -> Encoded | None:
        tokens, policy, limit = len(example.ids), self.policies.overlong, self.limit
        if policy == "split" or (policy == "auto" and example.targets is None):
            return example
        if policy == "drop":
            return None
        if policy == "truncate":
            targets = example.targets[:limit] if example.targets is not None else None
            return replace(example, ids=example.ids[:limit], targets=targets, truncated=tokens - (limit or 0))
        why = "" if policy == "error" else ", and it has targets that cutting would part from their prompt"
        raise ValueError(
            f"{block.where(pick)}: {tokens} tokens do not fit into {limit}{why}; pass overlong='truncate', 'drop' or "
            "'split', or a larger seq_len"
        )

    def _empty(self, block: Block, pick: int) -> Reason:
        if self.policies.empty == "error":
            raise ValueError(f"{block.where(pick)}: the example has no tokens; pass empty='drop' to leave it out")
        return "empty"

    def fingerprint(self) -> str:
        """Names the tokenizer by what decides the ids: vocabulary, special tokens and what it makes of a probe."""
        if self._fingerprint is None:
            self._fingerprint = self._make_fingerprint()
        return self._fingerprint

    def _make_fingerprint(self) -> str:
        if self.tokenizer is None:
            return "none"
        tokenizer = self.tokenizer
        ids = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        tokens = sorted(ids, key=ids.__getitem__)
        own = " ".join(f"{token} {token.swapcase()}" for token in tokens[:: max(1, len(tokens) // 50)])
        framing, *probe = (tokenizer(text, verbose=False)["input_ids"] for text in ("", _PROBE, own))
        eos = getattr(tokenizer, "eos_token_id", None)
        digest = hashlib.sha256("\n".join(tokens).encode(errors="surrogatepass"))
        digest.update(repr((framing, probe, eos, sorted(ids.values())[-1:])).encode())
        return f"{len(tokens)} tokens, {digest.hexdigest()[:16]}"


def _ids_by_backend(backend: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=True)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
