"""One training run of a small Llama-type model on one way of batching, in a process of its own.

All runs of a seed begin with the same weights and have the same learning rate, whatever a step holds, as in both
papers: a short warm-up, then constant, so that a run can be looked at in the middle. The loss of a step is the mean
over its targets, as `model(**batch)` computes it.
"""

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import ways
from transformers import LlamaConfig, LlamaForCausalLM

WARM_UP = 10
POINTS = 6
"""Evaluations of a run, at equal numbers of tokens, besides those at equal steps and cells."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs have in common."""

    train: list[dict[str, list[int]]]
    held_out: list[dict[str, list[int]]]
    vocab_size: int
    pad_token_id: int
    seq_len: int
    batch_size: int
    hidden: int
    layers: int
    heads: int
    learning_rate: float

    @property
    def tokens(self) -> int:
        """Of an epoch."""
        return sum(len(example["input_ids"]) for example in self.train)

    @property
    def equal_steps(self) -> int:
        """The steps of an epoch if nothing is padding: no way has fewer."""
        return max(1, self.tokens // (self.batch_size * self.seq_len))


class Point(NamedTuple):
    """Where a run is. Seconds are of CPU time, without evaluation."""

    steps: int
    rows: int
    tokens: int
    cells: int
    seconds: float
    loss: float


START = Point(0, 0, 0, 0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was measured in one epoch."""

    way: str
    batch_size: int
    seed: int
    megabytes: float
    """Growth of the peak of resident memory from before the first step."""
    points: tuple[Point, ...]

    @property
    def end(self) -> Point:
        return self.points[-1]

    @property
    def padding(self) -> float:
        return 1 - self.end.tokens / self.end.cells

    @property
    def speed(self) -> float:
        """Tokens (without padding) for a second of CPU time."""
        return self.end.tokens / self.end.seconds

    def loss_from(self, what: str, value: int) -> float:
        """The loss at the first evaluation with so many "steps" or "cells"; the last one if it has fewer."""
        return next((point.loss for point in self.points if getattr(point, what) >= value), self.end.loss)

    def loss_at_second(self, second: float) -> float:
        """Between the evaluations before and after."""
        return float(np.interp(second, *zip(*((point.seconds, point.loss) for point in self.points), strict=True)))


def train(way: str, batch_size: int, seed: int, plan: Plan) -> Run:
    """One epoch."""
    torch.set_num_threads(1)
    model = new_model(plan, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    setting = ways.Setting(seq_len=plan.seq_len, batch_size=batch_size, seed=seed, pad_token_id=plan.pad_token_id)
    steps = ways.WAYS[way].steps(plan.train, setting)
    before = psutil.Process().memory_info().rss
    points: list[Point] = []
    at = START
    for at in _steps(steps, model, optimizer, plan):
        if _is_due(at, points, plan):
            points.append(at._replace(loss=evaluate(model, plan)))
    if not points or points[-1].steps < at.steps:
        points.append(at._replace(loss=evaluate(model, plan)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return Run(way=way, batch_size=batch_size, seed=seed, megabytes=grown / 2**20, points=tuple(points))


def _steps(steps: Iterator[ways.Step], model: Any, optimizer: Any, plan: Plan) -> Iterator[Point]:
    """Where the run is after each step; the time that the caller takes does not count."""
    at = START
    began = time.process_time()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, (at.steps + 1) / WARM_UP)
        model(**step.batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        at = Point(
            at.steps + 1,
            at.rows + step.rows,
            at.tokens + step.tokens,
            at.cells + step.batch["input_ids"].numel(),
            at.seconds + time.process_time() - began,
            0.0,
        )
        yield at
        began = time.process_time()


def _is_due(at: Point, points: list[Point], plan: Plan) -> bool:
    """At POINTS equal numbers of tokens, at equal steps, and at the first step with as many cells as an epoch has
    tokens."""
    done = points[-1] if points else START
    return (
        at.tokens * POINTS // plan.tokens > done.tokens * POINTS // plan.tokens
        or at.steps == plan.equal_steps
        or (at.cells >= plan.tokens > done.cells)
    )


def new_model(plan: Plan, *, seed: int) -> Any:
    """A Llama from scratch with SDPA attention, which finds the examples of a row in position_ids."""
    config = LlamaConfig(
        vocab_size=plan.vocab_size,
        hidden_size=plan.hidden,
        intermediate_size=plan.hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=plan.seq_len * plan.batch_size,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


@torch.no_grad()
def evaluate(model: Any, plan: Plan) -> float:
    """Mean loss over the targets of held-out examples, each one alone."""
    total, targets = 0.0, 0
    for example in plan.held_out:
        ids, labels = (torch.tensor([example[key]]) for key in ("input_ids", "labels"))
        count = int((labels[:, 1:] != ways.IGNORE).sum())
        total += count * float(model(input_ids=ids, labels=labels, use_cache=False).loss)
        targets += count
    return total / targets
