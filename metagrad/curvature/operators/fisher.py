"""The Fisher information matrix of a model, exact, sampled or empirical, as an operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from metagrad.core.budget import checked_bytes
from metagrad.core.checks import check_choice, check_count
from metagrad.core.tree import LossFn
from metagrad.curvature.operators.batches import Batch, Reduction, count_of
from metagrad.curvature.operators.ggn import (
    OutputMatrix,
    fisher_of_outputs,
    observed_scores,
    operator_of,
    outer_products,
    sampled_scores,
)
from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.problem import Model, ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters

Kind = Literal["exact", "sampled", "empirical"]


def fisher(
    model: Model,
    loss_fn: LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch],
    *,
    kind: Kind = "exact",
    samples: int = 1,
    reduction: Reduction | None = None,
) -> Operator:
    r"""Make the operator of a Fisher information matrix.

    The loss is :math:`L = \sum_n s_n \ell_n` with :math:`\ell_n = -\log p(y_n | x_n, \theta)`. Here :math:`s_n` is
    the weight of a datum, divided by the divisor of a mean. Then

    .. math::
        F &= \sum_n s_n\, \mathbb{E}_{y \sim p(y | x_n, \theta)} \big[\nabla\ell_n(y) \nabla\ell_n(y)^\top\big]
           & \text{"exact"} \\
        F &\approx \frac{1}{M} \sum_{m=1}^M \sum_n s_n \nabla\ell_n(y_{nm}) \nabla\ell_n(y_{nm})^\top, \quad
           y_{nm} \sim p(y | x_n, \theta) & \text{"sampled"} \\
        E &= \sum_n s_n \nabla\ell_n(y_n) \nabla\ell_n(y_n)^\top & \text{"empirical"}

    ``"exact"`` takes the expectation in closed form. It is the Gauss-Newton matrix :func:`ggn` of every loss known
    there except ``F.binary_cross_entropy``, at the same cost. ``"sampled"`` converges to it, with an error like
    :math:`1 / \sqrt{M}`. ``"empirical"`` uses the labels of the data. It approximates the Fisher matrix only near an
    optimum of a well-specified model. Elsewhere it may be far from the curvature.

    The first dimension of the loss's input counts data. If the input is ``[N, C, d...]``, the gradients of all
    positions of a datum are added before the outer product. To treat every position as a datum, flatten in
    ``loss_fn``.

    Args:
        model: As for :func:`ggn`.
        loss_fn: Called as ``loss_fn(output, y)``. Except for ``kind="empirical"`` it must be, or return the result
            of, a loss that :func:`ggn` knows in closed form. These losses are the likelihoods.
        params: As for :func:`ggn`.
        data: As for :func:`ggn`: one batch ``(x, y)`` or an iterable of batches. Unless ``kind="empirical"``, ``y``
            matters only for its weights: classes that are ignored or weighted.
        kind: ``"exact"``, ``"sampled"`` or ``"empirical"``.
        samples: Number M of labels drawn for each datum. They are drawn once, from torch's default generator, so the
            operator is a fixed matrix.
        reduction: As for :func:`ggn`. Required for ``kind="empirical"`` with an unknown loss, to separate :math:`s_n`
            from :math:`\ell_n`. ``"mean"`` is over the first dimension of ``x``.

    Returns:
        An operator, which is a context manager.

    Raises:
        ValueError: As for :func:`ggn`. It is also raised if the loss is not a known likelihood, ``kind`` is unknown,
            or ``samples`` is not an int of 1 or more.
        TypeError: As for :func:`ggn`.

    Example:
        Logistic regression at 0, where every probability is 1/2: :math:`F = \tfrac{1}{4N} X^\top X`, and the
        empirical one is the same, for every residual is 1/2:

        >>> x, y = torch.tensor([[2.0], [4.0]]), torch.tensor([[0.0], [1.0]])
        >>> def model(params, x): return x @ params["w"]
        >>> loss_fn, params = torch.nn.functional.binary_cross_entropy_with_logits, {"w": torch.zeros(1, 1)}
        >>> for kind in ("exact", "sampled", "empirical"):
        ...     with metagrad.curvature.fisher(model, loss_fn, params, (x, y), kind=kind) as K:
        ...         print(K.to_dense())
        tensor([[2.5000]])
        tensor([[2.5000]])
        tensor([[2.5000]])

    References:
        Martens, "New insights and perspectives on the natural gradient method", JMLR 21, 2020, sections 5 and 11;
        Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural gradient descent",
        NeurIPS 2019, section 3.
    """
    call = "fisher(model, loss_fn, params, data)"
    check_choice(f"{call}: kind", kind, Kind)
    check_count(f"{call}: samples", samples)
    problem = ModelProblem(call, model, loss_fn, params, any_split=True)
    labels = Labels(torch.default_generator if kind == "sampled" else torch.Generator())

    def output_matrix_of(evaluation: ModelEvaluation) -> OutputMatrix:
        if kind == "exact":
            return fisher_of_outputs(evaluation)
        if kind == "empirical":
            count = count_of(call, evaluation.batch, evaluation.known, reduction)
            return outer_products(evaluation, observed_scores(evaluation, count))
        scores = sampled_scores(evaluation, samples, labels.generator(evaluation.loss.device))
        return outer_products(evaluation, [scores])

    chunk = checked_bytes(call, "chunk", "64MiB")
    return operator_of(problem, output_matrix_of, data, reduction, chunk=chunk, begin_pass=labels.restart)


class Labels:
    """The generator that draws labels. Every pass over the data draws the same random numbers."""

    def __init__(self, source: torch.Generator) -> None:
        self.seed = int(torch.randint(2**62, (), generator=source))
        self._generator: torch.Generator | None = None

    def restart(self) -> None:
        """Begin a pass."""
        self._generator = None

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator for the device of the outputs, in its state after the earlier batches."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator
