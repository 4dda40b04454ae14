"""Model-agnostic meta-learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metagrad.autograd.blocks.chain import chain
from metagrad.autograd.compile.compiled import Compile, CompileOptions, checked_compile
from metagrad.core.budget import Memory
from metagrad.meta.batching import Batching, Tasks
from metagrad.meta.checks import (
    BatchLike,
    ExamplesLike,
    check_adapted,
    check_arguments,
    check_ends,
    check_memory,
    check_steps,
    read_batch,
    read_support,
    refuse_transforms,
)
from metagrad.meta.curvature import check_layers
from metagrad.meta.finite import (
    Buffers,
    Nonfinite,
    Results,
    check_nonfinite,
    refuse_nonfinite,
    without_nonfinite,
)
from metagrad.meta.guard import Guard
from metagrad.meta.inner import InnerLoop, outer_phase
from metagrad.meta.learned import register_learned
from metagrad.meta.objective import Labels, LossFn, Objective
from metagrad.meta.programs import Programs
from metagrad.meta.reader import Reader
from metagrad.meta.result import Adapted, MAMLOutput
from metagrad.meta.structured import concatenated, restored
from metagrad.meta.tables import check_tables, find_rows
from metagrad.meta.whole import WholePrograms
from metagrad.meta.work import Work
from metagrad.optim.rules import Params, Rule, with_batch_ndim


class MAML(nn.Module):
    r"""Model-agnostic meta-learning: learn parameters from which a few gradient steps lead far.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T}
            L_i^{\mathrm{query}}\bigl(U_i^{\mathrm{steps}}(\theta)\bigr), \qquad
        U_i(\phi) = \phi - \alpha \nabla L_i^{\mathrm{support}}(\phi)

    The tasks of a batch run together: the forward is vmapped over stacked parameters, and one ordinary
    backward takes all their gradients. Where that cannot be done (LSTM, running statistics, backward hooks, buffers
    and attributes that forward changes, what torch.vmap computes otherwise than a loop) the tasks run one by one,
    with one warning that says why; where it would be slower (convolutions on CPU) they do so too. To find out, two
    tasks of the first batch are computed both ways, and again when modules, hooks or flags of the model have changed.

    The arguments are attributes, which may be assigned: what a call does is what they say then.

    Args:
        model: Any module; its parameters that require grad are the meta-parameters and are adapted. Called as
            ``model(x)``; as ``model(**x)`` where ``x`` is a dict, as ``model(*x)`` where it is a tuple or a list. It
            may return a dict (of any subclass), a tuple, a list or a dataclass, with tensors in it.
        loss_fn: ``loss_fn(prediction, target)`` for the examples of one task, a scalar; ``prediction`` is what the
            model returned. The parameters of one that is a module are meta-learned, but not adapted.
        inner: The rule of the inner steps. Its hyper-parameters that are :class:`torch.nn.Parameter` become
            parameters of this module (``inner_lr``), and are meta-learned; the rule reads them there at each call.
        steps: The number of inner steps, 0 or more.
        order: 2 differentiates through the inner gradients; 1 takes them as constants (first-order MAML).
        memory: What the inner loop keeps, see :func:`metagrad.unroll`. A budget is that of the whole batch.
            ``"block"`` keeps a state for each step and takes its derivative block by block, as
            :func:`metagrad.autograd.block_gradient` does: for models that are chains of blocks
            (``nn.Sequential``) and too large for the graph of one step; the tasks run one by one.
        truncate: Differentiate through the last so many inner steps alone, and take those before as first-order
            MAML takes all of them; None differentiates through all.
        tolerance: A task takes no further step once the norm of its inner gradient (over all parameters) is at most
            this; ``out.used`` counts the steps that each task took.
        task_chunk: How many tasks run together; None means all, 1 is a loop.
        sparse: The names of embedding tables ``[V, D]`` of which each task adapts the rows that its examples look
            up: the same result at a cost that does not depend on V, and the gradient of the table is a
            :class:`metagrad.sparse.RowSparse`. The rule must treat rows alike and one by one, as all elementwise
            ones do. The model runs once more on each batch, to find the rows.
        nonfinite: What is done about a loss or a meta-gradient that is NaN or infinite: ``"raise"`` an error that
            names the task and the inner step, or ``"skip"``, which leaves such tasks out of the loss and its
            gradient, computing the others once more, and marks them in ``out.skipped``. A gradient that overflows
            only because the loss was scaled passes: that is for the ``GradScaler`` to see.
        compile: Whether to compile one inner step, its vector-Jacobian product and the query loss, which serve any
            number of steps, seeds, data and values of the hyper-parameters; ``"whole"`` makes one graph of a
            meta-batch, for few steps; a dict holds options of ``torch.compile``, see :func:`metagrad.unroll`. What
            cannot be compiled (hooks, dropout, running statistics, control flow that depends on data, ``sparse``,
            inputs or outputs that are not single tensors, a loss that reads a learned tensor) runs
            as it is, with one warning that says why.

    Raises:
        ValueError: ``steps``, ``order``, ``memory``, ``truncate``, ``tolerance``, ``task_chunk`` or ``compile`` is
            out of range; no parameter of the model requires grad; a name in ``sparse`` is not a table that is
            adapted, or ``inner`` has a value for each of its rows.
        TypeError: ``model`` is not a module, or ``sparse`` is a string.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> maml = metagrad.MAML(model, torch.nn.functional.mse_loss,
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> task = metagrad.tasks.Sinusoid(shots=10, queries=10)
        >>> out = maml(task.sample(4, generator=torch.Generator().manual_seed(0)))
        >>> out.loss.backward()
        >>> out.losses.shape, out.query_logits.shape, model.weight.grad.shape
        (torch.Size([4, 5]), torch.Size([4, 10, 1]), torch.Size([1, 1]))

    References:
        Finn, Abbeel, Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
        algorithm 1 and section 5.2 (first order).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        order: int = 2,
        memory: Memory | Literal["block"] = "full",
        truncate: int | None = None,
        tolerance: float | None = None,
        task_chunk: int | None = None,
        sparse: Sequence[str] = (),
        nonfinite: Nonfinite = "raise",
        compile: Compile = False,
    ) -> None:
        super().__init__()
        check_arguments(model, steps, order, task_chunk)
        self.model = model
        self.loss_fn = loss_fn
        self.steps = steps
        self.order = order
        self.memory: Memory | Literal["block"] = memory
        self.truncate = truncate
        self.tolerance = tolerance
        self.task_chunk = task_chunk
        self.nonfinite: Nonfinite = nonfinite
        self._compile = checked_compile("MAML(...)", compile)
        self._remembered = _Remembered(model, loss_fn, task_chunk, self._compile)
        self.sparse = check_tables(model, sparse, inner)
        self._check()
        check_adapted(self._remembered.adapted())
        if memory == "block":
            chain(model, loss_fn)
        self.inner = inner

    @property
    def inner(self) -> Rule:
        """The rule of the inner steps; what is learned of it are the parameters that this module has now."""
        return self._learned.of(self)

    @inner.setter
    def inner(self, rule: Rule) -> None:
        check_layers(self.model, rule, is_block=self.memory == "block")
        for name in self._learned.names if "_learned" in self.__dict__ else ():
            self._parameters.pop(name or "", None)
        self._learned = register_learned(self, rule)

    def forward(
        self, batch: BatchLike | Sequence[Any] | Mapping[str, Any], *, steps: int | None = None
    ) -> MAMLOutput:
        """Adapt to every task's support examples and judge the result on its query examples.

        Differentiable where grad mode is on; under ``torch.no_grad()`` the tasks are adapted to all the same.

        Args:
            batch: ``support`` and ``query`` with ``x`` and ``y``, each ``[tasks, examples, ...]``: attributes, the
                keys of dicts, or pairs, as in ``((xs, ys), (xq, yq))``. Of an ``x`` or ``y`` that is a dict, a tuple
                or a nesting of such, every tensor is ``[tasks, ...]``; what is no tensor is the same for all tasks.
            steps: Another number of inner steps than the one given at construction.

        Raises:
            ValueError: The batch is empty, its task axes differ, a label is not a class of the model, or
                ``steps`` is negative.
            TypeError: The batch has another form, or what the model returns holds an object that is none of those.
            RuntimeError: It is called inside a ``torch.func`` transform other than reverse mode (``grad``, ``vjp``,
                ``jacrev``) with respect to all parameters that are adapted.
            FloatingPointError: A loss is NaN or infinite, or in the backward pass the gradient of a task; the
                message names the task and the inner step. With ``nonfinite="skip"``: of every task.
        """
        steps = self._steps(steps)
        support, query = read_batch(batch)
        labels = self._objective.label_bounds(support.y, query.y)
        tasks = Tasks(*support, *query, {})
        with outer_phase():
            results, skipped = self._over_tasks(Work.judge, _losses_judged, tasks, labels, steps)
        losses, used, query_losses, predictions, _ = results
        counted = query_losses[~skipped] if self.nonfinite == "skip" else query_losses
        return MAMLOutput(counted.mean(), losses, query_losses, restored(predictions), used, skipped)

    def adapt(
        self, support: ExamplesLike | Sequence[Any] | Mapping[str, Any], *, steps: int | None = None
    ) -> Adapted:
        """Adapt to every task's support examples.

        Args:
            support: ``x`` and ``y``, each ``[tasks, shots, ...]``, in the forms that :meth:`forward` takes.
            steps: Another number of inner steps than the one given at construction.

        Returns:
            The adapted model, to be called on inputs ``[tasks, n, ...]``.

        Raises:
            ValueError: As :meth:`forward`.
            FloatingPointError: As :meth:`forward`.
        """
        steps = self._steps(steps)
        examples = read_support(support)
        objective = self._objective
        labels = objective.label_bounds(examples.y)
        tasks = Tasks(*examples, None, None, {})
        with outer_phase():
            results, skipped = self._over_tasks(Work.adapt, _losses_adapted, tasks, labels, steps)
        params, losses, used, rows, chunk = results
        if self.sparse:
            reader = Reader(objective, self._loop(self.inner), steps, used, rows, chunk)
            return Adapted(params, losses, used, skipped, reader.predict, rows)
        predict = objective.predict_each if chunk == 1 else objective.predict_stacked
        return Adapted(params, losses, used, skipped, predict)

    def extra_repr(self) -> str:
        """Show what is not a submodule."""
        return (
            f"steps={self.steps}, order={self.order}, memory={self.memory!r}, "
            f"inner={type(self.inner).__name__}, task_chunk={self.task_chunk}"
        )

    @property
    def _objective(self) -> Objective:
        return Objective(self.model, self.loss_fn)

    def _loop(self, rule: Rule) -> InnerLoop:
        """Return the inner loop, as the attributes of this module say at present."""
        is_block = self.memory == "block"
        return InnerLoop(
            rule,
            self.order,
            "full" if self.memory == "block" else self.memory,
            self.truncate,
            self.tolerance,
            chain=chain(self.model, self.loss_fn) if is_block else None,
            programs=self._remembered.programs,
            loss_fn=self.loss_fn,
            model=self.model,
        )

    def _check(self) -> None:
        """Refuse attributes that mean nothing, at construction and where they have been assigned since."""
        check_arguments(self.model, self.steps, self.order, self.task_chunk)
        check_memory(self.memory, self._compile, self.sparse)
        check_ends(self.truncate, self.tolerance)
        check_nonfinite(self.nonfinite)
        if not self._remembered.belongs_to(self.model, self.loss_fn, self.task_chunk):
            self._remembered = _Remembered(self.model, self.loss_fn, self.task_chunk, self._compile)

    @property
    def _modules_read(self) -> list[nn.Module]:
        """The model, and beside it the loss, if it is a module: its parameters are not adapted, but learned."""
        return [part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module)]

    def _steps(self, steps: int | None) -> int:
        if steps is None:
            return self.steps
        check_steps("MAML(batch, steps)", steps)
        return steps

    def _over_tasks(
        self,
        do: Callable[..., tuple[Any, ...]],
        losses_in: Callable[[Results], Tensor],
        tasks: Tasks,
        labels: Labels | None,
        steps: int,
    ) -> tuple[Results, Tensor]:
        """Do a method of :class:`Work` on all tasks, and see to what is not finite.

        Returns:
            Its results with how many tasks ran together, and which tasks were left out.
        """
        self._check()
        if self.memory == "block" and not all(part is None or isinstance(part, Tensor) for part in tasks[:4]):
            raise ValueError('MAML(batch): with memory="block", inputs and targets are single tensors.')
        params = self._remembered.adapted()
        skipped = torch.zeros(tasks.count, dtype=torch.bool, device=tasks.device)

        check_adapted(params)
        refuse_transforms(list(params.values()))
        rule = self.inner
        if self.sparse:
            self.sparse = check_tables(self.model, self.sparse, rule)

        def compute(params: Params, rule: Rule, tasks: Tasks) -> Results:
            return self._together(do, self._loop(rule), params, tasks, labels, steps)

        def again(params: Params, rule: Rule, tasks: Tasks) -> Results:
            buffers = Buffers(self.model)
            inner = dataclasses.replace(self._loop(rule), memory="full", programs=None)
            results = self._together(do, inner, params, tasks, labels, steps)
            buffers.restore()
            return results

        def guarded(tasks: Tasks, numbers: range | Tensor) -> Results:
            dropped = skipped if self.nonfinite == "skip" else None
            return Guard(compute, again, numbers, dropped, self._modules_read)(params, rule, tasks)

        if self.nonfinite == "skip":
            results, kept = without_nonfinite(guarded, losses_in, tasks, self.model, steps)
            return results, skipped.fill_(True).index_fill_(0, kept, False)
        results = guarded(tasks, range(len(skipped)))
        refuse_nonfinite(losses_in(results), steps)
        return results, skipped

    def _together(
        self,
        do: Callable[..., tuple[Any, ...]],
        inner: InnerLoop,
        params: Params,
        tasks: Tasks,
        labels: Labels | None,
        steps: int,
    ) -> Results:
        """Do a method of :class:`Work`; return its results, and how many tasks ran together."""
        batching = self._remembered.batching
        chunk = 1
        if self.memory != "block":
            chunk = batching.chunk_size(self._objective, params, tasks, labels, self.sparse, inner.order)

        def compute(chunk: int) -> Results:
            located = tasks._replace(rows=find_rows(self.model, self.sparse, tasks.inputs, chunk))
            parts = list(located.each() if chunk == 1 else located.split(chunk))
            shared = inner.sharing(len(parts), tasks.device)
            if chunk != 1:
                shared = dataclasses.replace(shared, rule=with_batch_ndim(shared.rule, 1))
            work = Work(self._objective, shared, labels, steps, stacked=chunk != 1)
            if shared.programs is not None:
                return (*concatenated([work.compiled(do, params, part) for part in parts]), chunk)
            return (*concatenated([do(work, params, part) for part in parts]), chunk)

        return batching.run(self.model, compute, chunk)


class _Remembered:
    """What is found out about a model and its loss, and need not be found out again."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, task_chunk: int | None, options: CompileOptions | None
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.parameters = dict(model.named_parameters())
        self.batching = Batching(task_chunk)
        self.programs = None if options is None else (WholePrograms if options.whole else Programs)(options)

    def adapted(self) -> Params:
        """Return the parameters of the model that are adapted, with the values that they have now.

        In a ``functional_call`` tensors are in their places that need not require grad: the parameters say.
        """
        current = dict(self.model.named_parameters())
        if all(isinstance(p, nn.Parameter) for p in current.values()):
            self.parameters = current
        own = {name: self.parameters.get(name, p) for name, p in current.items()}
        return {name: p for name, p in current.items() if p.requires_grad or own[name].requires_grad}

    def belongs_to(self, model: nn.Module, loss_fn: LossFn, task_chunk: int | None) -> bool:
        """Say whether it is of these."""
        return self.model is model and self.loss_fn is loss_fn and self.batching.task_chunk == task_chunk


def _losses_judged(results: Results) -> Tensor:
    losses, _, query_losses, *_ = results
    return torch.cat([losses, query_losses.unsqueeze(1)], dim=1)


def _losses_adapted(results: Results) -> Tensor:
    return results[1]
