"""Options: what the command line understands."""

import argparse
from typing import Any, get_args

from streampack.chats import Targets
from streampack.conversations import Format
from streampack.encode import Overlong
from streampack.ending import AtEnd
from streampack.opening import SETTINGS
from streampack.packing import Packing
from streampack.report import BUFFER_SIZES, SAMPLE
from streampack.show import CHARACTERS

SETTING_FLAGS = {name: "--" + name.replace("_", "-") for name in (*SETTINGS, "source_name")}
"""Arguments of PackedDataset: the options that set them."""
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_SOURCE_HELP = (
    "files, globs or URLs (JSONL, Parquet, Arrow); a folder of MDS shards, of save_to_disk, or of such files; or a "
    "dataset of the Hub"
)
_STATE_HELP = (
    "where to start: a file of save_json or torch.save, a folder of save_stream or dcp.save, or a checkpoint of "
    "PackedTrainer; settings are taken from it"
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(prog="streampack", description="See what a packed stream does.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _report(commands)
    _plan(commands)
    _trace(commands)
    _show(commands)
    _state(commands)
    return whole


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    return added


def _report(commands: Any) -> None:
    command = _add(commands, "report", "what a source is made of, and what rows it makes")
    command.add_argument("source", nargs="+", metavar="SOURCE", help=_SOURCE_HELP)
    _add_reading(command)
    command.add_argument("--seq-lens", type=_positive, nargs="+", metavar="N", help="row lengths to compare")
    command.add_argument(
        "--buffer-sizes", type=_positive, nargs="+", default=BUFFER_SIZES, metavar="N", help="buffer sizes to compare"
    )
    command.add_argument(
        "--ranks", type=_positive, nargs="+", default=[1], metavar="R", help="ranks that you may ever use"
    )
    command.add_argument(
        "--workers", type=_not_negative, default=0, metavar="W", help="DataLoader workers of each rank"
    )
    command.add_argument("--batch-size", type=_positive, default=1, metavar="B", help="rows in a batch of a rank")
    command.add_argument("--html", metavar="FILE", help="write a page with pictures")
    _add_json(command)
    _add_stream(command)


def _plan(commands: Any) -> None:
    command = _add(commands, "plan", "how many steps, tokens and examples a training run takes")
    command.add_argument("source", nargs="+", metavar="SOURCE", help=_SOURCE_HELP)
    _add_reading(command)
    _add_topology(command)
    command.add_argument("--tokens", type=_count, metavar="N", help="plan a token budget (as 2B) instead of epochs")
    command.add_argument("--at-end", choices=get_args(AtEnd), help="how ranks end together (fill)")
    _add_json(command)
    _add_stream(command)


def _trace(commands: Any) -> None:
    command = _add(commands, "trace", "the examples of a training step, without training")
    command.add_argument("state", nargs="?", metavar="STATE", help=_STATE_HELP)
    command.add_argument("--source", nargs="+", required=True, metavar="SOURCE", help=_SOURCE_HELP)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=_not_negative, metavar="K", help="an optimizer step of the pass, counted from 0")
    which.add_argument("--row", type=_not_negative, metavar="G", help="a row of the stream, counted from 0")
    command.add_argument("--rows", type=_positive, default=1, metavar="N", help="with --row: so many rows (1)")
    _add_topology(command)
    command.add_argument(
        "--saved-after",
        type=_not_negative,
        metavar="S",
        help="steps done when STATE was saved, if it was not always this batch",
    )
    command.add_argument(
        "--epoch", type=_not_negative, default=0, metavar="E", help="without STATE: the epoch of the pass (0)"
    )
    _add_characters(command)
    _add_json(command)
    _add_stream(command)


def _show(commands: Any) -> None:
    command = _add(commands, "show", "packed rows as text: examples in colours, targets underlined, padding marked")
    command.add_argument("source", nargs="+", metavar="SOURCE", help=_SOURCE_HELP)
    command.add_argument("--state", metavar="STATE", help=_STATE_HELP)
    command.add_argument("--row", type=_not_negative, metavar="G", help="the first row (that of STATE, or 0)")
    command.add_argument("--rows", type=_positive, default=2, metavar="N", help="so many rows (2)")
    command.add_argument(
        "--epoch", type=_not_negative, default=0, metavar="E", help="without STATE: the epoch of the pass (0)"
    )
    _add_characters(command)
    _add_stream(command)


def _state(commands: Any) -> None:
    command = _add(commands, "state", "what a saved state says, or how two differ")
    command.add_argument("files", nargs="+", metavar="FILE | diff A B", help="a state, or the word diff and two")
    command.add_argument("--source", nargs="+", metavar="SOURCE", help="tell the share read, and whether it would load")
    _add_json(command)
    _add_stream(command)


# ---- groups of options -----------------------------------------------------------------------------------------------


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sample", type=_count, default=SAMPLE, metavar="N", help=f"examples to read ({SAMPLE:,})")
    command.add_argument("--all", action="store_true", help="read all: exact numbers")


def _add_topology(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=_positive, default=1, metavar="R", help="data-parallel ranks (1)")
    command.add_argument("--batch-size", type=_positive, default=1, metavar="B", help="rows in a batch of a rank (1)")
    command.add_argument(
        "--accumulation", type=_positive, default=1, metavar="A", help="batches in an optimizer step (1)"
    )


def _add_characters(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--characters",
        type=_not_negative,
        default=CHARACTERS,
        metavar="N",
        help=f"of a text that are shown; 0: all ({CHARACTERS})",
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="write all of it as JSON; -: to the standard output")


def _add_stream(command: argparse.ArgumentParser) -> None:
    """The source and the settings of PackedDataset: those that are not given are not there, so that defaults are the
    library's."""
    group = command.add_argument_group("source")
    group.add_argument("--config", help="of a dataset of the Hub")
    group.add_argument("--split", help="of it, or of what save_to_disk wrote; the subfolder of MDS")
    group.add_argument("--revision", help="of a dataset of the Hub")
    group.add_argument("--tokenizer", metavar="T", help="a folder, or a name on the Hub; none: examples have input_ids")

    group = command.add_argument_group("stream", "as in PackedDataset")

    def add(name: str, kind: Any = None, choices: Any = None, metavar: str | None = None) -> None:
        group.add_argument(
            SETTING_FLAGS[name], dest=name, type=kind, choices=choices, metavar=metavar, default=argparse.SUPPRESS
        )

    add("seq_len", int, metavar="N")
    add("format", choices=get_args(Format))
    add("targets", choices=get_args(Targets))
    add("text_column", metavar="NAME")
    for name in ("lanes", "buffer_size", "shuffle_block", "seed"):
        add(name, int, metavar="N")
    add("epochs", _epochs, metavar="N|endless")
    group.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
    add("packing", choices=get_args(Packing))
    add("overlong", choices=get_args(Overlong))
    add("truncate_keep", choices=("start", "end"))
    add("append_eos", _yes_no_auto, metavar="yes|no|auto")
    add("empty", choices=("drop", "error"))
    add("no_target", choices=("drop", "keep", "error"))
    add("bad", choices=("drop", "error"))
    for name in ("vocab_size", "max_example_len", "max_examples_per_row", "pad_to_multiple_of", "pad_token_id"):
        add(name, int, metavar="N")
    add("source_name", metavar="NAME")


def _count(text: str) -> int:
    """ "2B" is 2,000,000,000."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        value = float(digits.replace(",", "").replace("_", "")) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 20000, 20K, 3M or 2B") from None
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 1, and finite")
    return round(value)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a number of at least {least}")
    return int(text)


def _epochs(text: str) -> int | None:
    if text == "endless":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a number, or endless") from None


def _yes_no_auto(text: str) -> bool | str:
    if text not in ("yes", "no", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r}: pass yes, no or auto")
    return "auto" if text == "auto" else text == "yes"
