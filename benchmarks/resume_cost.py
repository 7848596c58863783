"""How long it takes to go on from a saved state, against the time that the run took to get there.

    python benchmarks/resume_cost.py

200,000 examples in one pass at the default settings: token ids (instruction lengths, 48 Mtoken) from Parquet with row
groups of 1000 examples, from an Arrow `Dataset` and from one JSONL file; texts of 15 lines of source code, about as
many tokens as an instruction has, from one JSONL file and from Parquet. One run saves its state at 10, 50 and 90 % of
the examples. Then each state is loaded into a new PackedDataset and PackedLoader: seconds from there to the first
batch, the best of three (the run is timed once). More than 5 % of the way there is a MISS.

Lines without a verdict show where that rule ends: `datasets` parses a JSONL file up to the position, which is all there
is to do for token ids; and of texts of 3 lines a tenth is passed in about a second.

`encoded`: examples that the tokenizer was given before the first row, without the loader's thread, which works ahead.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data import exit_status, kept, lengths_of, parquet_of_ids, show, show_versions, snippets, tokenizer

from streampack import Files, PackedDataset, PackedLoader, encode
from streampack.texts import TextTokenizer

EXAMPLES = 200_000
PLACES = (0.1, 0.5, 0.9)
LIMIT = 0.05
IDS_BY_DATASETS = "ids, JSONL by datasets"


class Counted(TextTokenizer):
    """Counts the texts that are tokenized."""

    texts = 0

    def ids(self, texts: list[str], *, specials: bool) -> list[list[int]]:
        Counted.texts += len(texts)
        return super().ids(texts, specials=specials)


def ids_in_parquet() -> str:
    lengths = lengths_of("flan_like")
    return parquet_of_ids("instructions", np.resize(lengths, EXAMPLES))


def ids_in_arrow() -> str:
    def write(path: pathlib.Path) -> None:
        table = pq.read_table(ids_in_parquet())
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)

    return kept("instructions.arrow", write)


def ids_in_jsonl() -> str:
    def write(path: pathlib.Path) -> None:
        with path.open("w") as file:
            for batch in pq.ParquetFile(ids_in_parquet()).iter_batches(1000):
                file.writelines(json.dumps(example) + "\n" for example in batch.to_pylist())

    return kept("instructions.jsonl", write)


def texts_in_jsonl(size: int) -> str:
    def write(path: pathlib.Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in snippets(EXAMPLES, size=size))

    return kept(f"snippets-{size}.jsonl", write)


def texts_in_parquet() -> str:
    def write(path: pathlib.Path) -> None:
        pq.write_table(pa.table({"text": snippets(EXAMPLES, size=15)}), path, row_group_size=1000)

    return kept("snippets-15.parquet", write)


def stream(kind: str, path: str) -> Any:
    return datasets.load_dataset(kind, data_files=path, split="train", streaming=True)


def run(open_data: Callable[[], Any], make_tokenizer: Callable[[], Any]) -> list[tuple[float, float, dict[str, Any]]]:
    """(share of the examples taken, seconds since the start, state) about the places asked for."""
    saved = []
    begin = time.perf_counter()
    loader = PackedLoader(PackedDataset(open_data(), make_tokenizer(), seq_len=4096))
    places = iter(PLACES)
    wanted = next(places, None)
    for _ in loader:
        share = loader.stats["examples"] / EXAMPLES
        if wanted is not None and share >= wanted:
            saved.append((share, time.perf_counter() - begin, loader.state_dict()))
            wanted = next(places, None)
    return saved


def resume(open_data: Callable[[], Any], make_tokenizer: Callable[[], Any], state: dict[str, Any]) -> tuple[float, int]:
    """(seconds to the first batch of a loader, examples tokenized before the first row of a dataset)"""
    data, of_text = open_data(), make_tokenizer()
    begin = time.perf_counter()
    loader = PackedLoader(PackedDataset(data, of_text, seq_len=4096))
    loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - begin
    batches.close()

    dataset = PackedDataset(open_data(), of_text, seq_len=4096)
    dataset.load_state_dict(state)
    before = Counted.texts
    next(iter(dataset))
    return seconds, Counted.texts - before


def main() -> int:
    show_versions()
    parquet, arrow, json_lines, texts = ids_in_parquet(), ids_in_arrow(), ids_in_jsonl(), texts_in_parquet()
    short, longer = texts_in_jsonl(3), texts_in_jsonl(15)
    plain = tokenizer()
    encode.TextTokenizer = Counted  # type: ignore[misc]
    of_ids, of_text = (lambda: None), (lambda: plain)
    kinds: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("ids, Parquet", lambda: stream("parquet", parquet), of_ids),
        ("ids, Arrow Dataset", lambda: datasets.Dataset.from_file(arrow), of_ids),
        ("ids, JSONL by Files", lambda: Files(json_lines), of_ids),
        (IDS_BY_DATASETS, lambda: stream("json", json_lines), of_ids),
        ("text of 15 lines, JSONL by datasets", lambda: stream("json", longer), of_text),
        ("text of 15 lines, JSONL by Files", lambda: Files(longer), of_text),
        ("text of 15 lines, Parquet", lambda: stream("parquet", texts), of_text),
        ("text of 3 lines, JSONL by datasets", lambda: stream("json", short), of_text),
        ("text of 3 lines, JSONL by Files", lambda: Files(short), of_text),
    ]
    rows: list[list[object]] = []
    for name, open_data, make_tokenizer in kinds:
        for share, there, state in run(open_data, make_tokenizer):
            tries = [resume(open_data, make_tokenizer, state) for _ in range(3)]
            seconds, encoded = min(tries)
            verdict = "ok" if seconds <= LIMIT * there else "MISS"
            row = [name, f"{share:.0%}", f"{there:.2f}", f"{seconds:.3f}", f"{seconds / there:.1%}"]
            is_judged = name != IDS_BY_DATASETS and not name.startswith("text of 3")
            rows.append([*row, encoded if name.startswith("text") else "-", verdict if is_judged else "-"])
    show(["data", "at", "seconds to get there", "seconds to the first batch", "share", "encoded", "verdict"], rows)
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
