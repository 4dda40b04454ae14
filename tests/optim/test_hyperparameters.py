from __future__ import annotations

import inspect

import pytest

from metagrad.optim.rule import with_arguments
from metagrad.optim.rules import adagrad, adam, lion, rmsprop
from metagrad.optim.torch_optim.optimizer import RuleOptimizer


@pytest.mark.parametrize(
    ("make", "keywords", "message"),
    [
        (adam, {"betas": (1.0, 0.9)}, r"betas\[0\] must be below 1, got 1.0"),
        (adam, {"betas": (0.9, -0.1)}, r"betas\[1\] must be at least 0"),
        (
            adam,
            {"betas": (0.9, 0.9, 0.9)},
            r"adam\(...\): betas must be as many as in \(0.9, 0.999\), got \(0.9, 0.9, 0.9\)",
        ),
        (adam, {"betas": (0.9,)}, r"betas must be as many as in \(0.9, 0.999\), got \(0.9,\)"),
        (adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value must be at least 0"),
        (rmsprop, {"alpha": 1}, r"rmsprop\(...\): alpha must be below 1, got 1"),
        (rmsprop, {"alpha": {"w": 1.5}}, r"alpha\['w'\] must be below 1, got 1.5"),
        (rmsprop, {"alpha": [0.5, 1.5]}, "alpha must be below 1, got 1.5"),
        (lion, {"betas": (0.9, 1.0)}, r"lion\(...\): betas\[1\] must be below 1"),
    ],
)
def test_bad_hyperparameters_are_refused(make, keywords, message):
    with pytest.raises(ValueError, match=message):
        make(**keywords)


def test_arguments_are_documented_before_the_examples_whatever_the_indentation():
    doc = "Do it.\n\n    Example:\n        >>> 1\n        1\n    "
    expected = "Do it.\n\nArgs:\n    lr: A step size.\n\nExample:\n    >>> 1\n    1"
    assert with_arguments(doc, [("lr", "A step size.")]) == expected
    assert with_arguments(inspect.cleandoc(doc), [("lr", "A step size.")]) == expected


def test_an_optimizer_cannot_give_a_default_to_a_field_that_its_rule_has_not():
    with pytest.raises(TypeError, match="class Typo: LionRule has no field beta"):
        type("Typo", (RuleOptimizer,), {}, rule=lion, beta=0.9)
