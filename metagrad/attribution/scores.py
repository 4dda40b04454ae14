"""Scores: the derivative of metrics of a trained model with respect to the weight of each training example."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from metagrad.core.checks import check_count, check_function, check_type, is_a, refuse
from metagrad.training import Trained
from metagrad.training.training import Metrics

UNSTABLE = 1e6
"""Growth of cotangents above which float32 scores are rounding errors."""


class AttributionMethod(Protocol):
    """A method that computes scores, such as :class:`Replay` or :class:`metagrad.attribution.TracIn`."""

    def scores(self, trained: Trained, metrics: Metrics) -> Tensor:
        """Return one row for each metric, in the shape of the weights, ``[k, n]``."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """The derivative of each metric with respect to the weight of each training example.

    A score keeps the sign of the derivative. Dropping example ``i`` changes metric ``j`` by about
    ``-values[j, i]``. If the metrics are losses, a helpful example has a negative score. :func:`attribute`
    returns scores.

    Attributes:
        values: Scores, ``[k, n]``. With weights of tokens, ``[k, n, length]``.
        at: Example weights of the training run, ``[n]`` or ``[n, length]``.
        metrics: Metrics of the trained model, ``[k]``.
        method: The method.
        growth: Growth of the cotangents in the backward pass, as a factor, or None. Above 1e6, float32 scores are
            only rounding errors.
        is_half: True if the training used half precision.
    """

    values: Tensor
    at: Tensor
    metrics: Tensor
    method: AttributionMethod
    growth: float | None = None
    is_half: bool = False

    def predict(self, weights: Tensor) -> Tensor:
        """Predict the metrics of models that are trained with other weights.

        Args:
            weights: Weights ``[n]``, or ``[m, n]`` for several models.

        Returns:
            Metrics ``[k]`` or ``[m, k]``, by linear extrapolation from the weights of the training.
        """
        size = self.at.ndim
        if weights.shape[-size:] != self.at.shape:
            refuse("Scores.predict(weights)", f"{list(self.at.shape)} or rows of it", list(weights.shape))
        change = (weights.to(self.values) - self.at).flatten(weights.ndim - size)
        return self.metrics + change @ self.values.flatten(1).T

    def helpful(self, count: int) -> Tensor:
        """Return the examples that reduce each metric the most, ``[k, count]``, the most helpful first."""
        return self._extreme(count, largest=False)

    def harmful(self, count: int) -> Tensor:
        """Return the examples that increase each metric the most, ``[k, count]``, the most harmful first."""
        return self._extreme(count, largest=True)

    def _extreme(self, count: int, *, largest: bool) -> Tensor:
        check_count("Scores.helpful(count)", count)
        totals = self.values.flatten(2).sum(2) if self.values.ndim > 2 else self.values
        return totals.topk(min(count, totals.shape[1]), largest=largest).indices

    def __repr__(self) -> str:
        grown = "" if self.growth is None else f", cotangents grew {self.growth:.2g} times"
        unsure = self.growth is not None and self.growth > UNSTABLE and self.values.dtype != torch.float64
        warning = ". They are rounding errors, train in float64" if unsure else ""
        half = ". The training used half precision, compare with float32" if self.is_half else ""
        k, n = self.values.shape[:2]
        return f"Scores of {n} examples for {k} metrics by {self.method}{grown}{warning}{half}"


@dataclasses.dataclass(frozen=True)
class Replay:
    """The exact derivative through training, for all metrics in one sweep, the default of :func:`attribute`.

    Attributes:
        chunk: Maximum number of metrics per sweep. Every further sweep repeats the training steps. None
            differentiates all metrics in one sweep.

    References:
        Ilyas, Engstrom, "MAGIC: Near-optimal data attribution for deep learning", arXiv:2504.16430.
    """

    chunk: int | None = None

    def scores(self, trained: Trained, metrics: Metrics) -> Tensor:
        """Return the derivative of each metric, ``[k, n]``."""
        return trained.jacobian(metrics, "weights", chunk=self.chunk)[1][0]


def attribute(trained: Trained, metrics: Metrics, method: AttributionMethod | None = None) -> Scores:
    """Return how each training example influences metrics of a trained model.

    Args:
        trained: The result of a :class:`metagrad.Training`.
        metrics: ``metrics(model)`` calls the trained model and returns ``[k]``. For example, it returns the
            loss of each test example.
        method: The method. The default is :class:`Replay`, the exact derivative through the training.

    Returns:
        Scores ``[k, n]``.

    Raises:
        TypeError: ``trained`` is not a :class:`metagrad.training.Trained`, or the metrics are not a tensor.
        ValueError: The metrics are not a 1-d tensor, or have no graph. The method does not support the
            weights (unequal weights, or weights of tokens).

    Example:
        >>> x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> training = metagrad.Training(
        ...     model, torch.nn.functional.mse_loss, (x, y), optimizer=metagrad.optim.rules.sgd(lr=0.5),
        ...     batch_size=2, steps=1
        ... )
        >>> metagrad.attribute(training(), lambda model: model(torch.ones(1, 1))[:, 0]).values.tolist()
        [[0.5, 1.5]]
    """
    if not is_a(trained, Trained):
        refuse("attribute(trained)", "a trained model, training()", type(trained).__name__, TypeError)
    check_function("attribute(...)", "metrics", metrics)
    method = Replay() if method is None else method
    if isinstance(method, type) or not hasattr(method, "scores"):
        refuse("attribute(method)", "a method such as metagrad.attribution.TracIn()", method, TypeError)
    with torch.no_grad():
        values = check_type("attribute(metrics): the returned value", metrics(trained), Tensor)
    if values.ndim != 1 or not len(values):
        refuse("attribute(metrics)", "a 1-d tensor with one number for each metric", tuple(values.shape))
    scores = method.scores(trained, metrics)
    own, given = list(scores.shape[1:]), list(trained.weights.shape)
    if own != given:
        refuse(f"attribute(trained, {method})", f"weights {own}", given)
    growth = trained.report.growth if isinstance(method, Replay) else None
    return Scores(scores, trained.weights.detach(), values.detach(), method, growth, trained.report.is_half)
