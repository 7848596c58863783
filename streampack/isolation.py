"""A check that a model keeps packed examples apart: new tokens in one example move no logits of another.

Call it once at the start, with the model and a batch as they will be trained:

    streampack.check_isolation(model, next(iter(loader)))

Whether examples see each other depends on the model, its attention, its cache, the mask and what a trainer adds or
takes out, and the loss does not show it: it falls either way.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from streampack.attention import segment_ids
from streampack.collate import Batch

COLUMNS = 64
"""Logits of each cell that are compared, about: a cell that moves moves nearly all of them."""
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
NOT_FOR_LOGITS = ("labels", "shift_labels", "loss_weights", "shift_loss_weights", "num_items_in_batch")


class IsolationError(ValueError):
    """A model lets packed examples see each other, or cuts them; the message says what to change."""


def check_isolation(
    model: torch.nn.Module, batch: Batch, *, extra: Mapping[str, Any] | None = None, tolerance: float = 0.01
) -> None:
    """Raise unless each example's logits depend on its own tokens, and on those of no other.

    It runs the model on the batch, and on the batch with other tokens in every second example. Logits of the others may
    not move; in the changed ones each cell must move with the cells before it (that later ones move earlier ones is
    not looked at). Where something is wrong it tries what could be changed, and the message names what helped.

    The model is put into eval mode without gradients, and its modes and the random numbers are as before afterwards.
    It costs six forward passes, and some more before it raises. With FSDP or tensor parallelism all ranks must call it.

    Args:
        model: takes `model(**batch)` and returns logits (or hidden states) of each cell.
        batch: as the loader gives it; it is moved to the GPU of the model. Labels and loss weights are left out.
        extra: what the trainer adds to the batch or changes, such as {"attention_mask": ...}; None takes a key out.
        tolerance: how far logits of other examples may move, as a share of how far an example moves its own.

    Raises:
        IsolationError: where examples see each other, or do not see themselves.
        ValueError: for a batch that shows nothing, since no row holds two examples.
    """
    segments, device = segment_ids(batch), _device_of(model)
    cells = _Cells.of(segments)
    if cells.count <= len(segments):
        raise ValueError(
            f"each row of the batch of {tuple(segments.shape)} is one segment, so that nothing can leak; check a batch "
            "with several examples in a row, as the loader gives it (what a trainer changes goes into extra)"
        )
    call = {name: value for name, value in batch.items() if name not in NOT_FOR_LOGITS}
    call = {name: value for name, value in {**call, **(extra or {})}.items() if value is not None}
    if call["input_ids"].numel() != segments.numel():
        raise ValueError(
            f"extra has input_ids of shape {tuple(call['input_ids'].shape)}, the batch of {tuple(segments.shape)}; "
            "pass the batch that holds these cells"
        )
    if device.type != "cpu":
        call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        cells = _Cells.of(segments.to(device))
    with _left_as_it_was(model, device):
        finding = _look(model, call, cells, tolerance)
        if finding is not None:
            tried = _remedies(batch, call, cells) if finding.kind != "deaf" else []
            needed = _fewest(tried, call, lambda changed: _look(model, changed, cells, tolerance) is None)
            raise IsolationError(f"{finding.what}; {_advice(model, finding, needed, tried)}")


# ---- looking ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cells:
    """The cells of a batch one after the other, [N], and its segments, counted through all rows."""

    shape: tuple[int, ...]
    segment: torch.Tensor
    within: torch.Tensor
    """int64 [N]: 0, 1, 2 ... in each segment: what position_ids should be."""
    ends: torch.Tensor
    """int32 [count + 1]: what cu_seq_lens should be."""
    count: int

    @classmethod
    def of(cls, segments: torch.Tensor) -> "_Cells":
        first = torch.ones_like(segments, dtype=torch.bool)
        first[:, 1:] = segments[:, 1:] != segments[:, :-1]
        segment = first.reshape(-1).cumsum(0) - 1
        starts = first.reshape(-1).nonzero().squeeze(1)
        place = torch.arange(segment.numel(), device=segments.device)
        return cls(
            shape=tuple(segments.shape),
            segment=segment,
            within=place - starts[segment],
            ends=torch.nn.functional.pad(starts, (0, 1), value=segment.numel()).to(torch.int32),
            count=len(starts),
        )

    def where(self, cell: torch.Tensor) -> str:
        """The segment of a cell, as a reader finds it in the batch."""
        segment, row_cells = self.segment[cell], self.shape[1]
        start, end = int(self.ends[segment]), int(self.ends[segment + 1])
        return f"row {start // row_cells}, cells {start % row_cells} to {(end - 1) % row_cells}"


class _Finding(NamedTuple):
    kind: Literal["leak", "cut", "deaf"]
    what: str


def _look(model: torch.nn.Module, call: Batch, cells: _Cells, tolerance: float) -> _Finding | None:
    """What is wrong with the call, if anything. Its runs change the even or odd cells of the even or odd segments."""
    before = _logits(model, call, cells)
    noise = float((_logits(model, call, cells) - before).abs().max())
    itself, leaked, stayed, changed_moves = 0.0, torch.zeros_like(before[:, 0]), torch.zeros_like(cells.segment), 0.0
    for half in (0, 1):
        for parity in (0, 1):
            mine = cells.segment % 2 == half
            changed = mine & (cells.within % 2 == parity)
            after = _logits(model, {**call, "input_ids": _with_others(call["input_ids"], changed)}, cells)
            moves = (after - before).abs().amax(1)
            own = mine & ~changed & (cells.within > parity)
            itself = max(itself, float(torch.where(own, moves, 0).max()))
            changed_moves = max(changed_moves, float(torch.where(changed, moves, 0).max()))
            leaked = torch.maximum(leaked, torch.where(mine, 0, moves))
            stayed |= own & (moves <= noise)
    if changed_moves <= noise:
        return _Finding("deaf", "new tokens moved no logits at all: the model does not look at input_ids")
    worst = leaked.argmax()
    if float(leaked[worst]) > max(tolerance * (itself or changed_moves), 4 * noise):
        return _Finding(
            "leak",
            f"examples see each other: new tokens in other segments moved the logits of the segment in "
            f"{cells.where(worst)}, by {float(leaked[worst]):.3g} (later ones of their own segment move by up to "
            f"{itself:.3g})",
        )
    if bool(stayed.any()):
        cell = stayed.argmax()
        return _Finding(
            "cut",
            f"examples do not see themselves: cell {int(cells.within[cell])} of the segment in {cells.where(cell)} "
            "does not depend on the cells before it",
        )
    return None


def _logits(model: torch.nn.Module, call: Batch, cells: _Cells) -> torch.Tensor:
    """float32 [N, about COLUMNS]."""
    out = model(**call)
    for name in ("logits", "last_hidden_state"):
        found = getattr(out, name, None)
        if found is not None:
            break
    else:
        found = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(found, torch.Tensor) or found.numel() % len(cells.segment) or found.ndim < 2:
        raise ValueError(
            f"the model gives {type(out).__name__} for {len(cells.segment)} cells; check_isolation needs logits of "
            "each cell (and no loss function that is fused with them)"
        )
    by_cell = found.reshape(len(cells.segment), -1)
    return by_cell[:, :: max(1, by_cell.shape[1] // COLUMNS)].float().clone()


def _with_others(input_ids: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Other ids where `changed`, taken from the batch itself, so that the model has them."""
    known, number = torch.unique(input_ids, return_inverse=True)
    others = known.roll(-1)[number] if len(known) > 1 else torch.where(input_ids > 0, input_ids - 1, input_ids + 1)
    return torch.where(changed.reshape(input_ids.shape), others, input_ids)


# ---- advice -------------------------------------------------------------------------------------------------------


class _Remedy(NamedTuple):
    name: str
    text: str
    change: Callable[[Batch], Batch]


def _advice(model: torch.nn.Module, finding: _Finding, needed: list[_Remedy], tried: list[_Remedy]) -> str:
    """What to change: the remedies that were tried and helped, as few as do."""
    if finding.kind == "deaf":
        return "pass a model and a batch that belong together"
    if needed:
        return f"this helped when tried: {'; and '.join(one.text for one in needed)}"
    names = ", ".join(one.name for one in tried)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with_it = "" if attention is None else f" with attn_implementation={attention!r}"
    return (
        f"{type(model).__name__}{with_it} does not keep packed examples apart{names and f' (tried: {names})'}; use "
        "another attention implementation, or a model whose attention follows position_ids, cu_seq_lens or seq_idx"
    )


def _fewest(remedies: list[_Remedy], call: Batch, right: Callable[[Batch], bool]) -> list[_Remedy]:
    """One remedy that helps, or those of all that are needed together; none if all do not help."""

    def helps(some: list[_Remedy]) -> bool | None:
        changed = call
        for one in some:
            changed = one.change(changed)
        try:
            return right(changed)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None  # the model does not take it so

    taken = []
    for one in remedies:
        helped = helps([one])
        if helped:
            return [one]
        taken += [one] if helped is not None else []
    if len(taken) < 2 or not helps(taken):
        return []
    needed = taken
    for one in taken:
        fewer = [other for other in needed if other is not one]
        needed = fewer if helps(fewer) else needed
    return needed


def _remedies(batch: Batch, call: Batch, cells: _Cells) -> list[_Remedy]:
    """What may be wrong in the call, by its looks, in the order in which it can be mended."""
    found = []
    if call.get("use_cache") is not False:
        how = f"use_cache={call['use_cache']!r} is passed" if "use_cache" in call else "use_cache is left to the model"
        text = f"{how}: pass use_cache=False, as the batch has it, since with a cache position_ids are not looked at"
        found.append(_Remedy("use_cache=False", text, lambda call: {**call, "use_cache": False}))
    if "attention_mask" in call:
        shape = tuple(getattr(call["attention_mask"], "shape", ()))
        text = f"an attention_mask of shape {shape} is passed: pass none, since with one position_ids are not looked at"
        found.append(_Remedy("no attention_mask", text, lambda call: _without(call, "attention_mask")))
    positions = call.get("position_ids")
    if positions is None or not torch.equal(positions.reshape(-1), cells.within):
        how = "are not passed" if positions is None else "run on, or do not begin at 0 in each segment"
        text = f"position_ids {how}: pass those of the batch"
        found.append(_Remedy("its position_ids", text, lambda call: _with_positions(call, cells)))
    missing = [name for name in LENGTHS if name not in call]
    shape, whole = tuple(call["input_ids"].shape), (1, len(cells.segment))
    if missing or shape != whole:
        if "cu_seq_lens_q" not in batch:
            text = "this attention finds no segments in a batch of rows: pass layout='flat' to PackedLoader"
        elif shape != whole:
            text = f"the flat batch was reshaped to {shape}, which cuts or joins segments: pass it as it is, {whole}"
        else:
            text = f"{', '.join(missing)} of the batch are not passed: pass them (Trainer: remove_unused_columns=False)"
        found.append(_Remedy("layout='flat'", text, lambda call: _as_flat(call, cells)))
    if "seq_idx" not in call:
        text = "seq_idx is not passed, by which this model tells segments apart: pass seq_idx=True to PackedLoader"
        found.append(_Remedy("seq_idx", text, lambda call: _with_seq_idx(call, cells)))
    return found


def _without(call: Batch, name: str) -> Batch:
    return {key: value for key, value in call.items() if key != name}


def _with_positions(call: Batch, cells: _Cells) -> Batch:
    return {**call, "position_ids": cells.within.reshape(call["input_ids"].shape)}


def _with_seq_idx(call: Batch, cells: _Cells) -> Batch:
    return {**call, "seq_idx": cells.segment.to(torch.int32).reshape(call["input_ids"].shape)}


def _as_flat(call: Batch, cells: _Cells) -> Batch:
    """The call as one row, with the lengths of its segments."""
    size = call["input_ids"].shape
    flat = {
        name: value.reshape(1, -1) if isinstance(value, torch.Tensor) and value.shape == size else value
        for name, value in call.items()
    }
    longest = int(cells.ends.diff().max())
    return {**flat, **dict(zip(LENGTHS, (cells.ends, cells.ends, longest, longest), strict=True))}


# ---- around it ----------------------------------------------------------------------------------------------------


def _device_of(model: torch.nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@contextlib.contextmanager
def _left_as_it_was(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode without gradients; each module's mode and the random numbers are restored."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
