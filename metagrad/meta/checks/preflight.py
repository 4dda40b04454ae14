"""What is right, wrong, missing or costly about the derivatives of a model, before it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.lint import HIGHEST_ORDER
from metagrad.autograd.compile.compiled import Compile
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.core.checks import is_a, is_list_or_tuple, is_mapping
from metagrad.core.modules import check_substitutable
from metagrad.core.structured import restored, structured
from metagrad.meta.algorithm import Algorithm, MetaOutput
from metagrad.meta.checks.costs import Costs, meta_costs, plain_costs
from metagrad.meta.checks.fixes import Remedy
from metagrad.meta.checks.known import applied, known_defects
from metagrad.meta.checks.measured import UnmeasurableError, measured_defects
from metagrad.meta.checks.report import ModuleFinding, Preflight
from metagrad.meta.checks.subject import Subject
from metagrad.meta.checks.tasks import loss_of_a_task, task_defects
from metagrad.meta.maml import MAML, check_steps
from metagrad.meta.objective.tasks import BatchLike, Tasks, read_batch, read_examples
from metagrad.optim import rules
from metagrad.optim.rules import Rule

LossFn = Callable[[Any, Any], Tensor]
_CALL = "preflight(model, loss_fn, batch)"
_FEW_TASKS = 2


@overload
def preflight(
    model: Algorithm,
    loss_fn: BatchLike | Sequence[Any] | Mapping[str, Any],
    /,
    *,
    order: int | None = ...,
    fix: bool = ...,
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
    compile: Compile = ...,
    fix: bool = ...,
) -> Preflight: ...
def preflight(
    model: Any,
    loss_fn: Any,
    batch: Any = None,
    *,
    order: int | None = None,
    inner: Rule | None = None,
    steps: int | None = None,
    compile: Compile = False,
    fix: bool = False,
) -> Preflight:
    r"""Say before training which derivatives of a model are right, wrong or missing, and what a step costs.

    Two things are done to find out. The operations that the model records are looked up in the table of what is known
    of torch (:func:`metagrad.autograd.lint`), and put down to its modules. And every derivative up to the order,

    .. math:: \nabla_\theta^k L(\theta), \qquad k = 1, \dots, \mathrm{order},

    is compared with finite differences of the one below, in float64, along random directions, on at most 4 examples
    (:func:`metagrad.gradcheck`). Where that fails the modules are compared one after the other, and the innermost
    that fails is named: so a wrong ``autograd.Function`` is found of which nobody knows. With a meta-batch it is also
    found out whether tasks can be stacked and steps compiled. The model is left as it was: parameters, gradients,
    buffers, flags and random generators.

    Args:
        model: The model; or a :class:`MAML` or another algorithm, as in ``preflight(maml, batch)``. Of MAML the loss
            of the support examples of a task is looked at, of others their own.
        loss_fn: ``loss_fn(prediction, target)``, a scalar.
        batch: Inputs and targets ``(x, y)``; or a meta-batch, in the forms that :class:`MAML` takes. A pair of pairs
            is a meta-batch; several inputs of plain data are a dict.
        order: The highest derivative of the loss that will be taken, 1 to 3: 2 for the gradient of MAML and Hessian
            products, 3 for the Hessian of MAML. None is 2, what a :class:`MAML` takes, or 1 for other algorithms.
        inner: With a meta-batch: the rule of the inner steps, whose memory is to be measured.
        steps: With a meta-batch: the number of inner steps.
        compile: With a meta-batch: what :class:`MAML` will be given; a finding says if it is refused.
        fix: Whether to apply the remedies that are safe: they change how a derivative is computed, and no value in
            training mode. They stay until ``report.undo()``, or the end of a ``with`` block around the call; the
            report says what they do. ``report.apply()`` applies them later.

    Returns:
        A report with ``ok``, ``findings``, ``memory``, ``notes``, ``raise_for_errors()``; its ``str`` is a table.
        Memory is that of one step on the whole batch, to the byte on CPU: of a meta-batch for ``memory="full"``,
        ``"step"`` and ``"sqrt"``, measured on at most four inner steps, beyond which every step adds
        the same; of plain data for each order.

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

    References:
        Griewank, Walther, "Evaluating Derivatives", 2nd ed., section 12 (memory of the modes).
    """
    request = _request(model, loss_fn, batch, order, inner, steps, compile)
    report = _report(request)
    if not fix or not report.remedies:
        return report
    report.apply()
    after = _report(request)
    gone = {(f.module, f.order, f.reason) for f in report.findings} - {
        (f.module, f.order, f.reason) for f in after.findings
    }
    fixed = [f for f in report.findings if (f.module, f.order, f.reason) in gone]
    return Preflight(
        after.title, after.order, after.findings, after.memory, after.notes, report.remedies, fixed
    )


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
    compile: Compile,
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
        maml = MAML(model, loss_fn, inner=rule, steps=steps or 0, compile=compile)
        return _of_maml(maml, batch, order, steps)
    if inner is not None or compile is not False:
        raise ValueError(
            f"{_CALL}: inner, steps and compile are of a meta-batch, ((support x, y), (query x, y)), got plain data."
        )
    whole = Subject(model, loss_fn, *read_examples(batch, _CALL, "batch"))
    return _Request(whole.part(), whole, _checked_order(order, 2))


def _of_maml(maml: MAML, batch: Any, order: int | None, steps: int | None) -> _Request:
    tasks = read_batch(batch)
    whole = loss_of_a_task(maml, tasks)
    return _Request(whole.part(), whole, _checked_order(order, maml.order), maml, tasks, batch, steps)


def _of_algorithm(algorithm: nn.Module, batch: Any, order: int | None) -> _Request:
    tasks = read_batch(batch)
    few, whole = (
        Subject(algorithm, _meta_loss, structured((part,), _CALL), torch.zeros(()))
        for part in (_batch(tasks.select(slice(0, _FEW_TASKS))), _batch(tasks))
    )
    return _Request(few, whole, _checked_order(order, 1), tasks=tasks)


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
    # As MAML itself does.
    attention = contextlib.nullcontext() if request.maml is None else unfused_attention
    with subject.untouched(), attention:
        found, remedies, notes = _derivatives(subject, order)
        if request.maml is not None and request.tasks is not None:
            more, statistics = task_defects(request.maml, subject, request.tasks)
            found += more
            remedies += statistics
        costs = _costs(request)
    how = "looked up in the table of known defects" if notes else "compared with finite differences"
    title = f"{_title(request, subject)}: {how}"
    return Preflight(title, order, found, costs.memory, [*notes, *costs.notes], remedies)


def _derivatives(subject: Subject, order: int) -> tuple[list[ModuleFinding], list[Remedy], list[str]]:
    found, remedies = known_defects(subject, order)
    try:
        with applied(remedies):
            rest = [f for f in found if not f.fixable]
            return [*found, *measured_defects(subject, order, rest)], remedies, []
    except UnmeasurableError as error:
        return found, remedies, [f"nothing was compared with finite differences, since {error}."]


def _costs(request: _Request) -> Costs:
    if request.maml is None or request.tasks is None:
        return plain_costs(request.whole, request.order)
    if request.steps is None:
        return Costs({}, [])
    return meta_costs(request.maml, request.batch, request.tasks, request.steps)


def _title(request: _Request, subject: Subject) -> str:
    name, order = type(subject.model).__name__, request.order
    orders = "order 1" if order == 1 else f"orders 1 to {order}"
    if request.tasks is None:
        return f"Derivatives of {orders} of {name}"
    steps = "" if request.steps is None else f", {request.steps} inner steps"
    return f"Derivatives of {orders} of {name}, {request.tasks.count} tasks{steps}"
