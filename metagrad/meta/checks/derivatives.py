"""Derivatives of a model: looked up in the table of known defects, and compared with finite differences.

The comparison uses a copy of the model in float64, at parameters that are moved a little. At an initialization with
zeros, connections that multiply by zero would hide what is behind them. A function with kinks agrees with finite
differences over a step that is small enough, so several steps are tried.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from metagrad.autograd.checks.gradcheck import WrongDerivative, gradcheck
from metagrad.autograd.checks.lint import HIGHEST_ORDER, findings
from metagrad.autograd.checks.lint_rules import Kind
from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.capture import RandomState
from metagrad.core.modules import ModuleSnapshot
from metagrad.core.structured import Nested, call_on, restored, structured
from metagrad.core.substitution import own_buffers, replaced
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import detached, dissect, tensors_in, tree_leaves, tree_map
from metagrad.meta.checks.report import ModuleFinding, Verdict

LOSS = "loss_fn(...)"
"""The path of the loss function."""

_STEPS = (1e-4, 1e-6, 1e-5, 1e-7, 1e-3, 1e-8)
_RTOL = 1e-6  # of the norm of a gradient
_ATOL = 1e-10
_SEEDS = (0, 1)  # a derivative is wrong if it is so at two points
_VERDICTS: dict[Kind, Verdict] = {"cut": "wrong", "wrong": "wrong", "error": "missing", "dense": "slower"}
_REMEDY = {
    "wrong": "Write its backward with differentiable operations on ctx.saved_tensors; metagrad.gradcheck of the "
    "module alone shows what is left. What detaches on purpose (straight-through, power iterations) shows here too.",
    "missing": "Write it with operations that can be differentiated, its backward too if it is an autograd.Function.",
}


class Subject(NamedTuple):
    """``loss_fn(model(x), y)``."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    x: Nested
    y: Nested

    @property
    def root(self) -> nn.ModuleList:
        """The model, and the loss if it is a module."""
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
        if path == LOSS and not isinstance(self.loss_fn, nn.Module):
            return getattr(self.loss_fn, "__name__", "a function")
        return type(self.part(path)).__name__

    def part(self, path: str) -> Callable[..., Any]:
        """Return the module at a path."""
        return self.loss_fn if path == LOSS else self.model.get_submodule(path)

    def in_float64(self) -> Subject:
        """Return a copy in float64."""
        model, loss_fn = copy.deepcopy((self.model, self.loss_fn))
        x, y = tree_map(_double, (self.x, self.y))
        copied = Subject(model, loss_fn, x, y)
        copied.root.double()
        return copied


class Trace:
    """The modules that made the nodes of a graph, and what each module was called on first.

    Attributes:
        owners: The path of the module that made each node.
        inputs: The arguments of the first call of each module, outside of torch.vmap.
    """

    def __init__(self, subject: Subject) -> None:
        self.owners: dict[Node, str] = {}
        self.inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._paths = {module: name for name, module in named_modules(subject.model)}
        self._running = [LOSS]
        self._visited: set[Node] = set()

    def loss(self, subject: Subject) -> Tensor:
        """Compute the loss of a subject."""
        with self._hooked():
            prediction = call_on(subject.model, subject.x)
        target = restored(subject.y)
        self.inputs[LOSS] = (prediction, target), {}
        loss = subject.loss_fn(prediction, target)
        _check_loss(loss)
        self._claim(loss)
        return loss

    @contextlib.contextmanager
    def _hooked(self) -> Generator[None]:
        handles = []
        for module in self._paths:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._claim((args, kwargs))
        self._running.append(self._paths[module])
        if not any(map(_torch.is_batched, tensors_of((args, kwargs)))):
            self.inputs.setdefault(self._running[-1], (args, kwargs))

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        self._claim(result)
        self._running.pop()

    def _claim(self, value: object) -> None:
        """Note that the module that is running made what is new behind tensors."""
        with _torch.without_torch_function():  # which refuses to tell stacked tasks of the graph
            for node in graph_nodes(map(_below_vmap, tensors_of(value)), self._visited):
                self.owners[node] = self._running[-1]


def _check_loss(loss: object) -> None:
    """Raise for a loss that has no gradient."""
    call = "preflight(model, loss_fn, batch)"
    if not isinstance(loss, Tensor):
        raise TypeError(f"{call}: loss_fn must return a tensor, got {type(loss).__name__}.")
    if loss.ndim:
        raise ValueError(
            f"{call}: loss_fn must return a scalar, got shape {tuple(loss.shape)}. Reduce it, as by its mean."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{call}: the loss depends on no parameter that requires grad. Does the model detach its output?"
        )


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in arguments or results; of unknown objects, those in lists, tuples and dicts."""
    try:
        return tree_leaves(structured(value, "preflight"))
    except TypeError:
        return tensors_in(value)


def _below_vmap(tensor: Tensor) -> Tensor:
    while _torch.is_batched(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return tensor


def known_defects(subject: Subject, order: int) -> list[ModuleFinding]:
    """Return what the table of known defects says of each module."""
    trace = Trace(subject)
    trace.loss(subject)
    nodes: dict[str, list[Node]] = {}
    for node, path in trace.owners.items():
        nodes.setdefault(path, []).append(node)
    found = []
    for path, own in nodes.items():
        for defect in findings(own, min(order, HIGHEST_ORDER), tuple(_VERDICTS)):
            reason = str(defect).removesuffix(defect.remedy).strip()
            verdict = _VERDICTS[defect.kind]
            found.append(
                ModuleFinding(path, subject.kind(path), defect.order, verdict, reason, defect.remedy)
            )
    return found


class UnmeasurableError(Exception):
    """Nothing can be compared; says why, in a sentence."""


def measured_defects(subject: Subject, order: int, known: Sequence[ModuleFinding]) -> list[ModuleFinding]:
    """Return what finite differences contradict: for the innermost modules that fail.

    Args:
        subject: The model, its loss and examples.
        order: The highest derivative to compare.
        known: Modules that are known to be wrong, which are not looked at again.

    Raises:
        UnmeasurableError: The loss cannot be computed in float64.
    """
    bad = {f.module: f.order for f in known if f.is_error}
    double, limit = _Float64(subject), min([order + 1, *bad.values()]) - 1
    mismatch = double.mismatch(None, limit) if limit else None
    if mismatch is None and limit == order:
        return []
    found: dict[str, Mismatch] = {}
    for path in reversed(double.inputs):  # what is inside comes after what it is inside of
        if not any(_is_within(other, path) for other in (*bad, *found)):
            own = double.mismatch(path, order)
            found |= {} if own is None else {path: own}
    if not found and mismatch is not None:
        found[""] = mismatch
    return [ModuleFinding(path, subject.kind(path), *m, _REMEDY[m.verdict]) for path, m in found.items()]


def _is_within(path: str, module: str) -> bool:
    if LOSS in (path, module):
        return path == module
    return not module or path == module or path.startswith(f"{module}.")


class Mismatch(NamedTuple):
    """A derivative that is not right, and the sentence that says so."""

    order: int
    verdict: Verdict
    reason: str


class _Float64:
    """A copy of a subject in float64, whose every call is as the first one."""

    def __init__(self, subject: Subject) -> None:
        try:
            self.subject = subject.in_float64()
            self.modules = list(self.subject.root.modules())
            self.generators, self.state = RandomState(), ModuleSnapshot(self.modules)
            trace = Trace(self.subject)
            loss = trace.loss(self.subject)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnmeasurableError(
                f"it cannot be computed in float64: {_line(error)}. Let tensors take their dtype from the inputs"
            ) from error
        if not torch.isfinite(loss):
            raise UnmeasurableError("the loss is not finite")
        self.inputs = {path: detached(given) for path, given in trace.inputs.items()}

    def mismatch(self, path: str | None, order: int) -> Mismatch | None:
        """Compare the derivatives of a module, or of the loss; None if they are right."""
        points, call = self._function(path)
        found = None
        for seed in _SEEDS if points else ():
            found = self._compared(call, self._moved(call, points, seed), order, seed)
            if found is None or found.verdict == "missing":
                break
        return found

    def _function(self, path: str | None) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return what a function depends on, its parameters and inputs, and the function."""
        given = ((), {}) if path is None else self.inputs[path]
        tensors, structure = dissect(given)
        places = [i for i, t in enumerate(tensors) if t.requires_grad]
        part = self.subject.loss if path is None else self.subject.part(path)
        root = part if isinstance(part, nn.Module) else self.subject.root
        params = (
            [] if path == LOSS and root is not part else [p for p in root.parameters() if p.requires_grad]
        )

        def call(values: Sequence[Tensor]) -> list[Tensor]:
            inputs = list(tensors)
            for i, value in zip(places, values[len(params) :], strict=True):
                inputs[i] = value
            args, kwargs = structure.fill(inputs)
            self.state.put_back()
            self.generators.restore()
            exchange = {id(p): value for p, value in zip(params, values, strict=False)}
            # A graph may need the buffers, so that later calls must not write into them.
            with replaced(root, exchange), own_buffers(self.modules):
                return tensors_of(part(*args, **kwargs))

        return [_double(t).detach() for t in (*params, *(tensors[i] for i in places))], call

    def _moved(self, call: Callable[..., list[Tensor]], points: list[Tensor], seed: int) -> list[Tensor]:
        """Move the points a little, if the function can be computed there."""
        generator = torch.Generator().manual_seed(seed)
        moved = []
        for point in points:
            noise = torch.randn(point.shape, generator=generator).to(point)
            size = point.abs().mean() if point.numel() else 0.0
            moved.append(point + 0.1 * (size + 0.1) * noise)
        with contextlib.suppress(Exception):  # a loss may not be defined there
            if all(torch.isfinite(t).all() for t in call(moved)):
                return moved
        return points

    def _compared(
        self, call: Callable[..., list[Tensor]], points: list[Tensor], order: int, seed: int
    ) -> Mismatch | None:
        sizes = [point.numel() for point in points]
        # A direction moves every tensor as far, whatever its size: what is wrong may be behind a small one.
        scales = [(sum(sizes) / max(size * len(sizes), 1)) ** 0.5 for size in sizes]

        def of_vector(flat: Tensor) -> list[Tensor]:
            moves = zip(points, flat.split_with_sizes(sizes), scales, strict=True)
            return call([point + scale * move.view(point.shape) for point, move, scale in moves])

        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=points[0].device, requires_grad=True)
        return _mismatch(of_vector, flat, order, seed)


def _mismatch(fn: Callable[[Tensor], object], flat: Tensor, order: int, seed: int) -> Mismatch | None:
    """Return the derivative of the lowest order that is not right."""
    try:
        gradcheck(fn, flat, order=order, eps=_STEPS, rtol=_RTOL, atol=_ATOL, seed=seed)  # type: ignore[reportArgumentType]
    except WrongDerivative as error:
        return Mismatch(
            error.order,
            "wrong",
            f"Its derivative of order {error.order} is {error.got:.6g} along a random direction, where finite "
            f"differences give {error.expected:.6g}.",
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a backward of the user's raises
        lower = _mismatch(fn, flat, order - 1, seed) if order > 1 else None
        reason = f"Its derivative of order {order} raises: {_line(error)}."
        return lower or Mismatch(order, "missing", reason)
    return None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
