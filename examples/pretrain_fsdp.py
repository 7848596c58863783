"""Pre-train with FSDP2 on a packed stream; kill it, and go on with another number of processes.

    torchrun --nproc-per-node 4 examples/pretrain_fsdp.py    # on CPUs (gloo) or GPUs, without network
    kill -9 ...
    torchrun --nproc-per-node 2 examples/pretrain_fsdp.py    # the same run goes on from the newest checkpoint

The model is sharded over the processes by `fully_shard`; torch.distributed.checkpoint writes model, optimizer and
stream together, and reads them on any number of processes. The rows of a step, and so the loss, are what they would
have been: the global batch is the same, and its rows are the next ones of the stream. The data are those of
examples/train.py: functions and classes of Python's standard library.

`--out` gets the newest two checkpoints and losses.jsonl: for each step the loss (mean over the targets of the global
batch) and a digest of its rows.
"""

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datasets import load_dataset
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from train import LOCAL_RANK, RANK, WORLD_SIZE, gather, look_at_rows, make_standard_library, open_log, put_together
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import streampack
from streampack.checkpoint import StreamState


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="steps in all, also of a run that goes on")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--global-batch", type=int, default=8, help="rows in a step, over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain_fsdp"))
    parser.add_argument("--data", type=Path, default=Path("runs/stdlib"), help="folder for the data made here")
    parser.add_argument("--max-files", type=int, help="make the data of so many source files only")
    args = parser.parse_args()
    if args.global_batch % WORLD_SIZE:
        parser.error(f"--global-batch {args.global_batch} rows cannot be dealt evenly to {WORLD_SIZE} processes")
    return args


def make_loader(args: argparse.Namespace, tokenizer: Any, *, flat: bool) -> streampack.PackedLoader:
    files = sorted(map(str, args.data.glob("*.parquet")))
    source = load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = streampack.PackedDataset(source, tokenizer, seq_len=args.seq_len, epochs=None)
    batch_size = args.global_batch // WORLD_SIZE
    return streampack.PackedLoader(dataset, batch_size, layout="flat" if flat else "rows", pin_memory=True)


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device, *, flash: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=args.seq_len,
        attn_implementation="flash_attention_2" if flash else "sdpa",
    )
    model = LlamaForCausalLM(config).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


class Training:
    """Model and optimizer, for torch.distributed.checkpoint."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def checkpoints(folder: Path) -> list[Path]:
    """Those that are whole, oldest first: torch.distributed.checkpoint writes .metadata last."""
    return sorted(path.parent for path in folder.glob("step-*/.metadata"))


def save(folder: Path, step: int, states: dict[str, Any]) -> None:
    """Write a checkpoint to a folder of its own, and remove all but the newest two."""
    dcp.save(states, checkpoint_id=folder / f"step-{step:08d}")
    if RANK == 0:
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def train_step(model: Any, optimizer: Any, batch: dict[str, Any], num_targets: int, device: torch.device) -> float:
    """One update with the gradient of the global batch; this rank's part of its loss."""
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(**batch, num_items_in_batch=num_targets).loss
    (loss * WORLD_SIZE).backward()  # FSDP takes the mean over ranks: this makes it the sum
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if RANK == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        make_standard_library(args.data, args.max_files)
    gather("ready")  # the others wait for the data

    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    loader = make_loader(args, tokenizer, flat=flash)
    model = make_model(args, len(tokenizer), device, flash=flash)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    states = {"training": Training(model, optimizer), "stream": StreamState(loader)}
    done = 0
    newest = gather(checkpoints(args.out)[-1:])[0]  # what rank 0 sees
    if newest:
        dcp.load(states, checkpoint_id=newest[0])
        done = int(newest[0].name.removeprefix("step-"))

    with open_log(args.out, done) as log:
        for step, batch in zip(range(done + 1, args.steps + 1), loader, strict=False):
            num_targets = sum(gather(loader.num_loss_tokens))
            loss = train_step(model, optimizer, batch, num_targets, device)
            line = put_together(loss, look_at_rows(batch, loader.provenance, args.seq_len))
            log.write(json.dumps({"step": step, "loss": line["loss"], "rows": line["rows"]}) + "\n")
            if RANK == 0:
                print(f"step {step}: loss {line['loss']:.4f}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                save(args.out, step, states)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
