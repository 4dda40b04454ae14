"""A small meta-batch as one compiled function, and what is not compiled."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from metagrad import memory as memory_tracking
from metagrad.autograd.unrolling.compiled import SEVERAL, is_small
from metagrad.core._torch import named_modules
from metagrad.core.tree import tensors_in
from metagrad.meta.execution.stacking import has_running_statistics
from metagrad.meta.inner.compiled import refuse_structured, with_tensors
from metagrad.meta.inner.loop import Evaluation, InnerLoop
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import is_plain
from metagrad.optim.rules import Params, Rule


def refusal(inner: InnerLoop, tasks: Tasks) -> str | None:
    """Return why the steps of a loop are not compiled, where that is known beforehand; else None."""
    if memory_tracking.current() is not None:
        return "a MemoryTracker is open"
    if inner.objective.norms is not None:
        return "norm= exchanges the normalisations of the model while it runs"
    if tables := (*tasks.rows, *inner.objective.tables):
        return f"only the rows of {', '.join(map(repr, dict.fromkeys(tables)))} are there, as sparse= says"
    if not tasks.are_tensors:
        return "inputs or targets are not single tensors"
    loss_fn = inner.objective.loss_fn
    modules = [*named_modules(inner.objective.model)]
    modules += [*named_modules(loss_fn)] if isinstance(loss_fn, nn.Module) else []
    for name, module in modules:
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        if not is_plain(module):
            return f"{kind} has hooks or a forward of its own"
        if has_running_statistics(module):
            return f"{kind} updates running statistics"
    return None


def is_one_graph(inner: InnerLoop, params: Params, tasks: Tasks) -> bool:
    """Return whether a meta-batch is small enough to be compiled as one function, and no step is needed alone."""
    if (
        type(inner) is not InnerLoop
        or inner.memory != "full"
        or inner.start is not None
        or inner.minimum is not None
    ):
        return False
    if not torch.is_grad_enabled() or inner.steps > SEVERAL or tasks.query_x is None:
        return False
    tensors = tensors_in((tasks.support_x, tasks.query_x))
    copies = tasks.count if inner.stacked else 1
    return is_small([*tensors, *(p.expand(copies, *p.shape) for p in params.values())])


def evaluated(inner: InnerLoop, params: Params, tasks: Tasks) -> Evaluation:
    """Evaluate a meta-batch as one compiled function."""
    assert inner.compiled is not None
    rule = with_tensors(inner.rule, next(iter(params.values())))
    alone = dataclasses.replace(inner, compiled=None)
    return inner.compiled.of(_evaluate)(alone, params, tasks, rule)


def _evaluate(inner: InnerLoop, params: Params, tasks: Tasks, rule: Rule) -> Evaluation:
    results = inner.run(params, tasks, rule)
    assert isinstance(results, Evaluation)
    refuse_structured(results)
    return results
