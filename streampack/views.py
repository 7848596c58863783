"""Views: traces, rows and states as tables and coloured text of a terminal (rich)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streampack.collate import PackedRow
from streampack.describe import StateDescription, StateDifference
from streampack.show import headline, place, stretches
from streampack.terminal import lines, pairs, table, title
from streampack.trace import TracedRow
from streampack.wording import many, number, share, visible

COLOURS = ("cyan", "yellow", "green", "magenta")
"""Of the examples in a row, in turn."""

# ---- trace and show --------------------------------------------------------------------------------------------------


def trace_view(rows: Sequence[TracedRow], texts: Sequence[Sequence[str]], *, step: int | None) -> RenderableType:
    """Traced rows, of a step or not; `texts` are those of their examples."""
    parts: list[RenderableType] = []
    if step is not None:
        numbers = sorted(row.row for row in rows)
        examples = many(sum(len(row.examples) for row in rows), "example")
        parts.append(
            title(f"Step {step:,}", f"{many(len(rows), 'row')}, {numbers[0]:,} .. {numbers[-1]:,}; {examples}")
        )
    for row, of_row in zip(rows, texts, strict=True):
        where = f"lane {row.lane}"
        if step is not None:
            where = f"rank {row.rank}, batch {row.batch}, place {row.place}, {where}"
        note = f"{where}; {many(len(row.examples), 'example')}, {many(row.num_loss_tokens, 'target')}"
        parts += [title(f"Row {row.row:,}", note), _examples(row, of_row)]
    return Group(*parts)


def _examples(row: TracedRow, texts: Sequence[str]) -> RenderableType:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, header_style="dim", expand=True)
    made.add_column("cells", justify="right", no_wrap=True)
    made.add_column("tokens", justify="right", no_wrap=True)
    made.add_column("example", overflow="fold")
    made.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for colour, example, text in zip(itertools.cycle(COLOURS), row.examples, texts, strict=False):
        name = place(example.source, example.shard, example.index)
        if example.first_token:
            name += f" from token {example.first_token:,}"
        cells = f"{example.begin} .. {example.end - 1}"
        made.add_row(
            cells, f"{example.tokens:,}", Text(visible(name)), Text(visible(" ".join(text.split())), style=colour)
        )
    return made


def row_view(name: str, row: PackedRow, tokenizer: Any, *, characters: int | None) -> RenderableType:
    """A packed row as coloured text."""
    text = Text(visible(name), style="bold").append(f": {visible(headline(row))}\n", style="not bold dim")
    for stretch in stretches(row, tokenizer, characters=characters):
        if stretch.example < 0:
            text.append(f"░░ {stretch.cells:,} cells of padding ░░", style="not bold dim")
        else:
            colour = f"not bold {COLOURS[stretch.example % len(COLOURS)]}"
            text.append(visible(stretch.text), style=f"{colour} underline" if stretch.is_target else colour)
    return text.append("\n")


# ---- states ----------------------------------------------------------------------------------------------------------


def state_view(
    state: StateDescription, *, epoch: float | None = None, taken: bool | str | None = None
) -> RenderableType:
    """A state in words.

    epoch: epochs that are out, where the source is known; taken: whether a stream over that takes the state, or why
    not; None: no source was named.
    """
    of = "of all ranks" if state.world_size == 1 else f"of rank {state.rank} of {state.world_size} alone"
    lane = state.next_row % state.stream["lanes"]
    named = [
        ("stream", str(state.stream["source"])),
        ("state", f"{of}, format version {state.version}"),
        ("pass", _pass(state)),
        ("rows", f"{state.rows:,} handed out; the next one is row {state.next_row:,}, of lane {lane}"),
        ("read", _read(state, epoch, is_named=taken is not None)),
        ("lanes", f"{state.lanes_begun} of {state.stream['lanes']} have begun"),
    ]
    parts: list[RenderableType] = [title("Where it is"), pairs(named)]
    if state.places:
        parts += [title("Lanes"), _places(state)]
    given = [(name.replace("_", " "), f"{count:,}") for name, count in state.totals.items() if count]
    given += [] if state.fill is None else [("fill", share(state.fill))]
    parts += [title("What it has read and given", "since the stream began"), pairs(given)]
    if taken is True:
        parts += [title("This source"), *lines(["a stream over it, with these settings, takes the state"])]
    elif taken is not None:
        parts += [title("This source"), *lines([str(taken)], "bold red")]
    return Group(*parts, title("It refuses"), *lines(state.refuses), title("It allows"), *lines(state.allows))


def _pass(state: StateDescription) -> str:
    first, last = state.epochs
    if last is None:
        return f"endless, from epoch {first}"
    many = "1 epoch" if last == first + 1 else f"{last - first} epochs"
    return f"of {many}, from epoch {first}" + (f"; it is over, and epoch {last} comes next" if state.ended else "")


def _read(state: StateDescription, epoch: float | None, *, is_named: bool) -> str:
    if epoch is not None:
        return f"{epoch:.4f} epochs are out in rows"
    if state.share is None and is_named:
        return "how much is not known: the source does not know how many examples it has"
    if state.share is None:
        return "how much is not known; name the source, with --source, if it knows how many examples it has"
    return f"{share(state.share)} of the epoch, about"


def _places(state: StateDescription) -> RenderableType:
    mixed = any(place.source is not None for place in state.places)
    head = ["lane", *["source"] * mixed, "epoch", *["read", "shard"] * (not mixed), "from", "taken", "waiting", "rows"]
    rows = [
        [
            str(place.lane),
            *[str(place.source)] * mixed,
            str(place.epoch),
            *(
                []
                if mixed
                else [
                    "?" if place.share is None else share(place.share),
                    number(place.shard) if place.shard is not None else "end",
                ]
            ),
            number(place.index),
            number(place.taken),
            number(place.waiting),
            number(place.rows) + (", done" if place.done else ""),
        ]
        for place in state.places
    ]
    return table(head, rows, left=1 + mixed)


def difference_view(difference: StateDifference, names: tuple[str, str]) -> RenderableType:
    """How two states differ."""
    if difference.is_empty:
        return Text("The states say the same.")
    parts: list[RenderableType] = []
    if difference.stream:
        parts += [
            title("They are of different streams", "neither is loaded where the other is"),
            _both(difference.stream, names),
        ]
    if difference.place:
        parts += [title("Where they are"), _both(difference.place, names)]
    if difference.counts:
        parts += [title("What they have given"), _both(difference.counts, names, steps=True)]
    if difference.lanes:
        lanes = {f"lane {lane}": rows for lane, rows in difference.lanes.items()}
        parts += [title("Rows of the lanes that differ"), _both(lanes, names, steps=True)]
    return Group(*parts)


def _both(values: Mapping[str, tuple[Any, Any]], names: tuple[str, str], *, steps: bool = False) -> RenderableType:
    rows = [
        [name.replace("_", " "), *map(_plain, both), *([f"{both[1] - both[0]:+,}"] if steps else [])]
        for name, both in values.items()
    ]
    return table(["", *names, *["change"] * steps], rows, left=1 if steps else 3)


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
