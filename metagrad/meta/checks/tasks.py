"""What becomes of a meta-batch: whether its tasks can be stacked, and whether a step can be compiled."""

from __future__ import annotations

from metagrad.autograd.compile.compiled import FreeTensorError, UncompilableError, check_compilable, operand
from metagrad.core._torch import named_modules
from metagrad.core.tree import dissect
from metagrad.meta.checks.calls import LOSS, CallStack
from metagrad.meta.checks.fixes import BatchStatistics, Remedy
from metagrad.meta.checks.known import kind_of
from metagrad.meta.checks.report import ModuleFinding
from metagrad.meta.checks.subject import Subject
from metagrad.meta.execution.executor import TaskExecutor, refuse_uncompilable
from metagrad.meta.execution.stacking import (
    has_running_statistics,
    loop_reason,
    own_loop_reason,
    prefers_loop,
)
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks

_LOOP = "Pass task_chunk=1 to choose the loop without a warning."


def loss_of_a_task(maml: MAML, tasks: Tasks) -> Subject:
    """Return the loss of the support examples of the first task."""
    first = tasks.select(0)
    return Subject(maml._callable_model(), maml.loss_fn, first.support_x, first.support_y)


def task_defects(maml: MAML, subject: Subject, tasks: Tasks) -> tuple[list[ModuleFinding], list[Remedy]]:
    """Return why tasks run one by one, or steps without being compiled, if they do and nobody asked for it."""
    executor = maml._executor(None, tasks)
    found, remedies = _stacking_defects(executor, subject, tasks)
    return [*found, *_compile_defects(executor, subject, tasks)], remedies


def _stacking_defects(
    executor: TaskExecutor, subject: Subject, tasks: Tasks
) -> tuple[list[ModuleFinding], list[Remedy]]:
    """Return why tasks run one by one, if they do and nobody asked for it."""
    if tasks.count == 1 or executor.stacking.task_chunk == 1:
        return [], []
    named = [(path, module) for path, module in named_modules(subject.model)]
    has_norm_policy = executor.inner.objective.norms is not None
    reasons = {path: own_loop_reason(path, module, has_norm_policy) for path, module in named}
    remedies: list[Remedy] = [
        BatchStatistics(path, module)
        for path, module in named
        if not has_norm_policy and has_running_statistics(module)
    ]
    fixable = {remedy.path for remedy in remedies if isinstance(remedy, BatchStatistics)}
    found = [
        _one_by_one(subject, path, reason, path in fixable) for path, reason in reasons.items() if reason
    ]
    if found or prefers_loop(subject.model, tasks.device.type, executor.params):
        return found, remedies
    with CallStack(subject.model, subject.loss_fn) as stack:
        reason = loop_reason(subject.model, has_norm_policy) or executor.comparison(tasks).difference()
    # An error leaves the modules in which it was raised.
    path = stack.running[-1] if stack.running else ""
    return ([] if reason is None else [_one_by_one(subject, path, reason, False)]), []


def _one_by_one(subject: Subject, path: str, reason: str, fixable: bool) -> ModuleFinding:
    remedy = (
        'Pass norm="running" or another policy to MAML, or construct it with track_running_stats=False, as the '
        "remedy makes it."
        if fixable
        else _LOOP
    )
    why = f"The tasks of a batch run one by one, because {reason}."
    return ModuleFinding(path, kind_of(subject, path), 1, "slower", why, remedy, fixable)


def _compile_defects(executor: TaskExecutor, subject: Subject, tasks: Tasks) -> list[ModuleFinding]:
    """Return why steps run without being compiled, if that was asked for."""
    if executor.inner.compiled is None:
        return []
    try:
        refuse_uncompilable(executor.inner, tasks)
        _check_loss(executor, tasks)
    except (UncompilableError, FreeTensorError) as error:
        path = LOSS if isinstance(error, FreeTensorError) else ""
        why = f"Its steps run without being compiled, because {str(error).rstrip('.')}."
        return [
            ModuleFinding(
                path,
                kind_of(subject, path),
                1,
                "slower",
                why,
                "Pass compile=False to choose this without a warning.",
            )
        ]
    return []


def _check_loss(executor: TaskExecutor, tasks: Tasks) -> None:
    """Run the loss of a task as compiled code would be checked."""
    tensors, structure = dissect((executor.params, *tasks.select(0)[:2]))

    def losses(*values):
        return (executor.inner.objective.single(*structure.fill(values))[0],)

    check_compilable(losses, tuple(operand(t, True) for t in tensors), "MAML(..., compile)")
