import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack.order import permutation, permutations

keys = st.lists(st.integers(0, 2**63), min_size=1, max_size=6).map(tuple)


def test_an_order_is_the_same_for_ever():
    assert permutation(10, 7, 0).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert permutation(10, 7, 1).tolist() == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]
    assert permutation(10, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert permutation(6, 2**40, 16, 3, 15, 2).tolist() == [2, 1, 5, 3, 0, 4]


def test_many_orders_of_one_key_are_the_same_for_ever():
    assert permutations(4, 5, 7, 0).tolist() == [[3, 4, 0, 2, 1], [1, 4, 3, 2, 0], [2, 1, 0, 3, 4], [0, 3, 2, 4, 1]]


def test_orders_of_nothing_and_of_one():
    assert permutation(0, 1).tolist() == []
    assert permutation(1, 1).tolist() == [0]
    assert permutations(0, 3, 1).shape == (0, 3)
    assert permutations(2, 1, 1).tolist() == [[0], [0]]


@given(st.integers(0, 300), keys)
def test_an_order_holds_each_number_once(size, key):
    order = permutation(size, *key)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


@given(st.integers(0, 20), st.integers(0, 20), keys)
def test_each_of_many_orders_holds_each_number_once(count, size, key):
    orders = permutations(count, size, *key)
    assert orders.dtype == np.int64
    assert np.sort(orders, axis=1).tolist() == [list(range(size))] * count


@given(keys, st.integers(0, 5), st.integers(1, 2**31))
def test_another_key_gives_another_order(key, place, change):
    other = list(key)
    other[place % len(key)] += change
    assert permutation(50, *key).tolist() != permutation(50, *other).tolist()


def test_one_order_of_many_is_the_order_of_the_key():
    assert permutations(1, 30, 5, 6)[0].tolist() == permutation(30, 5, 6).tolist()


def test_orders_of_one_key_differ_from_each_other():
    assert len({tuple(order) for order in permutations(100, 20, 3).tolist()}) == 100


def test_each_number_comes_about_equally_often_in_each_place():
    orders = permutations(6000, 4, 11)
    shares = np.stack([(orders == number).mean(axis=0) for number in range(4)])
    assert np.abs(shares - 0.25).max() < 0.02


def test_global_random_state_is_neither_read_nor_written():
    orders = []
    for seed in (0, 1):
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        before = str(np.random.get_state()), random.getstate(), torch.get_rng_state().tolist()
        orders.append((permutation(20, 5).tolist(), permutations(3, 20, 5).tolist()))
        assert (str(np.random.get_state()), random.getstate(), torch.get_rng_state().tolist()) == before
    assert orders[0] == orders[1]


def test_later_orders_are_made_without_those_before_them():
    whole = permutations(64, 7, 3, 1)
    assert permutations(5, 7, 3, 1, first=20).tolist() == whole[20:25].tolist()
