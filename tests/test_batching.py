"""Batches of examples that are not packed: padded to the longest, grouped by length, flattened without padding."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from streampack import Collator, PackedDataset, PackedLoader
from streampack.packing import by_length, first_row

from .streams import examples
from .test_models import TOLERANCE, docs, separate, small_model
from .test_ranks import run_ranks

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}, {"input_ids": [5] * 6}]


def unpacked(data: Any = None, **changes: Any) -> PackedDataset:
    data = ROWS if data is None else data
    settings = {"seq_len": 8, "lanes": 1, "shuffle": False, "packing": "none", "pad_token_id": 0, **changes}
    return PackedDataset(data, source_name="test", **settings)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def test_rows_are_padded_to_the_longest_of_their_batch() -> None:
    batches = [plain(batch) for batch in PackedLoader(unpacked(), 2, layout="rows")]
    assert batches == [
        {
            "input_ids": [[1, 2, 3], [4, 5, 0]],
            "labels": [[-100, 2, 3], [-100, 5, -100]],
            "position_ids": [[0, 1, 2], [0, 1, 0]],
            "use_cache": False,
        },
        {
            "input_ids": [[6, 7, 8, 9, 0, 0], [5] * 6],
            "labels": [[-100, 7, 8, 9, -100, -100], [-100, 5, 5, 5, 5, 5]],
            "position_ids": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]],
            "use_cache": False,
        },
    ]


def test_flattened_a_batch_is_its_examples_one_after_the_other_without_padding() -> None:
    batches = [plain(batch) for batch in PackedLoader(unpacked(), 3, layout="flat", seq_idx=True, shift_labels=True)]
    assert batches == [
        {
            "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9]],
            "labels": [[-100, 2, 3, -100, 5, -100, 7, 8, 9]],
            "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2, 3]],
            "seq_idx": [[0, 0, 0, 1, 1, 2, 2, 2, 2]],
            "shift_labels": [[2, 3, -100, 5, -100, 7, 8, 9, -100]],
            "cu_seq_lens_q": [0, 3, 5, 9],
            "cu_seq_lens_k": [0, 3, 5, 9],
            "max_length_q": 4,
            "max_length_k": 4,
            "use_cache": False,
        },
        {
            "input_ids": [[5] * 6],
            "labels": [[-100, 5, 5, 5, 5, 5]],
            "position_ids": [[0, 1, 2, 3, 4, 5]],
            "seq_idx": [[0] * 6],
            "shift_labels": [[5, 5, 5, 5, 5, -100]],
            "cu_seq_lens_q": [0, 6],
            "cu_seq_lens_k": [0, 6],
            "max_length_q": 6,
            "max_length_k": 6,
            "use_cache": False,
        },
    ]


def test_by_length_the_longest_that_waits_comes_first_and_ties_keep_their_order() -> None:
    assert by_length([3, 2, 4, 6, 3]) == [[3], [2], [0], [4], [1]]
    assert first_row("none", [3, 2], seq_len=8, must=1, max_examples=1) == [0]
    rows = PackedLoader(unpacked(packing="by_length", buffer_size=3), 1)
    assert [plain(batch)["input_ids"][0] for batch in rows] == [[6, 7, 8, 9], [1, 2, 3], [4, 5], [5] * 6]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("weights", [None, "example"])
def test_a_plain_dataloader_makes_the_same_batches(layout: Any, multiple: int | None, weights: Any) -> None:
    padded = layout == "flat" and multiple is not None
    options = {"layout": layout, "loss_weights": weights, "seq_idx": True, "cu_seqlens_padded": padded}
    changes = {"pad_to_multiple_of": multiple, "pad_token_id": 7}
    loader = PackedLoader(unpacked(**changes), 3, **options)
    plain_loader = DataLoader(unpacked(**changes), 3, collate_fn=Collator(**options))
    assert [plain(batch) for batch in loader] == [plain(batch) for batch in plain_loader]


def test_rows_of_other_lengths_are_refused_where_no_pad_token_is_known() -> None:
    short, long = (next(iter(unpacked(ROWS[:1], packing="auto", seq_len=seq_len))) for seq_len in (4, 8))
    with pytest.raises(ValueError, match="a row has 4 cells and another 8"):
        Collator("rows")([short, long])


def test_lanes_in_step_group_by_length_so_that_far_less_is_padding() -> None:
    def padding(packing: Any) -> float:
        dataset = unpacked(examples(2000, longest=60), packing=packing, seq_len=64, lanes=16, shuffle=True)
        loader = PackedLoader(dataset, 16, layout="rows")
        cells = sum(batch["input_ids"].numel() for batch in loader)
        stats = loader.stats
        assert stats["rows"] == 2000 - stats["no_target"] - stats["empty"]
        assert stats["cells"] == cells
        assert stats["padding_tokens"] == cells - stats["tokens"]
        assert stats["fill"] == stats["tokens"] / cells
        return 1 - stats["fill"]

    assert padding("by_length") < 0.35 * padding("none")


def test_flattened_nothing_is_padding() -> None:
    loader = PackedLoader(unpacked(), 2, layout="flat")
    assert sum(batch["input_ids"].numel() for batch in loader) == 15
    assert (loader.stats["fill"], loader.stats["padding_tokens"]) == (1.0, 0)


@pytest.mark.parametrize("packing", ["none", "by_length"])
def test_a_loader_with_workers_goes_on_exactly_with_other_batches_and_workers(packing: Any) -> None:
    def loader(batch_size: int, num_workers: int) -> PackedLoader:
        dataset = unpacked(examples(200), seq_len=64, lanes=4, shuffle=True, packing=packing, buffer_size=16)
        return PackedLoader(dataset, batch_size, num_workers=num_workers)

    def ids(batches: Any) -> list[int]:
        return [token for batch in batches for token in batch["input_ids"][0].tolist()]

    whole = ids(loader(4, 0))
    first = loader(4, 2)
    batches = iter(first)
    begun = ids([next(batches) for _ in range(7)])
    then = loader(3, 1)
    then.load_state_dict(first.state_dict())
    assert begun + ids(then) == whole


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_model_gives_each_example_its_own_logits_and_the_loss_of_all(layout: Any) -> None:
    model = small_model("llama", "sdpa").eval()
    loader = PackedLoader(unpacked(docs(), seq_len=24), 4, layout=layout)
    batch = next(iter(loader))
    rows = [[index for _, _, index in row] for row in loader.provenance]
    assert rows == [[0], [1], [2], [3]]
    found = model(**batch)
    wanted, loss = separate(model, rows)
    torch.testing.assert_close(found.loss, loss, rtol=0, atol=TOLERANCE)
    start = 0
    for row, (alone,) in enumerate(wanted):
        logits = found.logits[0, start : start + len(alone)] if layout == "flat" else found.logits[row, : len(alone)]
        torch.testing.assert_close(logits, alone, rtol=0, atol=TOLERANCE)
        start += len(alone)


def of_a_pass(dataset: PackedDataset, layout: Any) -> Any:
    loader = PackedLoader(dataset, 3, layout=layout)
    seen, steps = [], 0
    for batch in loader:
        dist.all_reduce(torch.ones(1))
        steps += 1
        assert batch["input_ids"].shape[0] == (1 if layout == "flat" else 3)
        seen += [place for row in loader.provenance for place in row]
    return seen, steps, loader.stats


def few() -> PackedDataset:
    return unpacked(examples(46), seq_len=64, lanes=4, shuffle=True)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_ranks_end_together_and_each_example_is_seen_once(tmp_path: Path, layout: Any) -> None:
    reports = run_ranks(of_a_pass, 2, tmp_path / "run", layout, make=few)
    assert set(Counter(tuple(place) for seen, _, _ in reports for place in seen).values()) == {1}
    assert sum(stats["rows"] for _, _, stats in reports) == sum(len(seen) for seen, _, _ in reports)
    assert len({steps for _, steps, _ in reports}) == 1


def test_what_needs_rows_of_fixed_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_examples_per_row=2 with packing='none'"):
        unpacked(max_examples_per_row=2)
    with pytest.raises(ValueError, match="fixed_segments=4 is for fixed shapes"):
        next(iter(PackedLoader(unpacked(), 2, fixed_segments=4)))
    assert unpacked().row_len is None
    assert unpacked(packing="auto").row_len == 8
