"""A meta-batch and its gradient as one compiled graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metagrad._tree import Structure, dissect, is_differentiable
from metagrad.autograd.compiled import Compiled, CompileOptions, operand, pass_gate
from metagrad.autograd.kernels import checked_before, exchanged
from metagrad.autograd.recompute import vjp
from metagrad.meta.programs import Programs

if TYPE_CHECKING:
    from metagrad.meta.batching import Tasks
    from metagrad.meta.work import Work
    from metagrad.optim.rules import Params


class MetaBatch(NamedTuple):
    """A meta-batch as a function of a list of tensors.

    Attributes:
        work: What is done, but for the rule.
        structure: Where the tensors stand: parameters, tasks, hyper-parameters of the rule.
    """

    work: Work
    structure: Structure

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adapt and judge: support losses, steps used, query losses, predictions."""
        params, tasks, rule = self.structure.fill(tensors)
        inner = dataclasses.replace(self.work.inner, rule=rule)
        return list(self.work._replace(inner=inner).judge(params, tasks))


_QUERY_LOSSES = 2  # among the results


def _meta_batch(batch: MetaBatch, tensors: list[Tensor]) -> list[Tensor]:
    pass_gate()
    return batch(tensors)


def _meta_gradient(
    batch: MetaBatch, wanted: tuple[int, ...], tensors: list[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the gradient of the sum of the query losses, and all results, from one graph."""
    pass_gate()

    def total(*chosen: Tensor) -> tuple[Tensor, list[Tensor]]:
        results = batch(exchanged(tensors, wanted, chosen))
        return results[_QUERY_LOSSES].sum(), results

    numbers = tuple(range(len(wanted)))
    with torch.enable_grad():
        return torch.func.grad(total, numbers, has_aux=True)(*(tensors[index] for index in wanted))


def _meta_pull(
    batch: MetaBatch,
    wanted: tuple[int, ...],
    present: tuple[int, ...],
    tensors: list[Tensor],
    cotangents: list[Tensor],
) -> tuple[Tensor, ...]:
    """Pull any cotangents back, computing everything again."""
    pass_gate()

    def outputs(*chosen: Tensor) -> tuple[Tensor, ...]:
        results = batch(exchanged(tensors, wanted, chosen))
        return tuple(results[index] for index in present)

    with torch.enable_grad():
        return torch.func.vjp(outputs, *(tensors[index] for index in wanted))[1](tuple(cotangents))


class WholePrograms(Programs):
    """The compiled pieces of a MAML whose meta-batches are one graph each.

    Args:
        options: What ``compile=`` says.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__(options)
        self.meta_batch = Compiled(_meta_batch, options.options)
        self.meta_gradient = Compiled(_meta_gradient, options.options)
        self.meta_pull = Compiled(_meta_pull, options.options)

    def judge_all(self, work: Work, params: Params, tasks: Tasks) -> tuple[Tensor, ...]:
        """Return what :meth:`Work.judge` does, from one graph."""
        rule = self.rule(work.inner.rule, params, work.steps)
        tensors, structure = dissect((params, tasks, rule))
        inner = dataclasses.replace(work.inner, programs=None)
        batch = MetaBatch(work._replace(inner=inner), structure)
        if torch.is_grad_enabled():
            return _Whole.apply(self, batch, *tensors)  # type: ignore[return-value]
        operands = [operand(tensor) for tensor in tensors]
        return tuple(self.meta_batch(lambda: self.check(batch, tensors), batch, operands))


class _Whole(torch.autograd.Function):
    """A meta-batch whose gradient, that of the mean query loss, is computed along with it."""

    @staticmethod
    def forward(ctx, programs, batch, *tensors):
        ctx.set_materialize_grads(False)
        ctx.programs, ctx.batch = programs, batch
        ctx.wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[2:]) if need)
        operands = [operand(tensor) for tensor in tensors]
        grads, results = programs.meta_gradient(
            lambda: programs.check(batch, tensors), batch, ctx.wanted, operands
        )
        ctx.save_for_backward(*tensors, *grads)
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        needed = ctx.needs_input_grad[2:]
        tensors, grads = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return (None, None, *vjp(ctx.batch, tensors, needed, cotangents))
        present = tuple(i for i, c in enumerate(cotangents) if c is not None)
        if present == (_QUERY_LOSSES,) and _is_uniform(cotangents[_QUERY_LOSSES]):
            products = [gradient * cotangents[_QUERY_LOSSES][0] for gradient in grads]
        else:
            products = _pulled(ctx, tensors, needed, cotangents, present)
        found = dict(zip(ctx.wanted, products, strict=True))
        return (None, None, *(found.get(i) for i in range(len(needed))))


def _is_uniform(values: Tensor) -> bool:
    """Say whether the query losses of all tasks weigh alike, as in their mean."""
    return bool((values == values[0]).all())


def _pulled(ctx, tensors, needed, cotangents, present) -> Sequence[Tensor | None]:
    """Pull cotangents back that are not those of the mean query loss."""

    def compiled() -> Sequence[Tensor | None]:
        handed = [operand(tensor) for tensor in tensors], [operand(cotangents[i]) for i in present]
        return ctx.programs.meta_pull(checked_before, ctx.batch, ctx.wanted, present, *handed)

    def eager() -> Sequence[Tensor | None]:
        found = vjp(ctx.batch, tensors, needed, cotangents)
        return [found[i] for i in ctx.wanted]

    return ctx.programs.attempt(compiled, eager)
