"""What MAML compiles: one inner step, the query loss, or a whole meta-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad._tree import Structure, dissect, is_differentiable, tree_map
from metagrad.autograd.compiled import (
    Compiled,
    CompileOptions,
    UncompilableError,
    check_compilable,
    operand,
    pass_gate,
)
from metagrad.autograd.compiled_loop import Kernels, checked_before, held
from metagrad.autograd.recompute import vjp
from metagrad.meta.stacked import is_plain
from metagrad.optim.rules import Rule

if TYPE_CHECKING:
    from metagrad.meta.batching import Tasks
    from metagrad.meta.inner import Loss
    from metagrad.meta.objective import Labels
    from metagrad.meta.work import Work
    from metagrad.optim.rules import Params


def _query(loss: Loss, structure: Structure, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Judge adapted parameters."""
    pass_gate()
    params, x, y = structure.fill(tensors)
    return loss(params, x, y, None)


class MetaBatch(NamedTuple):
    """A meta-batch as a function of a list of tensors.

    Attributes:
        work: What is done; its rule is one of the kind, with hyper-parameters that are among the tensors.
        kind: The class of the rule.
        structure: Where the tensors stand: parameters, tasks, fields of the rule.
    """

    work: Work
    kind: type
    structure: Structure

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adapt and judge: support losses, steps used, query losses, predictions."""
        params, tasks, fields = self.structure.fill(tensors)
        inner = dataclasses.replace(self.work.inner, rule=self.kind(**fields))
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
        results = batch(_exchanged(tensors, wanted, chosen))
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
        results = batch(_exchanged(tensors, wanted, chosen))
        return tuple(results[index] for index in present)

    with torch.enable_grad():
        return torch.func.vjp(outputs, *(tensors[index] for index in wanted))[1](tuple(cotangents))


def _exchanged(tensors: Sequence[Tensor], places: Sequence[int], chosen: Sequence[Tensor]) -> list[Tensor]:
    result = list(tensors)
    for index, tensor in zip(places, chosen, strict=True):
        result[index] = tensor
    return result


class _Whole(torch.autograd.Function):
    """A meta-batch whose gradient, that of the mean query loss, is computed along with it."""

    @staticmethod
    def forward(ctx, programs, batch, eager, check, *tensors):
        ctx.set_materialize_grads(False)
        ctx.programs, ctx.batch, ctx.eager = programs, batch, eager
        ctx.wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[4:]) if need)
        operands = [operand(tensor) for tensor in tensors]
        grads, results = programs.meta_gradient(check, batch, ctx.wanted, operands)
        ctx.save_for_backward(*tensors, *grads)
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        needed = ctx.needs_input_grad[4:]
        tensors, grads = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return (None, None, None, None, *vjp(ctx.eager, tensors, needed, cotangents))
        present = tuple(i for i, c in enumerate(cotangents) if c is not None)
        if present == (_QUERY_LOSSES,) and bool((cotangents[2] == cotangents[2][0]).all()):
            products = [gradient * cotangents[2][0] for gradient in grads]
        else:
            products = ctx.programs.attempt(
                lambda: ctx.programs.meta_pull(
                    checked_before,
                    ctx.batch,
                    ctx.wanted,
                    present,
                    [operand(tensor) for tensor in tensors],
                    [operand(cotangents[i]) for i in present],
                ),
                lambda: [g for g in vjp(ctx.eager, tensors, needed, cotangents) if g is not None],
            )
        found = dict(zip(ctx.wanted, products, strict=True))
        return (None, None, None, None, *(found.get(i) for i in range(len(needed))))


class Programs(Kernels):
    """The compiled pieces of a MAML.

    Args:
        options: What ``compile=`` says.

    Attributes:
        prediction: The shape of the predictions for the support examples of a task, once known.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__("MAML(..., compile)", options.options)
        self.is_whole = options.whole
        self.query = Compiled(_query, options.options)
        self.meta_batch = Compiled(_meta_batch, options.options)
        self.meta_gradient = Compiled(_meta_gradient, options.options)
        self.meta_pull = Compiled(_meta_pull, options.options)
        self.prediction: tuple[int, ...] | None = None

    def judge(
        self, loss: Loss, params: Params, x: Tensor, y: Tensor, labels: Labels | None
    ) -> tuple[Tensor, Tensor]:
        """Return losses and predictions of adapted parameters."""
        tensors, structure = dissect((params, x, y))

        def eager(tensors: list[Tensor]) -> list[Tensor]:
            params, x, y = structure.fill(tensors)
            return list(loss(params, x, y, labels))

        def run(tensors: list[Tensor]) -> list[Tensor]:
            return list(self.query(lambda: self._check(eager, tensors), loss, structure, tensors))

        if torch.is_grad_enabled():
            return held(run, eager, tensors)  # type: ignore[return-value]
        return run([operand(tensor) for tensor in tensors])  # type: ignore[return-value]

    def whole_batch(self, work: Work, params: Params, tasks: Tasks) -> tuple[Tensor, ...]:
        """Return what :meth:`Work.judge` does, from one graph."""
        rule = work.inner.rule
        tensors, structure = dissect((params, tasks, hyperparameters(rule, params)))
        inner = dataclasses.replace(work.inner, programs=None)
        eager = MetaBatch(work._replace(inner=inner), type(rule), structure)
        # Labels are checked outside: their bounds would be constants of the graph.
        batch = eager._replace(work=eager.work._replace(labels=None))

        def check() -> None:
            self._check(eager, tensors)

        if torch.is_grad_enabled():
            return _Whole.apply(self, batch, eager, check, *tensors)  # type: ignore[return-value]
        return tuple(self.meta_batch(check, batch, [operand(tensor) for tensor in tensors]))

    def _check(self, eager: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor]) -> None:
        handed = [operand(tensor, True) for tensor in tensors]
        check_compilable(lambda *tensors: tuple(eager(list(tensors))), tuple(handed), self.call)


def hyperparameters(rule: Rule, params: Params) -> dict[str, Any]:
    """Return the fields of a rule with every number as a 0-d tensor, so that another one needs no other code.

    The number 0 stays what it is: a rule leaves out the momentum or the decay that is not used.
    """
    like = next(iter(params.values()))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def made(leaf: object) -> object:
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and leaf != 0:
            return torch.full((), leaf, dtype=dtype, device=like.device)
        return leaf

    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
    return tree_map(made, {name: dict(v) if isinstance(v, Mapping) else v for name, v in fields.items()})


def refuse_model(model: nn.Module, rows: Params) -> None:
    """Raise for what torch.compile would pass over in silence, or cannot take."""
    if rows:
        raise UncompilableError(f"only the rows of {', '.join(map(repr, rows))} are there, as sparse= says")
    for name, module in model.named_modules():
        if not is_plain(module):
            raise UncompilableError(
                f"{type(module).__name__} ({name or 'the model itself'}) has hooks or a forward of its own"
            )
