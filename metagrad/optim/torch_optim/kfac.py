"""K-FAC as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.core.tree import widened
from metagrad.distributed.sums import sums
from metagrad.optim.kronecker.factors import (
    EigenBlock,
    FactorEstimate,
    Factors,
    FisherBlock,
    Sums,
    factors_of,
    scaling_of,
)
from metagrad.optim.kronecker.kfac import Blocks, KFACRule, KFACState
from metagrad.optim.kronecker.layers import Layer
from metagrad.optim.rule import Params
from metagrad.optim.torch_optim.layer_observer import LayerOptimizer
from metagrad.optim.torch_optim.move import Change
from metagrad.optim.torch_optim.optimizer import Group, Work
from metagrad.optim.torch_optim.state import ParameterState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class KFAC(LayerOptimizer, rule=KFACRule):
    r"""Optimize by K-FAC: natural gradients, with the Fisher matrix of a layer taken as a Kronecker product.

    .. math::
        A &= \mathbb{E}[a a^\top], \qquad G = \mathbb{E}[g g^\top] \\
        D &= \Bigl(G + \frac{\sqrt{\gamma}}{\pi} I\Bigr)^{-1} \nabla W \, \bigl(A + \pi \sqrt{\gamma} I\bigr)^{-1},
        \qquad \pi^2 = \frac{\operatorname{tr}(A) / \dim A}{\operatorname{tr}(G) / \dim G} \\
        V &\leftarrow \nu (\mu V + D) + \lambda W, \qquad W \leftarrow W - \eta V, \qquad
        \nu = \min\bigl(1, \sqrt{\kappa / (\eta^2 D^\top \nabla)}\bigr)

    with :math:`a` the inputs of a layer and :math:`g` the gradients of its outputs, seen by hooks. It knows
    ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``, whose patches are inputs at several positions; the
    parameters of other modules are moved along the plain gradient, no further than ``kl_clip`` allows, with one
    warning that names them. Grouped convolutions, and layers that are shared or called twice in one backward pass,
    are refused by name.

    With ``fisher="empirical"`` any loop works: ``loss.backward()`` and ``opt.step()``, or a closure. With
    ``"sampled"`` the labels are drawn from what the model predicts, which is the Fisher matrix proper and costs one
    backward pass more; the loss is then computed in the closure, or within ``with opt.recording():``, by one of
    torch's losses, as for :class:`~metagrad.optim.SophiaG`.

    With ``fisher="empirical"``, the default, the step is near to Newton's only where the model fits its data well in
    the sense of likelihood: the squares of the gradients stand for the curvature. On a regression by squared errors
    they grow with the residuals, as the Hessian does not, so that steps are short where the fit is bad and long where
    it is good; there ``"sampled"`` is the Fisher matrix, which is the Gauss-Newton matrix.

    At a step with an estimate, the patches of a convolution are laid out, which takes the memory of its input times
    the size of its kernel. A step costs two products of matrices for each layer, of the sizes of its factors: little
    where batches are large or convolutions have many positions, and as much as a gradient where a layer is wider than
    three batches.

    Of several processes, each with the loss of its own examples, a mean, and gradients that are averaged by
    :func:`metagrad.distributed.average_gradients` with their numbers as weights: with ``group`` the factors are those
    of the examples of all of them, and each computes a share of the inverses. Without, they are refused.

    What does not work: ``torch.compile`` of the model. Recurrent use of a layer raises.

    Raises:
        ValueError: A hyper-parameter is out of its range; a layer is grouped or shared.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import KFAC
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> opt = KFAC(model, lr=0.1)
        >>> loss = torch.nn.functional.mse_loss(model(torch.eye(2)), torch.tensor([[3.0], [7.0]]))
        >>> loss.backward()
        >>> opt.step()

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015;
        Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016; George et
        al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018; Ba, Grosse,
        Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR 2017, for
        ``kl_clip``.
    """

    def _unscaled(self) -> bool:
        """Unscale the gradients, and note the scale of the factors."""
        is_finite = super()._unscaled()
        if is_finite and (self._calls or self._sums):
            self._known_scale("factors")
        return is_finite

    def _observed(self, work: Work) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        layers = self._layers_of(work.params)
        for key in layers:
            self._reduce(key, keep_calls=work.group["eigen"])
        if self.group is not None and layers:
            self._add_up(work, self.group)
        for key in layers:
            if key in self._sums:
                yield f"the factor of the inputs of {key!r}", self._sums[key].inputs
                yield f"the factor of the outputs of {key!r}", self._sums[key].outputs

    def _add_up(self, work: Work, group: ProcessGroup) -> None:
        """Replace the sums over the examples of this process by those over the examples of all of them."""
        rule, params = self._rule(work.group), self._with_biases(work)[0]
        keys = list(self._layers_of(params))
        counts = [
            (own.num_examples, own.num_rows) if (own := self._sums.get(key)) else (0, 0) for key in keys
        ]
        (totals,) = sums([torch.tensor(counts, device=self._device())], group)
        # The loss of a process is the mean over its examples, and its gradients have that factor.
        power = rule.request.power
        for key, (own_examples, _), (examples, rows) in zip(keys, counts, to_list(totals), strict=True):
            if examples:
                self._shares[key] = (own_examples / examples) ** power
                zeros = rule.zeros(key, params)
                own = self._sums[key][:2] if own_examples else zeros
                pair = [each.to(zero.dtype) for each, zero in zip(own, zeros, strict=True)]
                inputs, outputs = sums([pair[0], pair[1] * self._shares[key]], group)
                self._sums[key] = Sums(inputs, outputs, examples, rows)

    def _layers_of(self, params: Params) -> dict[str, Layer]:
        return {key: layer for key, layer in self._layers.items() if key in params}

    def _changes(self, work: Work) -> Iterator[Change]:
        group, params, _ = work
        rule, kept = self._rule(group), self._kept(params)
        whole, gradients = self._with_biases(work)
        before = self._state_before(group, rule, whole, kept)
        estimates = ((key, self._estimate(key, rule)) for key in before.blocks if key in self._sums)
        directions, length, blocks = rule.directions(gradients, before, whole, estimates, self.group)
        _check_estimated(blocks)
        new = {key: block._asdict() for key, block in blocks.items() if block is not before.blocks[key]}
        used = {f"the direction of {key!r}": directions[key] for key in params}
        yield Change(params, {}, new, used=used)
        yield from self._moves(Work(group, params, directions), rule.descent(length), kept)

    def _with_biases(self, work: Work) -> tuple[Params, Params]:
        """Add biases of layers that have no gradient: a layer's is one matrix, with a column of zeros for those."""
        biases = map(self._bias_of, self._layers_of(work.params).values())
        silent = {self._names[b]: b for b in biases if b is not None and b.grad is None}
        grads = {**work.grads, **{key: torch.zeros_like(b) for key, b in silent.items()}}
        return {**work.params, **silent}, {key: widened(g) for key, g in grads.items()}

    def _state_before(
        self, group: Group, rule: KFACRule, params: Params, kept: Mapping[str, ParameterState]
    ) -> KFACState:
        kind, blocks = EigenBlock if group["eigen"] else FisherBlock, {}
        for key in self._layers_of(params):
            if self._lacks_factors(key):
                blocks[key] = kind(0, *rule.zeros(key, params) * 2)
            else:
                blocks[key] = kind(*(kept[key][slot] for slot in kind._fields))
        return KFACState(group["step"], None, blocks)

    def _estimate(self, key: str, rule: KFACRule) -> FactorEstimate:
        """Return the estimate of a layer from the calls since the last step."""
        of_step = self._sums[key]
        weight = self._weight(rule, of_step.num_examples)

        def squares(basis: Factors) -> Tensor:
            own = [scaling_of(*rows, basis) for rows in self._rows(key)]
            if self.group is None:
                return weight * torch.stack(own).sum(0)
            zeros = basis.inputs.new_zeros(len(basis.outputs), len(basis.inputs))
            (total,) = sums([self._shares[key] * sum(own, zeros)], self.group)
            return weight * total

        return FactorEstimate(factors_of(of_step, weight), squares)

    def _weight(self, rule: KFACRule, num_examples: int) -> float:
        """Return the weight of squared gradients, without the scale of a GradScaler."""
        weight = rule.request.weight(num_examples)
        if self._scale is None:
            return weight
        inverse = self._scale.double().reciprocal()
        return weight * float(inverse if rule.fisher == "sampled" else inverse**2)

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        if self.param_groups[index]["fisher"] != self.param_groups[0]["fisher"]:
            raise ValueError("KFAC(model): fisher must be the same in all groups.")


def _check_estimated(blocks: Blocks) -> None:
    for key, block in blocks.items():
        if not block.updates:
            raise RuntimeError(
                f"KFAC.step: {key!r} has a gradient, but no curvature: the call of its layer was not seen, or no "
                "labels were drawn. The forward pass must run after KFAC(model) was made, by calling the layer; with "
                'fisher="sampled", use opt.step(closure) or `with opt.recording():`.'
            )
