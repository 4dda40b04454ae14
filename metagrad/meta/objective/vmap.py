"""Call a model with other parameters: of one task, or stacked parameters of many tasks.

``torch.vmap`` supports stacked tasks for any module whose operations have vmap rules. Some layers have an
explicit form here. A batch of affine maps is one ``baddbmm``, and activations are called unchanged. This has
half as many graph nodes, since vmap replaces a linear layer with views, an expansion, a product and a sum.
The time of small networks depends on the number of graph nodes.

The table ``RULES`` lists operations that ``torch.vmap`` computes incorrectly without an error (torch 2.13). It was
found by running torch's operator tests (``OpInfo``) with ``torch.vmap`` and in a loop in float64. The comparison
includes values, gradients, and gradients of a non-linear function of gradients.
``tests/meta/objective/test_vmap_rules.py`` repeats it. The test fails if torch has fixed an operation of the
table.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import has_hooks
from metagrad.core.dispatch import Dispatch
from metagrad.core.norms import unfused_attention
from metagrad.core.substitution import copied, replaced
from metagrad.core.tree import Params, widened
from metagrad.meta.objective.norms import Moments, NormCalls, NormPass
from metagrad.meta.objective.structured import Nested, Structured, call_on, restored, structured
from metagrad.sparse.tables.table_proxy import LocalRows, SharedTable

T = TypeVar("T")
Values: TypeAlias = dict[int, "Tensor | LocalRows | SharedTable"]
"""Values of parameters by the id of the parameter, so tied weights stay tied."""

TABLES = (LocalRows, SharedTable)

RESULT = "MAML(model, ...): what the model returns"
"""The name of the output of the model in errors."""

_IGNORED = -100  # the default ignore_index of F.cross_entropy


def values_for(model: nn.Module, params: Params, rows: Params, tables: Collection[str] = ()) -> Values:
    """Return the values of named parameters, by the id of the parameter.

    For names in ``rows``, a value holds only these rows. Other ``tables`` keep their value and get row-sparse
    gradients.
    """
    values: Values = {}
    for name, p in model.named_parameters():
        if name in rows:
            values[id(p)] = LocalRows(name, tuple(p.shape), rows[name], params[name])
        elif name in params:
            values[id(p)] = params[name]
        elif name in tables:
            values[id(p)] = SharedTable(name, p)
    return values


def substituted(model: nn.Module, values: Values) -> contextlib.AbstractContextManager[None]:
    """Substitute values for parameters. Tables with rows are replaced by proxies."""
    return replaced(model, {k: v.proxy() if isinstance(v, TABLES) else v for k, v in values.items()})


def call_with(
    model: nn.Module, values: Values, x: Nested, norms: NormPass | None = None, *, by_copy: bool = False
) -> Any:
    """Call a model with other values for some parameters, under a policy of normalization layers.

    ``by_copy`` calls a copy of the model, which keeps the values for calls in a backward pass.
    """
    with (
        substituted(model, values),
        copied(model, unfused_attention()) if by_copy else contextlib.nullcontext(model) as model,
    ):
        if norms is None:
            return call_on(model, x)
        with norms.without_counters():
            result, found, moments = _normalised(model, x, norms.reference, norms)
    norms.collect(found, moments)
    return result


def _normalised(
    model: nn.Module, x: Nested, reference: Nested | None, norms: NormPass
) -> tuple[Any, list[tuple[str, float]], list[Moments]]:
    """Call a model under a policy. Return its output and the statistics of its layers."""
    given = None
    if reference is not None:
        with NormCalls(norms, measures=True) as calls:
            call_on(model, reference)
        given = calls.moments
    with NormCalls(norms, given) as calls:
        result = call_on(model, x)
    return result, calls.found, calls.moments


def forward_stacked(model: nn.Module, values: Values, x: Nested, norms: NormPass | None = None) -> Nested:
    """Call a model on ``x`` ``[tasks, n, ...]`` with stacked values for some parameters.

    All tasks share other parameters and the buffers.

    Args:
        model: The model.
        values: Values of parameters by their ids, ``[tasks, ...]`` each.
        x: The arguments of the model, ``[tasks, n, ...]`` or a nested value.
        norms: The policy of normalization layers. None means that the modules decide.

    Returns:
        Predictions ``[tasks, n, ...]``.
    """
    if norms is not None:
        return _forward_normalised(model, values, x, norms)
    if isinstance(x, Structured):
        return _vmapped([model])(_of([model], values), x)
    result: Nested = x
    for run in _runs(layers_of(model)):
        form = _stacked_form(run[0], values, result) if len(run) == 1 else None
        # A layer gets the output of the previous layer as one argument, even if it is a tuple.
        given = structured((result.restored(),), RESULT) if isinstance(result, Structured) else result
        result = _vmapped(run)(_of(run, values), given) if form is None else form(given)  # type: ignore[reportArgumentType]
    return result


def _forward_normalised(model: nn.Module, values: Values, x: Nested, norms: NormPass) -> Nested:
    """Call a model on stacked tasks, with a policy of normalization layers."""
    names: list[tuple[str, float]] = []

    def forward(own: Values, x: Nested, references: list[Nested]) -> tuple[Nested, list[Moments]]:
        with Dispatch(_HANDLERS), substituted(model, own):
            result, found, moments = _normalised(model, x, next(iter(references), None), norms)
        names[:] = found
        return structured(result, RESULT), moments

    references = [] if norms.reference is None else [norms.reference]
    with norms.without_counters():
        result, moments = torch.vmap(forward, randomness="different")(values, x, references)  # type: ignore[reportGeneralTypeIssues]
    norms.collect(names, moments)
    return result


def _runs(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group consecutive layers that are vectorized together."""
    runs: list[list[nn.Module]] = []
    for layer in layers:
        if runs and type(runs[-1][0]) not in FORMS and type(layer) not in (nn.Linear, nn.Flatten):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def losses_stacked(loss_fn: Callable[[Any, Any], Tensor], prediction: Nested, target: Nested) -> Tensor:
    """Return the loss of each task, ``[tasks]``."""
    if isinstance(prediction, Structured) or isinstance(target, Structured):
        on_values = lambda p, y: loss_fn(restored(p), restored(y))  # noqa: E731
        return vmapped(on_values)(prediction, target)
    if isinstance(loss_fn, functools.partial) and not loss_fn.args and not loss_fn.keywords:
        loss_fn = loss_fn.func
    if loss_fn is F.mse_loss and prediction.shape == target.shape:
        each = F.mse_loss(prediction, target, reduction="none")
        return each.mean(tuple(range(1, each.ndim))) if each.ndim > 1 else each
    if loss_fn is F.cross_entropy and prediction.ndim == 3 and target.ndim == 2:
        each = F.cross_entropy(prediction.flatten(0, 1), target.flatten(), reduction="none")
        counted = (target != _IGNORED).sum(1)
        # In float16 the sum over many examples may overflow although the mean does not.
        return (widened(each).view(target.shape).sum(1) / counted).to(each.dtype)
    return vmapped(loss_fn)(prediction, target)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that an ``nn.Sequential`` calls, including nested ones."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return [module]
    if not is_plain(module):
        return [module]
    return [layer for child in module for layer in layers_of(child)]


def _stacked_form(module: nn.Module, values: Values, x: Nested) -> Callable[[Tensor], Tensor] | None:
    """Return the explicit form of a layer for stacked tasks, or None."""
    if not isinstance(x, Tensor) or not is_plain(module):
        return None
    if type(module) in ELEMENTWISE:
        return module
    # The weight of a tied output layer may be a table that is replaced by its rows.
    if type(module) is nn.Linear and x.ndim > 2 and not isinstance(values.get(id(module.weight)), TABLES):
        return functools.partial(_linear, module, values)
    if type(module) is nn.Flatten and module.start_dim >= 0 and module.end_dim < 0:
        return functools.partial(torch.flatten, start_dim=module.start_dim + 1, end_dim=module.end_dim)
    return None


def _of(layers: Sequence[nn.Module], values: Values) -> Values:
    keys = {id(p) for layer in layers for p in layer.parameters()}
    return {key: value for key, value in values.items() if key in keys}


def _vmapped(layers: Sequence[nn.Module]) -> Callable[[Values, Nested], Nested]:
    """Return a function of values and inputs that calls layers on stacked tasks with torch.vmap."""

    def forward(own: Values, x: Nested) -> Nested:
        with Dispatch(_HANDLERS), contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(substituted(layer, own))
            result = layers[0](x) if isinstance(x, Tensor) else call_on(layers[0], x)
            for layer in layers[1:]:
                result = layer(result)
            return structured(result, RESULT)

    return torch.vmap(forward, randomness="different")  # type: ignore[reportReturnType]


def _linear(module: nn.Linear, values: Values, x: Tensor) -> Tensor:
    weight = values.get(id(module.weight))
    bias = module.bias if module.bias is None else values.get(id(module.bias))
    assert not isinstance(weight, TABLES)
    assert not isinstance(bias, TABLES)
    if weight is None or (bias is None) != (module.bias is None):
        return _shared_linear(module, weight, bias, x)
    flat = x if x.ndim == 3 else x.flatten(1, -2)
    transposed = weight.transpose(1, 2)
    y = torch.bmm(flat, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, transposed)
    return y if x.ndim == 3 else y.view(*x.shape[:-1], y.shape[-1])


def _shared_linear(module: nn.Linear, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    """Compute an affine map whose weight or bias is shared by all tasks."""
    y = F.linear(x, module.weight) if weight is None else torch.einsum("t...i,toi->t...o", x, weight)
    if module.bias is None:
        return y
    if bias is None:
        return y + module.bias
    return y + bias.view(bias.shape[0], *[1] * (y.ndim - 2), bias.shape[1])


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of the module is only its ``forward``, without hooks.

    Hooks of metagrad only check calls, and a recomputation may run without them.
    """
    everywhere = torch.nn.modules.module
    hooks = itertools.chain(
        everywhere._global_forward_hooks.values(),
        everywhere._global_forward_pre_hooks.values(),
        everywhere._global_backward_hooks.values(),
        everywhere._global_backward_pre_hooks.values(),
    )
    is_hooked = any(not getattr(hook, "__module__", "").startswith("metagrad.") for hook in hooks)
    return not (is_hooked or has_hooks(module) or "forward" in module.__dict__)


_ACTIVATIONS = "Dropout ELU GELU Hardtanh Identity LeakyReLU Mish ReLU SELU SiLU Sigmoid Softplus Tanh"
ELEMENTWISE: set[type[nn.Module]] = {getattr(nn, name) for name in _ACTIVATIONS.split()}
FORMS: set[type[nn.Module]] = {*ELEMENTWISE, nn.Linear, nn.Flatten}
"""The layers with an explicit form for stacked tasks."""


class NotStackableError(Exception):
    """A model does not support stacked tasks. The message is a reason, which errors put after "because"."""


def vmapped(fn: Callable[..., T]) -> Callable[..., T]:
    """Return ``torch.vmap(fn)`` with separate random numbers for each task.

    Inside, ``requires_grad`` is the value outside of ``torch.vmap``, and the padding of embeddings has no gradient.
    Operations in the table ``RULES`` raise :class:`NotStackableError`.
    """

    def call(*args: Any) -> T:
        with Dispatch(_HANDLERS):
            return fn(*args)

    return torch.vmap(call, randomness="different")  # type: ignore[reportReturnType]


class VmapRule(NamedTuple):
    """An operation that torch.vmap computes incorrectly, or an attribute with an incorrect value.

    Attributes:
        functions: The functions of torch.
        reason: A description of the defect, which errors put after "because".
        applies: Returns whether a call with these arguments has the defect.
    """

    functions: tuple[Callable[..., Any], ...]
    reason: str
    applies: Callable[..., bool] = lambda *args, **kwargs: True


RULES: tuple[VmapRule, ...] = (
    VmapRule(
        (torch.select_scatter, Tensor.select_scatter),
        "torch.vmap loses the gradient of torch.select_scatter with respect to what is written",
    ),
    VmapRule(
        (torch.roll, Tensor.roll),
        "torch.vmap rolls a scalar of each task across the tasks",
        lambda input, *args, **kwargs: input.ndim == 0,
    ),
    VmapRule(
        (torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
        "torch.vmap fills by torch.index_fill with one task's value for all, where the value alone differs",
        lambda input, dim, index, value: isinstance(value, Tensor),
    ),
    VmapRule(
        tuple(filter(None, [getattr(F, "linear_cross_entropy", None)])),
        "torch.vmap loses gradients of F.linear_cross_entropy(..., options)",
        lambda *args, options=None, **kwargs: options is not None,
    ),
    # Attributes of the graph, which wrapped tensors do not have.
    VmapRule(
        (Tensor.grad_fn.__get__, Tensor.is_leaf.__get__),  # type: ignore[reportAttributeAccessIssue]
        "the model asks for the graph of a tensor (grad_fn, is_leaf), which torch.vmap hides",
    ),
)


def _requires_grad(tensor: Tensor) -> bool:
    while _torch.is_batched(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return tensor.requires_grad


def _f_embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Look up rows. torch.vmap uses the padding row of the first task for all tasks (torch 2.13)."""
    # A shared table is a parameter at first, and a tensor in a recomputed step.
    if padding_idx is None or not _torch.is_batched(weight):
        return F.embedding(input, weight, padding_idx, *args, **kwargs)
    vectors = F.embedding(input, weight, None, *args, **kwargs)
    return _without_padding(vectors, input, padding_idx % weight.shape[0])


def _torch_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    if padding_idx < 0 or not _torch.is_batched(weight):
        return torch.embedding(weight, indices, padding_idx, *args, **kwargs)
    return _without_padding(torch.embedding(weight, indices, -1, *args, **kwargs), indices, padding_idx)


def _without_padding(vectors: Tensor, ids: Tensor, padding: int) -> Tensor:
    return torch.where((ids == padding).unsqueeze(-1), vectors.detach(), vectors)


def _attention(function: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute attention without the fused CPU kernel, which torch.vmap (2.13) does not support."""
    is_fused = query.device.type == "cpu" and not torch.compiler.is_compiling()
    with unfused_attention() if is_fused else contextlib.nullcontext():
        return function(query, *args, **kwargs)


def _refusing(rule: VmapRule, function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if rule.applies(*args, **kwargs):
            raise NotStackableError(rule.reason)
        return function(*args, **kwargs)

    return handler


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: _refusing(rule, function) for rule in RULES for function in rule.functions},
    F.embedding: _f_embedding,
    torch.embedding: _torch_embedding,
    F.scaled_dot_product_attention: functools.partial(_attention, F.scaled_dot_product_attention),
    F.multi_head_attention_forward: functools.partial(_attention, F.multi_head_attention_forward),
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[reportAttributeAccessIssue]
}
"""Replacements of functions that torch.vmap computes incorrectly. Some raise :class:`NotStackableError`."""
