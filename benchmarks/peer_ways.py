"""The ways that peers.py compares, each as its users set it up: from Parquet files to rows, and to batches of tensors.

Each way has `rows(num_workers=)`, which yields (the first token of each piece in the row, tokens, cells) for each row;
`batches()`, which makes batches of tensors and yields the tokens in each; and `state_dict`, `load_state_dict` of what
it reads with. Examples over seq_len are cut by all but TRL's bfd, which truncates them, and the padded way.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from data import tokenizer

Row = tuple[tuple[int, ...], int, int]


def stream_of(files: list[str], kind: str) -> Any:
    """A `datasets` stream of input_ids, tokenized on the way where the files hold texts."""
    import datasets

    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    if kind == "ids":
        return stream
    from transformers import PreTrainedTokenizerBase

    encoder: PreTrainedTokenizerBase = tokenizer()
    end = encoder.eos_token

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": encoder([text + end for text in batch["text"]])["input_ids"]}

    return stream.map(tokenize, batched=True, remove_columns=["text"])


class Trl:
    """A `datasets` stream packed by TRL's pack_dataset in chunks of 1000, batches by TRL's collator."""

    strategy = "bfd_split"
    shuffle = False

    def __init__(self, *, files: list[str], kind: str, seq_len: int, batch_size: int) -> None:
        from trl import pack_dataset

        stream = stream_of(files, kind)
        if self.shuffle:
            stream = stream.shuffle(seed=0, buffer_size=1000)
        self.seq_len, self.batch_size = seq_len, batch_size
        self.stream = pack_dataset(stream, seq_len, self.strategy)
        self.state_dict, self.load_state_dict = self.stream.state_dict, self.stream.load_state_dict

    def rows(self, *, num_workers: int) -> Iterator[Row]:
        from torch.utils.data import DataLoader

        source = DataLoader(self.stream, batch_size=None, num_workers=num_workers) if num_workers else self.stream
        for row in source:
            starts = np.cumsum([0, *row["seq_lengths"][:-1]])
            firsts = tuple(int(row["input_ids"][start]) for start in starts)
            yield firsts, len(row["input_ids"]), self.seq_len

    def batches(self) -> Iterator[int]:
        from torch.utils.data import DataLoader
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        for batch in DataLoader(self.stream, batch_size=self.batch_size, collate_fn=collator):
            yield batch["input_ids"].numel()


class TrlTruncating(Trl):
    """TRL's default strategy."""

    strategy = "bfd"


class TrlShuffled(Trl):
    """With a shuffle buffer, as streams are usually shuffled."""

    shuffle = True


class Padded:
    """A `datasets` stream in torchdata's StatefulDataLoader, not packed: padded to the longest of the batch."""

    def __init__(self, *, files: list[str], kind: str, seq_len: int, batch_size: int) -> None:
        self.seq_len, self.batch_size = seq_len, batch_size
        self.stream = stream_of(files, kind)
        self.loader: Any = None
        self._loaded: Any = None

    def _iterate(self, num_workers: int) -> Iterator[dict[str, Any]]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = StatefulDataLoader(
            self.stream, batch_size=self.batch_size, collate_fn=self._collate, num_workers=num_workers
        )
        if self._loaded is not None:
            self.loader.load_state_dict(self._loaded)
        return iter(self.loader)

    def _collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        ids = [torch.tensor(example["input_ids"][: self.seq_len]) for example in examples]
        mask = [torch.ones(len(one), dtype=torch.int64) for one in ids]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(ids, batch_first=True),
            "attention_mask": pad(mask, batch_first=True),
            "labels": pad(ids, batch_first=True, padding_value=-100),
        }

    def rows(self, *, num_workers: int) -> Iterator[Row]:
        for batch in self._iterate(num_workers):
            firsts = tuple(batch["input_ids"][:, 0].tolist())
            yield firsts, int(batch["attention_mask"].sum()), batch["input_ids"].numel()

    def batches(self) -> Iterator[int]:
        for batch in self._iterate(0):
            yield int(batch["attention_mask"].sum())

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loaded = state


class GrainFirstFit:
    """grain over all examples in memory (random access), shuffled: its packer keeps some bins open."""

    bins = 8

    def __init__(self, *, files: list[str], kind: str, seq_len: int, batch_size: int) -> None:
        import grain

        self.seq_len, self.batch_size = seq_len, batch_size
        column = "input_ids" if kind == "ids" else "text"
        examples = [example for file in files for example in pq.read_table(file)[column].to_numpy(zero_copy_only=False)]
        source = grain.MapDataset.source(examples).shuffle(seed=0)
        if kind == "text":
            encoder = tokenizer()
            source = source.map(lambda text: np.array(encoder(text + encoder.eos_token)["input_ids"]))
        pieces = grain.experimental.FlatMapIterDataset(source.to_iter_dataset(), _Cut(seq_len))
        self.dataset = self._pack(grain, pieces)
        self._iterator: Any = None

    def _pack(self, grain: Any, pieces: Any) -> Any:
        return grain.experimental.FirstFitPackIterDataset(
            pieces, length_struct={"input_ids": self.seq_len}, num_packing_bins=self.bins
        )

    def _iterate(self, num_workers: int) -> Iterator[dict[str, np.ndarray]]:
        if num_workers:
            import grain

            options = grain.MultiprocessingOptions(num_workers=num_workers)
            return iter(self.dataset.mp_prefetch(options))
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        return self._iterator  # type: ignore[no-any-return]

    def rows(self, *, num_workers: int) -> Iterator[Row]:
        for row in self._iterate(num_workers):
            held = row["input_ids_segment_ids"] > 0
            firsts = row["input_ids"][held & (row["input_ids_positions"] == 0)]
            yield tuple(firsts.tolist()), int(held.sum()), self.seq_len

    def batches(self) -> Iterator[int]:
        import torch

        rows = self._iterate(0)
        while batch := [row for row, _ in zip(rows, range(self.batch_size), strict=False)]:
            ids, positions, segments = (
                torch.from_numpy(np.stack([row[key] for row in batch]).astype(np.int64))
                for key in ("input_ids", "input_ids_positions", "input_ids_segment_ids")
            )
            labels = ids.masked_fill((segments == 0) | (positions == 0), -100)
            assert labels.shape == ids.shape
            yield int((segments > 0).sum())

    def state_dict(self) -> Any:
        return self._iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._iterator = iter(self.dataset)
        self._iterator.set_state(state)


class GrainBestFit(GrainFirstFit):
    bins = 64

    def _pack(self, grain: Any, pieces: Any) -> Any:
        return grain.experimental.BestFitPackIterDataset(
            pieces, length_struct={"input_ids": self.seq_len}, num_packing_bins=self.bins
        )


class _Cut:
    """Pieces of at most seq_len tokens, for grain's packers, which leave out what does not fit."""

    max_fan_out = 1 << 20

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def flat_map(self, ids: np.ndarray) -> list[dict[str, np.ndarray]]:
        return [{"input_ids": ids[start : start + self.seq_len]} for start in range(0, len(ids), self.seq_len)]


class Streampack:
    """The same files in a PackedLoader, at its defaults (shuffled)."""

    def __init__(self, *, files: list[str], kind: str, seq_len: int, batch_size: int) -> None:
        import datasets

        import streampack

        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        self.seq_len, self.batch_size = seq_len, batch_size
        self.dataset = streampack.PackedDataset(stream, None if kind == "ids" else tokenizer(), seq_len=seq_len)
        self.loader = self._loader(1, 0)
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def _loader(self, batch_size: int, num_workers: int) -> Any:
        import streampack

        return streampack.PackedLoader(self.dataset, batch_size, num_workers=num_workers)

    def rows(self, *, num_workers: int) -> Iterator[Row]:
        loader = self._loader(1, num_workers) if num_workers else self.loader
        for batch in loader:
            lengths = np.diff(batch["cu_seq_lens_q"].numpy())
            segments = len(loader.provenance[0])
            firsts = (np.cumsum(lengths) - lengths)[:segments]
            yield tuple(batch["input_ids"][0, firsts].tolist()), int(lengths[:segments].sum()), self.seq_len

    def batches(self) -> Iterator[int]:
        loader = self._loader(self.batch_size, 0)
        before = 0
        for _ in loader:
            tokens = int(loader.stats["tokens"])
            yield tokens - before
            before = tokens


WAYS = {
    "datasets + StatefulDataLoader, padded": Padded,
    "datasets + TRL bfd (truncates)": TrlTruncating,
    "datasets + TRL bfd_split": Trl,
    "the same, shuffle buffer of 1000": TrlShuffled,
    "grain first-fit, 8 bins": GrainFirstFit,
    "grain best-fit, 64 bins": GrainBestFit,
    "streampack": Streampack,
}
NEEDS = {
    "datasets + StatefulDataLoader, padded": ("torchdata",),
    "datasets + TRL bfd (truncates)": ("trl",),
    "datasets + TRL bfd_split": ("trl",),
    "the same, shuffle buffer of 1000": ("trl",),
    "grain first-fit, 8 bins": ("grain",),
    "grain best-fit, 64 bins": ("grain",),
}
"""The libraries of each way, beside datasets."""
