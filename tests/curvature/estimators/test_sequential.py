import torch

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probing import is_tight, spend


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
