"""Whether optimizers compute what they should: estimates against dense matrices, equal rules with each other."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from experiments.benchmarks.optimizers.methods import (
    LR,
    METHODS,
    RIVAL,
    Method,
    Optimizers,
    Work,
    of_all,
    rival,
)
from metagrad.optim import AdaHessian, SophiaG, SophiaH

PROBES = 1000
TOLERANCE = 0.25  # of a mean of so many estimates, relative


def few() -> Work:
    """A network in float64 that is small enough for dense matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Work(model, torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,)))


def exact_diagonals(work: Work) -> dict[str, Tensor]:
    """Return the diagonals of the Hessian and the Gauss-Newton matrix, from dense matrices."""
    params = {name: p.detach() for name, p in work.model.named_parameters()}

    def logits(params: dict[str, Tensor]) -> Tensor:
        return functional_call(work.model, params, (work.x,))

    blocks: Any = jacrev(jacrev(lambda params: F.cross_entropy(logits(params), work.y)))(params)
    jacobian = torch.cat([block.flatten(2) for block in jacrev(logits)(params).values()], 2)
    p = logits(params).softmax(1)
    curvature = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / len(p)
    return {
        "Hessian": torch.cat([blocks[n][n].reshape(v.numel(), -1).diagonal() for n, v in params.items()]),
        "Gauss-Newton": torch.einsum("bci,bcd,bdi->i", jacobian, curvature, jacobian),
    }


ESTIMATES: dict[str, tuple[str, Callable[[nn.Module], Optimizers], Callable[[dict[str, Any]], Tensor]]] = {
    "AdaHessian": (
        "Hessian",
        of_all(AdaHessian, betas=(0.9, 0.0), samples=PROBES),
        lambda state: state["square"].sqrt(),
    ),
    "SophiaH-10": ("Hessian", of_all(SophiaH, betas=(0.9, 0.0), samples=PROBES), lambda s: s["hessian"]),
    "SophiaG-10": ("Gauss-Newton", of_all(SophiaG, betas=(0.9, 0.0), samples=PROBES), lambda s: s["hessian"]),
    f"{RIVAL}.AdaHessian": (
        "Hessian",
        of_all(rival("AdaHessian"), num_samples=PROBES),
        lambda state: state["hessian"],
    ),
    f"{RIVAL}.SophiaH-10": ("Hessian", of_all(rival("SophiaH"), num_samples=PROBES), lambda s: s["hessian"]),
}
"""The matrix whose diagonal is estimated, what estimates it at its first step, and where it is in the state."""


def check(names: Sequence[str]) -> list[str]:
    """Compare means of estimates with exact diagonals, and Lion with Lion; say how far off they are.

    Raises:
        SystemExit: One of ours is further off than its standard error explains.
    """
    work, lines = few(), []
    exact = exact_diagonals(work)
    for name in (name for name in names if name in ESTIMATES and _is_there(name)):
        matrix, make, read = ESTIMATES[name]
        model = copy.deepcopy(work.model)
        (opt,) = make(model)
        Method(lambda _, opt=opt: [opt], wants_graph=METHODS[name].wants_graph).stepper(work, model)()
        estimate = torch.cat([read(opt.state[p]).reshape(-1) for p in model.parameters()])
        error = ((estimate.abs() - exact[matrix].abs()).norm() / exact[matrix].norm()).item()
        lines.append(f"{name}: the mean of {PROBES} estimates is off the {matrix} diagonal by {error:.1%}")
        if not error < TOLERANCE and not name.startswith(RIVAL):
            raise SystemExit(f"{lines[-1]}.")
    return lines + _alike(work, [name for name in ("Lion", f"{RIVAL}.Lion") if name in names])


def _alike(work: Work, names: Sequence[str]) -> list[str]:
    if len(names) < 2 or not all(map(_is_there, names)):
        return []
    ends = []
    for name in names:
        model = copy.deepcopy(work.model)
        step = METHODS[name].stepper(work, model)
        for _ in range(3):
            step()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    error = (ends[0] - ends[1]).abs().max().item()
    return [f"{' and '.join(names)}: after 3 steps parameters differ by {error:.1e}, of {3 * LR:.0e} moved"]


def _is_there(name: str) -> bool:
    return not name.startswith(RIVAL) or importlib.util.find_spec(RIVAL) is not None
