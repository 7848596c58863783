"""The command line: `streampack report | plan | trace | show | state`, also as `python -m streampack`."""

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from streampack.checkpoint import read_state
from streampack.dataset import PackedDataset
from streampack.describe import describe_state, diff_states
from streampack.opening import open_dataset, open_source, open_tokenizer
from streampack.options import SETTING_FLAGS, parser
from streampack.plan import make_plan
from streampack.progress import Progress, Start
from streampack.report import make_report
from streampack.show import show_row, stretches
from streampack.state import check
from streampack.trace import TracedRow, trace_rows, trace_step
from streampack.wording import visible

MISSING = "the command line needs rich and matplotlib: pip install 'streampack[report]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, or 2 after one line to the standard error that says what to do.

    Args:
        arguments: default: those of the process.
    """
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _write_warning(message)
            commands[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output, such as `head`, has seen enough; nor may the exit try to write it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"streampack: {visible(_as_flags(' '.join(str(error).split())))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("streampack: interrupted\n")
        return 130
    return 0


_IN_FLAGS = {
    "pass a tokenizer": "pass --tokenizer",
    "leave the tokenizer out": "leave --tokenizer out",
    "examples=None": "--all",
}


def _as_flags(text: str) -> str:
    """A message of the library in the words of the command line: seq_len=... is --seq-len ... here."""
    flags = {**SETTING_FLAGS, "saved_after": "--saved-after"}
    names = "|".join(sorted(flags, key=len, reverse=True))
    flagged = re.sub(
        rf"(\b(?:pass |choose |use |or )|\()({names})=", lambda found: found[1] + flags[found[2]] + " ", text
    )
    for said, meant in _IN_FLAGS.items():
        flagged = flagged.replace(said, meant)
    return flagged


def _write_warning(message: Warning | str) -> None:
    sys.stderr.write(f"streampack: {visible(' '.join(str(message).split()))}\n")


# ---- arguments -------------------------------------------------------------------------------------------------------


def _dataset(options: argparse.Namespace, *, saved: Any = None) -> PackedDataset:
    """The stream that the arguments name: the one place where they become arguments of PackedDataset."""
    names = options.source or []
    source = open_source(names, config=options.config, split=options.split, revision=options.revision)
    tokenizer = None if options.tokenizer is None else open_tokenizer(options.tokenizer)
    given = {name: getattr(options, name) for name in SETTING_FLAGS if hasattr(options, name)}
    return open_dataset(source, tokenizer, given=given, saved=saved)


def _state(options: argparse.Namespace) -> Any:
    return None if options.state is None else read_state(options.state)


def _views() -> Any:
    try:
        from streampack import terminal, views
    except ImportError as error:
        raise ImportError(MISSING) from error
    return terminal, views


class _Bar:
    """A bar of the examples read, on the standard error, if that is a terminal."""

    def __init__(self, total: int | None) -> None:
        self.bar = tqdm(total=total, desc="reading", unit=" examples", unit_scale=True, leave=False, disable=None)

    def __enter__(self) -> Callable[[int], object]:
        return self._update

    def _update(self, count: int) -> None:
        self.bar.update(count)

    def __exit__(self, *_: object) -> None:
        self.bar.close()


def _reading(options: argparse.Namespace, dataset: PackedDataset) -> tuple[int | None, _Bar]:
    """(examples to read, a bar for them)."""
    known = getattr(dataset.stream.parts[0].source, "num_examples", None)
    wanted = None if options.all else options.sample
    total = known if wanted is None else wanted if known is None else min(wanted, known)
    return wanted, _Bar(total)


def _write(options: argparse.Namespace, values: Any, show: Callable[[], object]) -> None:
    """The values as JSON to a file, or ("-") to the standard output instead of what is shown there."""
    if options.json == "-":
        sys.stdout.write(json.dumps(values, indent=1) + "\n")
        return
    show()
    if options.json is not None:
        Path(options.json).write_text(json.dumps(values, indent=1) + "\n")


# ---- commands --------------------------------------------------------------------------------------------------------


def _report(options: argparse.Namespace) -> None:
    terminal, _ = _views()
    dataset = _dataset(options)
    wanted, bar = _reading(options, dataset)
    with bar as progress:
        report = make_report(
            dataset,
            examples=wanted,
            seq_lens=options.seq_lens,
            buffer_sizes=options.buffer_sizes,
            ranks=options.ranks,
            workers=options.workers,
            batch_size=options.batch_size,
            progress=progress,
        )
    if options.html is not None:
        try:
            from streampack.page import page

            text = page(report)
        except ImportError as error:
            raise ImportError(MISSING) from error
        Path(options.html).write_text(text, encoding="utf-8")
    _write(options, report.as_dict(), lambda: terminal.write(terminal.report_view(report)))
    if options.html is not None and options.json != "-":
        sys.stdout.write(f"\nwritten: {options.html}\n")


def _plan(options: argparse.Namespace) -> None:
    terminal, _ = _views()
    passes = getattr(options, "epochs", 1)
    if passes is None and options.tokens is None:
        raise ValueError("an endless stream has no steps of its own: pass --tokens, or a number of --epochs")
    options.epochs = 1  # of each pass
    dataset = _dataset(options)
    wanted, bar = _reading(options, dataset)
    with bar as progress:
        plan = make_plan(
            dataset,
            ranks=options.ranks,
            batch_size=options.batch_size,
            accumulation=options.accumulation,
            epochs=1 if passes is None else passes,
            tokens=options.tokens,
            at_end=options.at_end,
            examples=wanted,
            progress=progress,
        )
    _write(options, plan.as_dict(), lambda: terminal.write(terminal.plan_view(plan)))


def _trace(options: argparse.Namespace) -> None:
    terminal, views = _views()
    state = _state(options)
    dataset = _dataset(options, saved=None if state is None else state["stream"])
    if options.step is not None:
        rows = trace_step(
            dataset,
            state,
            step=options.step,
            batch_size=options.batch_size,
            world_size=options.ranks,
            accumulation=options.accumulation,
            saved_after=options.saved_after,
            epoch=options.epoch,
        )
    else:
        rows = trace_rows(dataset, state, first=options.row, count=options.rows, epoch=options.epoch)
    texts = [_texts(dataset, row, options.characters) for row in rows]
    values = [row.as_dict() for row in rows]
    for row_values, of_row in zip(values, texts, strict=True):
        for example, text in zip(row_values["examples"], of_row, strict=True):
            example["text"] = text
    _write(options, values, lambda: terminal.write(views.trace_view(rows, texts, step=options.step)))


def _texts(dataset: PackedDataset, row: TracedRow, characters: int) -> list[str]:
    """The text of each example in a row; without a tokenizer its token ids."""
    texts = [""] * len(row.examples)
    tokenizer = dataset.stream.parts[0].encoder.tokenizer
    for stretch in stretches(dataset.as_dict(row.packed), tokenizer, characters=characters or None):
        if stretch.example >= 0:
            texts[stretch.example] += stretch.text
    return texts


def _show(options: argparse.Namespace) -> None:
    terminal, views = _views()
    state = _state(options)
    dataset = _dataset(options, saved=None if state is None else state["stream"])
    first = options.row if options.row is not None else 0 if state is None else state["row"]
    rows = trace_rows(dataset, state, first=first, count=options.rows, epoch=options.epoch)
    tokenizer = dataset.stream.parts[0].encoder.tokenizer
    coloured = sys.stdout.isatty()
    for row in rows:
        name, packed = f"Row {row.row:,}, lane {row.lane}", dataset.as_dict(row.packed)
        if coloured:
            terminal.write(views.row_view(name, packed, tokenizer, characters=options.characters or None))
        else:
            sys.stdout.write(f"{name}: {show_row(packed, tokenizer, characters=options.characters or None)}\n\n")


def _describe(options: argparse.Namespace) -> None:
    terminal, views = _views()
    files = options.files
    if files[0] == "diff":
        if len(files) != 3:
            raise ValueError("streampack state diff takes two states: streampack state diff A B")
        difference = diff_states(read_state(files[1]), read_state(files[2]))
        view = views.difference_view(difference, (Path(files[1]).name, Path(files[2]).name))
        _write(options, difference.as_dict(), lambda: terminal.write(view))
        return
    if len(files) != 1:
        raise ValueError("streampack state takes one state: streampack state FILE (or diff A B)")
    state = read_state(files[0])
    described = describe_state(state)
    epoch: float | None = None
    taken: bool | str | None = None
    if options.source is not None:
        dataset = _dataset(options, saved=state["stream"])
        try:
            check(state, stream=dataset.stream.identity())
            epoch, taken = _epochs_out(dataset, state), True
        except ValueError as error:
            taken = str(error)
    view = views.state_view(described, epoch=epoch, taken=taken)
    _write(options, described.as_dict(), lambda: terminal.write(view))


def _epochs_out(dataset: PackedDataset, state: Any) -> float | None:
    """The epochs that are out, where it is known how many examples an epoch has."""
    progress = Progress(dataset.stream, Start.of(state, rank=state["rank"], world_size=state["world_size"]))
    if any(progress.unsure_of(lane) for lane in progress.lanes_here()):
        return None
    return progress.stats()["epoch"]


commands: dict[str, Callable[[argparse.Namespace], None]] = {
    "report": _report,
    "plan": _plan,
    "trace": _trace,
    "show": _show,
    "state": _describe,
}
