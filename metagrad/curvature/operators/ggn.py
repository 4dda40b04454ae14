"""The generalized Gauss-Newton matrix and the Fisher information matrix of a model and a loss, as operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.derivatives.recorded import Recorded, refuse_order
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import check_choice, check_count, refuse
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import LossFn
from metagrad.curvature.estimators.probes import Generators
from metagrad.curvature.likelihoods import OutputLoss
from metagrad.curvature.operators.batches import (
    Batch,
    BatchedOperator,
    Reduction,
    checked_deterministic,
    count_of,
    is_one_batch,
)
from metagrad.curvature.operators.operator import GraphOperator, Operator
from metagrad.curvature.operators.problem import Model, ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters

Kind = Literal["exact", "sampled", "empirical"]


def ggn(
    model: Model,
    loss_fn: LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch],
    *,
    chunk: Bytes = "64MiB",
    create_graph: bool = False,
    reduction: Reduction | None = None,
) -> Operator:
    r"""Make the operator of the generalized Gauss-Newton (GGN) matrix.

    .. math:: G = J^\top H_L J, \qquad J = \frac{\partial f(\theta)}{\partial \theta}, \qquad
              H_L = \nabla_f^2 L(f)

    It is the Hessian of :math:`L(f(\theta))` without the curvature of the model. For a convex loss it has no negative
    eigenvalue. For a model that is linear in its parameters it is the Hessian. The matrix depends on how the loss is
    split into model and loss.

    :math:`H_L` is known in closed form for ``F.cross_entropy``, ``F.mse_loss``,
    ``F.binary_cross_entropy_with_logits``, ``F.binary_cross_entropy``, ``F.gaussian_nll_loss`` with a given variance,
    and ``F.nll_loss`` of log-probabilities (treated as cross-entropy), with all of their arguments. ``loss_fn`` may
    be one of these functions, its module, a partial, or a function that returns its result. Its input may be the
    output or an affine function of it, such as a slice or a cast. Every other loss is differentiated twice.

    Args:
        model: An ``nn.Module``, called as ``model(x)`` in its current mode, with ``params`` substituted for its own
            parameters. If its ``forward`` takes the items of a dict or tuple ``x``, it is called as ``model(**x)`` or
            ``model(*x)``. A function is called as ``model(params, x)``. Both may return a tensor or a pytree of
            tensors. Buffers do not change.
        loss_fn: Called as ``loss_fn(output, y)``. It must return one element.
        params: Parameters by name, such as ``dict(model.named_parameters())`` or some of them. They need not require
            grad. The parameters of a function may be :class:`~metagrad.sparse.SparseTensor`.
        data: One batch ``(x, y)``, whose graph is stored for all products. For an iterable of batches, every product
            goes through all batches, so it must be iterable more than once.
        chunk: As for :func:`hessian`.
        create_graph: Make products differentiable with respect to vectors and ``params``, which must then require
            grad.
        reduction: How the loss of a batch reduces its terms, as for :func:`hessian`, for several batches.
            Required if the loss is not known in closed form.

    Returns:
        An operator, which is a context manager.

    Raises:
        ValueError: The batch is not a pair, the loss is not a scalar or does not depend on a parameter (the error
            names it), a derivative is missing, two passes over the data differ, or the products are not symmetric.
        TypeError: ``data`` is an iterator, or ``params`` has an entry that is not a floating point tensor.

    Example:
        Linear regression, :math:`G = \tfrac{2}{N} X^\top X`:

        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> params, batch = dict(model.named_parameters()), (x, torch.zeros(2, 1))
        >>> with metagrad.curvature.ggn(model, torch.nn.functional.mse_loss, params, batch) as G:
        ...     torch.allclose(G.to_dense(), x.T @ x)
        True

    References:
        Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", Neural Computation
        14(7), 2002, section 3; Martens, "New insights and perspectives on the natural gradient method", JMLR 21,
        2020, section 8.
    """
    call = "ggn(model, loss_fn, params, data)"
    problem = ModelProblem(call, model, loss_fn, params, create_graph=create_graph)
    size = checked_bytes(call, "chunk", chunk)
    return operator_of(problem, loss_hessian, data, reduction, chunk=size)


class GaussNewtonOperator(GraphOperator):
    r""":math:`J^\top M J` of one batch, where :math:`M` is a matrix on the outputs."""

    def __init__(self, evaluation: ModelEvaluation, output_matrix: OutputMatrix, chunk: int) -> None:
        super().__init__(evaluation.problem.space, evaluation.loss, evaluation.recorded, chunk=chunk)
        self._output_matrix = output_matrix
        self._source = evaluation.loss

    is_symmetric = False

    @property
    def gradient(self) -> Tensor:
        """The flat gradient of the loss."""
        self._refuse_closed()
        params = self._recorded.params
        of_loss = Recorded("gradient", [self._source], params, create_graph=self._recorded.create_graph)
        return of_loss.pull(torch.ones_like(of_loss.outputs))

    def _product(self, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._recorded.on_tape):
            return self._recorded.pull(self._output_matrix(self._recorded.push(v)))

    def _free(self) -> None:
        super()._free()
        del self._output_matrix, self._source


def operator_of(
    problem: ModelProblem,
    output_matrix_of: Callable[[ModelEvaluation], OutputMatrix],
    data: Batch | Iterable[Batch],
    reduction: Reduction | None,
    *,
    chunk: int,
    begin_pass: Callable[[], None] | None = None,
) -> Operator:
    r"""Make :math:`J^\top M J` of one batch or of several batches, where ``M = output_matrix_of(evaluation)``."""
    is_alone = is_one_batch(data)

    def of_batch(batch: Batch) -> GaussNewtonOperator:
        evaluation = problem.evaluate(batch)
        operator = GaussNewtonOperator(evaluation, output_matrix_of(evaluation), chunk)
        if not is_alone:
            operator.count = count_of(problem.call, batch, evaluation.known, reduction)
        return operator

    if is_alone:
        return of_batch(data)
    model = problem.model if isinstance(problem.model, nn.Module) else None
    return checked_deterministic(
        BatchedOperator(problem.call, problem.space, of_batch, data, begin_pass), model
    )


OutputMatrix: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies the flat outputs ``[m]``, or rows ``[k, m]``."""


def loss_hessian(evaluation: ModelEvaluation) -> OutputMatrix:
    """Return the Hessian of the loss with respect to the outputs, in closed form if there is one."""
    known = evaluation.known
    if known is None:
        return _hessian_by_autodiff(evaluation).pull
    return flattened(known.hessian_product, known.output)


def _hessian_by_autodiff(evaluation: ModelEvaluation) -> Recorded:
    problem, on_tape = evaluation.problem, evaluation.problem.create_graph
    with torch.enable_grad():
        outputs = [z.view_as(z) if on_tape else z.detach().requires_grad_() for z in evaluation.outputs]
        loss = problem.loss_fn(evaluation.output_of(outputs), evaluation.batch[1])
        behind = {get_gradient_edge(z).node for z in outputs}
        if not behind & set(graph_nodes([loss])):
            raise ValueError(
                f"{problem.call}: the loss does not depend on what the model returns. It must be a function "
                "loss_fn(output, y) of the output. This matrix holds only the curvature through the output."
            )
        refuse_order(problem.call, [loss], outputs, 3 if on_tape else 2)
        gradients = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
    named = {f"output {i}": z for i, z in enumerate(outputs)}
    return Recorded(problem.call, gradients, named, create_graph=on_tape)


def flattened(product: Callable[[Tensor], Tensor], output: Tensor) -> OutputMatrix:
    """Convert a product with vectors in the shape of an output to a product with flat rows."""
    return lambda rows: product(rows.reshape(*rows.shape[:-1], *output.shape)).reshape(rows.shape)


def sampled_scores(evaluation: ModelEvaluation, samples: int, generator: torch.Generator | None) -> Tensor:
    r"""Return :math:`\sqrt{s_n / M} g_{nm}` for M sampled labels of each datum, ``[M, *output.shape]``."""
    known = known_loss(evaluation)
    if bool(known.output.isnan().any()):
        raise ValueError(
            f"{evaluation.problem.call}: the output of the model has nan, so no labels can be drawn from it."
        )
    with torch.no_grad():
        return torch.stack([known.score(generator) for _ in range(samples)]) / samples**0.5


def observed_scores(evaluation: ModelEvaluation, count: float | Tensor | None) -> list[Tensor]:
    r"""Return :math:`\sqrt{s_n} g_n` for the labels in the data, ``[1, *output.shape]`` for each output.

    The gradient of the loss with respect to the output is :math:`s_n g_n`.
    """
    known = evaluation.known
    if known is not None:
        root = known.scale.detach().expand(known.output.shape).sqrt()
        inverse = (1 / root).masked_fill(root == 0, 0)
    else:
        inverse = 1.0 if count is None else count**0.5
    return [(g * inverse).detach().unsqueeze(0) for g in evaluation.loss_gradients()]


def known_loss(evaluation: ModelEvaluation) -> OutputLoss:
    """Return the loss as a likelihood. Raise ``ValueError`` if it is not a known likelihood."""
    if evaluation.known is None:
        raise ValueError(
            f"{evaluation.problem.call}: the loss is not a known likelihood, so there is no distribution to draw "
            "labels from. Known are F.cross_entropy, F.nll_loss of log-probabilities, F.mse_loss, "
            "F.gaussian_nll_loss with a given variance, F.binary_cross_entropy and "
            "F.binary_cross_entropy_with_logits, when loss_fn returns what they return. "
            'Multiply the operator, not the loss, by a factor; "empirical" takes any loss.'
        )
    return evaluation.known


def outer_products(evaluation: ModelEvaluation, scores: Sequence[Tensor]) -> OutputMatrix:
    r"""Return the sum over samples M and data n of :math:`a_{nM} a_{nM}^\top`.

    Each score is ``[M, *output.shape]``.
    """
    num_data = _num_rows(evaluation)
    rows = [score.reshape(len(score), num_data, -1) for score in scores]

    sizes = [z.numel() for z in evaluation.outputs]

    def multiply(flat: Tensor) -> Tensor:
        parts = [
            part.reshape(-1, num_data, part.shape[-1] // num_data)
            for part in flat.split_with_sizes(sizes, -1)
        ]
        inner = sum(torch.einsum("knd,Mnd->kMn", p, a) for p, a in zip(parts, rows, strict=True))
        found = [torch.einsum("kMn,Mnd->knd", inner, a).flatten(1) for a in rows]
        return torch.cat(found, -1).reshape(flat.shape)

    return multiply


def _num_rows(evaluation: ModelEvaluation) -> int:
    if evaluation.known is not None:
        return evaluation.known.num_data
    sizes = {len(z) if z.ndim else 1 for z in evaluation.outputs}
    if len(sizes) > 1:
        call = f"{evaluation.problem.call}: the first dimensions of the outputs"
        refuse(call, "the number of data in every output", sorted(sizes))
    return sizes.pop()


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
    labels = labels_of(kind)

    def output_matrix_of(evaluation: ModelEvaluation) -> OutputMatrix:
        if kind == "exact":
            known = known_loss(evaluation)
            return flattened(known.fisher_product, known.output)
        if kind == "empirical":
            count = count_of(call, evaluation.batch, evaluation.known, reduction)
            return outer_products(evaluation, observed_scores(evaluation, count))
        scores = sampled_scores(evaluation, samples, labels[evaluation.loss.device])
        return outer_products(evaluation, [scores])

    chunk = checked_bytes(call, "chunk", "64MiB")
    return operator_of(problem, output_matrix_of, data, reduction, chunk=chunk, begin_pass=labels.clear)


def labels_of(kind: Kind, generator: torch.Generator | None = None) -> Generators:
    """Return the generators of labels, which only ``"sampled"`` needs."""
    return Generators(int(torch.randint(2**62, (), generator=generator)) if kind == "sampled" else 0)
