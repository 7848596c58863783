"""Train a small language model on a packed stream; stop it at any moment and go on exactly, on any number of processes.

    python examples/train.py                                # two minutes on a CPU, without network
    python examples/train.py --resume                       # after Ctrl-C or kill -9: the same run goes on
    torchrun --nproc-per-node 2 examples/train.py --resume  # the same on two processes, with the same global batches
    python examples/train.py --dataset HuggingFaceFW/fineweb-edu --dataset-config sample-10BT \
        --tokenizer HuggingFaceTB/SmolLM2-135M --seq-len 2048 --steps 1000 --out runs/fineweb

With no arguments it trains on text that every machine has: the functions and classes of Python's standard library,
written once to `--data` as Parquet files with a tokenizer trained on them, and streamed back by `datasets`.
`--dataset` takes a dataset of the Hub instead, or a folder or file of .parquet or .jsonl files.

`--out` gets the newest two checkpoints (model, optimizer and stream, one file each) and losses.jsonl: for each step
the loss (mean over the targets of the global batch), the norm of its gradient, a digest of the rows, and the lengths
of their examples. A line of the progress bar: loss, tokens/s, fill (tokens / cells), and epochs of the data read.

At the end it prints what padding would have cost for the same examples (of split ones: the fragments), in cells, that
is tokens and padding that a model has to process: as many examples in a batch as the packed batch has rows, each
batch padded to its longest; in the order seen, and with the examples of each 50 batches sorted by length before.
"""

import argparse
import ast
import hashlib
import importlib.util
import itertools
import json
import os
import signal
import sysconfig
import tempfile
import threading
import time
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from datasets import IterableDataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import streampack

RANK = int(os.environ.get("RANK", "0"))  # torchrun sets these three
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="steps in all, also of a run that is resumed")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--global-batch", type=int, default=8, help="rows in a step, over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers; 0, a thread, is best for text")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of checkpoints and losses.jsonl")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    parser.add_argument("--data", type=Path, default=Path("runs/stdlib"), help="folder for the data made here")
    parser.add_argument("--max-files", type=int, help="make the data of so many source files only")
    parser.add_argument("--dataset", help="use this Hub dataset, or local .parquet or .jsonl files, instead")
    parser.add_argument("--dataset-config", help="its configuration")
    parser.add_argument("--split", default="train")
    parser.add_argument("--revision", help="a commit of the dataset: pin it, so that the data stays what it is")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--tokenizer", help="name or folder of a tokenizer; needed with --dataset")
    args = parser.parse_args()
    if args.dataset and not args.tokenizer:
        parser.error("--dataset needs --tokenizer")
    if args.global_batch < 1 or args.global_batch % WORLD_SIZE:
        parser.error(f"--global-batch {args.global_batch} rows cannot be dealt evenly to {WORLD_SIZE} processes")
    if not args.resume and checkpoints(args.out):
        parser.error(f"{args.out} holds {checkpoints(args.out)[-1].name}: --resume it, or use another --out")
    return args


# ---- data ------------------------------------------------------------------------------------------------------------


def functions_and_classes(path: Path) -> list[str]:
    """The source text of each top-level function and class of a Python file."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        nodes = ast.parse(text).body
    except (SyntaxError, UnicodeDecodeError):
        return []
    lines = text.split("\n")
    return [
        "\n".join(lines[min(part.lineno for part in (node, *node.decorator_list)) - 1 : node.end_lineno])
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")


def make_standard_library(folder: Path, max_files: int | None) -> None:
    """Write the Parquet files and the tokenizer, unless they are there. All of it appears at once, or nothing."""
    if (folder / "tokenizer").exists():
        return
    print(f"writing {folder}: Parquet files and a tokenizer", flush=True)
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    texts = [text for path in paths[:max_files] for text in functions_and_classes(path)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-unfinished-", dir=folder.parent) as parent:
        unfinished = Path(parent, "data")
        unfinished.mkdir()
        for number, first in enumerate(range(0, len(texts), 500)):
            part = pa.table({"text": texts[first : first + 500]})
            pq.write_table(part, unfinished / f"{number:02d}.parquet", row_group_size=100)
        make_tokenizer(texts).save_pretrained(unfinished / "tokenizer")
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not (folder / "tokenizer").exists():  # else another run was faster
                raise


def open_stream(args: argparse.Namespace) -> IterableDataset:
    """The examples, as a stream that is neither shuffled nor split: streampack does both."""
    place = Path(args.dataset or args.data)
    if args.dataset and not place.exists():
        return load_dataset(args.dataset, args.dataset_config, split=args.split, revision=args.revision, streaming=True)
    files = [place] if place.is_file() else [*place.rglob("*.parquet")] or [*place.rglob("*.jsonl")]
    if not files:
        raise SystemExit(f"no .parquet or .jsonl files in {place}")
    builder = "parquet" if files[0].suffix == ".parquet" else "json"
    return load_dataset(builder, data_files=sorted(map(str, files)), split="train", streaming=True)


# ---- training --------------------------------------------------------------------------------------------------------


def start_processes() -> torch.device:
    """Join the other processes, if there are any, and make this one's arithmetic repeatable."""
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(torch.get_num_threads())  # fixed: the number of threads decides how sums are rounded
        torch.use_deterministic_algorithms(True)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def gather(mine: Any) -> list[Any]:
    """What each process passes, in the order of the ranks."""
    everyone = [mine] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def make_model(args: argparse.Namespace, vocab_size: int, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def train_step(
    model: Any, optimizer: Any, batch: dict[str, Any], num_targets: int, device: torch.device
) -> tuple[float, float]:
    """One update with the gradient of the global batch, which has `num_targets` targets.

    Returns this rank's part of the loss (the sum over its targets, divided by `num_targets`), and the gradient's norm.
    """
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(**batch, num_items_in_batch=num_targets).loss
    (loss * WORLD_SIZE).backward()  # DistributedDataParallel takes the mean over ranks: this makes it the sum
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def look_at_rows(batch: dict[str, Any], provenance: list[list[Any]], seq_len: int) -> list[tuple[str, list[int]]]:
    """For each row of a batch a digest of its token ids, and the lengths of its examples."""
    all_ids, all_positions = (batch[key].view(-1, seq_len) for key in ("input_ids", "position_ids"))
    rows = []
    for ids, positions, examples in zip(all_ids, all_positions, provenance, strict=True):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), seq_len]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        rows.append((hashlib.sha256(ids.numpy()).hexdigest(), lengths[: len(examples)]))  # after them: padding
    return rows


def put_together(loss: float, rows: list[tuple[str, list[int]]]) -> dict[str, Any]:
    """What a step was, from all processes: the same for any number of them."""
    parts = gather((loss, rows))
    in_order = [row for turn in zip(*(rows for _, rows in parts), strict=True) for row in turn]  # ranks take turns
    return {
        "loss": sum(part for part, _ in parts),
        "rows": hashlib.sha256("".join(digest for digest, _ in in_order).encode()).hexdigest(),
        "lengths": [lengths for _, lengths in in_order],
    }


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-*.pt"))


def save(folder: Path, step: int, **states: Any) -> None:
    """Write a checkpoint, which appears complete or not at all, and remove all but the newest two."""
    unfinished = folder / "unfinished.pt"
    with open(unfinished, "wb") as file:
        torch.save({"step": step, **states}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / f"step-{step:08d}.pt")
    for old in checkpoints(folder)[:-2]:
        old.unlink()


def open_log(folder: Path, steps: int) -> TextIO:
    """losses.jsonl, cut to the lines of the first `steps` steps: later ones, which no checkpoint holds, come again."""
    if RANK > 0:
        return open(os.devnull, "w")
    path, unfinished = folder / "losses.jsonl", folder / "unfinished.jsonl"
    lines = path.read_text().splitlines(keepends=True)[:steps] if path.exists() else []
    unfinished.write_text("".join(lines))
    os.replace(unfinished, path)
    return open(path, "a", buffering=1)


def make_loader(args: argparse.Namespace, tokenizer: Any, *, flat: bool) -> streampack.PackedLoader:
    dataset = streampack.PackedDataset(
        open_stream(args),
        tokenizer,
        seq_len=args.seq_len,
        text_column=args.text_column,
        seed=args.seed,
        epochs=None,  # endless, so that no rank runs out of rows before the others
    )
    return streampack.PackedLoader(
        dataset,
        batch_size=args.global_batch // WORLD_SIZE,
        layout="flat" if flat else "rows",
        num_workers=args.workers,
        pin_memory=True,
    )


def train(args: argparse.Namespace, loader: streampack.PackedLoader, model: Any, optimizer: Any, done: int) -> None:
    """Train from step `done` + 1 to the last one, or to a signal."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    parallel = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    start, tokens, speed = time.monotonic(), 0, 0.0
    with open_log(args.out, done) as log, tqdm(total=args.steps, initial=done, disable=RANK > 0) as bar:
        for step, batch in zip(range(done + 1, args.steps + 1), loader, strict=False):
            sums = torch.tensor([loader.num_loss_tokens, stop.is_set()], device=model.device)
            if WORLD_SIZE > 1:
                dist.all_reduce(sums)
            num_targets, stopping = sums.tolist()  # all ranks learn of a signal to one of them in the same step
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, step / 10)  # warm-up; not of --steps, which a resumed run may change
            loss, norm = train_step(parallel, optimizer, batch, num_targets, model.device)

            line = put_together(loss, look_at_rows(batch, loader.provenance, args.seq_len))
            log.write(json.dumps({"step": step, "gradient_norm": norm, **line}) + "\n")
            tokens += sum(map(sum, line["lengths"]))
            speed = tokens / (time.monotonic() - start)
            told = {"loss": line["loss"], "fill": loader.stats["fill"], "epoch": loader.stats["epoch"]}
            bar.set_postfix({key: f"{value:.4f}" for key, value in told.items()}, tokens_per_s=f"{speed:,.0f}")
            bar.update()
            if stopping or step == args.steps or step % args.save_every == 0:
                stream = streampack.merge_states(gather(loader.state_dict()))
                if RANK == 0:
                    save(args.out, step, model=model.state_dict(), optimizer=optimizer.state_dict(), stream=stream)
            if stopping:
                break
    if RANK == 0:
        left = "--resume goes on" if bar.n < args.steps else "--resume with more --steps goes on"
        print(f"{bar.n} of {args.steps} steps done and saved ({left}), {speed:,.0f} tokens/s")


def report(args: argparse.Namespace) -> None:
    """Print what packing saved, from losses.jsonl."""
    with open(args.out / "losses.jsonl") as file:
        rows = [row for line in file for row in json.loads(line)["lengths"]]
    lengths, size = [length for row in rows for length in row], args.global_batch
    windows = [sorted(lengths[first : first + 50 * size]) for first in range(0, len(lengths), 50 * size)]
    tokens, cells = sum(lengths), len(rows) * args.seq_len
    print(f"packed: {cells:,} cells for {tokens:,} tokens of {len(lengths):,} examples, fill {tokens / cells:.4f}")
    for how, order in (("as they come", lengths), ("sorted by length", list(itertools.chain(*windows)))):
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        padded = sum(len(batch) * max(batch) for batch in batches)
        print(f"padded, {size} in a batch, {how}: {padded:,} cells, {padded / cells:.2f} times as many")


def main() -> None:
    args = parse_arguments()
    device = start_processes()
    if RANK == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.dataset:
            make_standard_library(args.data, args.max_files)
    gather("ready")  # the others wait for the data

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.data / "tokenizer")
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    loader = make_loader(args, tokenizer, flat=flash)
    model = make_model(args, len(tokenizer), "flash_attention_2" if flash else "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    done = 0
    if args.resume and not checkpoints(args.out) and RANK == 0:
        print(f"no checkpoint in {args.out}: beginning with the first step")
    if args.resume and checkpoints(args.out):
        checkpoint = torch.load(checkpoints(args.out)[-1], map_location=device)
        loader.load_state_dict(checkpoint["stream"])
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["step"]
    train(args, loader, model, optimizer, done)
    if RANK == 0:
        report(args)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
