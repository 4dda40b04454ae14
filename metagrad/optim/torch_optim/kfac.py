"""K-FAC as an optimizer of torch's kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from metagrad.optim.kronecker.factors import (
    Eigenbasis,
    Factors,
    Sums,
    averaged,
    averaged_factors,
    eigenbasis_of,
    factors_of,
    inverses_of,
    kl_length,
    preconditioned,
    preconditioned_in_basis,
    scaling_of,
)
from metagrad.optim.kronecker.kfac import KFACRule, wide
from metagrad.optim.kronecker.layers import Layer, joined_gradient, split_gradient
from metagrad.optim.rule import Params
from metagrad.optim.torch_optim.layer_observer import LayerOptimizer
from metagrad.optim.torch_optim.move import Change, Later, working
from metagrad.optim.torch_optim.optimizer import Group, Work
from metagrad.sparse.tables.row_sparse import RowSparse


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

    What does not work: ``torch.compile`` of the model; DistributedDataParallel gives each process factors of its own
    batches. On recurrent use of a layer there is the error that says so.

    Raises:
        ValueError: A hyper-parameter is out of its range; a layer is grouped or shared.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        With a squared error, of whose Fisher matrix the labels drawn give the outputs' factor, one step solves a
        linear regression:

        >>> from metagrad.optim.kronecker.factors import Factors, inverses_of, preconditioned
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> fisher = Factors(x.T @ x / 2, torch.eye(1))
        >>> gradient = (x @ torch.zeros(2, 1) - torch.tensor([[3.0], [7.0]])).T @ x / 2
        >>> -preconditioned(gradient, inverses_of(fisher, 1e-12)).round(decimals=3)
        tensor([[3., 2.]])

        In a loop:

        >>> from metagrad.optim.torch_optim.kfac import KFAC
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> opt = KFAC(model, lr=0.1)
        >>> loss = torch.nn.functional.mse_loss(model(x), torch.tensor([[3.0], [7.0]]))
        >>> loss.backward()
        >>> opt.step()

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015;
        Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016; George et
        al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018; Ba, Grosse,
        Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR 2017, for
        ``kl_clip``.
    """

    def _rule(self, group: Group) -> Any:
        return super()._rule(group).descent

    def _unscaled(self) -> bool:
        """Learn the scale of the factors, too."""
        is_finite = super()._unscaled()
        if is_finite and (self._calls or self._sums):
            self._known_scale("factors")
        return is_finite

    def _observed(self, work: Work) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        for name in self._layers_of(work.params):
            self._reduce(name, keep_calls=work.group["eigen"])
            sums = self._sums.get(name)
            if sums is not None:
                yield f"the factor of the inputs of {name!r}", sums.inputs
                yield f"the factor of the outputs of {name!r}", sums.outputs

    def _layers_of(self, params: Params) -> dict[str, Layer]:
        weights = set(params.values())
        return {name: layer for name, layer in self._layers.items() if layer.weight in weights}

    def _changes(self, group: Group, params: Params, grads: Params) -> Iterator[Change | Later]:
        keys, of_layers = {p: key for key, p in params.items()}, {}
        for name, layer in self._layers_of(params).items():
            new = self._renewed(group, name)
            block = {**self.state.get(layer.weight, {}), **new}
            of_layers[name] = direction_of(self._gradient(layer, keys, grads), block, group["damping"])
            used = {f"the direction of {name!r}": of_layers[name]}
            yield Change({name: layer.weight}, {}, {name: new}, used=used)
        directions = self._directions(keys, grads, of_layers)
        yield from super()._changes(group, params, self._shortened(group, params, directions, grads))

    def _directions(self, keys: Mapping[Tensor, str], grads: Params, of_layers: Params) -> Params:
        """Return the direction of each parameter, by its name: of those that are in no layer, the gradient."""
        found = dict(grads)
        for name, direction in of_layers.items():
            layer = self._layers[name]
            for p, part in zip((layer.weight, layer.bias), split_gradient(layer, direction), strict=True):
                if p is not None and part is not None and p in keys:
                    found[keys[p]] = part
        return found

    def _gradient(self, layer: Layer, keys: Mapping[Tensor, str], grads: Params) -> Tensor:
        bias = None if layer.bias is None or layer.bias not in keys else working(grads[keys[layer.bias]])
        return joined_gradient(layer, working(grads[keys[layer.weight]]), bias)

    def _renewed(self, group: Group, name: str) -> dict[str, Any]:
        """Return the factors and the inverse of a layer, if they are new, after what was seen of it."""
        sums, state = self._sums.get(name), self.state.get(self._layers[name].weight, {})
        if sums is not None:
            rows = self._rows(name) if group["eigen"] else ()
            weight = self._weight(group, sums.num_examples)
            return renewed(
                state, sums, weight, rows, group, is_due=group["step"] % group["inverse_every"] == 0
            )
        if "updates" not in state:
            raise RuntimeError(
                f"KFAC.step: {name!r} has a gradient, but no curvature: its call was not seen, or no labels were "
                "drawn. The forward pass must run after KFAC(model) was made, by calling the layer; with "
                'fisher="sampled", use opt.step(closure) or `with opt.recording():`.'
            )
        return {}

    def _weight(self, group: Group, num_examples: int) -> float | Tensor:
        is_sampled = group["fisher"] == "sampled"
        weight = num_examples if not is_sampled and group["loss_reduction"] == "mean" else 1
        if self._scale is None:
            return weight
        inverse = self._scale.double().reciprocal()
        return weight * float(inverse if is_sampled else inverse**2)

    def _shortened(self, group: Group, params: Params, directions: Params, grads: Params) -> Params:
        """Return directions that change predictions no more than ``kl_clip`` allows, with velocities alike."""
        if group["kl_clip"] is None:
            return directions
        products = [(wide(d) * wide(grads[key])).sum() for key, d in directions.items()]
        device = products[0].device
        change = torch.stack([product.to(device) for product in products]).sum() * group["lr"] ** 2
        length = kl_length(change, group["kl_clip"])
        sign = -1 if group["maximize"] else 1
        found = {}
        for key, d in directions.items():
            own, state = length.to(d.device, working(d).dtype), self.state.get(params[key], {})
            found[key] = d * own
            if "momentum" in state and not isinstance(d, RowSparse) and "rows" not in state:
                # The rule of the directions adds the whole of momentum * velocity.
                found[key] = found[key] - sign * (1 - own) * group["momentum"] * state["momentum"]
        return found

    def _flat_with(self, group: Group, rule: Any, param: Tensor) -> None:
        return None  # one vector would take what is kept of factors along

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        if self.param_groups[index]["fisher"] != self.param_groups[0]["fisher"]:
            raise ValueError("KFAC(model): fisher must be the same in all groups.")


def renewed(
    state: Mapping[str, Any],
    sums: Sums,
    weight: float | Tensor,
    rows: Iterable[tuple[Tensor, Tensor]],
    group: Mapping[str, Any],
    *,
    is_due: bool,
) -> dict[str, Any]:
    """Return what is new in the state of a layer, of what was seen of it in one step.

    Args:
        state: ``updates``, the number of those before; ``inputs`` and ``outputs``, averages of the factors; and what
            is computed of these when ``is_due``, or for the first time: their inverses, or a basis and a ``scaling``.
        sums: Of the rows of the step.
        weight: As of :func:`~metagrad.optim.kronecker.factors.factors_of`.
        rows: Inputs and output gradients of each call; needed for a scaling alone.
        group: The hyper-parameters.
        is_due: Whether inverses are computed.
    """
    count = state.get("updates", 0) + 1
    decay, new = float(group["decay"]), factors_of(sums, weight)
    old = Factors(state["inputs"], state["outputs"]) if count > 1 else new
    factors = averaged_factors(old, new, count, decay)
    found = {"inputs": factors.inputs, "outputs": factors.outputs, "updates": count}
    is_new = is_due or count == 1
    if group["eigen"]:
        if is_new:
            found["input_basis"], found["output_basis"] = eigenbasis_of(factors)
        kept = {**state, **found}
        basis = (kept["input_basis"], kept["output_basis"])
        scaling = weight * torch.stack([scaling_of(*pair, basis) for pair in rows]).sum(0)
        found["scaling"] = scaling if is_new else averaged(state["scaling"], scaling, count, decay)
    elif is_new:
        found["input_inverse"], found["output_inverse"] = inverses_of(factors, group["damping"])
    return found


def direction_of(gradient: Tensor, state: Mapping[str, Any], damping: float | Tensor) -> Tensor:
    """Multiply a gradient with the inverse that is kept."""
    if "scaling" in state:
        basis = Eigenbasis(state["input_basis"], state["output_basis"], state["scaling"])
        return preconditioned_in_basis(gradient, basis, damping)
    return preconditioned(gradient, Factors(state["input_inverse"], state["output_inverse"]))
