import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.rows import IGNORE, Row, added_up, filler_row, lay_out

PAD, EOS = 0, 99


def row_of(*segments, targets=None):
    """A row of segments of ids; `targets` are those of all segments, as 0 and 1."""
    return Row(
        pieces=[np.array(segment, dtype=np.int32) for segment in segments],
        lengths=[len(segment) for segment in segments],
        targets=None if targets is None else np.array(targets, dtype=bool),
        origin=[(0, 0, number, 0, len(segment)) for number, segment in enumerate(segments)],
    )


def lay(*rows, seq_len, pad_token_id=PAD):
    """Rows laid out, their arrays as [rows, seq_len]."""
    layout = lay_out(rows, widths=[seq_len] * len(rows), pad_token_id=pad_token_id)
    keys = "input_ids", "labels", "position_ids"
    return replace(layout, **{key: getattr(layout, key).reshape(len(rows), seq_len) for key in keys})


def plain(layout):
    return {
        "input_ids": layout.input_ids.tolist(),
        "labels": layout.labels.tolist(),
        "position_ids": layout.position_ids.tolist(),
        "cu_seqlens": [added_up(one).tolist() for one in layout.segments],
        "max_seqlen": [max(one) for one in layout.segments],
    }


def test_two_examples_and_a_padding_tail():
    assert plain(lay(row_of([1, 2, 3], [4, 5]), seq_len=6)) == {
        "input_ids": [[1, 2, 3, 4, 5, PAD]],
        "labels": [[-100, 2, 3, -100, 5, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "cu_seqlens": [[0, 3, 5, 6]],
        "max_seqlen": [3],
    }


def test_the_padding_tail_is_one_segment():
    assert plain(lay(row_of([1, 2, 3], [4, 5]), seq_len=8)) == {
        "input_ids": [[1, 2, 3, 4, 5, PAD, PAD, PAD]],
        "labels": [[-100, 2, 3, -100, 5, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2]],
        "cu_seqlens": [[0, 3, 5, 8]],
        "max_seqlen": [3],
    }


def test_a_full_row_has_no_padding_segment():
    layout = plain(lay(row_of([1, 2, 3], [4, 5], [6, 7, 8, 9]), seq_len=9))
    assert layout["position_ids"] == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert layout["cu_seqlens"] == [[0, 3, 5, 9]]
    assert layout["max_seqlen"] == [4]


def test_a_padding_tail_longer_than_all_examples_is_the_longest_segment():
    assert lay(row_of([1, 2]), seq_len=10).segments == [[2, 8]]


def test_segments_are_those_of_the_row_and_not_found_by_token_values():
    segments = [[5, EOS, 6, EOS], [7, EOS]]
    expected = {"cu_seqlens": [[0, 4, 6, 8]], "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1]]}
    for row, pad in ((row_of(*segments), PAD), (row_of(*segments), EOS), (row_of([5, 1, 6, 1], [7, 1]), PAD)):
        layout = plain(lay(row, seq_len=8, pad_token_id=pad))
        assert {key: layout[key] for key in expected} == expected


def test_padding_with_the_eos_token_leaves_eos_a_target():
    layout = lay(row_of([1, EOS], [2, 3, EOS]), seq_len=8, pad_token_id=EOS)
    assert layout.input_ids.tolist() == [[1, EOS, 2, 3, EOS, EOS, EOS, EOS]]
    assert layout.labels.tolist() == [[-100, EOS, -100, 3, EOS, -100, -100, -100]]


def test_a_token_that_is_also_the_pad_token_stays_a_target():
    assert lay(row_of([1, PAD, 2]), seq_len=4).labels.tolist() == [[-100, PAD, 2, -100]]


def test_masks_say_which_labels_count():
    row = row_of([1, 2, 3], [4, 5, 6], targets=[0, 0, 1, 0, 1, 1])
    assert lay(row, seq_len=7).labels.tolist() == [[-100, -100, 3, -100, 5, 6, -100]]
    assert row.num_loss_tokens == 3


def test_a_target_at_the_first_place_of_a_segment_is_none():
    row = row_of([1, 2], [3, 4], targets=[1, 1, 1, 0])
    assert lay(row, seq_len=4).labels.tolist() == [[-100, 2, -100, -100]]
    assert row.num_loss_tokens == 1


def test_a_row_may_have_no_target_at_all():
    row = row_of([1, 2], targets=[0, 0])
    assert lay(row, seq_len=3).labels.tolist() == [[-100, -100, -100]]
    assert row.num_loss_tokens == 0


def test_plain_examples_have_a_loss_token_less_than_tokens():
    assert row_of([1, 2, 3], [4, 5]).num_loss_tokens == 3
    assert row_of([1], [2]).num_loss_tokens == 0


def test_laying_out_does_not_change_the_row():
    row = row_of([1, 2, 3], targets=[0, 1, 1])
    lay(row, seq_len=4)
    lay(row, seq_len=5)
    assert row.ids.tolist() == [1, 2, 3]
    assert row.lengths == [3]
    assert row.targets.tolist() == [False, True, True]


def test_rows_of_a_batch_are_laid_out_as_if_alone():
    rows = [
        row_of([1, 2, 3], [4, 5]),
        row_of([6] * 6),
        filler_row(),
        row_of([7], [8, 9], targets=[1, 0, 1]),
        row_of([1]),
    ]
    alone = [plain(lay(row, seq_len=6)) for row in rows]
    assert plain(lay(*rows, seq_len=6)) == {key: [one[key][0] for one in alone] for key in alone[0]}


def test_a_filler_row_is_nothing_but_padding():
    row = filler_row()
    assert row.num_loss_tokens == 0
    assert row.origin == []
    assert plain(lay(row, seq_len=4, pad_token_id=9)) == {
        "input_ids": [[9, 9, 9, 9]],
        "labels": [[-100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 3]],
        "cu_seqlens": [[0, 4]],
        "max_seqlen": [4],
    }


def test_arrays_have_the_types_that_models_and_kernels_take():
    layout = lay(row_of([1, 2, 3], [4, 5]), row_of([6, 7]), seq_len=6)
    for array in (layout.input_ids, layout.labels, layout.position_ids):
        assert array.dtype == np.int64
        assert array.shape == (2, 6)
        assert array.flags.c_contiguous
    for array in map(added_up, layout.segments):
        assert array.dtype == np.int32
        assert array.ndim == 1
        assert array.flags.c_contiguous
    assert {type(cells) for lengths in layout.segments for cells in lengths} == {int}


def test_large_token_ids_survive():
    assert lay(row_of([2**31 - 1, 2**31 - 2]), seq_len=2).input_ids.tolist() == [[2**31 - 1, 2**31 - 2]]


@st.composite
def batches(draw):
    """(segments of each row, their targets or None, seq_len)"""
    seq_len = draw(st.integers(2, 12))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        room, segments = seq_len, []
        while room and draw(st.booleans()):
            length = draw(st.integers(1, room))
            segments.append(draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)))
            room -= length
        cells = seq_len - room
        targets = draw(st.none() | st.lists(st.integers(0, 1), min_size=cells, max_size=cells))
        rows.append((segments, targets))
    return rows, seq_len


@given(batches(), st.integers(0, 5))
def test_the_rules_of_a_row_hold_for_any_batch(batch, pad_token_id):
    rows, seq_len = batch
    packed = [row_of(*segments, targets=targets) for segments, targets in rows]
    layout = lay(*packed, seq_len=seq_len, pad_token_id=pad_token_id)
    for place, (row, (segments, targets)) in enumerate(zip(packed, rows, strict=True)):
        tokens = [token for segment in segments for token in segment]
        padding = seq_len - len(tokens)
        lengths = [*map(len, segments), *([padding] if padding else [])]
        assert layout.input_ids[place].tolist() == tokens + [pad_token_id] * padding
        assert layout.position_ids[place].tolist() == [position for length in lengths for position in range(length)]
        assert layout.segments[place] == lengths
        assert added_up(lengths).tolist() == [sum(lengths[:end]) for end in range(len(lengths) + 1)]
        wanted = [*(targets or [1] * len(tokens)), *[0] * padding]
        assert layout.labels[place].tolist() == [
            token if target and position else IGNORE
            for token, target, position in zip(
                layout.input_ids[place].tolist(), wanted, layout.position_ids[place].tolist(), strict=True
            )
        ]
        assert row.num_loss_tokens == np.count_nonzero(layout.labels[place] != IGNORE)


@pytest.mark.parametrize("row", [row_of([1, 2], [3, 4, 5]), row_of([1, 2], [3], targets=[1, 0, 1]), filler_row()])
def test_a_row_that_was_sent_to_another_process_is_the_same_with_its_ids_in_one_array(row):
    received = pickle.loads(pickle.dumps(row))
    assert [received.ids.tolist()] == [piece.tolist() for piece in received.pieces]
    assert received.ids.tolist() == row.ids.tolist()
    assert received.ids.dtype == np.int32
    assert (received.lengths, received.origin) == (row.lengths, row.origin)
    assert plain(lay(received, seq_len=6)) == plain(lay(row, seq_len=6))


@pytest.mark.parametrize("field", ["pieces", "lengths", "targets", "origin"])
def test_a_row_cannot_be_changed_by_mistake(field):
    with pytest.raises(AttributeError):
        setattr(row_of([1]), field, None)
