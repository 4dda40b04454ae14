"""What is known of torch, looked up for the operations that a model records, and put down to its modules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import torch
from torch import nn

from metagrad.autograd.checks.lint import HIGHEST_ORDER, findings
from metagrad.autograd.checks.lint_rules import Kind, is_piecewise_linear
from metagrad.core.capture import RandomState
from metagrad.meta.checks.calls import LOSS, Trace
from metagrad.meta.checks.fixes import CONTEXTS, ForwardContext, ForwardWithin, Remedy
from metagrad.meta.checks.report import ModuleFinding, Verdict
from metagrad.meta.checks.subject import Subject
from metagrad.meta.execution.stacking import rounding

_VERDICTS: dict[Kind, Verdict] = {"cut": "wrong", "wrong": "wrong", "error": "missing", "dense": "slower"}


def known_defects(subject: Subject, order: int) -> tuple[list[ModuleFinding], list[Remedy]]:
    """Return what the table of defects says of each module, and the remedies that have been found to help.

    A remedy helps if the module has no wrong or missing derivative any more, and the loss is the same.
    """
    generators = RandomState()
    loss, trace = subject.traced()
    found = _looked_up(subject, trace, order)
    blamed = {f.module: module for f in found if f.is_error and (module := module_at(subject, f.module))}
    remedies: dict[str, Remedy] = {}
    for chosen in CONTEXTS if blamed else ():
        generators.restore()
        with _within(chosen, blamed):
            other, again = subject.traced()
        still = {f.module for f in _looked_up(subject, again, order) if f.is_error}
        if torch.allclose(other, loss, rtol=rounding(loss), atol=0.0):
            helped = {
                path: ForwardWithin(path, module, chosen)
                for path, module in blamed.items()
                if path not in still
            }
            remedies = {**helped, **remedies}
    found = [dataclasses.replace(f, fixable=f.is_error and f.module in remedies) for f in found]
    return [*found, *_random(subject, trace)], list(remedies.values())


def _looked_up(subject: Subject, trace: Trace, order: int) -> list[ModuleFinding]:
    found: list[ModuleFinding] = []
    for path, nodes in trace.nodes().items():
        kind = kind_of(subject, path)
        for defect in findings(nodes, min(order, HIGHEST_ORDER), tuple(_VERDICTS)):
            reason = f"{str(defect).removesuffix(defect.remedy).strip()}"
            found.append(
                ModuleFinding(path, kind, defect.order, _VERDICTS[defect.kind], reason, defect.remedy)
            )
        bent = sorted({node.name() for node in nodes if is_piecewise_linear(node.name())})
        if bent and order > 1:
            found.append(ModuleFinding(path, kind, 2, "right", _zero(bent[0]), _SMOOTH))
    return found


def _zero(node: str) -> str:
    return f"{node} is piecewise linear: its own second derivative is zero where it exists."


_SMOOTH = "That is exact; use a smooth activation (softplus, GELU, tanh) if curvature is to come from it."


def _random(subject: Subject, trace: Trace) -> list[ModuleFinding]:
    """Say which modules draw random numbers."""
    return [
        ModuleFinding(
            path,
            kind_of(subject, path),
            1,
            "right",
            "It draws random numbers, so that each call is another function. Derivatives of a call are right: "
            "stacked tasks draw their own, and what is recomputed draws the same again.",
            "Where several calls are to see one function (closures, products over batches), call eval().",
        )
        for path in trace.drawn
    ]


def kind_of(subject: Subject, path: str) -> str:
    """Return the class of a module, or the name of the loss function."""
    module = module_at(subject, path)
    return getattr(subject.loss_fn, "__name__", "a function") if module is None else type(module).__name__


def module_at(subject: Subject, path: str) -> nn.Module | None:
    """Return the module of a path; None for a loss that is a function."""
    if path == LOSS or path.startswith(f"{LOSS}."):
        loss = subject.loss_fn
        return loss.get_submodule(path[len(LOSS) + 1 :]) if isinstance(loss, nn.Module) else None
    return subject.model.get_submodule(path)


@contextlib.contextmanager
def _within(chosen: ForwardContext, modules: dict[str, nn.Module]) -> Generator[None]:
    with applied([ForwardWithin(path, module, chosen) for path, module in modules.items()]):
        yield


@contextlib.contextmanager
def applied(remedies: Sequence[Remedy]) -> Generator[None]:
    """Apply remedies for a while."""
    mine = [remedy for remedy in remedies if not remedy.is_applied]
    try:
        for remedy in mine:
            remedy.apply()
        yield
    finally:
        for remedy in reversed(mine):
            remedy.undo()
