"""The generalised Gauss-Newton matrix of a model and a loss, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from metagrad.autograd.derivatives.batched_vjp import Together
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.curvature.operators.batches import (
    Batch,
    Progress,
    Reduction,
    accumulated,
    batches_of,
    count_of,
    is_one_batch,
    refuse_graph,
)
from metagrad.curvature.operators.jacobian import Jacobian, JacobianMode, Mode
from metagrad.curvature.operators.operator import LossOperator, Operator
from metagrad.curvature.operators.output_hessians import OutputMatrix, loss_hessian
from metagrad.curvature.operators.problem import LossFn, Model, ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters, ParameterSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def ggn(
    model: Model,
    loss_fn: LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch],
    *,
    sparse: Sequence[str] = (),
    mode: Mode = "auto",
    chunk: Bytes = "64MiB",
    create_graph: bool = False,
    allow_unused: bool = False,
    reduction: Reduction | None = None,
    progress: Progress | None = None,
    check_deterministic: bool = True,
    group: ProcessGroup | None = None,
) -> Operator:
    r"""Make the operator of the generalised Gauss-Newton matrix.

    .. math:: G = J^\top H_L J, \qquad J = \frac{\partial f(\theta)}{\partial \theta}, \qquad
              H_L = \nabla_f^2 L(f)

    It is the Hessian of :math:`L(f(\theta))` without the curvature of the model; with a convex loss it has no
    negative eigenvalue, and for a model that is linear in its parameters it is the Hessian. The arguments are those
    of :func:`hessian`, ``(loss_fn, params, data)``, except that the loss is split into model and loss: the matrix
    depends on this split.

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
        sparse: As for :func:`hessian`.
        mode: How products with :math:`J` are computed. ``"reverse"``: from a graph of the backward pass, which is
            kept; ``"forward"``: by ``torch.func.jvp``, which runs the model for each, and needs forward derivatives;
            ``"auto"``: the first, and with a warning the second where a derivative is missing.
        chunk: As for :func:`hessian`.
        create_graph: Put products on the tape, to be differentiated in ``params``, which must require grad then, and
            in vectors.
        allow_unused: As for :func:`hessian`.
        reduction: For several batches, how their losses reduce their terms: ``"mean"``, ``"sum"``, or a function
            of the batch that counts; see :func:`~metagrad.curvature.accumulated`. Not needed for losses known in
            closed form.
        progress: As for :func:`hessian`.
        check_deterministic: As for :func:`hessian`.
        group: As for :func:`hessian`.

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
    problem = ModelProblem(call, model, loss_fn, params, sparse, allow_unused, create_graph)
    return operator_of(
        problem,
        loss_hessian,
        data,
        mode=mode,
        chunk=chunk,
        reduction=reduction,
        progress=progress,
        check_deterministic=check_deterministic,
        group=group,
    )


class GaussNewtonOperator(LossOperator):
    r""":math:`J^\top M J` of one batch, with a matrix :math:`M` of the outputs; made by :func:`ggn` and ``fisher``.

    Attributes:
        loss: The loss of the batch.
    """

    def __init__(
        self,
        evaluation: ModelEvaluation,
        output_matrix: OutputMatrix,
        *,
        mode: JacobianMode,
        chunk: int,
    ) -> None:
        super().__init__(evaluation.space())
        self.loss = evaluation.loss if evaluation.problem.create_graph else evaluation.loss.detach()
        self._evaluation = evaluation
        self._output_matrix = output_matrix
        self._jacobian = Jacobian(evaluation, mode)
        self._chunk = chunk
        self._together = Together()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the loss, flat."""
        loss = self._evaluation.loss
        parts = self._jacobian.transposed_products([torch.ones_like(loss)[None]], False, of=[loss])
        return self.space.join(parts)[0]

    @property
    def num_together(self) -> int:
        """How many products are computed together."""
        return self._together.most(self._chunk, self.device)

    def _products(self, vectors: Tensor) -> Tensor:
        return self._block_products(self.space, vectors)

    def _block_products(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        self._refuse_closed()
        jacobian = self._jacobian.block([self.space.names.index(name) for name in block.names])

        def multiply(part: list[Tensor], together: bool) -> list[Tensor]:
            return jacobian.transposed_products(
                self._output_matrix(jacobian.products(part, together), together), together
            )

        pieces = self._together.pieces(multiply, block.split(vectors), self._chunk)
        return torch.cat([block.join(products) for _, products in pieces])

    def _free(self) -> None:
        self.loss = self.loss.detach()
        del self._evaluation, self._output_matrix, self._jacobian


def operator_of(
    problem: ModelProblem,
    output_matrix_of: Callable[[ModelEvaluation], OutputMatrix],
    data: Batch | Iterable[Batch],
    *,
    mode: Mode,
    chunk: Bytes,
    reduction: Reduction | None,
    progress: Progress | None,
    check_deterministic: bool,
    begin_pass: Callable[[], None] | None = None,
    group: ProcessGroup | None = None,
) -> Operator:
    r"""Make :math:`J^\top M J` of a batch, or of several, with ``M = output_matrix_of(evaluation)``."""
    how = JacobianMode(problem.call, mode)
    size = checked_bytes(problem.call, "chunk", chunk)

    is_alone = group is None and is_one_batch(data)

    def operator_for(batch: Batch) -> GaussNewtonOperator:
        evaluation = problem.evaluate(batch)
        operator = GaussNewtonOperator(evaluation, output_matrix_of(evaluation), mode=how, chunk=size)
        if not is_alone:
            operator.count = count_of(problem.call, batch, evaluation.known, reduction)
        return operator

    refuse_graph(problem.call, group, has_data=True, create_graph=problem.create_graph)
    if is_alone:
        return operator_for(data)
    return accumulated(
        operator_for,
        problem.params,
        batches_of(data),
        call=problem.call,
        reduction=None,
        progress=progress,
        check_deterministic=check_deterministic,
        begin_pass=begin_pass,
        model=problem.model if isinstance(problem.model, nn.Module) else None,
        group=group,
    )
