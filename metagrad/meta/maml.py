"""Model-agnostic meta-learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metagrad.autograd.budget import Memory
from metagrad.autograd.chain import chain
from metagrad.autograd.compiled import Compile
from metagrad.meta.batching import Batching, Tasks
from metagrad.meta.checks import (
    BatchLike,
    ExamplesLike,
    check_arguments,
    check_compile,
    check_ends,
    check_steps,
    read_batch,
    read_support,
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
from metagrad.meta.objective import Labels, LossFn, Objective
from metagrad.meta.reader import Reader
from metagrad.meta.result import Adapted, MAMLOutput
from metagrad.meta.structured import concatenated, restored
from metagrad.meta.tables import check_tables, find_rows
from metagrad.meta.work import Work
from metagrad.optim.rules import Params, Rule, with_batch_ndim
from metagrad.optim.rules.walk import hyperparameters_in


class MAML(nn.Module):
    r"""Model-agnostic meta-learning: learn parameters from which a few gradient steps lead far.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T}
            L_i^{\mathrm{query}}\bigl(U_i^{\mathrm{steps}}(\theta)\bigr), \qquad
        U_i(\phi) = \phi - \alpha \nabla L_i^{\mathrm{support}}(\phi)

    The tasks of a batch run together: the forward is vmapped over stacked parameters, and one ordinary
    backward takes all their gradients. Where that cannot be done (LSTM, running statistics) the tasks run one
    by one, with one warning that says why; where it would be slower (convolutions on CPU) they do so too.

    Args:
        model: Any module; its parameters that require grad are the meta-parameters and are adapted.
        loss_fn: ``loss_fn(prediction, target)`` for the examples of one task, a scalar.
        inner: The rule of the inner steps. Its hyper-parameters that are :class:`torch.nn.Parameter` become
            parameters of this module, and are meta-learned.
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
            up, by :func:`metagrad.sparse.swap_tables`: the same result at a cost that does not know V, and the
            gradient of the table is a :class:`metagrad.sparse.RowSparse`. The rule must treat rows alike and one
            by one, as all elementwise ones do. The model runs once more on each batch, to find the rows.
        nonfinite: What is done about a loss or a meta-gradient that is NaN or infinite: ``"raise"`` an error that
            names the task and the inner step, or ``"skip"``, which leaves such tasks out of the loss and its
            gradient, computing the others once more, and marks them in ``out.skipped``. A gradient that overflows
            only because the loss was scaled passes: that is for the ``GradScaler`` to see.
        compile: Whether to compile one inner step, its vector-Jacobian product and the query loss, which serve any
            number of steps, seeds, data and values of the hyper-parameters; ``"whole"`` makes one graph of a
            meta-batch, for few steps; a dict holds options of ``torch.compile``, see :func:`metagrad.unroll`. What
            cannot be compiled (hooks, dropout, running statistics, control flow that depends on data, ``sparse``)
            runs as it is, with one warning that says why.

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
        is_block = memory == "block"
        kept: Memory = "full" if memory == "block" else memory
        check_arguments(model, steps, order, kept, task_chunk)
        programs = check_compile(compile, memory)
        check_ends(truncate, tolerance)
        check_layers(model, inner, is_block=is_block)
        check_nonfinite(nonfinite)
        self.nonfinite: Nonfinite = nonfinite
        self.sparse = check_tables(model, sparse, inner)
        self.model = model
        self.steps = steps
        if is_block and sparse:
            raise ValueError('MAML(..., memory="block"): tables cannot be replaced by rows within a block.')
        self.inner = InnerLoop(
            inner,
            order,
            kept,
            truncate,
            tolerance,
            chain=chain(model, loss_fn) if is_block else None,
            programs=programs,
            loss_fn=loss_fn,
            model=model,
        )
        self.objective = Objective(model, loss_fn)
        self.batching = Batching(1 if is_block else task_chunk)
        for name, parameter in _learned(inner):
            self.register_parameter(name, parameter)

    def forward(
        self, batch: BatchLike | Sequence[Any] | Mapping[str, Any], *, steps: int | None = None
    ) -> MAMLOutput:
        """Adapt to every task's support examples and judge the result on its query examples.

        Differentiable where grad mode is on; under ``torch.no_grad()`` the tasks are adapted to all the same.

        Args:
            batch: ``support`` and ``query`` with ``x`` and ``y``, each ``[tasks, examples, ...]``.
            steps: Another number of inner steps than the one given at construction.

        Raises:
            ValueError: The batch is empty, its task axes differ, a label is not a class of the model, or
                ``steps`` is negative.
            FloatingPointError: A loss is NaN or infinite, or in the backward pass the gradient of a task; the
                message names the task and the inner step. With ``nonfinite="skip"``: of every task.
        """
        steps = self._steps(steps)
        support, query = read_batch(batch)
        labels = self.objective.label_bounds(support.y, query.y)
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
            support: ``x`` and ``y``, each ``[tasks, shots, ...]``.
            steps: Another number of inner steps than the one given at construction.

        Returns:
            The adapted model, to be called on inputs ``[tasks, n, ...]``.

        Raises:
            ValueError: As :meth:`forward`.
            FloatingPointError: As :meth:`forward`.
        """
        steps = self._steps(steps)
        examples = read_support(support)
        labels = self.objective.label_bounds(examples.y)
        tasks = Tasks(*examples, None, None, {})
        with outer_phase():
            results, skipped = self._over_tasks(Work.adapt, _losses_adapted, tasks, labels, steps)
        params, losses, used, rows, chunk = results
        if self.sparse:
            reader = Reader(self.objective, self.inner, steps, used, rows, chunk)
            return Adapted(params, losses, used, skipped, reader.predict, rows)
        predict = self.objective.predict_each if chunk == 1 else self.objective.predict_stacked
        return Adapted(params, losses, used, skipped, predict)

    def extra_repr(self) -> str:
        """Show what is not a submodule."""
        return (
            f"steps={self.steps}, order={self.inner.order}, memory={self.inner.kept!r}, "
            f"inner={type(self.inner.rule).__name__}, task_chunk={self.batching.task_chunk}"
        )

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
        params: Params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        skipped = torch.zeros(tasks.count, dtype=torch.bool, device=tasks.device)

        def compute(params: Params, rule: Rule, tasks: Tasks) -> Results:
            inner = dataclasses.replace(self.inner, rule=rule)
            return self._together(do, inner, params, tasks, labels, steps)

        def again(params: Params, rule: Rule, tasks: Tasks) -> Results:
            buffers = Buffers(self.model)
            inner = dataclasses.replace(self.inner, rule=rule, memory="full", programs=None)
            results = self._together(do, inner, params, tasks, labels, steps)
            buffers.restore()
            return results

        def guarded(tasks: Tasks, numbers: range | Tensor) -> Results:
            dropped = skipped if self.nonfinite == "skip" else None
            return Guard(compute, again, numbers, dropped)(params, self.inner.rule, tasks)

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
        device_type = next(iter(params.values())).device.type
        chunk = self.batching.chunk_size(self.model, tasks.count, device_type, self.sparse)

        def compute(chunk: int) -> Results:
            located = tasks._replace(rows=find_rows(self.model, self.sparse, tasks.inputs, chunk))
            parts = list(located.each() if chunk == 1 else located.split(chunk))
            shared = inner.sharing(len(parts), tasks.device)
            if chunk != 1:
                shared = dataclasses.replace(shared, rule=with_batch_ndim(shared.rule, 1))
            work = Work(self.objective, shared, labels, steps, stacked=chunk != 1)
            if shared.programs is not None:
                return (*concatenated([work.compiled(do, params, part) for part in parts]), chunk)
            return (*concatenated([do(work, params, part) for part in parts]), chunk)

        return self.batching.run(compute, chunk)


def _losses_judged(results: Results) -> Tensor:
    losses, _, query_losses, *_ = results
    return torch.cat([losses, query_losses.unsqueeze(1)], dim=1)


def _losses_adapted(results: Results) -> Tensor:
    return results[1]


def _learned(rule: Rule) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the hyper-parameters of a rule that are to be meta-learned, with names fit for a module."""
    for path, value in hyperparameters_in(rule):
        if isinstance(value, nn.Parameter):
            yield f"inner_{path.replace('.', '_')}", value
