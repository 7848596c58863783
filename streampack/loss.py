"""The loss of packed batches: weights for each example, and sums over ranks and micro-batches that are exact.

A packed step holds many more examples than it has rows, ranks have different numbers of targets, and so have the
micro-batches of one step. The gradient is that of one big batch when each micro-batch sums its losses, and all divide
by one number, the targets (or weights) of the whole step:

    micro_batches = list(itertools.islice(batches, accumulate))
    normalizer = streampack.loss_normalizer(micro_batches)  # over all ranks
    for batch in micro_batches:
        labels, weights = batch.pop("labels"), batch.pop("loss_weights", None)
        logits = model(**batch).logits
        streampack.packed_cross_entropy(logits, labels, weights, normalizer=normalizer).backward()
    optimizer.step()
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from streampack.rows import IGNORE

LossWeighting = Literal["token", "example", "sqrt"]
"""How much an example of n targets counts: n, 1 or the square root of n."""
POWERS = {"token": 0.0, "example": 1.0, "sqrt": 0.5}


def check_weighting(loss_weights: Any) -> None:
    """Refuse what is no weighting."""
    if loss_weights is not None and loss_weights not in get_args(LossWeighting):
        raise ValueError(f"loss_weights={loss_weights!r}: pass 'token', 'example' or 'sqrt', or None for no weights")


def weights_of(labels: torch.Tensor, segments: Sequence[int], weighting: LossWeighting) -> torch.Tensor:
    """Loss weights float32 [C] of the labels [C] of segments one after the other (not shifted), 0 where there is no
    target. `segments`: the cells of each.

    Each of the n targets of a segment gets 1 ("token"), 1 / n ("example") or 1 / sqrt(n) ("sqrt"). A fragment of a
    split example is a segment of its own: a row does not know what other rows hold of the example.
    """
    targets = labels.numpy() != IGNORE
    cells = np.array(segments)
    counts = np.add.reduceat(targets, np.cumsum(cells) - cells, dtype=np.int64)
    each = (np.maximum(counts, 1) ** -POWERS[weighting]).astype(np.float32)
    weights = np.repeat(each, cells) * targets
    return torch.from_numpy(weights)


def packed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    normalizer: float | torch.Tensor | None = None,
    shifted: bool = False,
) -> torch.Tensor:
    """Sum of weight * negative log-likelihood over all targets, divided by `normalizer`: a float32 scalar.

    Args:
        logits: [..., V] of any float type; taken to float32.
        labels: int64 [...], -100 where not a target. Not shifted, as a batch has them: the logits of cell i are
            compared with the label of cell i + 1 of its row.
        weights: float32 [...] beside the labels, `batch["loss_weights"]`; None: 1 for each target.
        normalizer: what to divide by, see `loss_normalizer`. None: the targets (or weights) of these labels, which is
            right on one rank without accumulation. Without any target the loss is 0.
        shifted: labels and weights are moved one to the left already: `shift_labels`, `shift_loss_weights`.

    Raises:
        ValueError: where the shapes do not agree.
    """
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != logits.shape[:-1]:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} need {name} of shape {tuple(logits.shape[:-1])}, not "
                f"{tuple(tensor.shape)}; take both from the same batch"
            )
    if not shifted:
        labels = shift(labels, IGNORE)
        weights = None if weights is None else shift(weights, 0)
    flat = labels.reshape(-1)
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), flat, ignore_index=IGNORE, reduction="none"
    )
    counted = (flat != IGNORE) if weights is None else weights.reshape(-1)
    if normalizer is None:
        total = counted.sum()
        normalizer = torch.where(total == 0, 1, total)  # all losses are 0 then
    return (losses * counted).sum() / normalizer


def shift(tensor: torch.Tensor, fill: int) -> torch.Tensor:
    """[B, T] moved one cell to the left, `fill` at the end of each row."""
    return torch.nn.functional.pad(tensor[..., 1:], (0, 1), value=fill)


def loss_normalizer(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, group: Any = None) -> float:
    """What to divide the summed losses by, so that the gradient is the mean over all targets of a step, on all ranks.

    That is the targets of all micro-batches of all ranks (or the sum of their `loss_weights`, where the batches have
    them), divided by the number of ranks, since DDP and FSDP average gradients over ranks. All ranks of the group must
    call it, for each step, with as many micro-batches as they like; it waits for the others. 1 where no rank has any
    target, so that the loss is 0.

    Args:
        batches: the micro-batches of this rank that make one step. Best before they go to the GPU, which would wait.
        group: the ranks over which gradients are averaged and which hold different cells: all by default. With tensor
            parallelism, those of data parallelism alone; with context parallelism, data x context, and the parts of
            `context_parallel_part` as batches.
    """
    batches = [batches] if isinstance(batches, Mapping) else batches
    total = global_sum([_amount(batch) for batch in batches], group=group)
    return total / _size(group) if total else 1.0


def global_sum(values: float | torch.Tensor | Iterable[float | torch.Tensor], *, group: Any = None) -> float:
    """The sum of numbers (or tensors) over all ranks of a group; of this process alone without a process group.

    For instance `global_sum(loader.num_loss_tokens)`. Counts are exact (float64). All ranks must call it.
    """
    several = [values] if isinstance(values, (int, float, torch.Tensor)) else values
    total = sum(float(one.sum(dtype=torch.float64)) if isinstance(one, torch.Tensor) else one for one in several)
    if _size(group) == 1:
        return float(total)
    number = torch.tensor(total, dtype=torch.float64, device=_device(group))
    dist.all_reduce(number, group=group)
    return float(number)


def _amount(batch: Mapping[str, Any]) -> torch.Tensor:
    for name in ("loss_weights", "shift_loss_weights"):
        if name in batch:
            weights: torch.Tensor = batch[name]
            return weights
    for name in ("labels", "shift_labels"):
        if name in batch:
            targets: torch.Tensor = batch[name] != IGNORE
            return targets
    raise ValueError(f"the batch has no labels (it has: {', '.join(batch)}); count before taking them out")


def _size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _device(group: Any) -> torch.device:
    """Where the backend of a group can add: on the CPU if it can, as "cpu:gloo,cuda:nccl" does."""
    devices = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])
