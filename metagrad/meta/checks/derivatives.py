"""Check the derivatives of a model: look up known defects, and compare with finite differences.

The comparison uses a copy of the model in float64, with slightly changed parameters. A weight that is initialized
with zeros would otherwise hide the derivatives behind it. A piecewise smooth function agrees with finite differences
only for a small step, so several steps are tried.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.gradcheck import WrongDerivative, gradcheck
from metagrad.autograd.checks.lint import HIGHEST_ORDER, findings
from metagrad.autograd.checks.lint_rules import Kind
from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.capture import RandomState
from metagrad.core.modules import ModuleSnapshot
from metagrad.core.substitution import own_buffers, replaced
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import detached, dissect, tensors_in, tree_leaves, tree_map
from metagrad.meta.checks.report import ModuleFinding, Status
from metagrad.meta.objective.structured import Nested, call_on, restored, structured
from metagrad.meta.objective.task_loss import TaskLoss

LOSS = "loss_fn(...)"
"""The name that is used for the loss function in place of a module path."""

_STEPS = (1e-4, 1e-6, 1e-5, 1e-7, 1e-3, 1e-8)
_RTOL = 1e-6  # relative to the norm of a gradient
_ATOL = 1e-10
_SEEDS = (0, 1)  # a derivative is incorrect if the comparison fails at two points
_STATUSES: dict[Kind, Status] = {"cut": "wrong", "wrong": "wrong", "error": "missing", "dense": "slower"}
_SUGGESTION = {
    "wrong": "Write its backward with differentiable operations on ctx.saved_tensors; metagrad.gradcheck of the "
    "module alone shows what is left. What detaches on purpose (straight-through, power iterations) shows here too.",
    "missing": "Write it with operations that can be differentiated, its backward too if it is an autograd.Function.",
}


class Subject(NamedTuple):
    """The loss ``loss_fn(model(x), y)``."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    x: Nested
    y: Nested

    @property
    def root(self) -> nn.ModuleList:
        """The model, and the loss function if it is a module."""
        return nn.ModuleList(part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module))

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that require grad, each once."""
        return [p for p in self.root.parameters() if p.requires_grad]

    def loss(self) -> Tensor:
        """Compute the loss."""
        return self.loss_fn(call_on(self.model, self.x), restored(self.y))

    def kind(self, path: str) -> str:
        """Return the class of a module, or the name of the loss function."""
        part = self.part(path)
        return getattr(part, "__name__", type(part).__name__)

    def part(self, path: str) -> Callable[..., Any]:
        """Return the module at a path."""
        return self.loss_fn if path == LOSS else self.model.get_submodule(path)

    def in_float64(self) -> Subject:
        """Return a copy in float64."""
        copied = Subject(*copy.deepcopy((self.model, self.loss_fn)), *tree_map(_to_double, (self.x, self.y)))
        copied.root.double()
        return copied


class Trace:
    """The calls of modules that are recorded while the loss is computed.

    A call can be repeated with the same buffers and random numbers.

    Attributes:
        subject: The loss.
        loss: Value of the loss.
        inputs: The arguments of the first call of each module outside of torch.vmap, without their graph.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._modules = list(subject.root.modules())
        self._generators, self._state = RandomState(), ModuleSnapshot(self._modules)
        paths = {module: name for name, module in named_modules(subject.model)}
        given: dict[str, tuple[Any, Any]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not any(map(_torch.is_batched, tensors_of((args, kwargs)))):
                given.setdefault(paths[module], (args, kwargs))

        handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in paths]
        try:
            prediction = call_on(subject.model, subject.x)
        finally:
            for handle in handles:
                handle.remove()
        given[LOSS] = (prediction, restored(subject.y)), {}
        self.loss = subject.loss_fn(*given[LOSS][0])
        TaskLoss(subject.model, subject.loss_fn, name="preflight").check_loss(self.loss)
        if not self.loss.requires_grad:
            raise ValueError(
                "preflight(model, loss_fn, batch): the loss depends on no parameter that requires grad. Does the "
                "model detach its output?"
            )
        self.inputs = {path: detached(arguments) for path, arguments in given.items()}

    def function(self, path: str | None) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return a function that calls a module or the loss, and the values of its parameters and inputs."""
        tensors, structure = dissect(((), {}) if path is None else self.inputs[path])
        places = [i for i, t in enumerate(tensors) if t.requires_grad]
        part = self.subject.loss if path is None else self.subject.part(path)
        root = part if isinstance(part, nn.Module) else self.subject.root
        has_params = path != LOSS or root is part
        params = [p for p in root.parameters() if p.requires_grad] if has_params else []

        def call(values: Sequence[Tensor]) -> list[Tensor]:
            inputs = list(tensors)
            for i, value in zip(places, values[len(params) :], strict=True):
                inputs[i] = value
            args, kwargs = structure.fill(inputs)
            self._state.put_back()
            self._generators.restore()
            exchange = {id(p): value for p, value in zip(params, values, strict=False)}
            # The graph may need the buffers, so later calls must not write into them.
            with replaced(root, exchange), own_buffers(self._modules):
                return tensors_of(part(*args, **kwargs))

        return [t.detach() for t in (*params, *(tensors[i] for i in places))], call


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in arguments or results. In unknown objects, search only lists, tuples and dicts."""
    try:
        return tree_leaves(structured(value, "preflight"))
    except TypeError:
        return tensors_in(value)


def known_defects(subject: Subject, order: int) -> list[ModuleFinding]:
    """Return the known defects of the operations of each module."""
    trace = Trace(subject)
    found: list[ModuleFinding] = []
    for path in reversed(trace.inputs):  # a module comes before the modules in it
        points, call = trace.function(path)
        graph = graph_nodes(call([point.requires_grad_() for point in points]))
        for defect in findings(graph, min(order, HIGHEST_ORDER), tuple(_STATUSES)):
            reason = str(defect).removesuffix(defect.suggestion).strip()
            if not any(other.reason == reason and _is_within(other.module, path) for other in found):
                status = _STATUSES[defect.kind]
                kind = subject.kind(path)
                found.insert(0, ModuleFinding(path, kind, defect.order, status, reason, defect.suggestion))
    return found


class UnmeasurableError(Exception):
    """Nothing can be compared. The message says why, in a sentence."""


def measured_defects(subject: Subject, order: int, known: Sequence[ModuleFinding]) -> list[ModuleFinding]:
    """Return the innermost modules whose derivatives differ from finite differences.

    Args:
        subject: The model, its loss and examples.
        order: The highest derivative to compare.
        known: Findings about modules, which are not compared again.

    Raises:
        UnmeasurableError: If the loss cannot be computed in float64.
    """
    known_orders = {f.module: f.order for f in known if f.is_error}
    double, limit = _in_float64(subject), min([order + 1, *known_orders.values()]) - 1
    mismatch = _mismatch(double, None, limit) if limit else None
    if mismatch is None and limit == order:
        return []
    found: dict[str, _Mismatch] = {}
    for path in reversed(double.inputs):
        if not any(_is_within(other, path) for other in (*known_orders, *found)):
            own = _mismatch(double, path, order)
            found |= {} if own is None else {path: own}
    if not found and mismatch is not None:
        found[""] = mismatch
    return [ModuleFinding(path, subject.kind(path), *m, _SUGGESTION[m[1]]) for path, m in found.items()]


def _is_within(path: str, module: str) -> bool:
    if LOSS in (path, module):
        return path == module
    return not module or path == module or path.startswith(f"{module}.")


def _in_float64(subject: Subject) -> Trace:
    try:
        trace = Trace(subject.in_float64())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnmeasurableError(
            f"it cannot be computed in float64: {first_line(error)}. Let tensors take their dtype from the inputs"
        ) from error
    if not torch.isfinite(trace.loss):
        raise UnmeasurableError("the loss is not finite")
    return trace


_Mismatch: TypeAlias = tuple[int, Status, str]
"""The order of an incorrect or missing derivative, the status, and a sentence with the numbers."""


def _mismatch(trace: Trace, path: str | None, order: int) -> _Mismatch | None:
    """Compare the derivatives of a module, or of the loss. Return None if they are correct."""
    points, call = trace.function(path)
    points, found = list(map(_to_double, points)), None
    for seed in _SEEDS if points else ():
        found = _compared(call, _moved(call, points, seed), order, seed)
        if found is None or found[1] == "missing":
            break
    return found


def _moved(call: Callable[..., list[Tensor]], points: list[Tensor], seed: int) -> list[Tensor]:
    """Change the points a little, unless the function is not finite at the new points."""
    generator = torch.Generator().manual_seed(seed)
    moved = []
    for point in points:
        size = point.abs().mean() if point.numel() else 0.0
        moved.append(point + 0.1 * (size + 0.1) * torch.randn(point.shape, generator=generator).to(point))
    with contextlib.suppress(Exception):  # a loss may not be defined there
        if all(torch.isfinite(t).all() for t in call(moved)):
            return moved
    return points


def _compared(
    call: Callable[..., list[Tensor]], points: list[Tensor], order: int, seed: int
) -> _Mismatch | None:
    """Return the incorrect derivative of the lowest order."""
    sizes = [point.numel() for point in points]
    # A direction moves every tensor equally far, since the defect may depend on a small tensor.
    scales = [(sum(sizes) / max(size * len(sizes), 1)) ** 0.5 for size in sizes]

    def of_vector(flat: Tensor) -> list[Tensor]:
        moves = zip(points, flat.split_with_sizes(sizes), scales, strict=True)
        return call([point + scale * move.view(point.shape) for point, move, scale in moves])

    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=points[0].device, requires_grad=True)
    return _lowest(of_vector, flat, order, seed)


def _lowest(fn: Callable[[Tensor], object], flat: Tensor, order: int, seed: int) -> _Mismatch | None:
    try:
        gradcheck(fn, flat, order=order, eps=_STEPS, rtol=_RTOL, atol=_ATOL, seed=seed)  # type: ignore[reportArgumentType]
    except WrongDerivative as error:
        numbers = (
            f"{error.got:.6g} along a random direction, where finite differences give {error.expected:.6g}"
        )
        return error.order, "wrong", f"Its derivative of order {error.order} is {numbers}."
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a custom backward may raise any error
        lower = _lowest(fn, flat, order - 1, seed) if order > 1 else None
        return lower or (order, "missing", f"Its derivative of order {order} raises: {first_line(error)}.")
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error without the final period."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _to_double(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
