"""Encoding: from examples (text, conversations, token ids) to ids in int32 and, where not all are targets, a mask.

What cannot be used is left out by a named policy and counted by its reason: `empty` (no tokens), `no_target` (labels or
a mask that leave nothing to learn), `overlong` (more than max_example_len tokens), `bad` (see `sources.FAULTS`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from streampack.chats import AUTO, ChatReader, Targets
from streampack.conversations import COLUMNS, OPTIONAL, Format, hint_of
from streampack.sources import Fault
from streampack.tables import Block, Chunk, missing
from streampack.texts import TextReader, TextTokenizer, fingerprint
from streampack.token_ids import IDS_HINT, Encoded, IdReader, Tokens, needed

Overlong = Literal["auto", "split", "truncate", "drop", "error"]
Reason = Literal["empty", "no_target", "overlong"]

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What to do with examples that do not go into rows as they are."""

    overlong: Overlong = "auto"
    truncate_keep: Literal["start", "end"] = "start"
    empty: Literal["drop", "error"] = "drop"
    no_target: Literal["drop", "keep", "error"] = "drop"
    bad: Literal["drop", "error"] = "error"


class Encoder:
    """Encodes examples of a block; pure, example by example, so any batching gives the same tokens.

    Args:
        tokenizer: a Transformers tokenizer, or None for examples that have `input_ids`.
        format: of the examples, with a tokenizer.
        targets: which tokens are targets, of conversations and of prompts with completions.
        text_column: the column of text, with a tokenizer and format "text".
        append_eos: "auto": append eos_token_id to a text where the tokenizer has one and the ids do not end with it
            already; True: the same, but a tokenizer without one is an error; False: leave the ids as the tokenizer
            makes them. Conversations end as their template ends them.
        limit: tokens an example may have (before `split` cuts it); None: any number.
        vocab_size: of examples that have `input_ids`: ids from it on are bad; None: any id.
        cuts_any: packing may cut examples of any length (`wrapped`), as well as `split` those over the limit.
        policies: what to do with the rest.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: Format = "text",
        targets: Targets = "auto",
        text_column: str,
        append_eos: bool | Literal["auto"],
        limit: int | None,
        policies: Policies,
        cuts_any: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self.limit = limit
        self.policies = policies
        self.cuts_any = cuts_any
        self._columns = (text_column,) if format == "text" else COLUMNS[format]
        self._reader: IdReader | TextReader | ChatReader
        texts = TextTokenizer(tokenizer, append_eos=append_eos)
        if tokenizer is None:
            self._reader = IdReader(vocab_size=vocab_size)
        elif format == "text":
            self._reader = TextReader(texts, column=text_column, hint=self._hint)
        else:
            self._reader = ChatReader(texts, format=format, targets=AUTO[format] if targets == "auto" else targets)
        # Conversations stay whole even where every token is a target.
        self._is_whole = tokenizer is not None and format != "text"
        self._fingerprint: str | None = None

    @property
    def batch(self) -> int:
        """Examples to encode at a time: enough to keep a tokenizer's threads busy, few enough that the first row after
        a resume does not wait for a whole block. Token ids are only looked up, a block at once."""
        return 128 if self.tokenizer is not None else 1 << 30

    def select(self, table: pa.Table) -> Chunk:
        """A table with the columns that are looked at. Without the one that must be there its examples are faults."""
        with_text = self.tokenizer is not None
        for name in self._columns if with_text else ("input_ids",):
            if name not in table.column_names:
                return [missing(name, table.column_names, self._hint if with_text else IDS_HINT)] * len(table)
        if not with_text:
            return table.select(needed(table))
        return table.select([*self._columns, *(name for name in OPTIONAL[self.format] if name in table.column_names)])

    def _hint(self, names: Sequence[str]) -> str:
        return hint_of(self.format, names)

    def encode(self, block: Block, picks: Sequence[int]) -> list[Tokens | Encoded | Reason | Fault]:
        """The tokens of the picked examples of a block, or why one is left out.

        Tokens that are all targets, none cut off, are an array alone. Of token ids a whole block is encoded at once: an
        object around each array would have Python look for garbage all the time, among all that the process holds.

        Raises:
            ValueError: where a policy says "error"; names the example and the remedy.
        """
        if not len(picks):
            return []
        longest = _NO_LIMIT if self.limit is None else self.limit if not (self.cuts_any and self._is_whole) else 0
        return [
            one if type(one) is np.ndarray and 0 < len(one) <= longest else self._judge(_encoded(one), block, pick)
            for pick, one in zip(picks, self._reader.read(block, picks), strict=True)
        ]

    def tokens(self, block: Block, picks: Sequence[int]) -> Iterable[Encoded | Fault]:
        """The tokens of the picked examples, or what is wrong with them: before any policy."""
        return map(_encoded, self._reader.read(block, picks))

    # ---- policies ------------------------------------------------------------------------------------------------

    def _judge(self, example: Encoded | Fault, block: Block, pick: int) -> Tokens | Encoded | Reason | Fault:
        if isinstance(example, Fault):
            if self.policies.bad == "error":
                only = "where only some lack it, " if example.reason == "missing" else ""
                raise ValueError(
                    f"{block.where(pick)}: {example.what}; {only}mend the data, or pass bad='drop' to leave it out"
                )
            return example
        if len(example.ids) == 0:
            return self._empty(block, pick)
        if self.cuts_any and self._stays_whole(example) and self.policies.overlong != "split":
            raise ValueError(
                f"{block.where(pick)}: packing='wrapped' cuts examples at row ends, and this one {self._why(example)}; "
                "use another packing, or pass overlong='split' to cut anyway"
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
        return example.ids if example.targets is None and not example.truncated else example

    def _overlong(self, example: Encoded, block: Block, pick: int) -> Encoded | None:
        tokens, policy, limit = len(example.ids), self.policies.overlong, self.limit
        if policy == "split" or (policy == "auto" and not self._stays_whole(example)):
            return example
        if policy == "drop":
            return None
        if policy == "truncate":
            assert limit is not None
            kept = slice(limit) if self.policies.truncate_keep == "start" else slice(tokens - limit, None)
            targets = example.targets[kept] if example.targets is not None else None
            return replace(example, ids=example.ids[kept], targets=targets, truncated=tokens - limit)
        why = "" if policy == "error" else f", and it {self._why(example)}"
        raise ValueError(
            f"{block.where(pick)}: {tokens} tokens do not fit into {limit}{why}; pass overlong='truncate', 'drop' or "
            "'split', or a larger seq_len"
        )

    def _stays_whole(self, example: Encoded) -> bool:
        return self._is_whole or example.targets is not None

    def _why(self, example: Encoded) -> str:
        """Why an example stays whole, for messages."""
        if example.targets is None:
            return "is a conversation or a prompt with its completion, which stays whole"
        return "has targets that cutting would part from their prompt"

    def _empty(self, block: Block, pick: int) -> Reason:
        if self.policies.empty == "error":
            raise ValueError(f"{block.where(pick)}: the example has no tokens; pass empty='drop' to leave it out")
        return "empty"

    def fingerprint(self) -> str:
        """Names the tokenizer."""
        if self._fingerprint is None:
            self._fingerprint = "none" if self.tokenizer is None else fingerprint(self.tokenizer)
        return self._fingerprint


def _encoded(found: Tokens | Encoded | Fault) -> Encoded | Fault:
    return Encoded(found, None) if isinstance(found, np.ndarray) else found
