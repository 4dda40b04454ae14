import itertools
import math

import pytest
import torch
from scipy import stats

from metagrad.curvature.estimators.estimate import Estimate, from_samples, student_t
from metagrad.curvature.estimators.probes import is_tight, spend


def estimate(value, stderr, samples=64, **fields):
    return Estimate(torch.tensor(value), torch.tensor(stderr), samples, 64, "hutchinson", **fields)


def test_the_interval_is_students():
    low, high = estimate(3.0, 0.5, samples=8).interval(0.9)
    expected = stats.t.interval(0.9, df=7, loc=3.0, scale=0.5)
    torch.testing.assert_close(torch.stack([low, high]), torch.tensor(expected, dtype=torch.float32))


def test_one_sample_knows_nothing_of_its_error():
    found = from_samples(
        torch.tensor([2.0]), torch.tensor(0.0), matvecs=1, method="hutchinson", quantity="trace"
    )
    assert found.stderr == math.inf
    assert found.interval(0.5) == (-math.inf, math.inf)


def test_a_bound_holds_at_every_level():
    found = estimate(3.0, 0.5, samples=0)
    assert found.interval(0.1) == found.interval(0.99) == (2.5, 3.5)


def test_the_standard_error_is_that_of_a_mean():
    samples = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    zero = torch.tensor(0.0, dtype=torch.float64)
    found = from_samples(samples, zero, matvecs=3, method="m", quantity="q", shift=zero + 10)
    assert found.value == 13.0
    assert found.stderr.item() == pytest.approx(stats.sem(samples.numpy()))
    floored = from_samples(samples, 4 * found.stderr / 3, matvecs=3, method="m", quantity="q")
    assert floored.stderr.item() == pytest.approx(5 * found.stderr.item() / 3)  # 3, 4, 5
    inflated = from_samples(samples, zero, matvecs=3, method="m", quantity="q", inflation=zero + 4)
    assert inflated.stderr.item() == pytest.approx(2 * found.stderr.item())


REPRS = [
    (12.3456, 0.4, "trace = 12.35 +- 0.40 (hutchinson, 64 products)"),
    (12.3456, 4.2, "trace = 12.3 +- 4.2 (hutchinson, 64 products)"),
    (-0.5, 0.012, "trace = -0.500 +- 0.012 (hutchinson, 64 products)"),
    (123456.0, 4200.0, "trace = 1.235e+05 +- 4.2e+03 (hutchinson, 64 products)"),
    (1.25e-9, 3.4e-11, "trace = 1.250e-09 +- 3.4e-11 (hutchinson, 64 products)"),
    (0.0, 1e-12, "trace = 0 +- 1e-12 (hutchinson, 64 products)"),
    (3.0, 0.0, "trace = 3 +- 0 (hutchinson, 64 products)"),
    (3.0, math.inf, "trace = 3 +- inf (hutchinson, 64 products)"),
]


def test_repr_has_the_digits_that_the_error_lets_it_have():
    for value, stderr, expected in REPRS:
        value, stderr = torch.tensor(value, dtype=torch.float64), torch.tensor(stderr, dtype=torch.float64)
        assert repr(Estimate(value, stderr, 64, 64, "hutchinson", quantity="trace")) == expected


def test_repr_of_vectors_and_of_what_did_not_converge():
    found = Estimate(
        torch.tensor([-1.0, 2.0]), torch.tensor([0.1, 0.25]), 8, 8, "xtrace", False, quantity="diagonal"
    )
    assert (
        repr(found)
        == "diagonal = from -1 to 2, +- at most 0.25, of shape (2,) (xtrace, 8 products, not converged)"
    )
    empty = Estimate(torch.empty(0), torch.empty(0), 8, 8, "xtrace")
    assert repr(empty) == "estimate = empty, of shape (0,) (xtrace, 8 products)"


LEVELS = [0.01, 0.5, 0.68, 0.9, 0.95, 0.99, 0.9999]


def test_quantiles_are_scipys():
    for degrees, level in itertools.product([1, 2, 3, 4, 7, 31, 60, 199, 200, 201, 500, 10_000], LEVELS):
        expected = stats.t.ppf((1 + level) / 2, degrees)
        assert student_t(level, degrees) == pytest.approx(expected, rel=1e-7), level


@pytest.mark.parametrize("level", [1, math.nan])
def test_levels_are_probabilities(level):
    with pytest.raises(ValueError, match=r"interval\(level\): level must be between 0 and 1"):
        student_t(level, 5)


class Halving:
    """An estimate of 1 whose standard error is 1 / products."""

    def __init__(self):
        self.batches = []

    def extend(self, products):
        self.batches.append(products)

    def estimate(self):
        total = sum(self.batches)
        return Estimate(torch.tensor(1.0), torch.tensor(1 / total), 0, total, "halving")


def test_batches_grow_by_a_half_until_the_interval_is_tight():
    estimator = Halving()
    found = spend(estimator, 1000, 1 / 50)
    assert estimator.batches == [16, 8, 12, 18]
    assert found.matvecs == 54
    assert found.converged


def test_the_budget_is_spent_and_not_more():
    for budget in (1, 5, 15, 16, 17, 18, 40, 55):
        estimator = Halving()
        found = spend(estimator, budget, 1e-3, least=3)
        assert sum(estimator.batches) == budget
        assert not found.converged
        assert min(estimator.batches) >= min(3, budget)


def test_tightness_is_relative():
    def tight(value, stderr):
        return is_tight(Estimate(torch.tensor(value), torch.tensor(stderr), 0, 1, "m"), 0.1)

    assert tight(10.0, 1.0)
    assert tight(-10.0, 1.0)
    assert not tight(10.0, 1.1)
    assert tight(0.0, 0.0)
    assert not tight(0.0, 1e-9)
    assert tight([10.0, 0.0], [0.0, 1.0])  # by norms
    assert not tight([10.0, 0.0], [0.8, 0.8])
