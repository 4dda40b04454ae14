"""Derivatives compared with finite differences: of the loss, and where that fails of one module after the other.

Everything is computed in float64, at parameters that are moved a little from those of the model: at an initialisation
with zeros, connections that multiply by zero would hide what lies behind them, and kinks lie where values are equal.
A function with kinks agrees with differences over a step that is small enough; several are tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.checks.gradcheck import WrongDerivative, gradcheck
from metagrad.core.capture import RandomState
from metagrad.core.modules import ModuleContents
from metagrad.core.substitution import Slots, own_buffers
from metagrad.core.tree import detached, dissect, is_differentiable, tree_map
from metagrad.meta.checks.calls import LOSS, is_below, tensors_of
from metagrad.meta.checks.known import kind_of, module_at
from metagrad.meta.checks.report import ModuleFinding, Verdict
from metagrad.meta.checks.subject import Subject

_STEPS = (1e-4, 1e-6, 1e-5, 1e-7, 1e-3, 1e-8)
_RTOL = 1e-6  # of the norm of a gradient
_ATOL = 1e-10
_SEEDS = (0, 1)  # a derivative is wrong if it is so at two points
_WHOLE = "the loss"

_REMEDY = {
    "wrong": "Write its backward with differentiable operations on ctx.saved_tensors; metagrad.gradcheck of the "
    "module alone shows what is left. What detaches on purpose (straight-through, power iterations) shows here too.",
    "missing": "Write it with operations that can be differentiated, its backward too if it is an autograd.Function.",
}


class Mismatch(NamedTuple):
    """A derivative that is not right.

    Attributes:
        order: Its order.
        verdict: Wrong or missing.
        reason: What was seen, in a sentence.
    """

    order: int
    verdict: Verdict
    reason: str


class UnmeasurableError(Exception):
    """Nothing can be compared; says why, in a sentence."""


class _Function(NamedTuple):
    """A function of some tensors, whose derivatives are compared.

    Attributes:
        call: Values of the tensors to what the function returns.
        points: Where.
    """

    call: Callable[[Sequence[Tensor]], object]
    points: list[Tensor]


def measured_defects(subject: Subject, order: int, known: Sequence[ModuleFinding]) -> list[ModuleFinding]:
    """Return what is wrong or missing and not known to be.

    Args:
        subject: The model, its loss and examples.
        order: The highest derivative to compare.
        known: Findings that are not looked for again.

    Raises:
        UnmeasurableError: The loss cannot be computed in float64.
    """
    below = {f.module: min(f.order, order + 1) - 1 for f in known if f.is_error}
    with _Float64(subject, _SEEDS[0]).set_up() as model:
        model.check_loss()
        blamed = _Search(model, order, below).blamed(_WHOLE)
    return [
        ModuleFinding(path, kind_of(subject, path), m.order, m.verdict, m.reason, _REMEDY[m.verdict])
        for path, m in blamed.items()
    ]


class _Search:
    """Looks for the modules to blame: a module is, if its derivative fails and those of its parts do not."""

    def __init__(self, model: _Float64, order: int, below: Mapping[str, int]) -> None:
        self.model = model
        self.order = order
        self.below = below

    def blamed(self, path: str) -> dict[str, Mismatch]:
        """Return what is to blame of a module and its parts."""
        limit = min([self.order, *(order for p, order in self.below.items() if self._holds(path, p))])
        mismatch = self.model.mismatch(path, limit) if limit else None
        if mismatch is None and limit == self.order:
            return {}
        found: dict[str, Mismatch] = {}
        for part in self._parts(path):
            found |= self.blamed(part)
        return found or ({} if mismatch is None else {"" if path == _WHOLE else path: mismatch})

    def _holds(self, path: str, part: str) -> bool:
        return path in (_WHOLE, part) or is_below(part, path)

    def _parts(self, path: str) -> list[str]:
        """Return the modules that were called, below a module but not below each other."""
        called = self.model.inputs
        if path == _WHOLE:
            return [p for p in called if p in ("", LOSS)]
        inside = [p for p in called if p != path and is_below(p, path)]
        return [p for p in inside if not any(other != p and is_below(p, other) for other in inside)]


class _Float64:
    """A model in float64, for the duration of a context."""

    def __init__(self, subject: Subject, seed: int) -> None:
        x, y = tree_map(_double, (subject.x, subject.y))
        self.subject = Subject(subject.model, subject.loss_fn, x, y)
        self.slots = Slots(subject.modules)
        self.params = subject.params
        self.own = {m: list(m.parameters()) for root in subject.modules for m in root.modules()}
        self.inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.seed = seed

    @contextlib.contextmanager
    def set_up(self) -> Generator[_Float64]:
        """Put float64 tensors into the places of parameters and buffers."""
        floating = {id(t): t for t in self.slots.tensors if t.is_floating_point()}
        with self.slots.exchanged({key: _double(t) for key, t in floating.items()}):
            self.generators, self.state = RandomState(), ModuleContents(self.own)
            yield self

    def check_loss(self) -> None:
        """Compute the loss once, and note what modules are called on."""
        try:
            loss, trace = self.subject.traced()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnmeasurableError(
                f"it cannot be computed in float64: {_line(error)}. Let tensors take their dtype from the inputs"
            ) from error
        if not torch.isfinite(loss).all():
            raise UnmeasurableError("the loss is not finite")
        self.inputs = {path: detached(given) for path, given in trace.inputs.items()}

    def mismatch(self, path: str, order: int) -> Mismatch | None:
        """Compare the derivatives of a module; None if they are right."""
        found = None
        for seed in _SEEDS:
            function = self._whole(seed) if path == _WHOLE else self._of_module(path, seed)
            if function is None or (found := self._compared(function, order, seed)) is None:
                return None
            if found.verdict == "missing":
                break
        return found

    def _whole(self, seed: int) -> _Function | None:

        def call(values: Sequence[Tensor]) -> object:
            with self.slots.exchanged({id(p): v for p, v in zip(self.params, values, strict=True)}):
                return self.subject.loss()

        return self._moved(call, [_double(p) for p in self.params], seed)

    def _of_module(self, path: str, seed: int) -> _Function | None:
        """Return a module as a function of its parameters and of those of its inputs that depend on any."""
        module = module_at(self.subject, path)
        function = self.subject.loss_fn if module is None else module
        tensors, structure = dissect(self.inputs[path])
        places = [i for i, t in enumerate(tensors) if t.requires_grad]
        own = {id(p) for p in self.own.get(module, ())}  # type: ignore[reportArgumentType]
        params = [p for p in self.params if id(p) in own]

        def call(values: Sequence[Tensor]) -> object:
            given = list(tensors)
            for i, value in zip(places, values[len(params) :], strict=True):
                given[i] = value
            args, kwargs = structure.fill(given)
            with self.slots.exchanged({id(p): v for p, v in zip(params, values, strict=False)}):
                return tensors_of(function(*args, **kwargs))

        return self._moved(call, [_double(t) for t in (*params, *(tensors[i] for i in places))], seed)

    def _moved(
        self, call: Callable[[Sequence[Tensor]], object], points: list[Tensor], seed: int
    ) -> _Function | None:
        """Move the points a little, where the function can be computed there."""
        if not points:
            return None
        moved = _perturbed(points, seed)
        with contextlib.suppress(Exception):  # a loss may not be defined there
            if all(torch.isfinite(t).all() for t in tensors_of([self._again(call, moved)])):
                return _Function(call, moved)
        return _Function(call, points)

    def _again(self, call: Callable[[Sequence[Tensor]], object], values: Sequence[Tensor]) -> object:
        """Call a function as if it were for the first time."""
        self.state.put_back()
        self.generators.restore()
        with own_buffers(self.own):  # into which nobody else writes: a graph may need them
            return call(values)

    def _compared(self, function: _Function, order: int, seed: int) -> Mismatch | None:
        points, sizes = function.points, [point.numel() for point in function.points]
        # A direction moves every tensor as far, whatever its size: what is wrong may be behind a small one.
        scales = [(sum(sizes) / max(size * len(sizes), 1)) ** 0.5 for size in sizes]

        def of_vector(flat: Tensor) -> object:
            moves = zip(points, flat.split_with_sizes(sizes), scales, strict=True)
            values = [point + scale * move.view(point.shape) for point, move, scale in moves]
            return self._again(function.call, values)

        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=points[0].device, requires_grad=True)
        return _mismatch(of_vector, flat, order, seed)


def _mismatch(fn: Callable[[Tensor], object], flat: Tensor, order: int, seed: int) -> Mismatch | None:
    """Return the derivative of the lowest order that is not right."""
    try:
        gradcheck(fn, flat, order=order, eps=_STEPS, rtol=_RTOL, atol=_ATOL, seed=seed)
    except WrongDerivative as error:
        return _wrong(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a backward of the user's raises
        lower = _mismatch(fn, flat, order - 1, seed) if order > 1 else None
        reason = f"Its derivative of order {order} raises: {_line(error)}."
        return lower or Mismatch(order, "missing", reason)
    return None


def _wrong(error: WrongDerivative) -> Mismatch:
    reason = (
        f"Its derivative of order {error.order} is {error.got:.6g} along a random direction, where finite "
        f"differences give {error.expected:.6g}."
    )
    return Mismatch(error.order, "wrong", reason)


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _perturbed(points: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Move tensors a little at random, so that nothing is zero, or equal, by its initialization."""
    generator = torch.Generator().manual_seed(seed)
    moved = []
    for point in points:
        value = point.detach()
        if is_differentiable(value) and value.numel():
            noise = torch.randn(value.shape, generator=generator).to(value)
            value = value + 0.1 * (value.abs().mean() + 0.1) * noise
        moved.append(value)
    return moved
