"""Examples that are tokenized already: `input_ids`, and a column that says which tokens are targets, if not all are.

Lists, NumPy arrays, CPU tensors and Arrow lists of any integer type give the same tokens. What is wrong with an example
does not depend on those beside it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streampack.rows import IGNORE
from streampack.sources import Fault
from streampack.tables import Block, is_list_like, list_columns

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Per-token columns that are understood as target masks: 1 where the token is a target."""
TARGETS = ("labels", *MASKS)
IDS_HINT = "pass a tokenizer for examples of text"
UNUSED = ("token_type_ids", "special_tokens_mask", "attention_mask", "offset_mapping")
"""Per-token columns that tokenizers make and packing replaces. (attention_mask must be all ones.)"""
_KNOWN = ("input_ids", *TARGETS, *UNUSED)


Tokens = npt.NDArray[np.int32]
"""int32 [tokens] of an example of which every token is a target."""


@dataclass(slots=True)  # not frozen, which would take twice as long to make
class Encoded:
    """The tokens of one example."""

    ids: npt.NDArray[np.int32]
    """int32 [tokens]"""
    targets: npt.NDArray[np.bool_] | None
    """bool [tokens], or None: every token is a target."""
    truncated: int = 0
    """Tokens cut off by overlong="truncate"."""


def needed(table: pa.Table) -> list[str]:
    """The columns of a table that are looked at: others may change their type from file to file."""
    lists = list_columns(table)
    return [name for name in table.column_names if name in _KNOWN or name in lists]


class IdReader:
    """Reads tokens of examples. All examples of a stream must agree on the column that says what is a target."""

    def __init__(self, *, vocab_size: int | None = None) -> None:
        self._below = vocab_size or 1 << 31
        self._agreed: tuple[str | None] | None = None

    def read(self, block: Block, picks: Sequence[int]) -> Iterable[Tokens | Encoded | Fault]:
        """The tokens of the picked examples, or what is wrong with them. An example may have no tokens.

        Of tables of which every token is a target they come as arrays alone, which saves an object for each example.

        Raises:
            ValueError: for columns that are missing, that packing would drop, or that contradict each other.
        """
        if isinstance(block.data, pa.Table):
            return self._from_table(block, picks)
        ids = block.column("input_ids", hint=IDS_HINT)
        return [self._from_example(block, pick, ids.array(pick)) for pick in picks]

    def _from_table(self, block: Block, picks: Sequence[int]) -> Iterable[Tokens | Encoded | Fault]:
        ids = block.column("input_ids", hint=IDS_HINT)
        names = [name for name in block.names if name in TARGETS and not block.holds_numbers(name)]
        name = self._target_column(block, 0, names, list_columns(block.data))
        targets = block.column(name) if name else None
        attention = block.column("attention_mask") if "attention_mask" in block.names else None
        if attention is not None and attention.is_all_ones:
            attention = None
        if ids.holds_ids(below=self._below) and targets is None and attention is None:
            return [self._read(None) if array is None else array for array in ids.arrays(picks)]
        return [
            self._read(
                ids.array(pick),
                name=name,
                targets=targets.array(pick) if targets else None,
                attention=attention.array(pick) if attention else None,
            )
            for pick in picks
        ]

    def _from_example(self, block: Block, pick: int, ids: Any) -> Encoded | Fault:
        if isinstance(ids, Fault):
            return ids
        example: Any = block.data[pick]
        lists = [name for name, value in example.items() if is_list_like(value)]
        names = [name for name in TARGETS if name in example and (name in lists or example[name] is None)]
        name = self._target_column(block, pick, names, lists)
        targets = block.value(pick, name) if name else None
        attention = block.value(pick, "attention_mask") if "attention_mask" in lists else None
        return self._read(ids, name=name, targets=targets, attention=attention)

    def _target_column(self, block: Block, pick: int, names: list[str], lists: list[str]) -> str | None:
        """The column that says what is a target. Other lists would lose their meaning, so they are refused."""
        unknown = [name for name in lists if name not in _KNOWN]
        if unknown:
            raise ValueError(
                f"{block.where(pick)}: the column {unknown[0]!r} holds a list for each example, which packing would "
                f"drop; remove it, or, if it marks targets, name it one of: {', '.join(TARGETS)}"
            )
        if len(names) > 1:
            raise ValueError(f"{block.where(pick)}: both {names[0]!r} and {names[1]!r} say what is a target; keep one")
        name = names[0] if names else None
        if self._agreed is None:
            self._agreed = (name,)
        if self._agreed != (name,):
            raise ValueError(
                f"{block.where(pick)}: targets are given by {name or 'no column'}, those of earlier examples by "
                f"{self._agreed[0] or 'no column'}; give all examples the same columns"
            )
        return name

    def _read(
        self, ids: Any, *, name: str | None = None, targets: Any = None, attention: Any = None
    ) -> Encoded | Fault:
        fault = self._fault_in_ids(ids)
        if fault is None and attention is not None and not np.all(attention):
            fault = Fault("padded", "attention_mask has zeros: the example is padded; tokenize without padding")
        if fault is None and name is not None:
            fault = _fault_in_targets(name, targets, ids)
        if fault is not None:
            return fault
        tokens = ids.astype(np.int32, copy=False)
        if name is None:
            return Encoded(tokens, None)
        return Encoded(tokens, targets != IGNORE if name == "labels" else targets.astype(bool))

    def _fault_in_ids(self, ids: Any) -> Fault | None:
        if ids is None or isinstance(ids, Fault):
            return ids or Fault("null", "'input_ids' is null")
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
            return Fault("type", f"'input_ids' is {show(ids)}, not one list of integers")
        least, most = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if not 0 <= least <= most < self._below:
            return Fault("vocabulary", f"'input_ids' holds {least} .. {most}, outside 0 .. {self._below - 1}")
        return None


def _fault_in_targets(name: str, targets: Any, ids: npt.NDArray[Any]) -> Fault | None:
    if targets is None:
        return Fault("null", f"{name!r} is null")
    if not isinstance(targets, np.ndarray) or targets.ndim != 1 or (targets.dtype.kind not in "iub" and len(targets)):
        return Fault("type", f"{name!r} is {show(targets)}, not one list of integers")
    if len(targets) != len(ids):
        return Fault("ragged", f"{name!r} has {len(targets)} entries for {len(ids)} input_ids")
    if name == "labels":
        wrong = np.flatnonzero((targets != IGNORE) & (targets != ids))
        if len(wrong):
            at = int(wrong[0])
            return Fault(
                "labels",
                f"'labels' holds {int(targets[at])} at token {at}, where input_ids holds {int(ids[at])}: labels are "
                f"not shifted here, each is the id at its own place or {IGNORE}",
            )
    elif len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) <= 1:
        return Fault("labels", f"{name!r} holds {int(targets.min())} .. {int(targets.max())}, not 0 and 1")
    return None


def show(value: Any) -> str:
    """A value for an error message."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
