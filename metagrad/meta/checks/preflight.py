"""``preflight``: check the derivatives of a model before training, and measure the memory of one step."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.lint import HIGHEST_ORDER
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_choice, check_count, check_type, dtypes_explained
from metagrad.core.modules import ModuleSnapshot, check_substitutable
from metagrad.core.norms import unfused_attention
from metagrad.core.tree import LossFn
from metagrad.memory.tracker import MemoryTracker
from metagrad.meta.algorithm import Algorithm, MetaOutput
from metagrad.meta.checks.derivatives import (
    Subject,
    UnmeasurableError,
    first_line,
    known_defects,
    measured_defects,
)
from metagrad.meta.checks.report import MemoryCost, ModuleFinding, Preflight
from metagrad.meta.maml import MAML
from metagrad.meta.objective.structured import structured
from metagrad.meta.objective.tasks import BatchLike, read_batch, read_examples
from metagrad.optim import rules
from metagrad.optim.rules import Rule

_CALL = "preflight(model, loss_fn, batch)"
_MAX_EXAMPLES = 4  # maximum number of examples for the comparison of derivatives
_MODES = ("full", "step")
_WARM_UP = 2  # meta-steps until a recomputed derivative needs as much memory as in training
_MEASURED = 3  # number of measured inner steps. The memory of a longer loop is extrapolated


def preflight(
    model: nn.Module,
    loss_fn: LossFn | BatchLike,
    batch: BatchLike = None,
    *,
    order: int | None = None,
    inner: Rule | None = None,
    steps: int | None = None,
) -> Preflight:
    r"""Check the derivatives of a model before training, and estimate the memory of a step.

    The check has two parts. First, every operation of the model is looked up in a table of known PyTorch defects
    (:func:`metagrad.autograd.lint`). Second, every derivative up to ``order``,

    .. math:: \nabla_\theta^k L(\theta), \qquad k = 1, \dots, \mathrm{order},

    is compared with finite differences in float64, along random directions, on at most 4 examples
    (:func:`metagrad.gradcheck`). If a comparison fails, each module is tested, and the report names the innermost
    modules that fail. This also finds incorrect custom ``autograd.Function`` classes. The parameters,
    gradients, buffers, flags and random generators are unchanged afterwards.

    Args:
        model: The model. A :class:`MAML` or another algorithm is also accepted, as in ``preflight(maml,
            batch)``. For MAML, the check uses the support loss of one task. For other algorithms, it uses
            their own loss on the batch.
        loss_fn: ``loss_fn(prediction, target) -> scalar``.
        batch: Inputs and targets ``(x, y)``, or a meta-batch in any form that :class:`MAML` accepts. A pair of pairs
            is a meta-batch. Pass several inputs of plain data as a dict.
        order: The highest derivative of the loss that you will compute, 1 to 3. Use 2 for MAML and Hessian-vector
            products, and 3 for the Hessian of a MAML objective. The default is the order that a :class:`MAML` needs,
            2 for a loss function, and 1 for other algorithms.
        inner: The functional optimizer of the inner steps, if ``batch`` is a meta-batch.
        steps: The number of inner steps, if ``batch`` is a meta-batch.

    Returns:
        A report with ``ok``, ``findings``, ``memory``, ``notes`` and ``raise_for_errors()``. Its ``str`` is a table.
        For a meta-batch, ``memory`` is the cost of one outer step with ``memory="full"`` and ``"step"``. It is
        measured on at most 3 inner steps and extrapolated to more. For plain data, it has one row per order.

    Raises:
        ValueError: If ``order`` is not 1 to 3, or the loss is not a scalar that depends on a parameter. It is also
            raised if only one of ``inner`` and ``steps`` is given, or if both are given for plain data.
        TypeError: If ``model`` is not a module, or the batch has another form.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.x = x  # a constant in the backward pass, so the second derivative is lost
        ...         return x**2
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         return gradient * 2 * ctx.x.detach()
        >>> class Layer(torch.nn.Module):
        ...     def forward(self, x):
        ...         return Square.apply(x)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), Layer(), torch.nn.Linear(3, 1))
        >>> report = metagrad.preflight(model, torch.nn.functional.mse_loss, (torch.randn(5, 2), torch.randn(5, 1)))
        >>> [(finding.module, finding.status, finding.order) for finding in report.findings], report.ok
        ([('1', 'wrong', 2)], False)
    """
    with _unchanged(model, loss_fn):
        request = _request(model, loss_fn, batch, order, inner, steps)
        with dtypes_explained(_CALL, request.whole.params, (request.whole.x, batch)):
            return _report(request)


@contextlib.contextmanager
def _unchanged(*parts: object) -> Generator[None]:
    """Enable gradients in a ``with`` block, and restore buffers, attributes and random generators after it."""
    with torch.inference_mode(False), torch.enable_grad():
        modules = {m: None for part in parts if isinstance(part, nn.Module) for m in part.modules()}
        state, generators = ModuleSnapshot(modules, {}, math.inf), RandomState()
        try:
            yield
        finally:
            state.put_back(values=True)
            generators.restore()


class _Request(NamedTuple):
    """The subject of a check.

    Attributes:
        part: The loss that is differentiated, on a few examples.
        whole: The loss of all examples.
        order: The highest derivative.
        maml: The algorithm, if the batch is a meta-batch.
        batch: The meta-batch.
        steps: The number of inner steps. None if the memory of a meta-batch is not measured.
    """

    part: Subject
    whole: Subject
    order: int
    maml: MAML | None = None
    batch: Any = None
    steps: int | None = None


def _request(
    model: nn.Module, loss_fn: Any, batch: Any, order: int | None, inner: Rule | None, steps: int | None
) -> _Request:
    check_type(f"{_CALL}: model", model, nn.Module)
    check_substitutable(_CALL, model.modules())
    if isinstance(model, MAML):
        return _of_maml(model, loss_fn if batch is None else batch, order, model.steps)
    if batch is None and isinstance(model, Algorithm):
        read_batch(loss_fn, _CALL)
        subject = Subject(model, _meta_loss, structured((loss_fn,), _CALL), torch.zeros(()))
        return _Request(subject, subject, _checked_order(order, 1))
    if batch is None:
        raise TypeError(
            f"{_CALL}: batch is missing; without a loss, pass a MAML as in preflight(maml, batch)."
        )
    is_meta = _is_meta_batch(batch)
    if (inner is None) != (steps is None) or (inner is not None and not is_meta):
        raise ValueError(
            f"{_CALL}: inner and steps go together, with a meta-batch ((support x, y), (query x, y)); got {inner=}, "
            f"{steps=} and {'a meta-batch' if is_meta else 'plain data'}."
        )
    if is_meta:
        check_count("preflight(..., steps)", steps or 0, 0)
        rule = rules.sgd(lr=0.1) if inner is None else inner
        return _of_maml(MAML(model, loss_fn, inner=rule, steps=steps or 0), batch, order, steps)
    whole = Subject(model, loss_fn, *read_examples(batch, _CALL, "batch"))
    return _Request(_small_part(whole), whole, _checked_order(order, 2))


def _of_maml(maml: MAML, batch: Any, order: int | None, steps: int | None) -> _Request:
    task = read_batch(batch, _CALL).select(0)
    whole = Subject(maml.model, maml.loss_fn, task.support_x, task.support_y)
    return _Request(_small_part(whole), whole, _checked_order(order, maml.order), maml, batch, steps)


def _small_part(subject: Subject) -> Subject:
    """Return the loss of a few examples, or of all examples if the model does not accept fewer."""
    x, y = subject.x, subject.y
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim and len(x) == len(y)):
        return subject
    part = subject._replace(x=x[:_MAX_EXAMPLES], y=y[:_MAX_EXAMPLES])
    try:
        with torch.no_grad():
            part.loss()
    except Exception:  # of the model: its number of examples is fixed, or it also raises for all examples
        return subject
    return part


def _meta_loss(out: MetaOutput, target: Tensor) -> Tensor:
    return out.loss


def _checked_order(order: int | None, default: int) -> int:
    order = default if order is None else order
    return check_choice("preflight(..., order)", order, range(1, HIGHEST_ORDER + 1))


def _is_meta_batch(batch: Any) -> bool:
    try:
        return bool(read_batch(batch, _CALL))
    except TypeError:
        return False


def _report(request: _Request) -> Preflight:
    part, order, maml = request.part, request.order, request.maml
    # The second derivative of attention needs the kernel that MAML also uses.
    with contextlib.nullcontext() if maml is None else unfused_attention():
        findings, notes = known_defects(part, order), list[str]()
        try:
            findings += measured_defects(part, order, findings)
        except UnmeasurableError as error:
            notes.append(f"nothing was compared with finite differences, since {error}.")
        findings += [] if maml is None else _loop_findings(maml, request.batch)
        try:
            memory = _memory(request)
        except Exception as error:
            memory = {}
            notes.append(f"the memory was not measured: {first_line(error)}")
    if memory and maml is not None and (request.steps or 0) > _MEASURED:
        notes.append(f"the memory was extrapolated from {_MEASURED} steps.")
    name, orders = type(part.model).__name__, "order 1" if order == 1 else f"orders 1 to {order}"
    return Preflight(f"Derivatives of {orders} of {name}", order, tuple(findings), memory, tuple(notes))


def _loop_findings(maml: MAML, batch: Any) -> list[ModuleFinding]:
    """Return the warnings of a meta-batch whose tasks run sequentially."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        maml.keeping("full")(batch, steps=min(maml.steps, 1))
    texts = [str(w.message) for w in caught if "one by one" in str(w.message)]
    return [ModuleFinding("", type(maml.model).__name__, 1, "slower", text, "") for text in texts]


def _memory(request: _Request) -> dict[str, MemoryCost]:
    """Return the rows of the memory table."""
    whole, maml, steps = request.whole, request.maml, request.steps
    if maml is None:
        orders = range(1, request.order + 1)
        return {f"order {k}": _cost(functools.partial(_nested, whole, k), whole.params) for k in orders}
    return {} if steps is None else {mode: _meta_cost(maml, mode, request.batch, steps) for mode in _MODES}


def _nested(subject: Subject, order: int) -> Tensor:
    """Return a scalar whose gradient is a derivative of this order."""
    value = subject.loss()
    for _ in range(order - 1):
        grads = torch.autograd.grad(value, subject.params, create_graph=True, materialize_grads=True)
        value = torch.stack([gradient.square().sum() for gradient in grads]).sum()
    return value


def _meta_cost(maml: MAML, mode: Any, batch: Any, steps: int) -> MemoryCost:
    """Return the cost of an outer step.

    Each inner step after the third is assumed to add as much memory as the third.
    """
    if steps <= _MEASURED:
        return _measured_step(maml, mode, batch, steps)
    second, third = (_measured_step(maml, mode, batch, n) for n in (2, 3))
    more = (steps if maml.truncate is None else min(maml.truncate, steps)) - 2
    return MemoryCost(*(two + more * (three - two) for two, three in zip(second, third, strict=True)))


def _measured_step(maml: MAML, mode: Any, batch: Any, steps: int) -> MemoryCost:
    probe, params = maml.keeping(mode), [p for p in maml.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(_WARM_UP):
            torch.autograd.grad(probe(batch, steps=steps).loss, params, allow_unused=True)
        return _cost(lambda: probe(batch, steps=steps).loss, params)


def _cost(forward: Callable[[], Tensor], params: Sequence[Any]) -> MemoryCost:
    """Measure the additional memory of a scalar and its gradient."""
    with MemoryTracker(params[0].device) as tracker:
        with tracker.phase("forward"):
            value = forward()
        with tracker.phase("backward"):
            torch.autograd.grad(value, params, allow_unused=True)
        before, *_ = (record for record in tracker.records() if not record.depth)
    return MemoryCost(before.after - before.before, tracker.peak - before.before)
