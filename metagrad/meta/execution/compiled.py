"""Compile a small meta-batch as one function, and decide which meta-batches run eagerly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from metagrad import memory as memory_tracking
from metagrad.autograd.unrolling.compiled import SEVERAL, SMALL, Compiler
from metagrad.core._torch import Function, named_modules
from metagrad.core.tree import Params, Structure, dissect, fresh_leaf, tensors_in
from metagrad.meta.execution.vectorization import has_running_statistics
from metagrad.meta.inner.loop import Evaluation, InnerLoop, refuse_structured, with_tensors
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import is_plain, vmapped
from metagrad.optim.rules import Rule

_QUERY_LOSSES = Evaluation._fields.index("query_losses")
_LOSSES = ("losses", "query_losses", "path")
_CONSTANTS = (int, float, str, type(None), Tensor)


def refusal(inner: InnerLoop, tasks: Tasks) -> str | None:
    """Return why the steps of a loop cannot be compiled, or None if no reason is known."""
    if memory_tracking.current() is not None:
        return "a MemoryTracker is open"
    if inner.objective.by_copy:
        return "a module of the model runs again in the backward pass"
    if inner.objective.norms is not None:
        return "norm= exchanges the normalizations of the model while it runs"
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
    """Return whether a meta-batch is compiled as one function: it is small, and no step has to run separately."""
    assert inner.compiled is not None
    is_plain = type(inner) is InnerLoop and inner.start is None and inner.minimum is None
    if not is_plain or inner.memory != "full" or inner.compiled.by_steps or inner.steps > SEVERAL:
        return False
    if not torch.is_grad_enabled() or tasks.query_x is None or tasks.noise or not tasks.are_tensors:
        return False
    tensors = tensors_in((tasks.support_x, tasks.query_x))
    return sum(t.numel() for t in tensors) + tasks.count * sum(p.numel() for p in params.values()) <= SMALL


def evaluated(
    inner: InnerLoop, params: Params, tasks: Tasks, again: Callable[[Params, Rule], Evaluation]
) -> Evaluation | None:
    """Evaluate a meta-batch, and differentiate the mean of its query losses, by one compiled function.

    Args:
        inner: The loop.
        params: The initial parameters.
        tasks: The tasks.
        again: Evaluates the tasks eagerly, for other parameters and hyperparameters.

    Returns:
        The results. None if a result or the gradient is not finite, or the model reads another learned tensor.
    """
    compiler = inner.compiled
    assert compiler is not None
    own, structure = _parts(compiler, inner.rule, next(iter(params.values())))
    tensors, names = [*params.values(), *own], tuple(params)
    places = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    constants = [tensor.detach() for tensor in tensors]
    loop = dataclasses.replace(inner, compiled=None)
    results, grads, finite = compiler.of(_value_and_grads)(loop, names, structure, places, constants, tasks)
    inner.objective.check_predictions(results["predictions"].shape[1:])
    if any(result.requires_grad for result in results.values()):
        compiler.by_steps = True
        return None
    if not finite:
        return None

    def fallback(wanted: Sequence[Tensor]) -> list[Tensor]:
        compiler.by_steps = True
        return list(_present(again(*_filled(names, structure, tensors, places, wanted))).values())

    wanted = [tensors[place] for place in places]
    outputs = _EvaluatedBatch.apply(fallback, list(results.values()), grads, *wanted)
    return Evaluation(**dict(zip(results, outputs, strict=True)))


def _parts(compiler: Compiler, rule: Rule, like: Tensor) -> tuple[list[Tensor], Structure]:
    """Return the tensors of an optimizer, including its numbers as tensors, and its structure."""
    form = like.dtype, like.device
    if compiler.rule is None or compiler.rule[0] is not rule or compiler.rule[1] != form:
        parts = dissect(with_tensors(rule, like))
        if not all(isinstance(value, _CONSTANTS) for value in vars(rule).values()):
            return parts
        compiler.rule = rule, form, parts
    return compiler.rule[2]


def _value_and_grads(
    inner: InnerLoop,
    names: Sequence[str],
    structure: Structure,
    places: Sequence[int],
    tensors: Sequence[Tensor],
    tasks: Tasks,
) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    def objective(wanted: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        params, rule = _filled(names, structure, tensors, places, wanted)

        def evaluate(x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor) -> dict[str, Tensor]:
            results = inner.run(params, Tasks(x, y, query_x, query_y), rule)
            assert isinstance(results, Evaluation)
            refuse_structured(results)
            return {name: result[0] for name, result in _present(results).items()}

        results = vmapped(evaluate)(*tasks[:4])
        return results["query_losses"].mean(), results

    grads, results = torch.func.grad(objective, has_aux=True)([tensors[place] for place in places])
    sums = [tensor.sum() for tensor in (*grads, *(results[name] for name in _LOSSES))]
    return results, grads, torch.stack(sums).isfinite().all()


def _present(results: Evaluation) -> dict[str, Tensor]:
    pairs = zip(results._fields, results, strict=True)
    return {name: result for name, result in pairs if isinstance(result, Tensor)}


def _filled(
    names: Sequence[str],
    structure: Structure,
    tensors: Sequence[Tensor],
    places: Sequence[int],
    others: Sequence[Tensor],
) -> tuple[Params, Rule]:
    """Return parameters and a rule, with other tensors in some places."""
    every = list(tensors)
    for place, other in zip(places, others, strict=True):
        every[place] = other
    return dict(zip(names, every, strict=False)), structure.fill(every[len(names) :])


class _EvaluatedBatch(Function):
    """Results of a meta-batch.

    The backward pass of the mean query loss uses the gradient that was computed with the results.
    """

    @staticmethod
    def forward(ctx, again, outputs, grads, *wanted):
        ctx.set_materialize_grads(False)
        ctx.again, ctx.count = again, len(wanted)
        ctx.save_for_backward(*wanted, outputs[_QUERY_LOSSES], *grads)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        wanted, expected = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count]
        given = {i: cotangent for i, cotangent in enumerate(cotangents) if cotangent is not None}
        if not torch.is_grad_enabled() and list(given) == [_QUERY_LOSSES]:
            first, *others = given[_QUERY_LOSSES].tolist()
            if all(other == first for other in others):
                weight = first * (1 + len(others))
                return (
                    None,
                    None,
                    None,
                    *(gradient * weight for gradient in ctx.saved_tensors[ctx.count + 1 :]),
                )
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [t.view_as(t) if create_graph else fresh_leaf(t) for t in wanted]
            outputs = ctx.again(inputs)
            if not torch.allclose(outputs[_QUERY_LOSSES], expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise RuntimeError(
                    "MAML(..., compile): tasks are weighted differently or a gradient is differentiated again, for "
                    "which the meta-batch is computed again, but its losses are others now. Pass compile=False."
                )
            grads = torch.autograd.grad(
                [outputs[i] for i in given],
                inputs,
                list(given.values()),
                create_graph=create_graph,
                allow_unused=True,
            )
        return (None, None, None, *grads)
