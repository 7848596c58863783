import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, default_collate

from streampack import Collator, PackedDataset, PackedRow
from streampack.collate import packed_row
from streampack.rows import filler_row

from .test_rows import batches, row_of

A = row_of([1, 2, 3], [4, 5, 6])
B = row_of([7, 8, 9, 10, 11, 12], targets=[0, 0, 0, 1, 1, 1])
C = row_of([7, 8])
EXAMPLES = [("src", 0, 5), ("src", 0, 9)]


def packed(row, seq_len=6, pad_token_id=0):
    return packed_row(row, seq_len=seq_len, pad_token_id=pad_token_id, examples=EXAMPLES)


def plain(batch):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def assert_equal(batch, other):
    assert list(batch) == list(other)
    assert plain(batch) == plain(other)
    for key, value in batch.items():
        assert type(value) is type(other[key])
        assert getattr(value, "dtype", None) == getattr(other[key], "dtype", None)


# ---- rows -------------------------------------------------------------------------------------------------------


def test_a_packed_row_is_a_dict_of_tensors_and_plain_numbers():
    assert plain(packed(row_of([1, 2, 3], [4, 5]), seq_len=8)) == {
        "input_ids": [1, 2, 3, 4, 5, 0, 0, 0],
        "labels": [-100, 2, 3, -100, 5, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
        "seq_idx": [0, 0, 0, 1, 1, 2, 2, 2],
        "cu_seqlens": [0, 3, 5, 8],
        "max_seqlen": 3,
        "num_loss_tokens": 3,
        "examples": EXAMPLES,
    }


def test_a_packed_row_has_the_types_that_models_and_kernels_take():
    row = packed(A)
    assert isinstance(row, PackedRow)
    for key, dtype, shape in (
        ("input_ids", torch.int64, (6,)),
        ("labels", torch.int64, (6,)),
        ("position_ids", torch.int64, (6,)),
        ("seq_idx", torch.int32, (6,)),
        ("cu_seqlens", torch.int32, (3,)),
    ):
        assert row[key].dtype is dtype
        assert row[key].shape == shape
        assert row[key].is_contiguous()
    assert type(row["max_seqlen"]) is int
    assert type(row["num_loss_tokens"]) is int


def test_a_masked_row_has_the_labels_and_counts_of_its_mask():
    row = packed(B)
    assert row["labels"].tolist() == [-100, -100, -100, 10, 11, 12]
    assert row["num_loss_tokens"] == 3


def test_a_packed_row_survives_pickling():
    row = packed(A)
    copy = pickle.loads(pickle.dumps(row))
    assert isinstance(copy, PackedRow)
    assert_equal(copy, row)


# ---- batches ----------------------------------------------------------------------------------------------------


def test_flat_puts_rows_one_after_the_other_with_offset_lengths():
    assert plain(Collator("flat")([packed(A), packed(B)])) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]],
        "labels": [[-100, 2, 3, -100, 5, 6, -100, -100, -100, 10, 11, 12]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5]],
        "cu_seq_lens_q": [0, 3, 6, 12],
        "cu_seq_lens_k": [0, 3, 6, 12],
        "max_length_q": 6,
        "max_length_k": 6,
        "use_cache": False,
    }


def test_flat_counts_padding_as_segments_too():
    batch = Collator()([packed(C), packed(A), packed(C)])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 6, 9, 12, 14, 18]
    assert batch["max_length_q"] == 4


def test_flat_is_the_default():
    assert_equal(Collator()([packed(A)]), Collator("flat")([packed(A)]))


def test_rows_stacks_rows_and_leaves_segments_to_position_ids():
    assert plain(Collator("rows")([packed(A), packed(C)])) == {
        "input_ids": [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]],
        "labels": [[-100, 2, 3, -100, 5, 6], [-100, 8, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]],
        "use_cache": False,
    }


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_batch_has_no_attention_mask_and_the_types_that_models_take(layout):
    batch = Collator(layout, shift_labels=True)([packed(A), packed(B)])
    assert "attention_mask" not in batch
    for key in ("input_ids", "labels", "position_ids", "shift_labels"):
        assert batch[key].dtype is torch.int64
        assert batch[key].shape == ((1, 12) if layout == "flat" else (2, 6))
        assert batch[key].is_contiguous()
    if layout == "flat":
        for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
            assert batch[key].dtype is torch.int32
            assert batch[key].ndim == 1
            assert batch[key].is_contiguous()
        assert type(batch["max_length_q"]) is type(batch["max_length_k"]) is int


def test_shifted_labels_are_the_next_labels_and_lose_none():
    assert Collator("rows", shift_labels=True)([packed(A), packed(C)])["shift_labels"].tolist() == [
        [2, 3, -100, 5, 6, -100],
        [8, -100, -100, -100, -100, -100],
    ]
    flat = Collator("flat", shift_labels=True)([packed(A), packed(B)])
    assert flat["shift_labels"].tolist() == [[2, 3, -100, 5, 6, -100, -100, -100, 10, 11, 12, -100]]
    assert (flat["shift_labels"] != -100).sum() == (flat["labels"] != -100).sum()


def test_shifted_labels_come_only_on_request():
    assert "shift_labels" not in Collator("rows")([packed(A)])
    assert "shift_labels" not in Collator("flat")([packed(A)])


def test_a_layout_that_is_none_is_refused():
    for layout in ("packed", "row", None, "FLAT"):
        with pytest.raises(ValueError, match="layout=") as error:
            Collator(layout)
        assert str(error.value) == (
            f"layout={layout!r}: pass 'flat' (variable-length kernels) or 'rows' (SDPA, eager, flex)"
        )


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("shift_labels", [False, True])
def test_packed_rows_and_compact_rows_make_the_same_batch(layout, shift_labels):
    collator = Collator(layout, shift_labels=shift_labels)
    rows = [A, C, filler_row(), B]
    together = collator.compact(rows, seq_len=6, pad_token_id=9)
    assert_equal(collator([packed(row, pad_token_id=9) for row in rows]), together)


@given(batches())
def test_any_rows_make_the_same_batch_packed_or_compact_and_its_segments_are_those_of_the_rows(batch):
    given_rows, seq_len = batch
    rows = [row_of(*segments, targets=targets) for segments, targets in given_rows]
    for layout in ("flat", "rows"):
        collator = Collator(layout, shift_labels=True)
        together = collator.compact(rows, seq_len=seq_len, pad_token_id=3)
        assert_equal(collator([packed(row, seq_len, 3) for row in rows]), together)
    flat = Collator("flat").compact(rows, seq_len=seq_len, pad_token_id=3)
    bounds = flat["cu_seq_lens_q"]
    assert bounds[0] == 0
    assert bounds[-1] == len(rows) * seq_len
    assert (bounds.diff() > 0).all()
    assert bounds.diff().max() == flat["max_length_q"]
    assert np.flatnonzero(flat["position_ids"][0] == 0).tolist() == bounds[:-1].tolist()


def test_a_collator_survives_pickling():
    copy = pickle.loads(pickle.dumps(Collator("rows", shift_labels=True)))
    assert_equal(copy([packed(A)]), Collator("rows", shift_labels=True)([packed(A)]))


# ---- plain torch ------------------------------------------------------------------------------------------------


def test_default_collate_makes_a_batch_of_rows():
    assert_equal(default_collate([packed(A), packed(B)]), Collator("rows")([packed(A), packed(B)]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_plain_dataloader_makes_batches_with_and_without_a_collator(num_workers):
    examples = [{"input_ids": [number, *range(1, 1 + number % 5)]} for number in range(40)]
    dataset = PackedDataset(examples, seq_len=8, lanes=1)
    rows = list(dataset)
    assert len({len(row["cu_seqlens"]) for row in rows[:4]}) > 1  # which torch cannot stack
    dataset.set_epoch(0)
    batch = next(iter(DataLoader(dataset, batch_size=4, num_workers=num_workers)))
    assert_equal(batch, Collator("rows")(rows[:4]))
    dataset.set_epoch(0)
    batch = next(iter(DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=Collator("flat"))))
    assert_equal(batch, Collator("flat")(rows[:4]))
