"""Known faults of torch that change results without an error, each with a probe and with what the library does.

``python -m metagrad.info --probes`` runs the probes on the installed torch. The tests fail when a fault is gone, so
that the workaround can go too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class Fault(NamedTuple):
    """A fault of torch.

    Attributes:
        name: What torch computes wrongly.
        workaround: What the library does instead.
        is_there: Returns whether the installed torch has the fault.
        is_compiled: True if the probe compiles a kernel, which takes up to a minute.
    """

    name: str
    workaround: str
    is_there: Callable[[], bool]
    is_compiled: bool = False


def _compiled_alpha() -> bool:
    w, a, b = torch.ones(6, 3), torch.ones(6, 4), torch.ones(4, 3)
    compiled = torch.compile(lambda w, a, b: torch.add(w, a @ b, alpha=-0.1), fullgraph=True)
    return not torch.allclose(compiled(w, a, b), w - 0.1 * (a @ b), rtol=1e-3)


def _third_derivative_of_layer_norm() -> bool:
    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(F.layer_norm(x, (3,)).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x, create_graph=True)[0]

    x = torch.tensor([0.3, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    step = torch.tensor([1e-4, 0.0, 0.0], dtype=torch.float64)
    difference = (second(x + step) - second(x - step))[0] / 2e-4
    (third,) = torch.autograd.grad(second(x)[0], x)
    return not torch.allclose(third[0], difference, rtol=1e-2)


def _functional_call_of_a_module_that_occurs_twice() -> bool:
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer, layer)
    other = {name: p.detach() for name, p in model.named_parameters()}
    functional_call(model, other, (torch.ones(1, 1),))
    return not isinstance(layer.weight, nn.Parameter)


FAULTS = (
    Fault(
        "torch.compile of torch.add(w, a @ b, alpha=...) ignores alpha on a CPU",
        "formulas of functional optimizers are written as w + c * d",
        _compiled_alpha,
        is_compiled=True,
    ),
    Fault(
        "third derivatives of F.layer_norm, F.batch_norm and F.instance_norm are wrong",
        "mg.models.composite_norms writes them out, and lint reports them",
        _third_derivative_of_layer_norm,
    ),
    Fault(
        "functional_call leaves its tensors in a module that occurs twice in a model",
        "the library substitutes parameters itself",
        _functional_call_of_a_module_that_occurs_twice,
    ),
)
