"""Encoding: from examples (a text column, or token ids) to ids in int32 and, where not all are targets, a mask.

What cannot be used is left out by a named policy and counted by its reason: `empty` (no tokens), `no_target` (labels or
a mask that leave nothing to learn), `bad` (null, wrong type, ragged), `overlong` (more than max_example_len tokens).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streampack.rows import IGNORE
from streampack.tables import Block

Overlong = Literal["auto", "split", "truncate", "drop", "error"]
Reason = Literal["empty", "no_target", "bad", "overlong", "transform"]

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Per-token columns that are understood as target masks: 1 where the token is a target."""
UNUSED = ("token_type_ids", "special_tokens_mask", "attention_mask", "offset_mapping")
"""Per-token columns that tokenizers make and packing replaces. (attention_mask must be all ones.)"""
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What to do with examples that do not go into rows as they are."""

    overlong: Overlong = "auto"
    empty: Literal["drop", "error"] = "drop"
    no_target: Literal["drop", "keep", "error"] = "drop"
    bad: Literal["drop", "error"] = "error"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one example."""

    ids: npt.NDArray[np.int32]
    """int32 [tokens]"""
    targets: npt.NDArray[np.bool_] | None
    """bool [tokens], or None: every token is a target."""
    truncated: int = 0
    """Tokens cut off by overlong="truncate"."""


class Encoder:
    """Encodes examples of a block; pure, example by example, so any batching gives the same tokens.

    Args:
        tokenizer: a Transformers tokenizer, or None for examples that have `input_ids`.
        text_column: the column of text, with a tokenizer.
        append_eos: "auto": append eos_token_id where the tokenizer has one and the ids do not end with it already;
            True: the same, but a tokenizer without one is an error; False: leave the ids as the tokenizer makes them.
        limit: tokens an example may have (before `split` cuts it); None: any number.
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
    ) -> None:
        self.tokenizer = tokenizer
        self.text_column = text_column
        self.limit = limit
        self.policies = policies
        self.cuts_any = cuts_any
        self.eos = getattr(tokenizer, "eos_token_id", None) if append_eos else None
        if append_eos is True and self.eos is None:
            raise ValueError("append_eos=True, but the tokenizer has no eos_token_id; set tokenizer.eos_token")
        self._specials: int | None = None
        self._fingerprint: str | None = None

    @property
    def batch(self) -> int:
        """Examples to encode at a time: enough to keep a tokenizer's threads busy, few enough that the first row after
        a resume does not wait for a whole block. Token ids are only looked up, a block at once."""
        return 128 if self.tokenizer is not None else 1 << 30

    @property
    def columns(self) -> list[str] | None:
        """The columns that are needed, None where that shows only in the data."""
        return [self.text_column] if self.tokenizer is not None else None

    def encode(self, block: Block, picks: Sequence[int]) -> list[Encoded | Reason]:
        """The tokens of the picked examples of a block, or the reason why one is left out.

        Raises:
            ValueError: where a policy says "error", or a column is missing; names the example and the remedy.
        """
        raw = self._tokenize(block, picks) if self.tokenizer is not None else self._read_ids(block, picks)
        longest = self.limit or _INT32.max
        return [
            found
            if isinstance(found, str) or (found.targets is None and len(found.ids) <= longest)
            else self._judge(found, block, pick)
            for pick, found in zip(picks, raw, strict=True)
        ]

    # ---- text ----------------------------------------------------------------------------------------------------

    def _tokenize(self, block: Block, picks: Sequence[int]) -> list[Encoded | Reason]:
        texts = block.column(self.text_column, hint="pass text_column='...'").take(picks)
        found: list[Encoded | Reason] = ["bad"] * len(texts)
        usable = [place for place, text in enumerate(texts) if isinstance(text, str)]
        for place in set(range(len(texts))) - set(usable):
            self._bad(block, picks[place], f"{self.text_column!r} is {_show(texts[place])}, not text")
        if not usable:
            return found
        # truncation=False: over-long examples are this library's business; verbose=False silences only the warning
        # about them. The tokenizer's own rule says which special tokens it adds.
        batch = self.tokenizer(
            [texts[place] for place in usable],
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        if self._specials is None:
            self._specials = len(self.tokenizer("", verbose=False)["input_ids"])
        for place, ids in zip(usable, batch, strict=True):
            if len(ids) <= self._specials and (not texts[place] or not ids):
                found[place] = self._empty(block, picks[place])
                continue
            if self.eos is not None and ids[-1] != self.eos:
                ids.append(self.eos)
            found[place] = Encoded(np.array(ids, dtype=np.int32), None)
        return found

    # ---- token ids -----------------------------------------------------------------------------------------------

    def _read_ids(self, block: Block, picks: Sequence[int]) -> list[Encoded | Reason]:
        ids = block.column("input_ids", hint="pass a tokenizer for examples of text")
        known_good = ids.holds_ids
        extra = self._per_token_columns(block)
        targets = block.column(extra["targets"]) if "targets" in extra else None
        attention = block.column("attention_mask") if "attention_mask" in block.names else None
        if known_good and targets is None and attention is None:
            arrays = [ids.array(pick) for pick in picks]
            return [
                Encoded(array, None) if array is not None and len(array) else self._read_one(block, pick, array)
                for pick, array in zip(picks, arrays, strict=True)
            ]
        return [
            self._read_one(
                block,
                pick,
                ids.array(pick),
                targets.array(pick) if targets else None,
                extra.get("targets"),
                attention.array(pick) if attention else None,
            )
            for pick in picks
        ]

    def _per_token_columns(self, block: Block) -> dict[str, str]:
        """Which column says what is a target. Other per-token columns would lose their meaning, so they are refused."""
        names = block.list_columns()
        masks = [name for name in names if name in (*MASKS, "labels")]
        unknown = [name for name in names if name not in (*MASKS, *UNUSED, "labels", "input_ids")]
        if len(masks) > 1:
            raise ValueError(f"{block.where(0)}: both {masks[0]!r} and {masks[1]!r} say what is a target; keep one")
        if unknown:
            raise ValueError(
                f"{block.where(0)}: the column {unknown[0]!r} holds a list for each example, which packing would drop; "
                f"remove it, or, if it marks targets, name it one of: labels, {', '.join(MASKS)}"
            )
        return {"targets": masks[0]} if masks else {}

    def _read_one(
        self, block: Block, pick: int, ids: Any, targets: Any = None, name: str | None = None, attention: Any = None
    ) -> Encoded | Reason:
        fault = _fault_in_ids(ids)
        if fault is None and attention is not None and not np.all(attention):
            fault = "attention_mask has zeros: the example is padded; tokenize without padding"
        if fault is None and name is not None:
            fault = _fault_in_targets(name, targets, ids)
        if fault is not None:
            return self._bad(block, pick, fault)
        if len(ids) == 0:
            return self._empty(block, pick)
        if name is None:
            return Encoded(ids.astype(np.int32, copy=False), None)
        wanted = targets != IGNORE if name == "labels" else targets.astype(bool)
        return Encoded(ids.astype(np.int32, copy=False), wanted)

    # ---- policies ------------------------------------------------------------------------------------------------

    def _judge(self, example: Encoded, block: Block, pick: int) -> Encoded | Reason:
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

    def _bad(self, block: Block, pick: int, fault: str) -> Reason:
        if self.policies.bad == "error":
            raise ValueError(f"{block.where(pick)}: {fault}; mend the data, or pass bad='drop' to leave it out")
        return "bad"

    def fingerprint(self) -> str:
        """Names the tokenizer by what decides the ids: its vocabulary and special tokens (not its library version)."""
        if self._fingerprint is None:
            self._fingerprint = self._make_fingerprint()
        return self._fingerprint

    def _make_fingerprint(self) -> str:
        if self.tokenizer is None:
            return "none"
        tokenizer = self.tokenizer
        vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else []
        framing = tokenizer("", verbose=False)["input_ids"]
        eos = getattr(tokenizer, "eos_token_id", None)
        digest = hashlib.sha256(repr((vocabulary, framing, eos)).encode()).hexdigest()[:16]
        return f"{len(vocabulary)} tokens, {digest}"


def _fault_in_ids(ids: Any) -> str | None:
    if ids is None:
        return "'input_ids' is null"
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        return f"'input_ids' is {_show(ids)}, not one list of integers"
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _INT32.max:
        return f"'input_ids' holds {int(ids.min())} .. {int(ids.max())}, outside 0 .. {_INT32.max}"
    return None


def _fault_in_targets(name: str, targets: Any, ids: npt.NDArray[Any]) -> str | None:
    if not isinstance(targets, np.ndarray) or targets.ndim != 1 or (targets.dtype.kind not in "iub" and len(targets)):
        return f"{name!r} is {_show(targets)}, not one list of integers"
    if len(targets) != len(ids):
        return f"{name!r} has {len(targets)} entries for {len(ids)} input_ids"
    if name == "labels":
        wrong = np.flatnonzero((targets != IGNORE) & (targets != ids))
        if len(wrong):
            at = int(wrong[0])
            return (
                f"'labels' holds {int(targets[at])} at token {at}, where input_ids holds {int(ids[at])}: labels are "
                f"not shifted here, each is the id at its own place or {IGNORE}"
            )
    elif len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) <= 1:
        return f"{name!r} holds {int(targets.min())} .. {int(targets.max())}, not 0 and 1"
    return None


def _show(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray | pa.Scalar) else value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
