from __future__ import annotations

import numpy as np
import pytest

from precision_bert.data.epoch_order import POOL_BATCHES, shuffled_batches

LENGTHS = np.random.RandomState(1).randint(4, 40, size=201)


def test_the_documented_pool_is_32_batches():
    assert POOL_BATCHES == 32


@pytest.mark.parametrize("size", [1, 63, 64, 65, 201])
def test_each_pool_is_sorted_by_length_and_cut(size):
    lengths = LENGTHS[:size]
    batches = shuffled_batches(lengths, 2, bucket_by_length=True, seed=5, epoch=3)
    # The same by hand: pools of 64 positions, sorted in Python, which keeps the order of equals.
    order = np.random.RandomState([5, 3]).permutation(size).tolist()
    expected = []
    for start in range(0, size, 64):
        pool = sorted(order[start : start + 64], key=lambda position: lengths[position])
        expected += [pool[index : index + 2] for index in range(0, len(pool), 2)]
    assert sorted(batch.tolist() for batch in batches) == sorted(expected)
    assert len(batches) == (size + 1) // 2


def test_the_short_batch_may_come_anywhere():
    where = {
        [len(batch) for batch in shuffled_batches(
            LENGTHS[:9], 2, bucket_by_length=True, seed=0, epoch=epoch
        )].index(1)
        for epoch in range(100)
    }  # fmt: skip
    assert where == {0, 1, 2, 3, 4}


def test_without_bucketing_the_shuffled_positions_are_cut_in_order():
    batches = shuffled_batches(LENGTHS[:9], 4, bucket_by_length=False, seed=2, epoch=0)
    assert [len(batch) for batch in batches] == [4, 4, 1]
    order = np.random.RandomState([2, 0]).permutation(9)
    assert np.concatenate(batches).tolist() == order.tolist()


@pytest.mark.parametrize("bucket_by_length", [True, False])
def test_epochs_and_seeds_differ_and_repeat(bucket_by_length):
    def order(seed, epoch):
        batches = shuffled_batches(
            LENGTHS, 4, bucket_by_length=bucket_by_length, seed=seed, epoch=epoch
        )
        return tuple(np.concatenate(batches).tolist())

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_every_example_is_about_equally_likely_in_every_place():
    first = [
        shuffled_batches(LENGTHS[:10], 1, bucket_by_length=True, seed=seed, epoch=0)[0][0]
        for seed in range(2000)
    ]
    counts = np.bincount(first, minlength=10)
    # 200 expected; four standard errors of a binomial with p = 0.1.
    assert abs(counts - 200).max() < 4 * np.sqrt(2000 * 0.1 * 0.9)
