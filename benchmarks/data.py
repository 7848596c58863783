"""Data that the benchmarks share: real token lengths, ids of those lengths, Python's own source as text, a tokenizer.

`lengths/*.npy` are token counts of five real sets (int32, one for each example). Ids are random integers; text is the
standard library. What takes a while to make is kept in a temporary folder. Nothing is downloaded.
"""

import ast
import datetime
import os
import pathlib
import platform
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SETS = ("flan_like", "math", "code_funcs", "code_files", "longdoc")
VOCABULARY = 32_000
FOLDER = pathlib.Path(tempfile.gettempdir()) / "streampack-benchmarks"


def lengths_of(name: str) -> np.ndarray:
    """Token counts of a set, int64 [examples], in the order of the data."""
    return np.load(pathlib.Path(__file__).parent / "lengths" / f"{name}.npy").astype(np.int64)


def cut(lengths: np.ndarray, limit: int) -> tuple[list[int], list[int]]:
    """(lengths of the pieces, example of each piece) where examples over `limit` tokens are split as streampack does:
    no piece is a single token, so 9 by 4 is 4, 3, 2."""
    pieces, examples = [], []
    for example, length in enumerate(lengths.tolist()):
        full, rest = divmod(length, limit)
        parts = [limit] * full + [rest] * (rest > 0)
        if rest == 1 and full:
            parts[-2:] = [limit - 1, 2]
        pieces += parts
        examples += [example] * len(parts)
    return pieces, examples


def table_of_ids(lengths: np.ndarray, *, seed: Sequence[int]) -> pa.Table:
    """Examples with random `input_ids` of these lengths."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, int(lengths.sum()), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})


class LengthSource:
    """A Source of examples with `input_ids` of given lengths, made while reading. `files`: examples in each shard;
    default: runs of 1000."""

    def __init__(self, lengths: np.ndarray, *, files: Sequence[int] | None = None, name: str = "lengths") -> None:
        files = files or [min(1000, len(lengths) - start) for start in range(0, len(lengths), 1000)]
        self.name = name
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(files)])
        self.num_shards = len(files)

    def read(self, shard: int, start: int) -> Iterator[pa.Table]:
        lengths = self.lengths[self.starts[shard] : self.starts[shard + 1]]
        yield table_of_ids(lengths, seed=(shard,)).slice(start)


def parquet_of_ids(name: str, lengths: np.ndarray) -> str:
    """A Parquet file of ids with these lengths, in row groups of 1000 examples; made once."""

    def write(path: pathlib.Path) -> None:
        with pq.ParquetWriter(path, table_of_ids(lengths[:1], seed=(0,)).schema) as writer:
            for start in range(0, len(lengths), 1000):
                writer.write_table(table_of_ids(lengths[start : start + 1000], seed=(start,)))

    return kept(f"{name}-{len(lengths)}.parquet", write)


def source_files() -> Iterator[str]:
    """The Python source files of the standard library, in a fixed order."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # some tests of the standard library are in other encodings on purpose
                continue


def functions() -> list[str]:
    """Every function and method of the standard library as a text."""
    found = []
    for text in source_files():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError):  # wrong on purpose, as above
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


def snippets(count: int, *, size: int = 3) -> list[str]:
    """`count` short texts: runs of `size` lines of the standard library, from the start again where it is too small."""
    found: list[str] = []
    for text in source_files():
        lines = text.splitlines(keepends=True)
        found += [
            piece for start in range(0, len(lines), size) if (piece := "".join(lines[start : start + size])).strip()
        ]
    return [found[place % len(found)] for place in range(count)]


def tokenizer():  # type: ignore[no-untyped-def]
    """A fast Transformers tokenizer, byte-pair encoding trained on the standard library; trained once."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    def train(path: pathlib.Path) -> None:
        backend = ByteLevelBPETokenizer()
        backend.train_from_iterator(source_files(), VOCABULARY, special_tokens=["<eos>"], show_progress=False)
        backend.save(str(path))

    path = kept(f"tokenizer-{platform.python_version()}.json", train)
    return PreTrainedTokenizerFast(tokenizer_file=path, eos_token="<eos>", pad_token="<eos>")


def kept(name: str, make) -> str:  # type: ignore[no-untyped-def]
    """The path of a file in the temporary folder, made first if it is not there."""
    path = FOLDER / name
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}-{name}")
        make(unfinished)
        unfinished.rename(path)
    return str(path)


def show(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown, columns of figures to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(head, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[-1:] in (*"0123456789%-", "") for cell in column[1:]) for column in columns]
    rules = ["-" * (width - at) + ":" * at for width, at in zip(widths, right, strict=True)]
    for row in [list(head), rules, *cells]:
        parts = zip(row, widths, right, strict=True)
        print("| " + " | ".join(cell.rjust(width) if at else cell.ljust(width) for cell, width, at in parts) + " |")
    print(flush=True)


def exit_status(lines: Sequence[Sequence[object]]) -> int:
    """1 if the last cell of some lines is MISS, after saying how many."""
    misses = sum(line[-1] == "MISS" for line in lines)
    print(f"{misses} MISS")
    return min(1, misses)


def show_versions() -> None:
    """One line that belongs to every result."""
    names = ("torch", "datasets", "transformers", "numpy", "pyarrow")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"{datetime.date.today()}: Python {platform.python_version()}, {versions}, {os.cpu_count()} CPU cores\n")
