"""The forward pass of many tasks at once, each with parameters of its own.

``torch.vmap`` computes this for any module it has rules for. For the layers whose stacked form is known it is
written out here: a batch of affine maps is one ``baddbmm``, and an activation is itself. That is the same
arithmetic with half of the operations on the tape (vmap turns a linear layer into views, an expansion, a product
and a sum), which small networks are bound by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.meta.calling import Values, call_with, values_for
from metagrad.meta.structured import Nested, Structured, restored, structured
from metagrad.meta.vmapped import vmapped
from metagrad.optim.rules import Params
from metagrad.sparse.tables.table_proxy import LocalRows

RESULT = "MAML(model, ...): what the model returns"
"""How errors name it."""

_IGNORED = -100  # the default ignore_index of F.cross_entropy


def forward_stacked(model: nn.Module, params: Params, x: Nested, rows: Params | None = None) -> Nested:
    """Call a model on ``x`` ``[tasks, n, ...]`` with parameters ``[tasks, ...]``.

    Parameters that are not in ``params``, and buffers, are shared by all tasks.

    Args:
        model: The model.
        params: Parameters by name, ``[tasks, ...]`` each.
        x: ``[tasks, n, ...]``, or a nested value of such: the arguments of the model.
        rows: Which rows of a table ``params`` holds, ``[tasks, R]``, by the name of the table.

    Returns:
        Predictions ``[tasks, n, ...]``.
    """
    values = values_for(model, params, rows or {})
    return _vmapped(model, values, x) if isinstance(x, Structured) else _call(model, values, x)


def losses_stacked(loss_fn: Callable[[Any, Any], Tensor], prediction: Nested, target: Nested) -> Tensor:
    """Return the loss of each task, ``[tasks]``, as ``loss_fn`` gives it for one."""
    if isinstance(prediction, Structured) or isinstance(target, Structured):
        on_values = lambda p, y: loss_fn(restored(p), restored(y))  # noqa: E731
        return vmapped(on_values)(prediction, target)
    if isinstance(loss_fn, functools.partial) and not loss_fn.args and not loss_fn.keywords:
        loss_fn = loss_fn.func
    if loss_fn is F.mse_loss and prediction.shape == target.shape:
        return (prediction - target).square().flatten(1).mean(1)
    if loss_fn is F.cross_entropy and prediction.ndim == 3 and target.ndim == 2:
        each = F.cross_entropy(prediction.flatten(0, 1), target.flatten(), reduction="none")
        counted = (target != _IGNORED).sum(1)
        return each.view(target.shape).sum(1) / counted
    return vmapped(loss_fn)(prediction, target)


def _call(module: nn.Module, values: Values, x: Nested) -> Nested:
    has_forward_only = is_plain(module)
    if has_forward_only and type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            x = _call(child, values, x)  # type: ignore[arg-type]
        return x
    if has_forward_only and isinstance(x, Tensor):
        if type(module) in _ELEMENTWISE:
            return module(x)
        if type(module) is nn.Linear and x.ndim > 2 and not _has_rows(module, values):
            return _linear(module, values, x)
        if type(module) is nn.Flatten and module.start_dim >= 0 and module.end_dim < 0:
            return x.flatten(module.start_dim + 1, module.end_dim)
    # A child takes what the one before it returned as one argument, whatever that is.
    return _vmapped(module, values, structured((x.restored(),), RESULT) if isinstance(x, Structured) else x)


def _vmapped(module: nn.Module, values: Values, x: Nested) -> Nested:
    own = {key: values[key] for key in map(id, module.parameters()) if key in values}
    called = lambda own, x: structured(call_with(module, own, x), RESULT)  # noqa: E731
    return vmapped(called)(own, x)


def _has_rows(module: nn.Linear, values: Values) -> bool:
    """Say whether the weight is a table of which only rows are there, as in a tied output layer."""
    return isinstance(values.get(id(module.weight)), LocalRows)


def _linear(module: nn.Linear, values: Values, x: Tensor) -> Tensor:
    weight = values.get(id(module.weight))
    bias = module.bias if module.bias is None else values.get(id(module.bias))
    assert not isinstance(weight, LocalRows)
    assert not isinstance(bias, LocalRows)
    if weight is None or (bias is None) != (module.bias is None):
        return _shared_linear(module, weight, bias, x)
    flat = x if x.ndim == 3 else x.flatten(1, -2)
    transposed = weight.transpose(1, 2)
    y = torch.bmm(flat, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, transposed)
    return y if x.ndim == 3 else y.view(*x.shape[:-1], y.shape[-1])


def _shared_linear(module: nn.Linear, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    """Compute an affine map of which a part is frozen, and so the same for all tasks."""
    y = F.linear(x, module.weight) if weight is None else torch.einsum("t...i,toi->t...o", x, weight)
    if module.bias is None:
        return y
    if bias is None:
        return y + module.bias
    return y + bias.view(bias.shape[0], *[1] * (y.ndim - 2), bias.shape[1])


def is_plain(module: nn.Module) -> bool:
    """Say whether calling the module is calling its ``forward``: nobody hooked into it."""
    everywhere = torch.nn.modules.module
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
        or "forward" in module.__dict__
    )


_ELEMENTWISE = {
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
}
