"""Page: a report as one HTML file with its pictures inside (matplotlib), which needs no network and no other file."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from streampack.interval import Estimate
from streampack.report import PADDED_BATCH, Packed, Report
from streampack.wording import many, number, share, visible

_COLOURS = ("#4c78a8", "#f2a541", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_INK, _QUIET, _EMPTY = "#1f2933", "#7b8794", "#e4e7eb"
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: #1f2933; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 4px; }
p.note, p.read { color: #7b8794; margin: 0 0 12px; }
p.read { margin: 4px 0 24px; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 10px; padding: 20px 24px; margin: 16px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid #e4e7eb; border-radius: 10px; padding: 14px 16px; }
.card b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: #7b8794; font-size: 13px; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: #7b8794; font-weight: 500; text-align: right; border-bottom: 1px solid #cbd2d9; padding: 4px 10px; }
td { text-align: right; border-bottom: 1px solid #f0f2f5; padding: 4px 10px; }
th:first-child, td:first-child { text-align: left; }
tr.own td { font-weight: 650; background: #f5f7fa; }
ul { margin: 8px 0 0; padding-left: 20px; }
.stop { color: #b42318; font-weight: 600; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 16px; }
.two section { margin: 0; padding: 20px 16px; }
.two th, .two td { padding: 4px 6px; font-size: 13px; }
"""


def page(report: Report) -> str:
    """The whole page, as HTML.

    Raises:
        ImportError: without matplotlib.
    """
    packed, epoch = report.packed, report.epoch
    shards = f"{report.read.shards:,} of {many(report.read.of_shards, 'shard')}"
    what = "all of it" if report.read.is_all else "a sample"
    cards = [
        (_card_number(None if epoch is None else epoch.rows), f"rows of {packed.seq_len:,} in an epoch"),
        (_card_number(None if epoch is None else epoch.tokens), "tokens in an epoch"),
        (_card_number(None if epoch is None else epoch.examples), "examples"),
        (share(packed.fill), "fill"),
        (share(packed.saved), f"of the cells of padded batches of {PADDED_BATCH} saved"),
        (number(report.examples_per_row.mean), "examples in a row"),
    ]
    body = [
        f"<h1>{_text(report.source)}</h1>",
        f'<p class="read">{report.read.examples:,} examples read, {shards}: {what}.</p>',
        '<div class="cards">',
        *(f'<div class="card"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for value, name in cards),
        "</div>",
        _section("Lengths", "Tokens of an example; logarithmic.", _lengths(report) + _left_out(report)),
        _section(
            "The first rows",
            f"Each line is a row of {packed.seq_len:,} cells, each colour an example; what is pale is padding.",
            _picture(_strip(report), "a strip of packed rows, the examples in colours"),
        ),
        '<div class="two">',
        _section(
            "Buffer sizes",
            "What more examples to choose from are worth.",
            _picture(_fill_against_buffer(report), "fill against the buffer size")
            + _choices(report.by_buffer_size, "buffer_size", own=packed.buffer_size),
        ),
        _section(
            "Row lengths",
            "Fill, and the cells saved against padding.",
            _picture(_fill_against_rows(report), "fill and padding saved against the row length")
            + _choices(report.by_seq_len, "seq_len", own=packed.seq_len),
        ),
        "</div>",
        _section("In a row", "", _in_a_row(report)),
        _section("Lanes", f"Now: lanes={report.lanes.lanes}. Advice: lanes={report.lanes.advised}.", _lanes(report)),
        _section("Settings", "What identifies the stream.", _settings(report)),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>streampack: {_text(report.source[:80])}</title><style>{_STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(visible(str(value)))


def _section(title: str, note: str, inner: str) -> str:
    noted = f'<p class="note">{_text(note)}</p>' if note else ""
    return f"<section><h2>{_text(title)}</h2>{noted}{inner}</section>"


def _card_number(estimate: Estimate | None) -> str:
    if estimate is None:
        return "?"
    if estimate.is_exact:
        return number(estimate.value)
    reach = max(estimate.high - estimate.value, estimate.value - estimate.low) / max(estimate.value, 1)
    return f"{number(estimate.value)} ± {reach:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, own: int | None = None) -> str:
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = [
        f"<tr{' class=own' if place == own else ''}>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
        for place, row in enumerate(rows)
    ]
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _lengths(report: Report) -> str:
    spread = report.lengths
    names = [{"0": "least", "100": "most"}.get(name, f"{name} %") for name in spread.quantiles]
    values = [number(value) for value in (*spread.quantiles.values(), spread.mean)]
    return _picture(_histogram(report), "a histogram of lengths") + _table([*names, "mean"], [values])


def _left_out(report: Report) -> str:
    points = [f"{count:,} left out: {reason.replace('_', ' ')}" for reason, count in report.left_out.items()]
    if report.overlong:
        points.insert(0, f"{report.overlong:,} over-long (overlong={report.settings['overlong']!r})")
    points += [f"{where}: {what}" for where, _, what in report.bad]
    stops = [f'<li class="stop">this would stop training: {_text(stop)}</li>' for stop in report.stops]
    listed = "".join([f"<li>{_text(point)}</li>" for point in points] + stops)
    return f"<ul>{listed or '<li>All examples fit and can be used.</li>'}</ul>"


def _choices(choices: Sequence[Packed], name: str, *, own: int) -> str:
    rows = [
        [
            f"{getattr(one, name):,}",
            f"{one.rows:,}",
            share(one.fill),
            "-" if one.fill_before_ends is None else share(one.fill_before_ends),
            share(one.saved),
            number(one.examples_per_row),
        ]
        for one in choices
    ]
    place = next((at for at, one in enumerate(choices) if getattr(one, name) == own), None)
    return _table([name, "rows", "fill", "before ends", "saved", "examples"], rows, own=place)


def _in_a_row(report: Report) -> str:
    rows = [
        ["examples in a row", *(number(value) for value in report.examples_per_row.quantiles.values())],
        ["attention cost", *(f"{value:.2f}" for value in report.attention.quantiles.values())],
    ]
    names = [{"0": "least", "100": "most"}.get(name, f"{name} %") for name in report.attention.quantiles]
    note = (
        f"{report.tokens_per_row:,.0f} tokens and {report.loss_tokens_per_row:,.0f} targets in a row. Attention cost: "
        "the sum of squared lengths; 1 is one example that fills the row."
    )
    if report.slowest is not None and report.ranks > 1:
        note += f" The dearest of {report.ranks} ranks costs {report.slowest:.2f} times the mean in a step."
    return f'<p class="note">{_text(note)}</p>' + _table(["", *names], rows)


def _lanes(report: Report) -> str:
    points = list(report.lanes.reasons)
    if report.lanes.rows_least is not None:
        points.insert(0, f"between {report.lanes.rows_least:,} and {report.lanes.rows_most:,} rows in each lane now")
    return f"<ul>{''.join(f'<li>{_text(point)}</li>' for point in points)}</ul>"


def _settings(report: Report) -> str:
    return _table(["", ""], [[name, str(value)] for name, value in report.settings.items()])


# ---- pictures --------------------------------------------------------------------------------------------------------


def _picture(figure: Any, what: str) -> str:
    """A figure as an SVG image inside the page."""
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(written.getvalue()).decode()
    return f'<img alt="{_text(what)}" src="data:image/svg+xml;base64,{data}">'


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """(a figure, its axes), without a window or a global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_QUIET)
    axes.tick_params(colors=_QUIET, labelcolor=_INK, labelsize=9)
    return figure, axes


def _histogram(report: Report) -> Any:
    figure, axes = _figure(10, 2.8)
    begins, ends, counts = zip(*report.histogram, strict=True)
    widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    axes.bar(begins, counts, width=widths, align="edge", color=_COLOURS[0], edgecolor="white", linewidth=0.5)
    axes.set_xscale("log")
    seq_len = report.packed.seq_len
    if begins[0] <= seq_len <= 4 * ends[-1]:
        axes.axvline(seq_len, color=_COLOURS[4], linewidth=1.2)
        axes.annotate(
            f" seq_len {seq_len:,}", (seq_len, max(counts)), color=_COLOURS[4], fontsize=9, va="top", ha="left"
        )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel("examples", fontsize=9)
    return figure


def _strip(report: Report) -> Any:
    rows, seq_len = report.strip, report.packed.seq_len
    figure, axes = _figure(10, 0.5 + 0.16 * len(rows))
    for line, lengths in enumerate(rows):
        begin = 0
        spans, colours = [], []
        for place, length in enumerate(lengths):
            spans.append((begin, length))
            colours.append(_COLOURS[place % len(_COLOURS)])
            begin += length
        axes.broken_barh([(0, seq_len)], (line - 0.4, 0.8), facecolors=_EMPTY)
        axes.broken_barh(spans, (line - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.4)
    axes.set_xlim(0, seq_len)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(0, len(rows), 8))
    axes.set_ylabel("row", fontsize=9)
    axes.spines["left"].set_visible(False)
    return figure


def _line(choices: Sequence[Packed], name: str, label: str) -> tuple[Any, Any]:
    figure, axes = _figure(5, 2.6)
    places = [getattr(one, name) for one in choices]
    axes.plot(places, [one.fill for one in choices], marker="o", color=_COLOURS[0], label="fill")
    before = [(place, one.fill_before_ends) for place, one in zip(places, choices, strict=True)]
    known = [(place, fill) for place, fill in before if fill is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="^", color=_COLOURS[2], label="fill before lanes end")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label, fontsize=9)
    axes.grid(axis="y", color=_EMPTY, linewidth=0.8)
    return figure, axes


def _fill_against_buffer(report: Report) -> Any:
    figure, axes = _line(report.by_buffer_size, "buffer_size", "buffer_size, examples")
    axes.set_ylabel("fill", fontsize=9)
    least = min(one.fill for one in report.by_buffer_size)
    axes.set_ylim(least - max(0.002, (1 - least) * 0.2), 1 + max(0.0005, (1 - least) * 0.1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.legend(fontsize=9, frameon=False)
    return figure


def _fill_against_rows(report: Report) -> Any:
    figure, axes = _line(report.by_seq_len, "seq_len", "seq_len, tokens")
    places = [one.seq_len for one in report.by_seq_len]
    axes.plot(places, [one.saved for one in report.by_seq_len], marker="s", color=_COLOURS[1], label="saved")
    axes.set_ylim(min(0.0, *(one.saved for one in report.by_seq_len)), 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=9, frameon=False)
    return figure
