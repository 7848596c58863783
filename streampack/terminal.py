"""Terminal: reports and plans as tables and text of a terminal (rich), and the pieces that such views are made of."""

import io
import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streampack.plan import Plan
from streampack.report import PADDED_BATCH, Packed, Report, Spread
from streampack.wording import about, many, number, share, visible

WIDTH = 100
"""Columns where the output is no terminal."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def write(view: RenderableType) -> None:
    """To the standard output: coloured, or plain text where it is no terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view)
        return
    console = Console(highlight=False, width=WIDTH, no_color=True, file=io.StringIO())
    with console.capture() as captured:
        console.print(view)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


# ---- pieces ----------------------------------------------------------------------------------------------------------


def title(text: str, note: str = "") -> Text:
    """What a section is about."""
    made = Text("\n").append(text, style="bold")
    return made.append(f"  {note}", style="dim") if note else made


def pairs(values: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and values, a line each."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values:
        made.add_row(name, Text(visible(value)))
    return Padding(made, (0, 0, 0, 2), expand=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> RenderableType:
    """A table; the first `left` columns are text, the others figures."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, header_style="dim")
    for place, name in enumerate(head):
        made.add_column(name, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(escape(visible(cell)) for cell in row))
    return Padding(made, (0, 0, 0, 1), expand=False)


def lines(texts: Iterable[str], style: str = "") -> list[RenderableType]:
    """Sentences, each a point of a list."""
    return [Padding(Text(f"- {visible(text)}", style=style), (0, 0, 0, 2), expand=False) for text in texts]


def _quantiles(of: Spread, *, as_share: bool = False) -> list[str]:
    shown = [f"{value:.2f}" if as_share else number(value) for value in of.quantiles.values()]
    return [*shown, f"{of.mean:.2f}" if as_share else number(of.mean)]


# ---- report ----------------------------------------------------------------------------------------------------------


def report_view(report: Report) -> RenderableType:
    """A report, all of it."""
    read = report.read
    what = "all of it" if read.is_all else "a sample; --all reads all, for exact numbers"
    shards = many(read.of_shards, "shard")
    shards = f"{read.shards:,} of {shards}" if read.shards < read.of_shards else shards
    head = Text(visible(report.source), style="bold", overflow="fold").append(
        f"\nread {read.examples:,} examples in {shards}: {what}", style="dim"
    )
    parts: list[RenderableType] = [head, *_of_lengths(report), *_of_left_out(report)]
    epoch = report.epoch
    parts.append(title("An epoch", "" if read.is_all else "estimated, with an interval"))
    if epoch is None:
        parts += lines(["this sample does not tell how much there is: read more of it, or --all"])
    else:
        named = [
            ("examples", about(epoch.examples)),
            ("tokens in rows", about(epoch.tokens)),
            ("rows", about(epoch.rows)),
        ]
        parts.append(pairs(named))
    return Group(*parts, *_of_rows(report), *_of_choices(report), *_of_lanes(report))


def _of_lengths(report: Report) -> list[RenderableType]:
    spread = report.lengths
    names = [{"0": "least", "100": "most"}.get(name, f"{name} %") for name in spread.quantiles]
    most = max(count for _, _, count in report.histogram)
    bars = "".join(_BLOCKS[-(-8 * count // most)] for _, _, count in report.histogram)
    low, high = report.histogram[0][0], report.histogram[-1][1] - 1
    picture = Text(f"   {low:,.0f} ", style="dim").append(bars, style="cyan").append(f" {high:,.0f}", style="dim")
    return [
        title("Lengths", "tokens of an example; so many % have at most so many"),
        table([*names, "mean"], [_quantiles(spread)], left=0),
        picture,
    ]


def _of_left_out(report: Report) -> list[RenderableType]:
    settings, rows = report.settings, []
    if report.overlong:
        longest = settings["max_example_len"] or settings["seq_len"]
        rows.append(
            ("over-long", f"{report.overlong:,} of more than {longest:,} tokens (overlong={settings['overlong']!r})")
        )
    rows += [(reason.replace("_", " "), f"{count:,} left out") for reason, count in report.left_out.items()]
    parts: list[RenderableType] = [title("Not as they are", f"of the {report.read.examples:,} examples read")]
    parts.append(pairs(rows) if rows else pairs([("nothing", "all examples fit and can be used")]))
    for where, _, what in report.bad[:3]:
        parts += lines([f"{where}: {what}"], "yellow")
    parts += lines([f"this would stop training: {stop}" for stop in report.stops], "bold red")
    return parts


def _of_rows(report: Report) -> list[RenderableType]:
    packed, segments, cost = report.packed, report.examples_per_row.quantiles, report.attention.quantiles
    named = [
        (
            "fill",
            f"{share(packed.fill)}{_before_ends(packed)}; {report.tokens_per_row:,.0f} tokens, of them "
            f"{report.loss_tokens_per_row:,.0f} targets",
        ),
        ("padding saved", f"{share(packed.saved)} of the cells that batches of {PADDED_BATCH}, padded, would take"),
        (
            "examples in a row",
            f"{number(report.examples_per_row.mean)} on average; at most {number(segments['1'])} in 1 % of rows, "
            f"{number(segments['99'])} in 99 %, {number(segments['100'])} in all",
        ),
        (
            "attention cost",
            f"{report.attention.mean:.2f} of one example that fills the row; at most {cost['5']:.2f} in 5 % of rows, "
            f"{cost['95']:.2f} in 95 %",
        ),
    ]
    if report.ranks > 1 and report.slowest is not None:
        named.append(("", f"the dearest of {report.ranks} ranks costs {report.slowest:.2f} times the mean in a step"))
    return [title(f"Rows of {packed.seq_len:,}", f"packing={report.settings['packing']!r}"), pairs(named)]


def _before_ends(packed: Packed) -> str:
    return f", {share(packed.fill_before_ends)} before lanes end" if packed.fill_before_ends is not None else ""


def _of_choices(report: Report) -> list[RenderableType]:
    head = ["rows", "fill", "before ends", "padding saved", "over-long", "examples in a row"]
    parts: list[RenderableType] = []
    for heading, name, choices in (
        ("Row lengths", "seq_len", report.by_seq_len),
        ("Buffer sizes", "buffer_size", report.by_buffer_size),
    ):
        rows = [[f"{getattr(one, name):,}", *_choice(one)] for one in choices]
        note = "" if report.read.is_all else "of the sample"
        parts += [title(heading, note), table([name, *head], rows, left=0)]
    return parts


def _choice(one: Packed) -> list[str]:
    ends = "-" if one.fill_before_ends is None else share(one.fill_before_ends)
    return [f"{one.rows:,}", share(one.fill), ends, share(one.saved), f"{one.overlong:,}", number(one.examples_per_row)]


def _of_lanes(report: Report) -> list[RenderableType]:
    lanes = report.lanes
    even = "how even they are shows when all is read"
    if lanes.rows_least is not None:
        even = f"between {lanes.rows_least:,} and {lanes.rows_most:,} rows each"
    named = [(f"lanes={lanes.lanes}", even)]
    same = lanes.advised == lanes.lanes
    named.append(("advice", f"lanes={lanes.advised}" + (", as it is" if same else "")))
    return [title("Lanes"), pairs(named), *lines(lanes.reasons)]


# ---- plan ------------------------------------------------------------------------------------------------------------


def plan_view(plan: Plan) -> RenderableType:
    """A plan."""
    topology = f"{plan.ranks} ranks x {plan.batch_size} rows x {plan.accumulation} accumulated"
    step = [
        ("rows", f"{plan.rows_per_step:,}  ({topology})"),
        (
            "tokens",
            f"{number(round(plan.tokens_per_step))}, of them {number(round(plan.loss_tokens_per_step))} targets",
        ),
        ("examples", number(plan.examples_per_step)),
    ]
    parts: list[RenderableType] = [title("A step", "on average"), pairs(step)]
    if plan.epoch is not None:
        epoch = plan.epoch
        note = "exact" if epoch.rows.is_exact else "estimated, with an interval"
        left = f", {share(plan.left_out)} of them left out" if plan.left_out else ""
        rows = [("examples", about(epoch.examples) + left), ("tokens", about(epoch.tokens))]
        rows.append(("rows", about(epoch.rows)))
        parts += [title("An epoch", note), pairs([*rows, ("steps", about(plan.steps_per_epoch))])]
    epochs = (
        f"{number(plan.epochs)} epoch{'s' * (plan.epochs != 1)}"
        if plan.epochs is not None
        else "an unknown number of epochs"
    )
    heading = f"{plan.budget:,} tokens, {epochs}" if plan.budget is not None else epochs
    whole = [("steps", about(plan.steps)), ("tokens", about(plan.tokens)), ("examples", about(plan.examples))]
    parts += [title(heading[0].upper() + heading[1:]), pairs(whole)]
    parts += [title("The schedule"), pairs([("num_training_steps", f"{plan.num_training_steps:,}")])]
    stops = lines([f"this would stop training: {stop}" for stop in plan.stops], "bold red")
    return Group(*parts, *lines(plan.advice), *stops)
