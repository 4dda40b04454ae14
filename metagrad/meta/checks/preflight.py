"""What is wrong, missing or costly about the derivatives of a model, before it is trained."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.lint import HIGHEST_ORDER
from metagrad.core.capture import RandomState
from metagrad.core.checks import is_a, is_list_or_tuple, is_mapping
from metagrad.core.modules import ModuleSnapshot, check_substitutable
from metagrad.core.norms import unfused_attention
from metagrad.core.structured import restored, structured
from metagrad.core.tree import LossFn
from metagrad.memory.tracker import MemoryTracker
from metagrad.meta.algorithm import Algorithm, MetaOutput
from metagrad.meta.checks.derivatives import Subject, UnmeasurableError, known_defects, measured_defects
from metagrad.meta.checks.report import MemoryCost, ModuleFinding, Preflight
from metagrad.meta.maml import MAML, check_steps
from metagrad.meta.objective.tasks import BatchLike, Tasks, read_batch, read_examples
from metagrad.optim import rules
from metagrad.optim.rules import Rule

_CALL = "preflight(model, loss_fn, batch)"
_FEW_TASKS = 2
_MOST_EXAMPLES = 4  # on which derivatives are examined
_MODES = ("full", "step")
_UNKNOWN = 2  # meta-steps until the derivative of all that is recomputed is known, and needs less
_MEASURED = 3  # the most inner steps of a loop that is measured as it is


@overload
def preflight(
    model: Algorithm,
    loss_fn: BatchLike | Sequence[Any] | Mapping[str, Any],
    /,
    *,
    order: int | None = ...,
) -> Preflight: ...
@overload
def preflight(
    model: nn.Module,
    loss_fn: LossFn,
    batch: BatchLike | Sequence[Any] | Mapping[str, Any],
    *,
    order: int | None = ...,
    inner: Rule | None = ...,
    steps: int | None = ...,
) -> Preflight: ...
def preflight(
    model: Any,
    loss_fn: Any,
    batch: Any = None,
    *,
    order: int | None = None,
    inner: Rule | None = None,
    steps: int | None = None,
) -> Preflight:
    r"""Report before training which derivatives of a model are wrong or missing, and the memory of one step.

    The operations that the model records are looked up in the table of known defects of torch
    (:func:`metagrad.autograd.lint`). Every derivative up to the order,

    .. math:: \nabla_\theta^k L(\theta), \qquad k = 1, \dots, \mathrm{order},

    is compared with finite differences of the one below (:func:`metagrad.gradcheck`): in float64, along random
    directions, on at most 4 examples. If a derivative fails, the modules are compared one after the other, and the
    innermost that fail are named. The model is left as it was: parameters, gradients, buffers, flags and random
    generators.

    Args:
        model: The model; or a :class:`MAML` or another algorithm, as in ``preflight(maml, batch)``. For MAML the
            loss of the support examples of a task is examined, for other algorithms their own loss.
        loss_fn: ``loss_fn(prediction, target)``, a scalar.
        batch: Inputs and targets ``(x, y)``; or a meta-batch, in the forms that :class:`MAML` takes. A pair of pairs
            is a meta-batch; several inputs of plain data are a dict.
        order: The highest derivative of the loss that will be taken, 1 to 3: 2 for the gradient of MAML and Hessian
            products, 3 for the Hessian of MAML. None is 2, what a :class:`MAML` takes, or 1 for other algorithms.
        inner: With a meta-batch: the rule of the inner steps, whose memory is to be measured.
        steps: With a meta-batch: the number of inner steps.

    Returns:
        A report with ``ok``, ``findings``, ``memory``, ``notes`` and ``raise_for_errors()``; its ``str`` is a table.
        The memory of a meta-batch is that of one outer step for ``memory="full"`` and ``"step"``. It is measured on
        at most three inner steps, and every further step adds what the third one adds. For plain data there is a row
        for each order.

    Raises:
        ValueError: ``order`` is not 1 to 3, ``inner`` or ``steps`` is given alone or without a meta-batch, no
            parameter requires grad, or the loss depends on none or is no scalar.
        TypeError: ``model`` is not a module, or the batch has another form.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.x = x  # a constant to the backward pass: the second derivative is lost
        ...         return x**2
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         return gradient * 2 * ctx.x.detach()
        >>> class Layer(torch.nn.Module):
        ...     def forward(self, x):
        ...         return Square.apply(x)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), Layer(), torch.nn.Linear(3, 1))
        >>> report = metagrad.preflight(model, torch.nn.functional.mse_loss, (torch.randn(5, 2), torch.randn(5, 1)))
        >>> [(finding.module, finding.verdict, finding.order) for finding in report.findings], report.ok
        ([('1', 'wrong', 2)], False)
    """
    request = _request(model, loss_fn, batch, order, inner, steps)
    with _untouched(request.subject):
        return _report(request)


@contextlib.contextmanager
def _untouched(subject: Subject) -> Generator[None]:
    """Leave buffers, attributes of modules and random generators as they were; look in grad mode."""
    # As MAML itself does, second derivatives of attention are taken by the kernel that has them.
    with torch.inference_mode(False), torch.enable_grad():
        state, generators = ModuleSnapshot(subject.root.modules(), {}, math.inf), RandomState()
        try:
            yield
        finally:
            state.put_back(values=True)
            generators.restore()


class _Request(NamedTuple):
    """What is to be looked at.

    Attributes:
        subject: The loss of a few examples: plain ones, those of a task, or tasks of another algorithm.
        whole: The loss of all of them.
        order: Of derivatives.
        maml: What trains on a meta-batch.
        tasks: The meta-batch.
        batch: As it was given.
        steps: The number of inner steps, if memory is to be measured.
    """

    subject: Subject
    whole: Subject
    order: int
    maml: MAML | None = None
    tasks: Tasks | None = None
    batch: Any = None
    steps: int | None = None


def _request(
    model: nn.Module,
    loss_fn: Any,
    batch: Any,
    order: int | None,
    inner: Rule | None,
    steps: int | None,
) -> _Request:
    """Read the arguments."""
    if isinstance(model, MAML):
        return _of_maml(model, loss_fn if batch is None else batch, order, model.steps)
    if not is_a(model, nn.Module):
        raise TypeError(f"{_CALL}: model must be a torch.nn.Module or a MAML, got {type(model).__name__}.")
    check_substitutable(_CALL, model.modules())
    if batch is None and isinstance(model, Algorithm):
        return _of_algorithm(model, loss_fn, order)
    if batch is None:
        raise TypeError(
            f"{_CALL}: batch is missing; without a loss, pass a MAML as in preflight(maml, batch)."
        )
    if (inner is None) != (steps is None):
        raise ValueError(f"{_CALL}: inner and steps go together; got {inner=}, {steps=}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{_CALL}: no parameter of the model requires grad, so it has no derivative.")
    if _is_meta_batch(batch):
        check_steps(_CALL, steps or 0)
        rule = rules.sgd(lr=0.1) if inner is None else inner
        maml = MAML(model, loss_fn, inner=rule, steps=steps or 0)
        return _of_maml(maml, batch, order, steps)
    if inner is not None:
        raise ValueError(
            f"{_CALL}: inner and steps are of a meta-batch, ((support x, y), (query x, y)), got plain data."
        )
    whole = Subject(model, loss_fn, *read_examples(batch, _CALL, "batch"))
    return _Request(_part(whole), whole, _checked_order(order, 2))


def _of_maml(maml: MAML, batch: Any, order: int | None, steps: int | None) -> _Request:
    tasks = read_batch(batch)
    first = tasks.select(0)
    whole = Subject(maml.model, maml.loss_fn, first.support_x, first.support_y)
    return _Request(_part(whole), whole, _checked_order(order, maml.order), maml, tasks, batch, steps)


def _of_algorithm(algorithm: nn.Module, batch: Any, order: int | None) -> _Request:
    tasks = read_batch(batch)
    few, whole = (
        Subject(algorithm, _meta_loss, structured((part,), _CALL), torch.zeros(()))
        for part in (_batch(tasks.select(slice(0, _FEW_TASKS))), _batch(tasks))
    )
    return _Request(few, whole, _checked_order(order, 1), tasks=tasks)


def _part(subject: Subject) -> Subject:
    """Return the loss of a few examples, where these are the first axis of single tensors."""
    x, y = subject.x, subject.y
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim and len(x) == len(y):
        return subject._replace(x=x[:_MOST_EXAMPLES], y=y[:_MOST_EXAMPLES])
    return subject


class _Examples(NamedTuple):
    x: Any
    y: Any


class _Batch(NamedTuple):
    """A meta-batch as :class:`Algorithm` says, which is also a pair of pairs."""

    support: _Examples
    query: _Examples


def _batch(tasks: Tasks) -> _Batch:
    xs, ys, xq, yq = (restored(part) for part in tasks[:4] if part is not None)
    return _Batch(_Examples(xs, ys), _Examples(xq, yq))


def _meta_loss(out: MetaOutput, target: Tensor) -> Tensor:
    return out.loss


def _checked_order(order: int | None, default: int) -> int:
    if order is None:
        return default
    if isinstance(order, bool) or order not in range(1, HIGHEST_ORDER + 1):
        raise ValueError(f"{_CALL}: order must be from 1 to {HIGHEST_ORDER}, got {order!r}.")
    return order


def _is_meta_batch(batch: Any) -> bool:
    if is_mapping(batch):
        return set(batch) == {"support", "query"}
    if all(hasattr(batch, name) for name in ("support", "query")):
        return True
    return is_list_or_tuple(batch) and len(batch) == 2 and all(map(_are_examples, batch))


def _are_examples(part: Any) -> bool:
    if is_mapping(part):
        return set(part) == {"x", "y"}
    return (is_list_or_tuple(part) and len(part) == 2) or all(hasattr(part, name) for name in "xy")


def _report(request: _Request) -> Preflight:
    subject, order = request.subject, request.order
    with contextlib.nullcontext() if request.maml is None else unfused_attention():
        found, notes = _derivatives(subject, order)
        found += _slow(request)
        memory: dict[str, MemoryCost] = {}
        try:
            memory |= {name: measure() for name, measure in _measures(request).items()}
        except Exception as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes.append(f"the memory was not measured: {line}")
    name, orders = type(subject.model).__name__, "order 1" if order == 1 else f"orders 1 to {order}"
    tasks = "" if request.tasks is None else f", {request.tasks.count} tasks"
    return Preflight(f"Derivatives of {orders} of {name}{tasks}", order, tuple(found), memory, tuple(notes))


def _derivatives(subject: Subject, order: int) -> tuple[list[ModuleFinding], list[str]]:
    found = known_defects(subject, order)
    try:
        return [*found, *measured_defects(subject, order, found)], []
    except UnmeasurableError as error:
        return found, [f"nothing was compared with finite differences, since {error}."]


def _slow(request: _Request) -> list[ModuleFinding]:
    """Return what a meta-batch warns of: that its tasks run one by one."""
    if request.maml is None:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request.maml.keeping("full")(request.batch, steps=min(request.maml.steps, 1))
    kind = type(request.maml.model).__name__
    return [
        ModuleFinding("", kind, 1, "slower", str(w.message), "")
        for w in caught
        if "one by one" in str(w.message)
    ]


def _measures(request: _Request) -> dict[str, Callable[[], MemoryCost]]:
    """Return what measures each row of the memory table."""
    if request.maml is None or request.tasks is None:
        whole = request.whole
        return {
            f"order {k}": lambda k=k: _measured(lambda: _nested(whole, k), whole.params)
            for k in range(1, request.order + 1)
        }
    if request.steps is None:
        return {}
    return {mode: lambda mode=mode: _meta_cost(request, mode) for mode in _MODES}


def _nested(subject: Subject, order: int) -> Tensor:
    """Return a scalar whose gradient is a derivative of an order."""
    value = subject.loss()
    for _ in range(order - 1):
        grads = torch.autograd.grad(value, subject.params, create_graph=True, materialize_grads=True)
        value = torch.stack([gradient.square().sum() for gradient in grads]).sum()
    return value


def _meta_cost(request: _Request, mode: Any) -> MemoryCost:
    """Return the cost of an outer step, in which every inner step after the second adds what the third does."""
    maml, steps = request.maml, request.steps
    assert maml is not None
    assert steps is not None
    if steps <= _MEASURED:
        return _meta_step(maml, mode, request.batch, steps)
    second, third = (_meta_step(maml, mode, request.batch, n) for n in (2, 3))
    more = (steps if maml.truncate is None else min(maml.truncate, steps)) - 2
    return MemoryCost(*(two + more * (three - two) for two, three in zip(second, third, strict=True)))


def _meta_step(maml: MAML, mode: Any, batch: Any, steps: int) -> MemoryCost:
    probe, params = maml.keeping(mode), [p for p in maml.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe(batch, steps=min(steps, 1))
        for _ in range(0 if mode == "full" else _UNKNOWN):
            torch.autograd.grad(probe(batch, steps=steps).loss, params, allow_unused=True)
        return _measured(lambda: probe(batch, steps=steps).loss, params)


def _measured(forward: Callable[[], Tensor], params: Sequence[Any]) -> MemoryCost:
    """Measure a scalar and its gradient, from what is in use before."""
    with MemoryTracker(params[0].device) as tracker:
        with tracker.phase("forward"):
            value = forward()
        with tracker.phase("backward"):
            torch.autograd.grad(value, params, allow_unused=True)
        before, *_ = (record for record in tracker.records() if not record.depth)
    return MemoryCost(before.after - before.before, tracker.peak - before.before)
