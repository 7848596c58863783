"""Show: a packed row as text a person can read: its examples apart, its targets and its padding marked."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.collate import PackedRow
from streampack.rows import IGNORE
from streampack.wording import many, visible

CHARACTERS = 400
"""Of one stretch of text that are shown, unless more are asked for."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some text of a row: all target or none, of one example."""

    example: int
    """Which of the row, from 0; -1: padding."""
    is_target: bool
    text: str
    """Of padding: ""."""
    cells: int


def stretches(row: PackedRow, tokenizer: Any = None, *, characters: int | None = CHARACTERS) -> list[Stretch]:
    """A row as stretches of text. Without a tokenizer the text is the token ids.

    characters: longer ones lose their middle; None: none do.
    """
    ids, targets = row["input_ids"].numpy(), (row["labels"] != IGNORE).numpy()
    ends = row["cu_seqlens"].tolist()
    tokens = row["segment_tokens"].tolist() if "segment_tokens" in row else np.diff(ends).tolist()
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        if number >= len(row["examples"]):
            found.append(Stretch(-1, False, "", end - begin))
            continue
        last = begin + tokens[number]
        for is_target, cells, text in _runs(ids[begin:last], targets[begin:last], tokenizer):
            found.append(Stretch(number, is_target, _shortened(text, characters), cells))
        if last < end:
            found.append(Stretch(-1, False, "", end - last))
    return found


def _runs(
    ids: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_], tokenizer: Any
) -> Iterator[tuple[bool, int, str]]:
    """(is it target, cells, text) of each run of an example."""
    edges = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    before = ""
    for begin, end in itertools.pairwise(edges):
        if tokenizer is None:
            text = " ".join(map(str, ids[begin:end].tolist())) + (" " if end < len(ids) else "")
        else:  # up to the end each time, since what a token is as text depends on those before it
            whole = _decoded(tokenizer, ids[:end])
            text = whole[len(before) :] if whole.startswith(before) else _decoded(tokenizer, ids[begin:end])
            before = whole
        yield bool(targets[begin]), end - begin, text


def _decoded(tokenizer: Any, ids: npt.NDArray[np.int64]) -> str:
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _shortened(text: str, characters: int | None) -> str:
    if characters is None or len(text) <= characters:
        return text
    half = max(1, characters // 2)
    left = len(text) - 2 * half
    if left <= 0:
        return text
    return f"{text[:half]} [... {left:,} characters ...] {text[len(text) - half :]}"


def headline(row: PackedRow) -> str:
    """What there is in a row: "4 examples, 2,040 of 2,048 tokens, 1,990 targets"."""
    seq_len, examples = len(row["input_ids"]), len(row["examples"])
    ends = row["cu_seqlens"].tolist()
    tokens = row["segment_tokens"].tolist() if "segment_tokens" in row else np.diff(ends).tolist()
    used = sum(tokens[:examples])
    targets = many(row["num_loss_tokens"], "target")
    return f"{many(examples, 'example')}, {used:,} of {seq_len:,} tokens, {targets}"


def show_row(row: PackedRow, tokenizer: Any = None, *, characters: int | None = CHARACTERS) -> str:
    """A row of a PackedDataset as plain text: each example after its number and place, its targets in «», padding as
    [padding]. The first token of an example is never a target.

    Args:
        row: what a PackedDataset yields.
        tokenizer: turns ids into text; None: ids are shown.
        characters: stretches of text longer than that lose their middle; None: none do.
    """
    lines, last = [headline(row)], None
    for stretch in stretches(row, tokenizer, characters=characters):
        if stretch.example < 0:
            lines.append(f"[padding] {stretch.cells:,} cells")
            last = None
            continue
        if stretch.example != last:
            source, shard, index = row["examples"][stretch.example]
            lines += [f"[{stretch.example + 1}] {place(source, shard, index)}", ""]
            last = stretch.example
        lines[-1] += f"«{stretch.text}»" if stretch.is_target else stretch.text
    return visible("\n".join(lines))


def place(source: str, shard: int | str, index: int) -> str:
    """Where an example is, in a line: files name themselves, of others the source goes with the number of the shard."""
    return f"{shard}, {index}" if isinstance(shard, str) else f"{source}, shard {shard}, {index}"
