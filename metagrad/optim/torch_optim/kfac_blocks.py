"""What is kept of a layer's block of the Fisher matrix, and the direction that it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    preconditioned,
    preconditioned_in_basis,
    scaling_of,
)


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
