"""The matrices M in the products J^T M J: Hessians of losses in a model's outputs, and Fisher matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.derivatives.recorded import Recorded, refuse_order
from metagrad.core.tape import graph_nodes
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.curvature.operators.problem import ModelEvaluation

OutputMatrix: TypeAlias = Callable[[list[Tensor], bool], list[Tensor]]
"""``output_matrix(vectors, batched)``: multiply vectors of the shapes of the outputs, or stacks of them."""


def loss_hessian(evaluation: ModelEvaluation) -> OutputMatrix:
    """Return the Hessian of the loss in the outputs, in closed form if there is one."""
    known = evaluation.known
    if known is None:
        return _hessian_by_autodiff(evaluation).pull
    return lambda vectors, batched: [known.hessian_product(vectors[0])]


def _hessian_by_autodiff(evaluation: ModelEvaluation) -> Recorded:
    problem, on_tape = evaluation.problem, evaluation.problem.create_graph
    with torch.enable_grad():
        outputs = [z.view_as(z) if on_tape else z.detach().requires_grad_() for z in evaluation.outputs]
        loss = problem.loss_fn(evaluation.output_of(outputs), evaluation.batch[1])
        behind = {get_gradient_edge(z).node for z in outputs}
        if not behind & set(graph_nodes([loss])):
            raise ValueError(
                f"{problem.call}: the loss does not depend on what the model returns. It must be a function "
                "loss_fn(output, y) of the output; what it takes from elsewhere is not part of this matrix."
            )
        refuse_order(problem.call, [loss], outputs, 3 if on_tape else 2)
        gradients = torch.autograd.grad(
            loss, outputs, torch.ones_like(loss), create_graph=True, allow_unused=True
        )
    named = {f"output {i}": z for i, z in enumerate(outputs)}
    return Recorded(problem.call, gradients, named, create_graph=on_tape)


def fisher_of_outputs(evaluation: ModelEvaluation) -> OutputMatrix:
    r"""Return :math:`F_L`, the expectation over the predictive distribution in closed form."""
    known = known_loss(evaluation)
    return lambda vectors, batched: [known.fisher_product(vectors[0])]


def sampled_scores(
    evaluation: ModelEvaluation, samples: int, generator: torch.Generator | None
) -> OutputMatrix:
    r"""Return :math:`\frac{1}{M} \sum_m \sum_n s_n g_{nm} g_{nm}^\top` for labels that are drawn M times."""
    known = known_loss(evaluation)
    if bool(known.output.isnan().any()):
        raise ValueError(
            f"{evaluation.problem.call}: what the model returned has nan, so that no labels can be drawn from it."
        )
    with torch.no_grad():
        scores = torch.stack([known.score(generator) for _ in range(samples)]) / samples**0.5
    return _outer_products([scores], known.num_data)


def observed_scores(evaluation: ModelEvaluation, count: float | Tensor | None) -> OutputMatrix:
    r"""Return :math:`\sum_n s_n g_n g_n^\top` for the labels in the data.

    The gradient of the loss in the output is :math:`s_n g_n`.
    """
    known, loss, outputs = evaluation.known, evaluation.loss, evaluation.outputs
    gradients = torch.autograd.grad(
        loss, outputs, torch.ones_like(loss), retain_graph=True, allow_unused=True
    )
    if known is not None:
        root = known.scale.detach().expand(outputs[0].shape).sqrt()
        inverse = (1 / root).masked_fill(root == 0, 0)
    else:
        inverse = 1.0 if count is None else count**0.5
    scores = [
        (torch.zeros_like(z) if g is None else g * inverse).detach().unsqueeze(0)
        for g, z in zip(gradients, outputs, strict=True)
    ]
    return _outer_products(scores, _num_rows(evaluation))


def known_loss(evaluation: ModelEvaluation) -> OutputLoss:
    """Return the loss as a likelihood, or raise."""
    if evaluation.known is None:
        raise ValueError(
            f"{evaluation.problem.call}: the loss is no likelihood that is known, so there is no distribution to "
            "draw labels from. Known are F.cross_entropy, F.nll_loss of log-probabilities, F.mse_loss, "
            "F.gaussian_nll_loss with a given variance, F.binary_cross_entropy and "
            "F.binary_cross_entropy_with_logits, when loss_fn returns what they return. "
            'Multiply the operator, not the loss, by a factor; kind="empirical" takes any loss.'
        )
    return evaluation.known


def _outer_products(scores: Sequence[Tensor], num_data: int) -> OutputMatrix:
    r"""Return the sum over samples M and data n of :math:`a_{nM} a_{nM}^\top`, from ``[M, *output.shape]`` each."""
    rows = [score.reshape(len(score), num_data, -1) for score in scores]

    def multiply(vectors: list[Tensor], batched: bool) -> list[Tensor]:
        count = len(vectors[0]) if batched else 1
        parts = [vector.reshape(count, num_data, -1) for vector in vectors]
        inner = sum(torch.einsum("knd,Mnd->kMn", p, a) for p, a in zip(parts, rows, strict=True))
        return [
            torch.einsum("kMn,Mnd->knd", inner, a).view_as(vector)
            for a, vector in zip(rows, vectors, strict=True)
        ]

    return multiply


def _num_rows(evaluation: ModelEvaluation) -> int:
    if evaluation.known is not None:
        return evaluation.known.num_data
    sizes = {len(z) if z.ndim else 1 for z in evaluation.outputs}
    if len(sizes) > 1:
        raise ValueError(
            f"{evaluation.problem.call}: the first dimension of every output must count the data, got sizes "
            f"{sorted(sizes)}."
        )
    return sizes.pop()
