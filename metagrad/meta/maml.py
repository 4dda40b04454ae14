"""Model-agnostic meta-learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metagrad._tree import tree_leaves, tree_structure, tree_unflatten
from metagrad.autograd.unroll import Memory
from metagrad.meta.batching import Batching, Tasks
from metagrad.meta.checks import (
    BatchLike,
    ExamplesLike,
    check_arguments,
    check_batch,
    check_steps,
    refuse_nonfinite,
)
from metagrad.meta.inner import InnerLoop, outer_phase, phase
from metagrad.meta.objective import Labels, LossFn, Objective
from metagrad.meta.result import Adapted, MAMLOutput
from metagrad.optim.rules import Params, Rule


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
        memory: What the inner loop keeps, see :func:`metagrad.unroll`.
        task_chunk: How many tasks run together; None means all, 1 is a loop.

    Raises:
        ValueError: ``steps``, ``order``, ``memory`` or ``task_chunk`` is out of range, or no parameter of
            the model requires grad.
        TypeError: ``model`` is not a module.

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
        memory: Memory = "full",
        task_chunk: int | None = None,
    ) -> None:
        super().__init__()
        check_arguments(model, steps, order, memory, task_chunk)
        self.model = model
        self.steps = steps
        self.inner = InnerLoop(inner, order, memory)
        self.objective = Objective(model, loss_fn)
        self.batching = Batching(task_chunk)
        for name, parameter in _learned(inner):
            self.register_parameter(name, parameter)

    def forward(self, batch: BatchLike, *, steps: int | None = None) -> MAMLOutput:
        """Adapt to every task's support examples and judge the result on its query examples.

        Differentiable where grad mode is on; under ``torch.no_grad()`` the tasks are adapted to all the same.

        Args:
            batch: ``support`` and ``query`` with ``x`` and ``y``, each ``[tasks, examples, ...]``.
            steps: Another number of inner steps than the one given at construction.

        Raises:
            ValueError: The batch is empty, its task axes differ, a label is not a class of the model, or
                ``steps`` is negative.
            FloatingPointError: A loss is NaN or infinite; the message names the task and the inner step.
        """
        steps = self._steps(steps)
        check_batch("MAML(batch)", {"support": batch.support, "query": batch.query})
        labels = self.objective.label_bounds(batch.support.y, batch.query.y)
        tasks = Tasks(batch.support.x, batch.support.y, batch.query.x, batch.query.y)
        with outer_phase():
            results, _ = self._over_tasks(self._judge, tasks, labels, steps)
        losses, query_losses, predictions = results
        refuse_nonfinite(losses, query_losses)
        return MAMLOutput(query_losses.mean(), losses, query_losses, predictions)

    def adapt(self, support: ExamplesLike, *, steps: int | None = None) -> Adapted:
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
        check_batch("MAML.adapt(support)", {"support": support})
        labels = self.objective.label_bounds(support.y)
        tasks = Tasks(support.x, support.y, None, None)
        with outer_phase():
            (params, losses), chunk = self._over_tasks(self._adapt, tasks, labels, steps)
        refuse_nonfinite(losses, None)
        predict = self.objective.predict_each if chunk == 1 else self.objective.predict_stacked
        return Adapted(params, losses, predict)

    def extra_repr(self) -> str:
        """Show what is not a submodule."""
        return (
            f"steps={self.steps}, order={self.inner.order}, memory={self.inner.memory!r}, "
            f"inner={type(self.inner.rule).__name__}, task_chunk={self.batching.task_chunk}"
        )

    def _steps(self, steps: int | None) -> int:
        if steps is None:
            return self.steps
        check_steps("MAML(batch, steps)", steps)
        return steps

    def _over_tasks(
        self, work: Work, tasks: Tasks, labels: Labels | None, steps: int
    ) -> tuple[tuple[Any, ...], int]:
        """Do some work on all tasks; return its results, and how many tasks were computed together."""
        params: Params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        device_type = next(iter(params.values())).device.type
        used = self.batching.chunk_size(self.model, tasks.support_x.shape[0], device_type)

        def compute(chunk: int) -> tuple[Any, ...]:
            nonlocal used
            used = chunk
            parts = tasks.each() if chunk == 1 else tasks.split(chunk)
            return _concatenated([work(params, part, labels, steps, chunk != 1) for part in parts])

        return self.batching.run(compute, used), used

    def _adapt(
        self, params: Params, tasks: Tasks, labels: Labels | None, steps: int, stacked: bool
    ) -> tuple[Params, Tensor]:
        """Return adapted parameters ``[tasks, ...]`` and support losses ``[tasks, steps]``."""
        adapted, losses = self._run(params, tasks, labels, steps, stacked)
        return (adapted if stacked else {name: p.unsqueeze(0) for name, p in adapted.items()}), losses

    def _judge(
        self, params: Params, tasks: Tasks, labels: Labels | None, steps: int, stacked: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return support losses ``[tasks, steps]``, query losses ``[tasks]`` and predictions ``[tasks, ...]``."""
        assert tasks.query_x is not None
        assert tasks.query_y is not None
        adapted, losses = self._run(params, tasks, labels, steps, stacked)
        loss = self.objective.stacked if stacked else self.objective.single
        with phase("query"):
            query_losses, predictions = loss(adapted, tasks.query_x, tasks.query_y, labels)
        if stacked:
            return losses, query_losses, predictions
        return losses, query_losses.unsqueeze(0), predictions.unsqueeze(0)

    def _run(
        self, params: Params, tasks: Tasks, labels: Labels | None, steps: int, stacked: bool
    ) -> tuple[Params, Tensor]:
        """Run the inner loop; return its parameters, and its losses ``[tasks, steps]``."""
        x, y = tasks.support_x, tasks.support_y
        if not stacked:
            adapted, losses = self.inner.run(self.objective.single, params, x, y, labels, steps)
            return adapted, losses.reshape(1, steps)
        start = {name: _repeated(p, x.shape[0]) for name, p in params.items()}
        adapted, losses = self.inner.run(self.objective.stacked, start, x, y, labels, steps)
        return adapted, losses.t()


Work = Callable[[Params, Tasks, "Labels | None", int, bool], tuple[Any, ...]]
"""Parameters, some tasks, label bounds, steps, and whether the tasks are stacked, to tensors ``[tasks, ...]``."""


def _concatenated(results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Join what parts of the tasks came to, tensor by tensor."""
    if len(results) == 1:
        return results[0]
    leaves = [tree_leaves(result) for result in results]
    return tree_unflatten(
        [torch.cat(column) for column in zip(*leaves, strict=True)], tree_structure(results[0])
    )


def _repeated(param: Tensor, num_tasks: int) -> Tensor:
    """Give every task the parameter, without a copy; to be differentiated with respect to in any grad mode."""
    if torch.is_grad_enabled():
        return param.expand(num_tasks, *param.shape)
    # A view made without grad mode says that it requires grad, but gradients pass it by.
    return param.detach().expand(num_tasks, *param.shape).requires_grad_()


def _learned(rule: Rule) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the hyper-parameters of a rule that are to be meta-learned, with names fit for a module."""
    for field in dataclasses.fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, field.name)
        for path, leaf in _leaves(f"inner_{field.name}", value):
            if isinstance(leaf, nn.Parameter):
                yield path.replace(".", "_"), leaf


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}_{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}_{index}", item)
    else:
        yield path, value
