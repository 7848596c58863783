"""The two papers' comparisons of batching, repeated on one CPU in minutes.

    python benchmarks/papers.py [--picture benchmarks/papers.png] [--dataset FILE.jsonl] [--tokenizer NAME]

A small Llama-type model is trained from scratch for one epoch in each way of batching that the papers compare, with
several seeds (of weights and of the order of the examples): on functions of the standard library, prompt (signature
and docstring, no targets) and completion (body), or on --dataset with `prompt` and `completion` in each line. Examples
that do not fit into a row are left out for all ways alike. Measured:

- rows, steps and padding of an epoch;
- tokens/s: tokens without padding for a second of CPU time, batches included, evaluation not; of the seed that took
  least, since other programs disturb. Two processes of one thread each run at a time. A GPU's variable-length kernels
  skip what examples of a row do not share; SDPA on a CPU computes it under a mask, so one flat row of
  batch_size * seq_len tokens pays for all its square;
- MB: how far the peak of resident memory grows while training, in a process of its own;
- validation loss: the mean over targets of held-out examples, each one alone, at equal epochs, at equal steps, at equal
  tokens with padding, at equal CPU time. The learning rate is the same everywhere, as in both papers.

The tables have the papers' shape with their own figures beside, and one line for each claim says whether it was
reproduced here. The model is small, and the data is neither paper's: what is not reproduced is not refuted.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

import claims
import data
import instructions
import papers_tables
import ways
from training import Plan, Run, train

PROCESSES = 2


def main() -> None:
    arguments = parse()
    if arguments.picture:
        papers_tables.load_matplotlib()  # now, and not after all runs
    began = time.perf_counter()
    plan = make_plan(arguments)
    data.show_versions()
    describe(plan, seeds=arguments.seeds)
    runs = claims.Runs(
        found=run_all(plan, seeds=arguments.seeds), batch_size=plan.batch_size, equal_steps=plan.equal_steps
    )
    papers_tables.show_tables(runs)
    for claim in claims.all_claims(runs):
        print(claim)
    if arguments.picture:
        papers_tables.draw(runs, arguments.picture)
    print(f"\n{(time.perf_counter() - began) / 60:.0f} minutes")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dataset", help="a JSONL file with prompt and completion; default: the standard library")
    parser.add_argument("--tokenizer", help="name or folder of a Transformers tokenizer; default: a small one, trained")
    parser.add_argument("--examples", type=int, default=1500, help="examples of an epoch")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--picture", help="where to write a PNG of the losses")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a look at whether all works")
    return parser.parse_args()


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Tokenized examples, and the model's size."""
    path = arguments.dataset
    pairs = instructions.pairs_of_file(path) if path else instructions.functions_with_docstrings()
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        tokenizer = instructions.small_tokenizer(prompt + completion for prompt, completion in pairs)
    train_set, held_out = instructions.split(
        instructions.encode(tokenizer, pairs),
        seq_len=arguments.seq_len,
        train=arguments.examples,
        held_out=max(4, min(64, arguments.examples // 10)),
    )
    return Plan(
        train=train_set,
        held_out=held_out,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0,
        seq_len=arguments.seq_len,
        batch_size=4,
        hidden=16 if arguments.quick else 64,
        layers=1 if arguments.quick else 2,
        heads=2,
        learning_rate=arguments.learning_rate,
    )


def describe(plan: Plan, *, seeds: int) -> None:
    lengths = [len(example["input_ids"]) for example in plan.train]
    print(
        f"{len(lengths):,} examples of {sum(lengths) / len(lengths):.0f} tokens on average (at most {max(lengths)}), "
        f"{sum(lengths):,} in all; {len(plan.held_out)} held out. Rows of {plan.seq_len} tokens, "
        f"{plan.batch_size} rows or examples a step. Llama: {plan.layers} layers of {plan.hidden}, vocabulary "
        f"{plan.vocab_size}; learning rate {plan.learning_rate:g}, {seeds} seeds.\n",
        flush=True,
    )


def run_all(plan: Plan, *, seeds: int) -> dict[tuple[str, int], list[Run]]:
    """All ways, and those of paper 1's Table 4 also with one row a step: each run in a process of its own, the ways of
    a seed one after the other, so that all meet the same machine."""
    kinds = [(way, plan.batch_size) for way in ways.WAYS] + [(ways.CONTAMINATED, 1), (ways.WRAPPED, 1)]
    tasks = [(way, size, seed, plan) for seed in range(seeds) for way, size in kinds]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training"])  # torch is imported once, and not in each process
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where the server, which knows nothing else, finds it
    found: dict[tuple[str, int], list[Run]] = {}
    with context.Pool(PROCESSES, maxtasksperchild=1) as pool:
        for number, run in enumerate(pool.imap(_train, tasks, chunksize=1), 1):
            print(f"\rrun {number} of {len(tasks)}", end="\n" * (number == len(tasks)), file=sys.stderr, flush=True)
            found.setdefault((run.way, run.batch_size), []).append(run)
    return found


def _train(task: Sequence) -> Run:  # type: ignore[type-arg]
    return train(*task)


if __name__ == "__main__":
    main()
