"""Model-agnostic meta-learning (MAML)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.unrolling.compiled import Compile, Compiler, checked_compile
from metagrad.core._torch import averaging_wrapper
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.checks import check_choice, check_count, check_function, check_number, is_a
from metagrad.core.modules import check_substitutable, refuse_wrapped
from metagrad.core.reach import Place, placed
from metagrad.core.substitution import sole_use, tensor_places
from metagrad.core.tape import is_on_the_tape, is_transformed
from metagrad.core.tree import LossFn, Params
from metagrad.meta.algorithm import AdaptedModel, MetaOutput
from metagrad.meta.execution.executor import TaskExecutor
from metagrad.meta.execution.nonfinite import Nonfinite
from metagrad.meta.execution.tables import AdaptedTables, check_tables
from metagrad.meta.execution.vectorization import Vectorization
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop
from metagrad.meta.objective.norms import OF_STEPS, Norm, NormPass, Norms, PerStepNorms, check_norm
from metagrad.meta.objective.structured import Nested, restored
from metagrad.meta.objective.task_loss import TaskLoss, label_bounds
from metagrad.meta.objective.tasks import (
    BatchLike,
    ExamplesLike,
    Tasks,
    check_task_axis,
    read_batch,
    read_support,
)
from metagrad.meta.options import read_options
from metagrad.meta.selection import Adapt, select_parameters
from metagrad.optim.hyperparameters import hyperparameters_in, with_hyperparameters
from metagrad.optim.rules import Rule
from metagrad.optim.transforms.chain import check_rule


class MAML(nn.Module):
    r"""Model-agnostic meta-learning (MAML).

    MAML learns an initialization that adapts to a new task in a few gradient steps.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T}
            L_i^{\mathrm{query}}\bigl(U_i^{\mathrm{steps}}(\theta)\bigr), \qquad
        U_i(\phi) = \phi - \alpha \nabla L_i^{\mathrm{support}}(\phi)

    All tasks of a batch run together. The forward pass is vectorized over tasks with :func:`torch.vmap`, and one
    backward pass computes all gradients. Models that ``torch.vmap`` does not support run task by task, with one
    warning. Examples are LSTMs, running statistics, backward hooks, and a ``forward`` that changes buffers or
    attributes. Convolutions on a CPU also run task by task, because that is faster. To decide this, a new
    model is called up to three times on one task of the first batch.

    Every argument is also an attribute. An assignment takes effect at the next call.

    Args:
        model: Any ``nn.Module``. Its parameters with ``requires_grad=True`` are the meta-parameters. It is called as
            ``model(x)``, or as ``model(**x)`` if ``x`` is a dict, or ``model(*x)`` if ``x`` is a tuple or list. It
            may return a tensor, or a dict, tuple, list or dataclass of tensors.
        loss_fn: ``loss_fn(prediction, target) -> scalar``, for the examples of one task. If it is an ``nn.Module``,
            its parameters are meta-learned, but not adapted in the inner loop.
        inner: The functional optimizer of the inner steps. Hyperparameters that are ``nn.Parameter`` become
            parameters of this module (``inner_lr``) and are meta-learned.
        steps: The number of inner steps, 0 or more.
        adapt: The parameters that are adapted to a task. A string is the name of a parameter or module, or a pattern
            such as ``"head.*"`` or ``"!head.*"`` (all except the head). A module, a list of these, or a predicate
            ``(name, parameter) -> bool`` is also accepted. ``None`` means all parameters that require grad. Other
            parameters are meta-learned and shared by all tasks. The attribute is called ``adapted``.
        order: 2 differentiates through the inner gradients. 1 treats them as constants (first-order MAML), so shared
            parameters get only the gradient of the query loss at the adapted parameters.
        memory: The checkpointing policy of the inner loop, see :func:`metagrad.unroll`. A budget applies to the
            whole batch. If the graph of one step is too large, pass ``task_chunk=1`` and call
            :func:`metagrad.checkpoint` around the layers of the model.
        norm: The statistics of normalization layers with running statistics, such as batch normalization. All
            values except None allow vectorized tasks.

            - None: The modules decide.
            - ``"transductive"``: The statistics of the current set (the support or the query examples of a task),
              also in evaluation.
            - ``"support"``: The statistics of the support examples of the task, also for its query examples.
            - ``"running"``: The statistics of the current set in training, and running statistics in evaluation.
              They are updated once per pass, towards the mean over tasks.
            - ``"per_step"``: As ``"running"``, with separate running statistics, weights and biases for each inner
              step. They are in ``per_step_norms``. The weights and biases are meta-learned, but not adapted.
            - ``"per_step_transductive"``: The weights and biases of ``"per_step"``, with the statistics of the
              current set.
        compile: Whether to compile. Up to five small inner steps and the query loss are compiled as one function.
            Otherwise one inner step and the query loss are compiled, for any number of steps. A dict holds the
            arguments of ``torch.compile``. Models that cannot be compiled run eagerly, with one warning.
            Reasons are hooks, custom autograd Functions, running statistics, ``norm``, ``sparse``, and inputs
            or outputs that are not single tensors. The meta-gradient of large compiled steps cannot be
            differentiated again.
        **options: ``sparse``, ``task_chunk``, ``nonfinite``, ``truncate`` and ``tolerance``, see
            :class:`metagrad.meta.Options`. They are also attributes.

    Raises:
        ValueError: If an argument is out of range, or no parameter of the model requires grad. It is also raised if
            ``norm`` does not fit the model, or ``adapt`` or ``sparse`` has an unknown name.
        TypeError: If an argument has another type, or is unknown.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> maml = metagrad.MAML(model, torch.nn.functional.mse_loss,
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> task = metagrad.tasks.Sinusoid(shots=10, queries=10)
        >>> out = maml(task.sample(4, generator=torch.Generator().manual_seed(0)))
        >>> out.loss.backward()
        >>> out.support_losses.shape, out.query_outputs.shape, model.weight.grad.shape
        (torch.Size([4, 5]), torch.Size([4, 10, 1]), torch.Size([1, 1]))

    References:
        Finn, Abbeel, Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
        algorithm 1 and section 5.2 (first order).
    """

    sparse: Sequence[str]
    task_chunk: int | None
    nonfinite: Nonfinite
    truncate: int | None
    tolerance: float | None

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        adapt: Adapt = None,
        order: int = 2,
        memory: Memory = "full",
        norm: Norm | None = None,
        compile: Compile = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_arguments(model, steps, order, None)
        check_rule("MAML(...)", inner, "inner")
        for name, value in vars(read_options(type(self).__name__, options)).items():
            setattr(self, name, value)
        self.model = model
        self.loss_fn = loss_fn
        self.steps = steps
        self.adapted = adapt
        self.order = order
        self.memory: Memory = memory
        self.norm = norm
        self._compile = checked_compile("MAML(...)", compile)
        self._forget()
        self._own_parameters = dict(model.named_parameters())
        self.sparse = check_tables(model, self.sparse, inner, self._adapted_parameters())
        self.inner = inner
        self._check()

    def _forget(self) -> None:
        """Drop the decisions and compiled functions for the previous model and loss."""
        self._vectorization = Vectorization(self.task_chunk, type(self).__name__)
        self._compiler = None if self._compile is None else Compiler("MAML(..., compile)", self._compile)

    @property
    def inner(self) -> Rule:
        """The functional optimizer of the inner steps, with the learned hyperparameters of this module."""
        return self._learned.of(self)

    @inner.setter
    def inner(self, rule: Rule) -> None:
        check_rule("MAML(...)", rule, "inner")
        for name in self._learned.names if "_learned" in self.__dict__ else ():
            self._parameters.pop(name or "", None)
        self._learned = register_learned(self, rule)

    @property
    def norm(self) -> Norm | None:
        """The statistics of normalization layers."""
        return self._norm

    @norm.setter
    def norm(self, norm: Norm | None) -> None:
        check_norm(self.model, norm, self.steps, type(self).__name__)
        if norm not in OF_STEPS:
            self.per_step_norms: PerStepNorms | None = None
        elif getattr(self, "per_step_norms", None) is None:
            self.per_step_norms = PerStepNorms(self.model, self.steps)
        self._norm: Norm | None = norm

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute. The next call checks it."""
        self.__dict__["_is_checked"] = False
        # An adapted module is already registered as a part of the model.
        kept: Any = (value,) if name == "adapted" and isinstance(value, nn.Module) else value
        super().__setattr__(name, kept)
        if name in ("model", "loss_fn", "task_chunk") and "_vectorization" in self.__dict__:
            self._forget()

    def forward(self, batch: BatchLike, *, steps: int | None = None) -> MetaOutput:
        """Adapt to the support examples of every task, and evaluate on its query examples.

        The result is differentiable if grad mode is on. The inner steps also run under ``torch.no_grad()``.

        Args:
            batch: ``support`` and ``query`` with ``x`` and ``y``, each ``[tasks, examples, ...]``. These are
                attributes, keys of dicts, or pairs as in ``((xs, ys), (xq, yq))``. ``x`` and ``y`` may be dicts,
                tuples or nested containers of tensors ``[tasks, ...]``. Values in them that are not tensors are
                shared by all tasks.
            steps: The number of inner steps, if it differs from ``self.steps``.

        Raises:
            ValueError: If the batch is empty, its task axes differ, a label is not a class of the model, or
                ``sparse`` is used in a ``DistributedDataParallel``.
            TypeError: If the batch has another form, or the model returns an object of unknown type.
            RuntimeError: If it is called inside a ``torch.func`` transform other than reverse mode (``grad``,
                ``vjp``, ``jacrev``) with respect to all adapted parameters.
            FloatingPointError: If a loss, or a gradient in the backward pass, is NaN or Inf. The message names the
                task and the inner step. With ``nonfinite="skip"``, it is raised only if no task is finite.
        """
        if self.sparse and averaging_wrapper() is not None:
            raise ValueError(
                f"{type(self).__name__}(..., sparse): DistributedDataParallel averages dense gradients alone. Call "
                "the learner itself on batch.shard(), and metagrad.distributed.average_gradients after the backward "
                "pass, which sends the rows."
            )
        tasks = read_batch(batch)
        with sole_use(self.model):
            results, skipped, _ = self._executor(steps, tasks).run(tasks)
        assert isinstance(results, Evaluation)
        losses = _weighted(self._step_weights(results.losses.shape[1]), results)
        counted = losses[~skipped] if self.nonfinite == "skip" else losses
        return MetaOutput(
            counted.mean(),
            results.query_losses,
            restored(results.predictions),
            results.losses,
            results.used,
            skipped,
            self.norm,
        )

    def adapt(self, support: ExamplesLike, *, steps: int | None = None) -> AdaptedModel:
        """Adapt to the support examples of every task.

        Args:
            support: ``x`` and ``y``, each ``[tasks, shots, ...]``, in any form that :meth:`forward` accepts.
            steps: The number of inner steps, if it differs from ``self.steps``.

        Returns:
            The adapted model. Call it on inputs ``[tasks, n, ...]``.

        Raises:
            ValueError: As in :meth:`forward`.
            FloatingPointError: As in :meth:`forward`.
        """
        tasks = read_support(support)
        with sole_use(self.model):
            executor = self._executor(steps, tasks)
            results, skipped, chunk = executor.run(tasks)
        assert isinstance(results, Adaptation)
        params, losses, used, rows = results
        inner = executor.query_loop(tasks)
        if rows:
            predict = AdaptedTables(inner, used, rows, chunk).predict
        else:
            predict = functools.partial(inner.objective.predict, chunk=chunk)
        # Keep the tensors that the model has now. A ``functional_call`` around this call may have ended before the
        # adapted model is called.
        predict = functools.partial(_predicted, tensor_places(self.model), predict)
        return AdaptedModel(params, losses, used, skipped, predict, rows)

    def keeping(self, memory: Memory) -> MAML:
        """Return an uncompiled copy with the same modules and another checkpointing policy."""
        other = copy.copy(self)
        other.memory, other._compile = memory, None
        other._forget()
        return other

    def extra_repr(self) -> str:
        """Return the arguments that are not submodules."""
        return (
            f"steps={self.steps}, order={self.order}, memory={self.memory!r}, "
            f"inner={type(self.inner).__name__}, task_chunk={self.task_chunk}, norm={self.norm!r}"
        )

    def _executor(self, steps: int | None, tasks: Tasks) -> TaskExecutor:
        """Make an executor for a batch from the current values of the attributes."""
        count: int = check_count("MAML(batch, steps)", self.steps if steps is None else steps, 0)
        if not self._is_checked:
            self._check()
            self.__dict__["_is_checked"] = True
        check_task_axis(self.model, tasks)
        params = self._adapted_parameters()
        refuse_transforms(list(params.values()))
        if self.sparse:
            self.__dict__["sparse"] = check_tables(self.model, self.sparse, self.inner, params)
        inner = self._inner_loop(count, tasks)
        adapted = tuple(name for name in self.sparse if name in params)
        return TaskExecutor(inner, params, adapted, self.nonfinite, self._vectorization, type(self).__name__)

    def _inner_loop(self, steps: int, tasks: Tasks) -> InnerLoop:
        weights = self._step_weights(steps)
        norms = None if self.norm is None else NormPass(Norms(self.model, self.norm, self.per_step_norms))
        labels = label_bounds(self.loss_fn, *tasks.targets)
        return InnerLoop(
            TaskLoss(self.model, self.loss_fn, labels, norms=norms, tables=tuple(self.sparse)),
            self.inner,
            steps,
            self.order,
            self.memory,
            self.truncate,
            self.tolerance,
            self._compiler,
            None if type(self)._start is MAML._start else self._start,
            evaluates_each=weights is not None and any(map(_counts, weights[:-1])),
        )

    def _start(self, model: nn.Module, params: Params, tasks: Tasks, stacked: bool) -> Params:
        """Return the task-specific initial values of some parameters."""
        return {}

    def _step_weights(self, steps: int) -> Sequence[float | Tensor] | Tensor | None:
        """Return the weights of the query losses after each step, or None if only the last loss counts."""
        return None

    def _adapted_parameters(self) -> Params:
        """Return the current values of the adapted parameters."""
        params = self._trained()
        if not params:
            raise ValueError(
                "MAML(model, ...): no parameter of the model requires grad, so nothing can be adapted."
            )
        names: Iterable[str] = params
        if self.adapted is not None:
            own = {name: self._own_parameters.get(name, p) for name, p in params.items()}
            names = select_parameters(self.model, self.adapted, own)
        if self.per_step_norms is not None:
            names = self.per_step_norms.others(names)
        return {name: params[name] for name in names}

    def _trained(self) -> Params:
        """Return the current values of the parameters that require grad.

        The tensors of a ``functional_call`` need not require grad, so the flags of the parameters count.
        """
        current = dict(self.model.named_parameters())
        if all(is_a(p, nn.Parameter) for p in current.values()):
            self.__dict__["_own_parameters"] = current
        own = {name: self._own_parameters.get(name, p) for name, p in current.items()}
        return {name: p for name, p in current.items() if p.requires_grad or own[name].requires_grad}

    def _check(self) -> None:
        """Raise for attributes that are out of range or have another type."""
        check_function(f"{type(self).__name__}(model, loss_fn, ...)", "loss_fn", self.loss_fn)
        check_arguments(self.model, self.steps, self.order, self.task_chunk)
        checked_memory("MAML(...)", self.memory)
        check_count("MAML(..., truncate)", self.truncate, optional=True)
        check_number("MAML(..., tolerance)", self.tolerance, 0, optional=True)
        check_norm(self.model, self.norm, self.steps)
        check_choice("MAML(..., nonfinite)", self.nonfinite, Nonfinite)


def _weighted(weights: Sequence[float | Tensor] | Tensor | None, results: Evaluation) -> Tensor:
    """Return the weighted sum of the query losses of each task, ``[tasks]``."""
    if weights is None:
        return results.query_losses
    each = [*results.path.unbind(1), results.query_losses]
    terms = zip(list(weights)[-len(each) :], each, strict=True)
    # A loss with weight 0 was not computed.
    return torch.stack([weight * loss for weight, loss in terms if _counts(weight)]).sum(0)


def _counts(weight: float | Tensor) -> bool:
    return isinstance(weight, Tensor) or weight != 0


def _predicted(
    shared: list[tuple[Place, Tensor]],
    predict: Callable[[Params, Nested], Nested],
    params: Params,
    x: Nested,
) -> Nested:
    """Predict with the shared parameters and buffers that the model had during adaptation."""
    with placed(shared):
        return predict(params, x)


@dataclass(frozen=True)
class LearnedRule:
    """A functional optimizer whose learned hyperparameters are parameters of a module.

    A learned hyperparameter exists only as a parameter of the module. Replacing it there (``functional_call``,
    ``load_state_dict(assign=True)``, ``parametrize``, an assignment) also changes the optimizer.

    Attributes:
        template: The optimizer. Meta tensors take the place of the learned hyperparameters.
        names: The names of the parameters in the module, in the order of ``hyperparameters_in``. None for other
            tensors.
    """

    template: Rule
    names: tuple[str | None, ...]

    def of(self, module: nn.Module) -> Rule:
        """Return the optimizer with the current parameters of the module."""
        if not any(self.names):
            return self.template
        names = iter(self.names)

        def current(tensor: Tensor) -> Tensor:
            name = next(names)
            return tensor if name is None else getattr(module, name)

        return with_hyperparameters(self.template, current)


def register_learned(module: nn.Module, rule: Rule) -> LearnedRule:
    """Register the hyperparameters of an optimizer that are ``nn.Parameter`` in a module."""
    names: list[str | None] = []
    for path, tensor in hyperparameters_in(rule):
        name = None
        if isinstance(tensor, nn.Parameter):
            name = f"inner_{path.replace('.', '_')}"
            while name in names:
                name += "_"
            module.register_parameter(name, tensor)
        names.append(name)
    kept = iter(names)

    def emptied(tensor: Tensor) -> Tensor:
        return tensor if next(kept) is None else torch.empty_like(tensor, device="meta", requires_grad=False)

    return LearnedRule(with_hyperparameters(rule, emptied) if any(names) else rule, tuple(names))


def check_arguments(
    model: object, steps: int, order: int, task_chunk: int | None, name: str = "MAML"
) -> None:
    """Raise for arguments that are out of range or have another type."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}(model, ...): model must be a torch.nn.Module, got {type(model).__name__}.")
    refuse_wrapped(f"{name}(model, ...)", model)
    check_substitutable(f"{name}(model, ...)", model.modules())
    check_count("MAML(..., steps)", steps, 0)
    check_choice("MAML(..., order)", order, (1, 2))
    check_count(f"{name}(..., task_chunk)", task_chunk, optional=True)


def refuse_transforms(params: list[Tensor]) -> None:
    """Raise inside torch.func transforms where autograd cannot differentiate with respect to the parameters."""
    if is_transformed() and not is_on_the_tape(params):
        raise RuntimeError(
            "MAML(batch): of torch.func, reverse mode (grad, vjp, jacrev) with respect to all parameters that are "
            "adapted is taken, as in grad(lambda p: functional_call(maml, p, (batch,)).loss)(params). Instead of "
            "vmap, call it batch by batch; instead of jvp, or for a part of the parameters, differentiate "
            "maml(batch).loss by torch.autograd.grad."
        )
