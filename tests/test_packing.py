from itertools import combinations
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.packing import (
    OVER_AGE,
    best_fit,
    first_row,
    next_fit,
    oldest_first,
    oldest_first_limited,
    resolve,
    wrapped,
)

LIMITS = st.none() | st.integers(1, 6)


@st.composite
def buffers(draw, *, most=40):
    """(lengths, seq_len): examples that wait, each of which fits into a row."""
    seq_len = draw(st.integers(2, 40))
    return draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=most)), seq_len


@st.composite
def buffers_with_must(draw, *, most=40, limited=False):
    """(lengths, seq_len, must, max_examples): the `must` oldest fit into a row together."""
    lengths, seq_len = draw(buffers(most=most))
    max_examples = draw(st.integers(1, 6) if limited else LIMITS)
    fitting = [
        count
        for count in range(1, min(len(lengths), max_examples or len(lengths)) + 1)
        if sum(lengths[:count]) <= seq_len
    ]
    return lengths, seq_len, draw(st.sampled_from(fitting)), max_examples


def total(lengths, row):
    return sum(lengths[place] for place in row)


def is_in_age_order(row):
    return list(row) == sorted(set(row))


def best_row(lengths, *, seq_len, must, max_examples):
    """By trying all: the fullest row that holds the `must` oldest.

    A full one of the shortest run of oldest examples that allows it; of equally full ones (where the number of
    examples is limited: those with the fewest of them) the one with the oldest examples, compared from the youngest on.
    """
    limited = max_examples is not None
    choices = [
        (*range(must), *others)
        for count in range(min(max_examples or len(lengths), len(lengths)) - must + 1)
        for others in combinations(range(must, len(lengths)), count)
        if total(lengths, (*range(must), *others)) <= seq_len
    ]
    full = [row for row in choices if total(lengths, row) == seq_len]
    if full:
        run = min(row[-1] for row in full)
        choices = [row for row in full if row[-1] == run]
    most = max(total(lengths, row) for row in choices)
    fullest = [row for row in choices if total(lengths, row) == most]
    if limited:
        fullest = [row for row in fullest if len(row) == min(map(len, fullest))]
    return list(min(fullest, key=lambda row: [place in row for place in reversed(range(len(lengths)))]))


# ---- oldest_first -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_len", "expected"),
    [
        ([4, 5, 3, 3, 6], 10, [0, 2, 3]),  # 4 + 3 + 3; 4 + 6 would need a younger one
        ([4, 5, 3, 6, 3], 10, [0, 3]),
        ([10, 1], 10, [0]),
        ([1], 10, [0]),
        ([9, 2, 3], 10, [0]),
        ([3, 8, 4, 5], 10, [0, 3]),  # no sum of 10: 3 + 5 is the most
        ([2, 2, 2, 2], 5, [0, 1]),  # equal sums: the oldest
        ([1, 1, 1, 1, 1], 3, [0, 1, 2]),
        ([5, 6, 6, 5], 11, [0, 1]),
        ([7, 2, 2, 2, 1], 10, [0, 1, 4]),  # the shortest run that fills the row goes to its end
    ],
)
def test_oldest_first_fills_a_row_with_the_oldest_that_fill_it(lengths, seq_len, expected):
    assert oldest_first(lengths, seq_len=seq_len) == expected


def test_oldest_first_holds_the_oldest_that_must_be_in():
    assert oldest_first([4, 1, 6, 5], seq_len=10) == [0, 2]
    assert oldest_first([4, 1, 6, 5], seq_len=10, must=2) == [0, 1, 3]
    assert oldest_first([4, 1, 6], seq_len=11, must=3) == [0, 1, 2]


@given(buffers_with_must(most=8))
def test_oldest_first_is_the_best_of_all_rows(case):
    lengths, seq_len, must, _ = case
    expected = best_row(lengths, seq_len=seq_len, must=must, max_examples=None)
    assert oldest_first(lengths, seq_len=seq_len, must=must) == expected


@given(buffers_with_must())
def test_a_row_of_oldest_first_fits_and_holds_the_oldest(case):
    lengths, seq_len, must, _ = case
    row = oldest_first(lengths, seq_len=seq_len, must=must)
    assert is_in_age_order(row)
    assert row[:must] == list(range(must))
    assert total(lengths, row) <= seq_len
    # No example that was left out would still fit.
    left = seq_len - total(lengths, row)
    assert all(length > left for place, length in enumerate(lengths) if place not in row)


@given(buffers(), st.lists(st.integers(1, 40), max_size=20))
def test_younger_examples_do_not_change_a_full_row(buffer, younger):
    lengths, seq_len = buffer
    row = oldest_first(lengths, seq_len=seq_len)
    if total(lengths, row) == seq_len:
        assert oldest_first([*lengths, *younger], seq_len=seq_len) == row


# ---- oldest_first_limited ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_len", "max_examples", "expected"),
    [
        ([4, 5, 3, 3, 6], 10, 3, [0, 2, 3]),
        ([4, 5, 3, 3, 6], 10, 2, [0, 4]),
        ([4, 5, 3, 3, 6], 10, 1, [0]),
        ([1, 1, 1, 1, 1], 4, 2, [0, 1]),
        ([2, 3, 3, 1, 5], 9, 2, [0, 4]),
        ([10, 1], 10, 1, [0]),
    ],
)
def test_a_limited_row_is_filled_by_few_examples(lengths, seq_len, max_examples, expected):
    assert oldest_first_limited(lengths, seq_len=seq_len, must=1, max_examples=max_examples) == expected


@given(buffers_with_must(most=8, limited=True))
def test_a_limited_row_is_the_best_of_all_rows(case):
    lengths, seq_len, must, max_examples = case
    expected = best_row(lengths, seq_len=seq_len, must=must, max_examples=max_examples)
    assert oldest_first_limited(lengths, seq_len=seq_len, must=must, max_examples=max_examples) == expected


@given(buffers_with_must(limited=True))
def test_a_limited_row_fits_and_holds_the_oldest(case):
    lengths, seq_len, must, max_examples = case
    row = oldest_first_limited(lengths, seq_len=seq_len, must=must, max_examples=max_examples)
    assert is_in_age_order(row)
    assert row[:must] == list(range(must))
    assert total(lengths, row) <= seq_len
    assert len(row) <= max_examples


@given(buffers())
def test_a_limit_that_does_not_bind_fills_a_row_as_far(buffer):
    lengths, seq_len = buffer
    limited = oldest_first_limited(lengths, seq_len=seq_len, must=1, max_examples=len(lengths))
    assert total(lengths, limited) == total(lengths, oldest_first(lengths, seq_len=seq_len))


# ---- best_fit ---------------------------------------------------------------------------------------------------


def test_best_fit_plans_all_and_gives_the_fullest_half():
    # Longest first: 8, 7 open rows; 5, 5 share one; 4 opens one; 3 goes to 7; 2 goes to 8; 1 to 4.
    lengths = [3, 5, 8, 1, 7, 2, 5, 4]
    assert best_fit(lengths, range(8, 0, -1), seq_len=10) == [[0, 4], [1, 6]]


def test_best_fit_puts_an_example_where_the_least_room_is_left():
    # 6 leaves 4, 7 leaves 3: the 3 goes to the 7, and the 4 had gone to the 6.
    assert best_fit([6, 7, 4, 3], [4, 3, 2, 1], seq_len=10) == [[0, 2]]
    assert best_fit([6, 7, 3], [3, 2, 1], seq_len=10) == [[1, 2]]


def test_best_fit_gives_rows_in_the_order_of_their_oldest_and_of_equally_full_ones_the_older():
    assert best_fit([10, 10, 10, 10], [4, 3, 2, 1], seq_len=10) == [[0], [1]]
    assert best_fit([1, 9, 10, 9, 1], [5, 4, 3, 2, 1], seq_len=10) == [[0, 1], [2]]


def test_best_fit_gives_a_row_that_is_over_age_however_empty():
    lengths = [2, 10, 10, 10]
    at_limit = OVER_AGE * len(lengths)
    assert best_fit(lengths, [at_limit, 3, 2, 1], seq_len=10) == [[1], [2]]
    assert best_fit(lengths, [at_limit + 1, 3, 2, 1], seq_len=10) == [[0], [1], [2]]


@given(buffers(), LIMITS, st.data())
def test_rows_of_best_fit_are_apart_and_fit_and_at_least_half_of_a_whole_plan(buffer, max_examples, data):
    lengths, seq_len = buffer
    ages = sorted(data.draw(st.lists(st.integers(1, 200), min_size=len(lengths), max_size=len(lengths))), reverse=True)
    rows = best_fit(lengths, ages, seq_len=seq_len, max_examples=max_examples)

    assert rows
    places = [place for row in rows for place in row]
    assert len(places) == len(set(places))
    for row in rows:
        assert is_in_age_order(row)
        assert total(lengths, row) <= seq_len
        assert max_examples is None or len(row) <= max_examples
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)

    everything = best_fit(lengths, [10**9] * len(lengths), seq_len=seq_len, max_examples=max_examples)
    assert sorted(place for row in everything for place in row) == list(range(len(lengths)))
    assert {tuple(row) for row in rows} <= {tuple(row) for row in everything}
    rest = [row for row in everything if row not in rows]
    assert len(rows) >= len(rest)
    assert all(ages[row[0]] <= OVER_AGE * len(lengths) for row in rest)
    young = [row for row in rows if ages[row[0]] <= OVER_AGE * len(lengths)]
    assert max((total(lengths, row) for row in rest), default=0) <= min(
        (total(lengths, row) for row in young), default=99
    )


@given(buffers())
def test_best_fit_leaves_no_two_rows_that_would_fit_into_one(buffer):
    lengths, seq_len = buffer
    rows = best_fit(lengths, [10**9] * len(lengths), seq_len=seq_len)
    assert sum(2 * total(lengths, row) <= seq_len for row in rows) <= 1


@pytest.mark.parametrize("max_examples", [None, 3])
@pytest.mark.parametrize("size", [4, 32])
def test_no_example_of_a_stream_waits_for_ever_under_best_fit(size, max_examples):
    seq_len, head, gone = 100, 0, []
    lengths = np.random.default_rng(1).integers(1, 100, size=4000)
    lengths[::50], lengths[25::50] = 3, 100  # odd ones that nothing needs, and full rows, which go first
    waiting = []
    while head < len(lengths):
        while len(waiting) < size and head < len(lengths):
            waiting.append(head)
            head += 1
        plan = best_fit(
            [int(lengths[number]) for number in waiting],
            [head - number for number in waiting],
            seq_len=seq_len,
            max_examples=max_examples,
        )
        taken = {waiting[place] for row in plan for place in row}
        gone += [(number, head - number) for number in taken]
        waiting = [number for number in waiting if number not in taken]
        assert all(head - number <= OVER_AGE * size for number in waiting)
    assert max(age for _, age in gone) <= (OVER_AGE + 1) * size
    assert max(age for _, age in gone) > size  # some did wait


# ---- next_fit and wrapped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_len", "max_examples", "expected"),
    [
        ([3, 2, 4, 1], 6, None, [0, 1]),
        ([3, 3, 4], 6, None, [0, 1]),
        ([6, 1], 6, None, [0]),
        ([1, 1], 6, None, [0, 1]),
        ([1, 1, 1], 6, 2, [0, 1]),
        ([5, 4, 1], 6, 2, [0]),
    ],
)
def test_next_fit_takes_the_oldest_up_to_the_first_that_does_not_fit(lengths, seq_len, max_examples, expected):
    assert next_fit(lengths, seq_len=seq_len, max_examples=max_examples) == expected


@pytest.mark.parametrize(
    ("lengths", "seq_len", "max_examples", "expected"),
    [
        ([3, 2, 4, 1], 6, None, [0, 1, 2]),
        ([3, 3, 4], 6, None, [0, 1]),
        ([9, 1], 6, None, [0]),
        ([1, 1], 6, None, [0, 1]),
        ([1, 1, 9], 6, 2, [0, 1]),
        ([1, 9, 9], 6, 2, [0, 1]),
    ],
)
def test_wrapped_takes_the_oldest_until_the_row_is_full_or_more(lengths, seq_len, max_examples, expected):
    assert wrapped(lengths, seq_len=seq_len, max_examples=max_examples) == expected


@given(buffers(), LIMITS)
def test_next_fit_keeps_the_order_of_the_stream(buffer, max_examples):
    lengths, seq_len = buffer
    row = next_fit(lengths, seq_len=seq_len, max_examples=max_examples)
    assert row == list(range(len(row)))
    assert row
    assert total(lengths, row) <= seq_len
    assert max_examples is None or len(row) <= max_examples
    if len(row) < len(lengths) and len(row) != max_examples:
        assert total(lengths, row) + lengths[len(row)] > seq_len


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(2, 40), LIMITS)
def test_wrapped_is_full_and_only_its_last_example_goes_over(lengths, seq_len, max_examples):
    row = wrapped(lengths, seq_len=seq_len, max_examples=max_examples)
    assert row == list(range(len(row)))
    assert row
    assert total(lengths, row[:-1]) < seq_len
    assert max_examples is None or len(row) <= max_examples
    if len(row) < len(lengths) and len(row) != max_examples:
        assert total(lengths, row) >= seq_len


# ---- choosing a rule --------------------------------------------------------------------------------------------


def test_auto_is_oldest_first_up_to_a_mean_of_a_quarter_row_and_best_fit_beyond():
    assert resolve("auto", tokens=100, count=4, seq_len=100) == "oldest_first"
    assert resolve("auto", tokens=101, count=4, seq_len=100) == "best_fit"
    assert resolve("auto", tokens=0, count=1, seq_len=100) == "oldest_first"


@pytest.mark.parametrize("packing", ["oldest_first", "best_fit", "next_fit", "wrapped"])
def test_a_rule_that_is_named_is_itself(packing):
    assert resolve(packing, tokens=1, count=1, seq_len=100) == packing
    assert resolve(packing, tokens=100, count=1, seq_len=100) == packing


RULES = ["oldest_first", "best_fit", "next_fit", "wrapped"]


@given(st.sampled_from(RULES), buffers_with_must())
def test_the_first_row_of_any_rule_holds_what_must_be_in_and_fits(packing, case):
    lengths, seq_len, must, max_examples = case
    row = first_row(packing, lengths, seq_len=seq_len, must=must, max_examples=max_examples)
    assert is_in_age_order(row)
    assert row[:must] == list(range(must))
    assert max_examples is None or len(row) <= max_examples
    assert total(lengths, row[:-1] if packing == "wrapped" else row) <= seq_len


def test_the_first_row_is_made_by_the_rule_that_is_named():
    case = {"seq_len": 10, "must": 1, "max_examples": None}
    lengths = [4, 5, 3, 3, 6]
    assert first_row("oldest_first", lengths, **case) == [0, 2, 3]
    assert first_row("best_fit", lengths, **case) == [0, 2, 3]
    assert first_row("next_fit", lengths, **case) == [0, 1]
    assert first_row("wrapped", lengths, **case) == [0, 1, 2]
    assert first_row("oldest_first", lengths, seq_len=10, must=1, max_examples=2) == [0, 4]


# ---- pitfalls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["oldest_first", "next_fit"])
@pytest.mark.parametrize("max_examples", [None, 3])
def test_examples_that_never_fit_together_make_a_row_each_and_no_empty_one(packing, max_examples):
    waiting, rows = [4, 4, 4], []
    while waiting:
        row = first_row(packing, waiting, seq_len=5, must=1, max_examples=max_examples)
        rows.append([waiting[place] for place in row])
        waiting = [length for place, length in enumerate(waiting) if place not in row]
    assert rows == [[4], [4], [4]]
    assert best_fit([4, 4, 4], [3, 2, 1], seq_len=5) == [[0], [1]]


def test_a_plan_of_best_fit_is_no_burst_of_more_than_half_of_the_buffer():
    lengths = np.random.default_rng(0).integers(200, 1000, size=256).tolist()
    rows = best_fit(lengths, range(256, 0, -1), seq_len=1000)
    everything = best_fit(lengths, [10**9] * 256, seq_len=1000)
    assert len(rows) == (len(everything) + 1) // 2


class Counted(int):
    """A length that counts how often it is looked at."""

    looks = 0

    def _look(name):
        method = getattr(int, name)

        def looked(self, other):
            Counted.looks += 1
            return method(self, other)

        return looked

    __eq__, __lt__, __gt__, __rrshift__ = map(_look, ("__eq__", "__lt__", "__gt__", "__rrshift__"))
    __hash__ = int.__hash__


def test_oldest_first_looks_only_at_the_examples_that_it_needs():
    looks = []
    for size in (256, 4096):
        Counted.looks = 0
        lengths = [Counted(length) for length in np.random.default_rng(0).integers(1, 300, size=size)]
        row = oldest_first(lengths, seq_len=2048)
        assert total(lengths, row) == 2048
        looks.append(Counted.looks)
    assert looks[0] == looks[1]  # a longer buffer costs nothing
    assert len(row) <= looks[0] < 40


def test_best_fit_places_an_example_by_looking_at_few_rows():
    for size in (256, 4096):
        Counted.looks = 0
        lengths = [Counted(length) for length in np.random.default_rng(0).integers(1, 2048, size=size)]
        best_fit(lengths, range(size, 0, -1), seq_len=2048)
        assert size <= Counted.looks < 4 * size * log2(size)
