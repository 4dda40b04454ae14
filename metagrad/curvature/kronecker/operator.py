"""K-FAC and EK-FAC as a linear operator with an exact inverse, root and log-determinant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metagrad.core.checks import check_choice, check_count, check_scalar, check_type, refuse
from metagrad.core.tree import LossFn
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import Generators
from metagrad.curvature.kronecker.factors import Eigenblock
from metagrad.curvature.kronecker.groups import Groups, Other, Sharing
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.operators.batches import (
    Batch,
    Reduction,
    count_of,
    each_batch,
    is_one_batch,
    refuse_iterator,
)
from metagrad.curvature.operators.ggn import Kind, known_loss, labels_of, observed_scores, sampled_scores
from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.problem import ModelEvaluation, ModelProblem
from metagrad.curvature.operators.space import Parameters, ParameterSpace, Vectors
from metagrad.curvature.solvers.solution import Result, Solution, Stats


def kfac(
    model: nn.Module,
    loss_fn: LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch],
    *,
    correct: bool = False,
    fisher: Kind = "sampled",
    samples: int = 1,
    generator: torch.Generator | None = None,
    sharing: Sharing = "expand",
    other: Other = "error",
    reduction: Reduction | None = None,
    group: dist.ProcessGroup | None = None,
) -> Kronecker:
    r"""Approximate the Fisher matrix by one Kronecker product for each layer (K-FAC), as an operator.

    .. math:: F_l \approx A \otimes G, \qquad A = \mathbb{E}[a a^\top], \qquad G = \mathbb{E}[g g^\top]

    where :math:`a` are the inputs of a layer, including a 1 for its bias, and :math:`g` are the gradients of its
    outputs. The matrix has the scale of :func:`fisher` and :func:`ggn`. Its products, inverse, root and
    log-determinant are exact, from the eigenvectors of the factors. As a preconditioner of :func:`ggn` it pays off
    at small damping. If the predictions are nearly certain, few sampled labels differ from them. In this case use
    ``fisher="exact"`` or more samples.

    =========================== ==========================================================================
    layer                       block
    =========================== ==========================================================================
    ``Linear``, ``Conv1d`` ...  the Kronecker product. Patches of a convolution are inputs at positions
    ``Embedding``               the Kronecker product. :math:`A` is the diagonal of counts
    layers of norms             the whole Fisher block up to 1024 numbers, and its diagonal beyond
    others                      by ``other``: an error, the diagonal, or the identity
    =========================== ==========================================================================

    A layer that is called several times, and layers that share their parameters, have one block. Each of their calls
    is a position. Positions whose label is ignored by the loss do not count in :math:`A`.

    Args:
        model: Called as ``model(x)`` in its current mode. The first dimension of its input counts examples.
        loss_fn: As for :func:`fisher`.
        params: As for :func:`ggn`.
        data: One batch ``(x, y)`` or an iterable of batches, which is read once, or twice with ``correct``.
        correct: Replace the eigenvalues of the products by the moments of the examples' gradients in the eigenbasis
            (EK-FAC). The trace is then the trace of the Fisher matrix.
        fisher: The labels, as for :func:`fisher`. ``"sampled"`` costs ``samples`` backward passes for each batch.
            ``"exact"`` costs one for each output of an example. ``"empirical"`` adds the gradients of all positions
            of an example, also if ``loss_fn`` flattens positions. :func:`fisher` then counts each position.
        samples: Number of labels drawn for each datum.
        generator: Draws the labels.
        sharing: How a layer with several positions is approximated. ``"expand"`` treats each position as an example,
            which is exact if the loss is a sum over positions. ``"reduce"`` averages the inputs and adds the
            gradients, which is exact behind an average over positions. Tables always expand.
        other: The block of parameters without a known layer: ``"error"``, ``"diagonal"`` or ``"identity"``.
        reduction: As for :func:`fisher`.
        group: Process group whose ranks have shares of the data, such as ``torch.distributed.group.WORLD``. All ranks
            get the matrix of all data. None uses only the data of this process.

    Raises:
        ValueError: As for :func:`fisher`. It is also raised if a batch norm is in training mode, a parameter has no
            known layer, or its gradient is not the gradient of a plain layer, as for a weight that is used elsewhere.
            A weight of the loss is negative, no label counts, or a sum is NaN or Inf.
        TypeError: ``model`` is no module, or the data can be iterated over only once.

    Example:
        For one linear layer and squared errors, the Kronecker product is the Gauss-Newton matrix:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> params, batch = dict(model.named_parameters()), (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
        >>> K = metagrad.kfac(model, torch.nn.functional.mse_loss, params, batch, fisher="exact")
        >>> K.to_dense(), K.solve(torch.tensor([22.0]), damping=1.0).value
        (tensor([[10.]]), tensor([2.]))

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015; George
        et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018;
        Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural network architectures",
        NeurIPS 2023, for ``sharing``.
    """
    call = "kfac(model, loss_fn, params, data)"
    check_type(call, model, nn.Module)
    check_choice(f"{call}: fisher", fisher, Kind)
    check_choice(f"{call}: sharing", sharing, Sharing)
    check_choice(f"{call}: other", other, Other)
    check_count(f"{call}: samples", samples)
    refuse_iterator(call, data)
    problem = ModelProblem(call, model, loss_fn, params, any_split=True)
    groups = Groups(problem, model, other, sharing)
    labels, blocks = labels_of(fisher, generator), list[Eigenblock]()
    kept = [groups.observe(data)] if is_one_batch(data) else []
    for _ in range(1 + correct):
        labels.clear()
        total: float | Tensor = 0.0
        for evaluation in kept or map(groups.observe, each_batch(call, data, problem.space.device)):
            count = count_of(call, evaluation.batch, evaluation.known, reduction)
            if evaluation.num_examples and (count is None or count):  # the mean over no data is nan
                with torch.autocast(problem.space.device.type, enabled=False):
                    groups.add(evaluation, _columns(evaluation, fisher, samples, labels, count))
                total = math.inf if count is None else total + count  # a sum has no divisor
        if group is not None and group.size() > 1:
            total = groups.over_ranks(total, group)
        blocks = groups.blocks(1.0 if total == math.inf else total)
    return Kronecker(problem.space, blocks)


def _columns(
    evaluation: ModelEvaluation, fisher: Kind, samples: int, labels: Generators, count: float | Tensor | None
) -> Iterator[list[Tensor]]:
    """Yield cotangents of the outputs. Their outer products for each example add up to ``count`` times the matrix."""
    known = evaluation.known
    if known is not None and (least := float(known.scale.min())) < 0:
        refuse(f"{evaluation.problem.call}: weights of the loss", "numbers of 0 or more", least)
    root = 1.0 if count is None else float(count) ** 0.5  # the square root of an int64 tensor is float32
    if fisher == "exact":
        known = known_loss(evaluation)
        places = known.output.detach().reshape(evaluation.num_examples, -1)
        for unit in places.new_zeros(places.shape[1], places.shape[1]).fill_diagonal_(1):
            yield [known.root_column(unit.expand_as(places).reshape(known.output.shape)).detach() * root]
    elif fisher == "sampled":
        scores = sampled_scores(evaluation, samples, labels[evaluation.loss.device])
        yield from ([score * root] for score in scores)
    else:
        yield [score.squeeze(0) * root for score in observed_scores(evaluation, count)]


class Kronecker(Operator):
    """A block-diagonal matrix in its eigenbasis, made by :func:`kfac`: an operator with closed forms.

    Args:
        space: The parameters.
        blocks: The blocks. Each parameter is in one block.
    """

    def __init__(self, space: ParameterSpace, blocks: Sequence[Eigenblock]) -> None:
        super().__init__(space)
        self.blocks: tuple[Eigenblock, ...] = tuple(blocks)

    def _products(self, vectors: Tensor) -> Tensor:
        return self._scaled(vectors, [block.eigenvalues for block in self.blocks])

    def _scaled(self, rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Multiply rows by factors of the eigenvectors, one tensor for each block."""
        parts = dict(zip(self.space.names, self.space.split(rows), strict=True))
        for block, own in zip(self.blocks, factors, strict=True):
            products = block.scaled([parts[name] for name in block.names], own)
            parts.update(zip(block.names, products, strict=True))
        return self.space.join(list(parts.values()))

    def _damped(self, call: str, damping: float | Tensor, *, split: bool = False) -> list[Tensor]:
        """Return damped eigenvalues. Raise ``ValueError`` if an eigenvalue is 0 up to rounding errors."""
        self._refuse_closed()
        check_scalar(f"{call}: damping", damping, 0)
        found = [block.damped(damping, split=split) for block in self.blocks]
        for block, values in zip(self.blocks, found, strict=True):
            least = 0.0 if damping else torch.finfo(values.dtype).eps * values.max()
            if bool((values <= least).any()):
                refuse(
                    f"{call}: the block of {', '.join(block.names)} is singular: damping", "above 0", damping
                )
        return found

    def root(self, damping: float | Tensor = 0.0, power: float = -0.5, *, split: bool = False) -> Rows:
        r"""Return the map :math:`v \mapsto (K + \gamma I)^p v` of vectors, for :meth:`preconditioned` and samples.

        Args:
            damping: The number :math:`\gamma`, 0 or more. It may be a tensor that requires grad.
            power: The exponent :math:`p`.
            split: Damp the factors of each Kronecker product in place of the product, as the optimizer K-FAC does:
                :math:`(A + \pi \sqrt{\gamma} I) \otimes (G + \sqrt{\gamma} / \pi \, I)`. EK-FAC has no factors.

        Raises:
            ValueError: ``damping`` is negative, or it is 0 and a block is singular.
        """
        factors = [
            values**power for values in self._damped("K.solve, K.inverse or K.root", damping, split=split)
        ]
        return lambda rows: self._scaled(rows.reshape(-1, rows.shape[-1]), factors).reshape(rows.shape)

    def inverse(self, damping: float | Tensor = 0.0, *, split: bool = False) -> Rows:
        r"""Return the map :math:`v \mapsto (K + \gamma I)^{-1} v` of vectors, which can be a preconditioner.

        Args:
            damping: As for :meth:`root`.
            split: As for :meth:`root`.
        """
        return self.root(damping, -1.0, split=split)

    def solve(
        self, b: Tensor | Vectors, damping: float | Tensor = 0.0, split: bool = False, **options: object
    ) -> Solution:
        """Solve ``(K + damping I) x = b`` exactly, for a dict, a flat vector ``[n]`` or rows ``[k, n]``.

        Args:
            b: The right-hand side. The solution has its form.
            damping: As for :meth:`root`.
            split: As for :meth:`root`.
            **options: Options of the solve of other operators, which are ignored because this solve is exact.
        """
        named = self.space.unflatten(b) if isinstance(b, Tensor) else b  # checks the size
        flat = self.space.flatten(named, call="K.solve(b)")
        value = self.inverse(damping, split=split)(flat)
        zeros = value.new_zeros(flat.shape[:-1])
        stats = Stats((Result.CONVERGED,) * zeros.numel(), zeros.long(), zeros, 0, None)
        solved: Any = value if isinstance(b, Tensor) else self.space.unflatten(value)
        return Solution(solved, Result.CONVERGED, stats)

    def trace(self, **options: Any) -> Estimate:
        """Return the trace, with a standard error of 0."""
        return self._sum([block.eigenvalues for block in self.blocks], "trace")

    def log_determinant(self, *, damping: float | Tensor = 0.0, **options: Any) -> Estimate:
        """Return the log-determinant of ``K + damping I``, differentiable in ``damping``, as for :meth:`root`."""
        values = self._damped("K.log_determinant(damping)", damping)
        return self._sum([own.log() for own in values], "log-determinant")

    def _sum(self, values: Sequence[Tensor], quantity: str) -> Estimate:
        value = torch.stack([own.sum() for own in values]).sum()
        return Estimate(value, torch.zeros_like(value), 0, 0, "closed form", quantity=quantity)

    def state_dict(self) -> dict[str, Any]:
        """Return the blocks as tensors and names, for ``torch.save``."""
        return {"blocks": [tuple(block) for block in self.blocks]}

    @classmethod
    def from_state_dict(cls, params: Parameters, state: Mapping[str, Any]) -> Kronecker:
        """Make the operator that returned ``state``, for the same parameters.

        Raises:
            ValueError: The parameters have other names or sizes.
        """
        call = "Kronecker.from_state_dict(params, state)"
        space, blocks = ParameterSpace(params, call=call), [Eigenblock(*own) for own in state["blocks"]]
        sizes = {block.names: block.eigenvalues.numel() for block in blocks}
        if sorted(n for names in sizes for n in names) != sorted(params) or sum(sizes.values()) != space.size:
            refuse(call, f"parameters with the sizes {sizes}", space)
        return cls(space, blocks)
