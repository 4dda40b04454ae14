"""Which pairs of a solve are kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from metagrad.optim.newton.krylov import PairSampler, place_given_up


def kept_after(num_steps, length):
    kept = []
    for step in range(num_steps):
        place = place_given_up(step, length)
        if place is not None:
            kept = [*kept, step] if len(kept) < length else [*kept[:place], *kept[place + 1 :], step]
    return kept


@pytest.mark.parametrize("length", [2, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("num_steps", [1, 4, 17, 40, 250])
def test_steps_are_kept_evenly(length, num_steps):
    """The places are full, the first step is there, and gaps are a power of two, or twice that."""
    kept = kept_after(num_steps, length)
    assert len(kept) == min(num_steps, length)
    assert kept[0] == 0
    assert kept == sorted(set(kept))
    gaps = {b - a for a, b in itertools.pairwise(kept)}
    stride = min(gaps, default=1)
    assert stride & (stride - 1) == 0
    assert gaps <= {stride, 2 * stride}
    assert num_steps - kept[-1] <= max(1, 2 * stride)


def test_a_single_place_is_that_of_the_first_step():
    assert [place_given_up(step, 1) for step in range(5)] == [0, None, None, None, None]


def test_rows_without_a_pair_keep_theirs():
    rows, both = torch.arange(4.0).reshape(2, 2), torch.tensor([True, True])
    sampler = PairSampler(rows, 2)
    sampler(0, rows, rows, 2 * rows, both)
    sampler(1, rows, rows + 1, 3 * rows, torch.tensor([True, False]))
    pairs = sampler.pairs
    assert torch.stack(pairs.moves, 1).tolist() == [[[0, 1], [1, 2]], [[0, 0], [2, 3]]]
    assert torch.stack(pairs.changes, 1).tolist() == [[[0, 2], [0, 3]], [[0, 0], [4, 6]]]
    sampler(2, rows, rows, rows, ~both)
    sampler(2, 1e-6 * rows, rows, rows, both)  # so small a residual has lost its digits
    assert sampler.pairs is pairs
