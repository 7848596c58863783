import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, default_collate

from streampack import Collator, PackedDataset, PackedLoader, PackedRow
from streampack.collate import packed_row
from streampack.rows import Row, filler_row

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


def test_seq_idx_counts_segments_from_0_in_each_row_and_through_a_flat_batch():
    rows = [packed(A), packed(C)]
    batch = Collator("rows", seq_idx=True)(rows)
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    assert batch["seq_idx"].dtype is torch.int32
    batch = Collator("flat", seq_idx=True)(rows)
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3]]
    assert batch["seq_idx"].dtype is torch.int32
    assert "seq_idx" not in Collator("rows")(rows)


# ---- loss weights -----------------------------------------------------------------------------------------------

D = row_of([1, 2, 3, 4, 5], [6, 7], [8])


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [
        ("token", [0, 1, 1, 1, 1, 0, 1, 0, 0, 0]),
        ("example", [0, 0.25, 0.25, 0.25, 0.25, 0, 1, 0, 0, 0]),
        ("sqrt", [0, 0.5, 0.5, 0.5, 0.5, 0, 1, 0, 0, 0]),
    ],
)
def test_loss_weights_say_how_much_an_example_counts(weighting, weights):
    batch = Collator("rows", loss_weights=weighting)([packed(D, seq_len=10)])
    assert batch["loss_weights"].tolist() == [weights]
    assert batch["loss_weights"].dtype is torch.float32
    assert "loss_weights" not in Collator("rows")([packed(D, seq_len=10)])


def test_loss_weights_count_targets_alone_and_lie_beside_the_labels():
    batch = Collator("flat", loss_weights="example", shift_labels=True)([packed(A), packed(B)])
    half, third = 0.5, float(np.float32(1 / 3))
    assert batch["loss_weights"].tolist() == [[0, half, half, 0, half, half, 0, 0, 0, third, third, third]]
    assert batch["shift_loss_weights"].tolist() == [[half, half, 0, half, half, 0, 0, 0, third, third, third, 0]]
    assert ((batch["loss_weights"] > 0) == (batch["labels"] != -100)).all()
    assert ((batch["shift_loss_weights"] > 0) == (batch["shift_labels"] != -100)).all()


def test_loss_weights_of_padding_alone_are_0():
    batch = Collator("flat", loss_weights="example").compact([filler_row()], seq_len=4, pad_token_id=0)
    assert batch["loss_weights"].tolist() == [[0, 0, 0, 0]]


@given(batches())
def test_the_weights_of_any_example_with_a_target_sum_to_one_or_to_its_size(batch):
    given_rows, seq_len = batch
    rows = [row_of(*segments, targets=targets) for segments, targets in given_rows]
    for weighting, power in (("token", 1), ("example", 0), ("sqrt", 0.5)):
        flat = Collator("flat", loss_weights=weighting).compact(rows, seq_len=seq_len, pad_token_id=3)
        for start, end in zip(flat["cu_seq_lens_q"][:-1], flat["cu_seq_lens_q"][1:], strict=True):
            targets = int((flat["labels"][0, start:end] != -100).sum())
            total = float(flat["loss_weights"][0, start:end].sum())
            assert total == pytest.approx(targets**power if targets else 0, rel=1e-6)


def test_a_weighting_that_is_none_is_refused():
    with pytest.raises(ValueError, match="loss_weights='mean': pass 'token', 'example' or 'sqrt', or None"):
        Collator(loss_weights="mean")


# ---- fixed shapes -----------------------------------------------------------------------------------------------


def test_fixed_segments_give_every_batch_the_same_shapes_and_numbers():
    collator = Collator("flat", fixed_segments=3)
    assert plain(collator([packed(A), packed(B)])) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]],
        "labels": [[-100, 2, 3, -100, 5, 6, -100, -100, -100, 10, 11, 12]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5]],
        "cu_seq_lens_q": [0, 3, 6, 12, 12, 12, 12],
        "cu_seq_lens_k": [0, 3, 6, 12, 12, 12, 12],
        "max_length_q": 6,
        "max_length_k": 6,
        "use_cache": False,
    }
    other = collator([packed(A), packed(A)])
    assert other["cu_seq_lens_q"].tolist() == [0, 3, 6, 9, 12, 12, 12]
    assert other["max_length_q"] == other["max_length_k"] == 6
    assert other["cu_seq_lens_q"].dtype is torch.int32


def test_more_segments_than_fixed_are_refused_naming_both_and_the_remedy():
    rows = [packed(row_of([1], [2], [3])), packed(row_of([1], [2], [3], [4]))]
    with pytest.raises(ValueError, match="fixed_segments") as error:
        Collator("flat", fixed_segments=4)(rows)
    assert str(error.value) == (
        "a batch of 2 rows has 9 segments, more than fixed_segments=4 for each row; pass max_examples_per_row=3 to "
        "PackedDataset (a row may also end with a segment of padding), or more fixed_segments"
    )
    assert len(Collator("flat", fixed_segments=5)(rows)["cu_seq_lens_q"]) == 11


@pytest.mark.parametrize("wrong", [0, 1, 2.0, True, "all"])
def test_fixed_segments_that_are_no_number_are_refused(wrong):
    with pytest.raises(ValueError, match=r"fixed_segments=.*pass an int of at least 2"):
        Collator("flat", fixed_segments=wrong)


@pytest.mark.parametrize("option", [{"fixed_segments": 4}, {"cu_seqlens_padded": True}])
def test_what_is_about_cu_seqlens_is_refused_for_rows_which_have_none(option):
    with pytest.raises(ValueError, match=r"is about cu_seqlens, which layout='rows' has not; pass 'flat'"):
        Collator("rows", **option)


# ---- examples padded to a multiple ------------------------------------------------------------------------------


def padded_row():
    """Examples of 3 and 2 tokens, each padded to 4 cells."""
    return Row(
        pieces=[np.array([1, 2, 3, 0], dtype=np.int32), np.array([4, 5, 0, 0], dtype=np.int32)],
        lengths=[4, 4],
        targets=np.array([1, 1, 1, 0, 1, 1, 0, 0], dtype=bool),
        origin=[(0, 0, 5, 0, 3), (0, 0, 9, 0, 2)],
    )


def test_padded_examples_have_the_cu_seqlens_of_their_cells_and_of_their_tokens():
    batch = Collator("flat", cu_seqlens_padded=True)([packed(padded_row(), seq_len=12), packed(padded_row(), 12)])
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 9, 12, 14, 18]  # the padding tail counts as it is
    assert batch["cu_seqlens"].dtype is batch["cu_seqlens_padded"].dtype is torch.int32
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 8, 12, 16, 20, 24]
    fixed = Collator("flat", cu_seqlens_padded=True, fixed_segments=5)([packed(padded_row(), seq_len=12)])
    assert fixed["cu_seqlens"].tolist() == [0, 3, 5, 9, 9, 9]
    assert fixed["cu_seqlens_padded"].tolist() == [0, 4, 8, 12, 12, 12]


def test_a_packed_row_says_the_tokens_of_its_segments_where_examples_are_padded():
    row = packed(padded_row(), seq_len=12)
    assert row["segment_tokens"].tolist() == [3, 2, 4]
    assert row["segment_tokens"].dtype is torch.int32
    assert "segment_tokens" not in packed(A)


def test_the_padding_of_examples_reaches_the_batches_of_a_loader():
    examples = [{"input_ids": list(range(1, 1 + length))} for length in (3, 5, 4, 1, 7)]
    dataset = PackedDataset(examples, seq_len=16, lanes=1, pad_to_multiple_of=4, packing="next_fit", shuffle=False)
    batch = next(iter(PackedLoader(dataset, 2, cu_seqlens_padded=True)))
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 12, 16, 20, 28, 32]
    assert batch["cu_seqlens"].tolist() == [0, 3, 8, 12, 13, 20, 24]


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_packed_and_compact_rows_make_the_same_batch_with_every_option(layout):
    lengths = {"fixed_segments": 4, "cu_seqlens_padded": True} if layout == "flat" else {}
    collator = Collator(layout, shift_labels=True, loss_weights="sqrt", seq_idx=True, **lengths)
    rows = [padded_row(), row_of([1, 2, 3], [4, 5]), filler_row()]
    together = collator.compact(rows, seq_len=12, pad_token_id=9)
    assert_equal(collator([packed(row, 12, 9) for row in rows]), together)


def test_a_loader_passes_its_arguments_on_and_counts_examples():
    examples = [{"input_ids": [number, 1, 2]} for number in range(7)]
    dataset = PackedDataset(examples, seq_len=8, lanes=1, packing="next_fit", shuffle=False)
    loader = PackedLoader(dataset, 2, loss_weights="example", seq_idx=True, fixed_segments=5)
    assert loader.num_examples == 0
    counts = []
    for batch in loader:
        assert batch["seq_idx"].shape == batch["loss_weights"].shape == (1, 16)
        assert len(batch["cu_seq_lens_q"]) == 11
        assert float(batch["loss_weights"].sum()) == loader.num_examples
        counts.append(loader.num_examples)
    assert counts == [4, 3]


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
