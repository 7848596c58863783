"""The ways of batching that the two papers compare, each as steps that a Transformers model trains on.

Six are streampack's own (`PackedDataset(packing=...)`, `PackedLoader(layout=...)`). The others are only for comparison:
they take the single examples of a PackedDataset with packing="none", put them into rows by the rules of row_rules.py,
and make batches with streampack's Collator. Those "without PosID" give up isolation: examples of a row see each other.
None of the comparison ways streams, resumes, or can be shared by ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import row_rules
import torch

from streampack import Collator, PackedDataset, PackedLoader, PackedRow

IGNORE = -100
Examples = Sequence[dict[str, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all ways of one run."""

    seq_len: int
    batch_size: int
    """Rows of a step; of ways that do not pack, examples."""
    seed: int
    """Of the order of the examples."""
    pad_token_id: int

    def dataset(self, examples: Examples, packing: Any) -> PackedDataset:
        """One epoch, shuffled as a whole. One lane, since each lane ends with a part-filled row. Cutting examples whose
        prompt is no target has to be asked for (overlong="split"), and "wrapped" does it on purpose."""
        return PackedDataset(
            examples,
            seq_len=self.seq_len,
            packing=packing,
            overlong="split" if packing == "wrapped" else "auto",
            lanes=1,
            shuffle_block=max(1, len(examples)),
            seed=self.seed,
            pad_token_id=self.pad_token_id,
            source_name="instructions",
        )


class Step(NamedTuple):
    """What the model sees in one step."""

    batch: dict[str, Any]
    """For `model(**batch)`."""
    rows: int
    tokens: int
    """Without padding."""


class Way(NamedTuple):
    """One way of batching."""

    name: str
    steps: Callable[[Examples, Setting], Iterator[Step]]
    isolated: bool
    """Examples do not see each other."""
    public: str
    """How streampack does it; "" for ways that are only here."""


# ---- streampack's own ---------------------------------------------------------------------------------------------


def own(examples: Examples, setting: Setting, *, packing: str, layout: Any) -> Iterator[Step]:
    """As anyone would write it."""
    loader = PackedLoader(setting.dataset(examples, packing), setting.batch_size, layout=layout)
    before = 0
    for batch in loader:
        tokens = int(loader.stats["tokens"])
        yield Step(batch, len(loader.provenance), tokens - before)
        before = tokens


# ---- for comparison -----------------------------------------------------------------------------------------------


def contaminated(examples: Examples, setting: Setting) -> Iterator[Step]:
    """Concatenation without position ids: the rows of packing="wrapped", their boundaries erased. Paper 1's
    FixedLengthPacking, TRL's packing of the time; the same rows, labels and steps as with position ids."""
    rows = list(setting.dataset(examples, "wrapped"))
    yield from _collated(_grouped(rows, setting.batch_size), isolated=False)


def by_rule(
    examples: Examples, setting: Setting, *, rule: Callable[..., list[row_rules.Row]], isolated: bool
) -> Iterator[Step]:
    """Rows of `seq_len` by a rule that sees all lengths of the epoch, in a random order."""
    singles = list(setting.dataset(examples, "none"))
    pieces = rule(_lengths(singles), seq_len=setting.seq_len)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(setting.seed)).tolist()
    rows = [joined(singles, pieces[place], width=setting.seq_len) for place in order]
    yield from _collated(_grouped(rows, setting.batch_size), isolated=isolated)


def multipack(examples: Examples, setting: Setting) -> Iterator[Step]:
    """Steps as multipack chooses them. (Its rows lie side by side here; axolotl lays those of a step end to end.)"""
    singles = list(setting.dataset(examples, "none"))
    steps = row_rules.multipack(_lengths(singles), seq_len=setting.seq_len, batch_size=setting.batch_size)
    yield from _collated(
        ([joined(singles, pieces, width=setting.seq_len) for pieces in step] for step in steps), isolated=True
    )


def offline_flat(examples: Examples, setting: Setting) -> Iterator[Step]:
    """Each step is one row of batch_size * seq_len tokens, filled before training: paper 1's offline batch packing."""
    singles = list(setting.dataset(examples, "none"))
    width = setting.batch_size * setting.seq_len
    rows = row_rules.next_fit(_lengths(singles), capacity=width)
    yield from _collated(([joined(singles, pieces, width=width)] for pieces in rows), isolated=True)


def joined(singles: Sequence[PackedRow], pieces: row_rules.Row, *, width: int) -> PackedRow:
    """A row of `width` cells that holds pieces of rows of single examples, each a segment with its own positions; the
    padding is one last segment. The first label of each segment is -100."""
    parts = [{key: singles[at][key][start:stop] for key in ("input_ids", "labels")} for at, start, stop in pieces]
    lengths = [stop - start for _, start, stop in pieces]
    padding = width - sum(lengths)
    if padding:
        filler = torch.tensor([singles[0]["pad_token_id"]]).expand(padding)
        parts.append({"input_ids": filler, "labels": torch.full((padding,), IGNORE)})
        lengths.append(padding)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    labels = torch.cat([part["labels"] for part in parts])
    labels[ends[:-1]] = IGNORE
    return PackedRow(
        input_ids=torch.cat([part["input_ids"] for part in parts]),
        labels=labels,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        seq_idx=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int(),
        cu_seqlens=ends.int(),
        max_seqlen=max(lengths),
        num_loss_tokens=int((labels != IGNORE).sum()),
        examples=[singles[at]["examples"][0] for at, _, _ in pieces],
    )


def one_segment(row: PackedRow) -> PackedRow:
    """The row without its boundaries: positions go through, and examples see those before them."""
    width = len(row["input_ids"])
    return PackedRow(
        {
            **row,
            "position_ids": torch.arange(width),
            "seq_idx": torch.zeros(width, dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, width], dtype=torch.int32),
            "max_seqlen": width,
        }
    )


def _lengths(singles: Sequence[PackedRow]) -> list[int]:
    return [len(single["input_ids"]) for single in singles]


def _grouped(rows: Sequence[PackedRow], size: int) -> Iterator[Sequence[PackedRow]]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def _collated(groups: Iterator[Sequence[PackedRow]], *, isolated: bool) -> Iterator[Step]:
    """Steps of rows; without targets there is none (paper 2's code drops such rows too)."""
    collate = Collator("rows")
    for group in groups:
        rows = [row for row in group if row["num_loss_tokens"]]
        if rows:
            tokens = sum(int(row["cu_seqlens"][len(row["examples"])]) for row in rows)
            batch = collate(rows if isolated else [one_segment(row) for row in rows])
            yield Step(batch, len(rows), tokens)


# ---- all of them --------------------------------------------------------------------------------------------------

PADDING, GROUPED, FLATTENED = "padding", "grouped by length + padding", "online mini-batch + PosID"
CONTAMINATED, WRAPPED, FLAT = "concatenation, no PosID", "concatenation + PosID", "offline flat packing + PosID"
DEFAULT, NEXT_FIT = "streampack's default", "in-order next-fit"
RANDOM, RANDOM_POSID = "random packing, no PosID", "random packing + PosID"
GREEDY, GREEDY_POSID = "greedy packing, no PosID", "greedy packing + PosID"
SORTED, MULTIPACK = "sorted packing + PosID", "multipack + PosID"


def _own(name: str, packing: str, layout: str) -> Way:
    return Way(name, partial(own, packing=packing, layout=layout), True, f"packing={packing!r}, layout={layout!r}")


def _by_rule(name: str, rule: Callable[..., list[row_rules.Row]], isolated: bool) -> Way:
    return Way(name, partial(by_rule, rule=rule, isolated=isolated), isolated, "")


WAYS = {
    way.name: way
    for way in (
        _own(PADDING, "none", "rows"),
        _own(GROUPED, "by_length", "rows"),
        _own(FLATTENED, "none", "flat"),
        Way(CONTAMINATED, contaminated, False, ""),
        _own(WRAPPED, "wrapped", "rows"),
        Way(FLAT, offline_flat, True, ""),
        _own(DEFAULT, "auto", "rows"),
        _own(NEXT_FIT, "next_fit", "rows"),
        _by_rule(RANDOM, row_rules.concatenate_and_cut, False),
        _by_rule(RANDOM_POSID, row_rules.concatenate_and_cut, True),
        _by_rule(GREEDY, row_rules.greedy, False),
        _by_rule(GREEDY_POSID, row_rules.greedy, True),
        _by_rule(SORTED, row_rules.by_sorted_length, True),
        Way(MULTIPACK, multipack, True, ""),
    )
}
UNPACKED = (PADDING, GROUPED, FLATTENED)
