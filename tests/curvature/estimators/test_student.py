from __future__ import annotations

import itertools
import math

import pytest
from scipy import stats

from metagrad.curvature.estimators.student import student_t

LEVELS = [0.01, 0.5, 0.68, 0.9, 0.95, 0.99, 0.9999]


def test_quantiles_are_scipys():
    for degrees, level in itertools.product([1, 2, 3, 4, 7, 31, 60, 199, 200, 201, 500, 10_000], LEVELS):
        expected = stats.t.ppf((1 + level) / 2, degrees)
        assert student_t(level, degrees) == pytest.approx(expected, rel=1e-9), level


def test_without_degrees_of_freedom_nothing_is_known():
    assert student_t(0.9, 0) == math.inf


@pytest.mark.parametrize("level", [1, math.nan])
def test_levels_are_probabilities(level):
    with pytest.raises(
        ValueError, match=r"interval\(level\): level must be between 0 and 1, such as 0.95, got"
    ):
        student_t(level, 5)
