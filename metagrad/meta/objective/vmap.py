"""Calling a model with other parameters: those of one task, or stacked ones of many tasks.

``torch.vmap`` computes the latter for any module it has rules for. For the layers whose stacked form is known it is
written out here: a batch of affine maps is one ``baddbmm``, and an activation is itself. That is the same
arithmetic with half of the operations on the tape (vmap turns a linear layer into views, an expansion, a product
and a sum), which small networks are bound by.

The table ``RULES`` lists what ``torch.vmap`` computes differently from a loop without an error. It was found by
running torch's own operator tests (``OpInfo``) through ``torch.vmap`` and through a loop in float64: values,
gradients and gradients of a non-linear function of these (torch 2.13). ``tests/meta/objective/test_vmap_rules.py``
does so again, and shows the defect of every row, so that it fails once torch has fixed it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.core import _torch
from metagrad.core._torch import has_hooks
from metagrad.core.structured import Nested, Structured, call_on, restored, structured
from metagrad.core.substitution import replaced
from metagrad.core.tree import widened
from metagrad.meta.objective.norms import Moments, NormCalls, NormPass
from metagrad.optim.rules import Params
from metagrad.sparse.tables.table_proxy import LocalRows, SharedTable

T = TypeVar("T")
Values: TypeAlias = dict[int, "Tensor | LocalRows | SharedTable"]
"""Values by the id of the parameter they stand for, so that tied weights stay tied."""

TABLES = (LocalRows, SharedTable)

RESULT = "MAML(model, ...): what the model returns"
"""How errors name it."""

_IGNORED = -100  # the default ignore_index of F.cross_entropy


def values_for(model: nn.Module, params: Params, rows: Params, tables: Collection[str] = ()) -> Values:
    """Find the parameters that are named, and key their values by identity.

    Of some, only ``rows`` have values; ``tables`` that have none are themselves, with gradients that are rows.
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
    """Substitute values for parameters, and proxies that can be looked up for tables of which rows are given."""
    return replaced(model, {k: v.proxy() if isinstance(v, TABLES) else v for k, v in values.items()})


def call_with(
    model: nn.Module,
    values: Values,
    x: Nested,
    norms: NormPass | None = None,
) -> Any:
    """Call a model with other values for some of its parameters.

    Args:
        model: The model.
        values: Of parameters, by their ids.
        x: The inputs.
        norms: The policy of normalisation layers; None leaves that to the model.
    """
    if norms is None:
        with substituted(model, values):
            return call_on(model, x)
    given = None
    with substituted(model, values), norms.without_counters():
        if norms.reference is not None:
            with NormCalls(norms, measures=True) as calls:
                call_on(model, norms.reference)
            given = calls.moments
        with NormCalls(norms, given) as calls:
            result = call_on(model, x)
    norms.collect(calls.found, calls.moments)
    return result


def forward_stacked(
    model: nn.Module,
    values: Values,
    x: Nested,
    norms: NormPass | None = None,
    call: Callable[..., Nested] | None = None,
) -> Nested:
    """Call a model on ``x`` ``[tasks, n, ...]`` with stacked values for some parameters, as :func:`call_with` does.

    Other parameters, and buffers, are shared by all tasks.

    Args:
        model: The model.
        values: Of parameters, by their ids, ``[tasks, ...]`` each.
        x: ``[tasks, n, ...]``, or a nested value of such: the arguments of the model.
        norms: The policy of normalisation layers; None leaves that to the model.
        call: What calls a module whose stacked form is not known; by default :func:`torch.vmap` does.

    Returns:
        Predictions ``[tasks, n, ...]``.
    """
    if norms is not None:
        return _forward_normalised(model, values, x, norms)
    if isinstance(x, Structured):
        return _vmapped([model], values, x) if call is None else call(model, values, x)
    result: Nested = x
    for run in _runs(layers_of(model), is_grouped=call is None):
        form = _stacked_form(run[0], values, result) if len(run) == 1 else None
        # A layer takes what the one before it returned as one argument, whatever that is.
        given = structured((result.restored(),), RESULT) if isinstance(result, Structured) else result
        if form is not None:
            result = form(given)  # type: ignore[reportArgumentType]
        else:
            result = _vmapped(run, values, given) if call is None else call(run[0], values, given)
    return result


def _forward_normalised(model: nn.Module, values: Values, x: Nested, norms: NormPass) -> Nested:
    """Call a model on stacked tasks, with its normalisation layers under a policy."""
    given = None
    with norms.without_counters():
        if norms.reference is not None:
            measured = _NormalisedLayers(norms, measures=True)
            forward_stacked(model, values, norms.reference, call=measured)
            given = measured.moments
        normalised = _NormalisedLayers(norms, given)
        result = forward_stacked(model, values, x, call=normalised)
    norms.collect(normalised.found, normalised.moments)
    return result


def _runs(layers: Sequence[nn.Module], *, is_grouped: bool) -> list[list[nn.Module]]:
    """Group layers: those whose stacked form is not known with those that follow, up to one whose form is known."""
    if not is_grouped:
        return [[layer] for layer in layers]
    runs: list[list[nn.Module]] = []
    for layer in layers:
        if runs and type(runs[-1][0]) not in FORMS and type(layer) not in (nn.Linear, nn.Flatten):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def losses_stacked(loss_fn: Callable[[Any, Any], Tensor], prediction: Nested, target: Nested) -> Tensor:
    """Return the loss of each task, ``[tasks]``, as ``loss_fn`` gives it for one."""
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
        # Of many examples the sum may overflow in float16, where the mean does not.
        return (widened(each).view(target.shape).sum(1) / counted).to(each.dtype)
    return vmapped(loss_fn)(prediction, target)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a chain calls one after the other, also those of chains within."""
    if not is_plain(module) or type(module).forward is not nn.Sequential.forward:
        return [module]
    return [layer for child in module._modules.values() for layer in layers_of(child)]  # type: ignore[arg-type]


def _stacked_form(module: nn.Module, values: Values, x: Nested) -> Callable[[Tensor], Tensor] | None:
    """Return what computes a layer for stacked tasks, if that is known."""
    if not isinstance(x, Tensor) or not is_plain(module):
        return None
    if type(module) in ELEMENTWISE:
        return module
    # As a tied output layer may have a weight of which only rows are there.
    if type(module) is nn.Linear and x.ndim > 2 and not isinstance(values.get(id(module.weight)), TABLES):
        return functools.partial(_linear, module, values)
    if type(module) is nn.Flatten and module.start_dim >= 0 and module.end_dim < 0:
        return functools.partial(torch.flatten, start_dim=module.start_dim + 1, end_dim=module.end_dim)
    return None


def _vmapped(layers: Sequence[nn.Module], values: Values, x: Nested) -> Nested:
    keys = {id(p) for layer in layers for p in layer.parameters()}
    own = {key: value for key, value in values.items() if key in keys}

    def forward(own: Values, x: Nested) -> Nested:
        with _Corrections(), contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(substituted(layer, own))
            result = layers[0](x) if isinstance(x, Tensor) else call_on(layers[0], x)
            for layer in layers[1:]:
                result = layer(result)
            return structured(result, RESULT)

    return torch.vmap(forward, randomness="different")(own, x)  # type: ignore[reportReturnType]


class _NormalisedLayers:
    """Calls layers as :func:`_vmapped` does, with norms as a policy says; statistics pass in and out ``[tasks, C]``.

    Args:
        norms: The pass.
        given: The statistics to normalise by, in the order of the calls of norms.
        measures: Whether to note the statistics, to be given.

    Attributes:
        found: What the statistics in ``moments`` are of, see :class:`.norms.NormCalls`.
        moments: The statistics.
    """

    def __init__(
        self, norms: NormPass, given: Sequence[Moments] | None = None, *, measures: bool = False
    ) -> None:
        self.norms, self.given, self.measures = norms, given, measures
        self.found: list[tuple[str, float]] = []
        self.moments: list[Moments] = []
        self._num_calls = 0

    def __call__(self, module: nn.Module, values: Values, x: Nested) -> Nested:
        """Call a layer."""
        own = {key: values[key] for key in map(id, module.parameters()) if key in values}
        calls = NormCalls(self.norms, measures=self.measures)

        def forward(own: Values, x: Nested, given: Sequence[Moments]) -> tuple[Nested, list[Moments]]:
            calls.given = given if self.given is not None else None
            with _Corrections(), substituted(module, own), calls:
                return structured(call_on(module, x), RESULT), calls.moments

        given = [] if self.given is None else self.given[self._num_calls :]
        result, moments = torch.vmap(forward, randomness="different")(own, x, given)  # type: ignore[reportGeneralTypeIssues]
        self.found += calls.found
        self.moments += moments
        self._num_calls += calls.num_calls
        return result


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
    """Compute an affine map of which a part is frozen, and so the same for all tasks."""
    y = F.linear(x, module.weight) if weight is None else torch.einsum("t...i,toi->t...o", x, weight)
    if module.bias is None:
        return y
    if bias is None:
        return y + module.bias
    return y + bias.view(bias.shape[0], *[1] * (y.ndim - 2), bias.shape[1])


def is_plain(module: nn.Module) -> bool:
    """Say whether calling the module is calling its ``forward``: it has no hooks."""
    everywhere = torch.nn.modules.module
    return not (
        has_hooks(module)
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
        or "forward" in module.__dict__
    )


ELEMENTWISE: set[type[nn.Module]] = {
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


FORMS: set[type[nn.Module]] = {*ELEMENTWISE, nn.Linear, nn.Flatten}
"""The layers whose stacked form is known."""


class NotStackableError(Exception):
    """A model cannot be called for stacked tasks; the message is the reason, to follow "because"."""


def vmapped(fn: Callable[..., T]) -> Callable[..., T]:
    """Return ``torch.vmap(fn)``, in which each task draws random numbers of its own.

    The function sees which tensors require grad, as it would see outside of ``torch.vmap``; padding of embeddings has
    no gradient; other operations in the table ``RULES`` raise :class:`NotStackableError`.
    """

    def call(*args: Any) -> T:
        with _Corrections():
            return fn(*args)

    return torch.vmap(call, randomness="different")  # type: ignore[reportReturnType]


class TorchCall(NamedTuple):
    """The arguments of a call of a torch function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, position: int, name: str, default: object = None) -> Any:
        """Return an argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class VmapRule(NamedTuple):
    """An operation that torch.vmap computes wrongly, or an attribute that it reports wrongly."""

    functions: tuple[Callable[..., Any], ...]
    reason: str  # follows "because"
    applies: Callable[[TorchCall], bool]


def _always(call: TorchCall) -> bool:
    return True


RULES: tuple[VmapRule, ...] = (
    VmapRule(
        (torch.select_scatter, Tensor.select_scatter),
        "torch.vmap loses the gradient of torch.select_scatter with respect to what is written",
        _always,
    ),
    VmapRule(
        (torch.roll, Tensor.roll),
        "torch.vmap rolls a scalar of each task across the tasks",
        lambda call: call.argument(0, "input").ndim == 0,
    ),
    VmapRule(
        (torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
        "torch.vmap fills by torch.index_fill with one task's value for all, where the value alone differs",
        lambda call: isinstance(call.argument(3, "value"), Tensor),
    ),
    VmapRule(
        tuple(filter(None, [getattr(F, "linear_cross_entropy", None)])),
        "torch.vmap loses gradients of F.linear_cross_entropy(..., options)",
        lambda call: call.kwargs.get("options") is not None,
    ),
    # Of the graph, which tensors that vmap wraps do not know.
    VmapRule(
        (Tensor.grad_fn.__get__, Tensor.is_leaf.__get__),  # type: ignore[reportAttributeAccessIssue]
        "the model asks for the graph of a tensor (grad_fn, is_leaf), which torch.vmap hides",
        _always,
    ),
)


class _Corrections(TorchFunctionMode):
    """Replaces or refuses functions that torch.vmap computes wrongly; all others pass."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})


def _requires_grad(func: Callable[..., bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensor = args[0]
    while _torch.is_batched(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return func(tensor)


def _embedding(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Look up rows; torch.vmap passes the padding row of the first task on as that of all (torch 2.13)."""
    call = TorchCall(args, kwargs)
    first, second = call.argument(0, _NAMES[func][0]), call.argument(1, _NAMES[func][1])
    ids, table = (first, second) if func is F.embedding else (second, first)
    padding = call.argument(2, "padding_idx")
    # A shared table is a parameter at first, and a tensor when a step is recomputed.
    if padding is None or not _torch.is_batched(table) or (func is torch.embedding and padding < 0):
        return func(*args, **kwargs)
    unpadded = {key: value for key, value in kwargs.items() if key not in (*_NAMES[func], "padding_idx")}
    vectors = func(first, second, _NONE[func], *args[3:], **unpadded)
    is_padding = (ids == padding % table.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, vectors.detach(), vectors)


def _attention(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Attend in all tasks at once, which torch.vmap (2.13) cannot by the fused kernel of CPUs."""
    if TorchCall(args, kwargs).argument(0, "query").device.type != "cpu" or torch.compiler.is_compiling():
        return func(*args, **kwargs)
    with unfused_attention:
        return func(*args, **kwargs)


_NAMES = {F.embedding: ("input", "weight"), torch.embedding: ("weight", "indices")}
_NONE = {F.embedding: None, torch.embedding: -1}


def _refusing(rules: list[VmapRule]) -> Callable[..., Any]:
    def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for rule in rules:
            if rule.applies(TorchCall(args, kwargs)):
                raise NotStackableError(rule.reason)
        return func(*args, **kwargs)

    return handler


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        function: _refusing([rule for rule in RULES if function in rule.functions])
        for rule in RULES
        for function in rule.functions
    },
    F.embedding: _embedding,
    torch.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _attention,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[reportAttributeAccessIssue]
}
