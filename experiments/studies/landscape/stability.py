r"""How sharp a loss may be where an optimizer trains: its preconditioner, and the edge of stability.

On a quadratic with the Hessian H, steps along :math:`P^{-1} \nabla L` stay bounded while the largest eigenvalue of
:math:`P^{-1} H`, the preconditioned sharpness, is below the edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.studies.landscape.schema import Method
from metagrad.optim.kronecker.layers import joined
from metagrad.optim.kronecker.per_axis import axis_product

if TYPE_CHECKING:
    from experiments.studies.landscape.schema import RunConfig
    from metagrad.curvature import Operator

Stacks = dict[str, Tensor]
"""Rows of vectors by the names of the parameters, [k, ...]."""


def edge(run: RunConfig, gradient_norm: float) -> float:
    r"""Return the preconditioned sharpness above which steps oscillate with growing amplitude.

    .. math:: \frac{2 (1 + \beta)}{\eta} \text{ with momentum}, \quad
              \frac{2 (1 + \beta_1)}{(1 - \beta_1) \eta} \text{ with an average of gradients}, \quad
              \frac{\|g\|}{2 \rho} \Bigl(\sqrt{1 + \frac{8 \rho}{\eta \|g\|}} - 1\Bigr) \text{ with SAM}

    References:
        Cohen, Kaur, Li, Kolter, Talwalkar, ICLR 2021; Cohen et al., "Adaptive gradient methods at the edge of
        stability", 2022; Long, Bartlett, "Sharpness-aware minimization and the edge of stability", 2023.
    """
    if run.rho:
        ratio = gradient_norm / (2 * run.rho)
        return ratio * (math.sqrt(1 + 4 / (run.lr * ratio)) - 1) if ratio else 0.0
    if run.method in (Method.adam, Method.soap):
        beta = run.options["betas"][0]
        return 2 * (1 + beta) / ((1 - beta) * run.lr)
    return 2 * (1 + run.options.get("momentum", 0.0)) / run.lr


def preconditioned(operator: Operator, run: RunConfig, optimizer: Any, model: nn.Module) -> Operator:
    r"""Return :math:`P^{-1/2} H P^{-1/2}` for the preconditioner that the last step of an optimizer had."""
    make = {Method.gd: None, Method.adam: _adam, Method.soap: _soap, Method.kfac: _kfac}[run.method]
    if make is None:
        return operator
    root, space = make(optimizer, dict(model.named_parameters())), operator.space
    return operator.preconditioned(lambda rows: space.flatten(root(space.unflatten(rows))))


Root = Callable[[Stacks], Stacks]


def _adam(optimizer: torch.optim.Adam, params: Mapping[str, nn.Parameter]) -> Root:
    group, scales = optimizer.param_groups[0], {}
    for name, p in params.items():
        state = optimizer.state[p]
        scales[name] = _inverse_root(state["exp_avg_sq"], group, int(state["step"]))
    return lambda stacks: {name: stack * scales[name] for name, stack in stacks.items()}


def _soap(optimizer: Any, params: Mapping[str, nn.Parameter]) -> Root:
    """Scale in the coordinates of SOAP's bases, and turn back."""
    states, group = {name: optimizer.state[p] for name, p in params.items()}, optimizer.param_groups[0]

    def turned(stack: Tensor, bases: list[Tensor]) -> Tensor:
        for axis, basis in enumerate(bases):
            stack = axis_product(stack, basis, axis, batch_ndim=1)
        return stack

    def root(stacks: Stacks) -> Stacks:
        found = {}
        for name, stack in stacks.items():
            state = states[name]
            scale = _inverse_root(state["square"], group, state["step"])
            found[name] = turned(
                turned(stack, state["bases"]) * scale, [basis.mT for basis in state["bases"]]
            )
        return found

    return root


def _inverse_root(square: Tensor, group: Mapping[str, Any], step: int) -> Tensor:
    """Return the inverse root of Adam's preconditioner, with the corrections of both averages."""
    first, second = group["betas"]
    return ((1 - first**step) * ((square / (1 - second**step)).sqrt() + group["eps"])).rsqrt()


def _kfac(optimizer: Any, params: Mapping[str, nn.Parameter]) -> Root:
    """Multiply the matrix of each layer, its bias the last column, by the roots of both inverse factors."""
    weights = {name: p for name, p in params.items() if "input_inverse" in optimizer.state[p]}
    roots = {
        name: [_root(optimizer.state[p][f"{side}_inverse"]) for side in ("output", "input")]
        for name, p in weights.items()
    }

    def root(stacks: Stacks) -> Stacks:
        found = {}
        for name, (left, right) in roots.items():
            bias = f"{name.rpartition('.')[0]}.bias"
            matrix = left @ joined(stacks[name], stacks[bias], batch_ndim=1) @ right
            found[name], found[bias] = matrix[..., :-1].reshape(stacks[name].shape), matrix[..., -1]
        return found

    return root


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT
