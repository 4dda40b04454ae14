"""The generalised Gauss-Newton matrix of a model and a loss, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from metagrad.autograd.derivatives.recorded import Recorded
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.curvature.operators.batches import (
    Accumulated,
    Batch,
    Reduction,
    checked_deterministic,
    count_of,
    is_one_batch,
)
from metagrad.curvature.operators.operator import GraphOperator, Operator
from metagrad.curvature.operators.output_matrices import OutputMatrix, loss_hessian
from metagrad.curvature.operators.problem import LossFn, Model, ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters


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
    r"""Make the operator of the generalised Gauss-Newton matrix.

    .. math:: G = J^\top H_L J, \qquad J = \frac{\partial f(\theta)}{\partial \theta}, \qquad
              H_L = \nabla_f^2 L(f)

    It is the Hessian of :math:`L(f(\theta))` without the curvature of the model; with a convex loss it has no
    negative eigenvalue, and for a model that is linear in its parameters it is the Hessian. The loss is
    split into model and loss, and the matrix depends on this split.

    :math:`H_L` is known in closed form for ``F.cross_entropy``, ``F.nll_loss`` of log-probabilities (taken for
    cross-entropy), ``F.mse_loss``, ``F.binary_cross_entropy_with_logits``, ``F.binary_cross_entropy`` and
    ``F.gaussian_nll_loss`` with a given variance, with all of their arguments; ``loss_fn`` may be one of these, or
    the module, a partial or a function that returns the result of one, on the output itself or reshaped, transposed,
    sliced, or cast. Every other loss is differentiated twice.

    Args:
        model: An ``nn.Module``, called as ``model(x)`` in its current mode, with ``params`` substituted for its own
            parameters; its buffers do not change. Or a function, called as ``model(params, x)``. It may return a
            tensor, or any tree of them.
        loss_fn: Called as ``loss_fn(output, y)``; returns one element.
        params: Parameters by name, such as ``dict(model.named_parameters())`` or some of them; a function's may be
            :class:`~metagrad.sparse.SparseTensor`. They need not require grad.
        data: A batch ``(x, y)``, whose graph is kept for all products; or an iterable of batches that can be iterated
            over repeatedly: every product goes through all of them.
        chunk: As for :func:`hessian`.
        create_graph: Put products on the tape, to be differentiated in ``params``, which must require grad then, and
            in vectors.
        reduction: For several batches, as for :func:`hessian`; it must be given if the loss is not known in closed
            form.

    Returns:
        An operator, which is a context manager.

    Raises:
        ValueError: The batch is no pair, the loss is not one number or does not depend on a parameter (it is named),
            a derivative is missing, or two passes over the data differ.
        TypeError: ``data`` is an iterator, or ``params`` has something that is no floating point tensor.

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
    r""":math:`J^\top M J` of one batch, with a matrix :math:`M` of the outputs."""

    def __init__(self, evaluation: ModelEvaluation, output_matrix: OutputMatrix, chunk: int) -> None:
        problem = evaluation.problem
        super().__init__(
            problem.space,
            evaluation.loss,
            evaluation.recorded,
            chunk=chunk,
            create_graph=problem.create_graph,
        )
        self._output_matrix = output_matrix
        self._source = evaluation.loss

    @property
    def gradient(self) -> Tensor:
        """The gradient of the loss, flat."""
        self._refuse_closed()
        params = self._recorded.params
        of_loss = Recorded("gradient", [self._source], params, create_graph=self._create_graph)
        return self.space.join(of_loss.pull([torch.ones_like(self._source)]))

    def _multiplier(self, places: Sequence[int] | None) -> Callable[[list[Tensor], bool], list[Tensor]]:
        recorded = self._recorded if places is None else self._recorded.block(places, is_symmetric=False)

        def multiply(parts: list[Tensor], batched: bool) -> list[Tensor]:
            with torch.set_grad_enabled(recorded.on_tape):
                return recorded.pull(self._output_matrix(recorded.push(parts, batched), batched), batched)

        return multiply

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
    r"""Make :math:`J^\top M J` of a batch, or of several, with ``M = output_matrix_of(evaluation)``."""
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
    return checked_deterministic(Accumulated(problem.call, problem.space, of_batch, data, begin_pass), model)
