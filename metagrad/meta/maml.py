"""Model-agnostic meta-learning."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.unrolling.compiled import Compile, Compiler, checked_compile
from metagrad.core._torch import averaging_wrapper
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.checks import check_function, is_a, is_integer
from metagrad.core.modules import check_substitutable, refuse_wrapped
from metagrad.core.reach import Place, placed
from metagrad.core.structured import Nested, restored
from metagrad.core.substitution import sole_use, tensor_places
from metagrad.core.tape import is_on_the_tape, is_transformed
from metagrad.core.tree import LossFn, Params
from metagrad.meta.algorithm import AdaptedModel, MetaOutput
from metagrad.meta.execution.executor import TaskExecutor
from metagrad.meta.execution.nonfinite import Nonfinite, check_nonfinite
from metagrad.meta.execution.stacking import Stacking
from metagrad.meta.execution.tables import AdaptedTables, check_tables
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop
from metagrad.meta.objective.norms import OF_STEPS, Norm, NormPass, Norms, PerStepNorms, check_norm
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
    r"""Model-agnostic meta-learning: learn an initialization that adapts to a task in a few gradient steps.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T}
            L_i^{\mathrm{query}}\bigl(U_i^{\mathrm{steps}}(\theta)\bigr), \qquad
        U_i(\phi) = \phi - \alpha \nabla L_i^{\mathrm{support}}(\phi)

    The tasks of a batch run together: the forward is vmapped over stacked parameters, and one ordinary
    backward takes all their gradients. If that is not possible (LSTM, running statistics, backward hooks, buffers and
    attributes that ``forward`` changes, operations that :func:`torch.vmap` does not take or computes differently from
    a loop), the tasks run one by one, with one warning that says why. If it would be slower (convolutions on CPU),
    they run one by one, too. A new model is called twice on one task, to see whether it changes from call to call.

    The arguments are attributes, which may be assigned; the next call uses the new values.

    Args:
        model: Any module; its parameters that require grad are the meta-parameters. Called as ``model(x)``; as
            ``model(**x)`` where ``x`` is a dict, as ``model(*x)`` where it is a tuple or a list. It may return a dict
            (of any subclass), a tuple, a list or a dataclass, with tensors in it.
        loss_fn: ``loss_fn(prediction, target)`` for the examples of one task, a scalar; ``prediction`` is what the
            model returned. The parameters of one that is a module are meta-learned, but not adapted.
        inner: The rule of the inner steps. Its hyper-parameters that are :class:`torch.nn.Parameter` become
            parameters of this module (``inner_lr``), and are meta-learned; the rule reads them there at each call.
        steps: The number of inner steps, 0 or more.
        adapt: Which parameters adapt to a task: a name (of a parameter, or of a module for all below it), a pattern
            such as ``"head.*"`` or ``"!head.*"`` (all but those), a module of the model, a list of these, or a
            predicate ``(name, parameter) -> bool``; None means all that require grad. The others that require
            grad are meta-learned and shared by all tasks: they are not stacked, and no inner step moves them. The
            attribute is called ``adapted``.
        order: 2 differentiates through the inner gradients; 1 takes them as constants (first-order MAML), so that
            shared parameters get the gradient of the query loss at the adapted ones, and nothing by way of these.
        memory: What the inner loop keeps, see :func:`metagrad.unroll`. A budget is that of the whole batch.
            If the graph of one step is too large, pass ``task_chunk=1`` and call :func:`metagrad.checkpoint`
            around the layers of the model.
        norm: Which statistics normalisation layers with running statistics (batch normalisation) use. The sets are
            the support and the query examples of a task. ``"transductive"``: those of the set at hand, also in
            evaluation. ``"support"``: those of the support examples of the task, at the same parameters, for its
            query examples too. ``"running"``: in training those of the set at hand, and in evaluation (``eval()``)
            running ones, which move once for each pass, towards the mean over tasks. ``"per_step"``: likewise, with
            running statistics and, where they are learned, weights and biases for each inner step in
            ``per_step_norms``, which are meta-learned, not adapted. ``"per_step_transductive"``: these weights and
            biases with the statistics of the set at hand. With all of these tasks may be stacked, and a recomputation
            does not update statistics. None leaves it to the modules.
        compile: Whether to compile. Up to five small steps and the query loss are one compiled function. Otherwise
            one inner step and the query loss are compiled, and serve any number of steps and values of the
            hyperparameters. A dict holds the arguments of ``torch.compile``. What cannot be compiled (hooks, running
            statistics, control flow that depends on data, ``norm``, ``sparse``, inputs or outputs that are not single
            tensors) runs eagerly, with one warning that says why. The meta-gradient of large compiled steps cannot
            be differentiated again.
        **options: ``sparse``, ``task_chunk``, ``nonfinite``, ``truncate`` and ``tolerance``, see
            :class:`metagrad.meta.Options`. They are attributes, too.

    Raises:
        ValueError: ``steps``, ``order``, ``memory``, ``truncate``, ``tolerance``, ``task_chunk`` or ``compile`` is
            out of range; no parameter of the model requires grad; the model cannot follow ``norm``; ``adapt`` names
            something that the model does not have; a name in ``sparse`` is not a table that is learned, or
            ``inner`` has a value for each of its rows.
        TypeError: ``model`` is not a module, ``inner`` is not a rule, ``adapt`` is of another type, or ``sparse`` is
            a string.

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
        """Forget what was found out about the model and the loss."""
        self._stacking = Stacking(self.task_chunk, type(self).__name__)
        self._compiler = None if self._compile is None else Compiler("MAML(..., compile)", self._compile)

    @property
    def inner(self) -> Rule:
        """The rule of the inner steps; what is learned of it are the parameters that this module has now."""
        return self._learned.of(self)

    @inner.setter
    def inner(self, rule: Rule) -> None:
        check_rule("MAML(...)", rule, "inner")
        for name in self._learned.names if "_learned" in self.__dict__ else ():
            self._parameters.pop(name or "", None)
        self._learned = register_learned(self, rule)

    @property
    def norm(self) -> Norm | None:
        """Whose statistics normalise."""
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
        """Assign an attribute, to be checked by the next call."""
        self.__dict__["_is_checked"] = False
        # A module that adapts is a part of the model already, and not registered again.
        kept: Any = (value,) if name == "adapted" and isinstance(value, nn.Module) else value
        super().__setattr__(name, kept)
        if name in ("model", "loss_fn", "task_chunk") and "_stacking" in self.__dict__:
            self._forget()

    def forward(
        self, batch: BatchLike | Sequence[Any] | Mapping[str, Any], *, steps: int | None = None
    ) -> MetaOutput:
        """Adapt to every task's support examples and evaluate on its query examples.

        Differentiable where grad mode is on; under ``torch.no_grad()`` the inner steps run too.

        Args:
            batch: ``support`` and ``query`` with ``x`` and ``y``, each ``[tasks, examples, ...]``: attributes, the
                keys of dicts, or pairs, as in ``((xs, ys), (xq, yq))``. Of an ``x`` or ``y`` that is a dict, a tuple
                or a nesting of such, every tensor is ``[tasks, ...]``; what is no tensor is the same for all tasks.
            steps: Another number of inner steps than the one given at construction.

        Raises:
            ValueError: The batch is empty, its task axes differ, a label is not a class of the model, ``steps`` is
                negative, or tables of ``sparse`` are in a ``DistributedDataParallel``.
            TypeError: The batch has another form, or what the model returns holds an object that is none of those.
            RuntimeError: It is called inside a ``torch.func`` transform other than reverse mode (``grad``, ``vjp``,
                ``jacrev``) with respect to all parameters that are adapted.
            FloatingPointError: A loss is NaN or infinite, or in the backward pass the gradient of a task; the
                message names the task and the inner step. With ``nonfinite="skip"``: of every task.
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

    def adapt(
        self, support: ExamplesLike | Sequence[Any] | Mapping[str, Any], *, steps: int | None = None
    ) -> AdaptedModel:
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
        # A ``functional_call`` may have ended when the adapted model is called.
        predict = functools.partial(_predicted, tensor_places(self.model), predict)
        return AdaptedModel(params, losses, used, skipped, predict, rows)

    def keeping(self, memory: Memory) -> MAML:
        """Return one of the same modules and arguments that stores something else, and compiles nothing."""
        other = copy.copy(self)
        other.memory, other._compile = memory, None
        other._forget()
        return other

    def extra_repr(self) -> str:
        """Show what is not a submodule."""
        return (
            f"steps={self.steps}, order={self.order}, memory={self.memory!r}, "
            f"inner={type(self.inner).__name__}, task_chunk={self.task_chunk}, norm={self.norm!r}"
        )

    def _executor(self, steps: int | None, tasks: Tasks) -> TaskExecutor:
        """Return what runs tasks, as the attributes of this module say at present."""
        check_steps("MAML(batch, steps)", self.steps if steps is None else steps)
        if not self._is_checked:
            self._check()
            self.__dict__["_is_checked"] = True
        check_task_axis(self.model, tasks)
        params = self._adapted_parameters()
        refuse_transforms(list(params.values()))
        if self.sparse:
            self.__dict__["sparse"] = check_tables(self.model, self.sparse, self.inner, params)
        inner = self._inner_loop(self.steps if steps is None else steps, tasks)
        adapted = tuple(name for name in self.sparse if name in params)
        return TaskExecutor(inner, params, adapted, self.nonfinite, self._stacking, type(self).__name__)

    def _inner_loop(self, steps: int, tasks: Tasks) -> InnerLoop:
        """Return the loop that adapts to tasks."""
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
            judges_each=weights is not None and any(map(_counts, weights[:-1])),
        )

    def _start(self, model: nn.Module, params: Params, tasks: Tasks, stacked: bool) -> Params:
        """Return the values that some parameters start from in each task, where an algorithm has such."""
        return {}

    def _step_weights(self, steps: int) -> Sequence[float | Tensor] | Tensor | None:
        """Return the weights of the query losses after each step; None where only the last counts."""
        return None

    def _adapted_parameters(self) -> Params:
        """Return the parameters that adapt, with the values that they have now."""
        params = self._trained()
        check_trained(params)
        names: Iterable[str] = params
        if self.adapted is not None:
            own = {name: self._own_parameters.get(name, p) for name, p in params.items()}
            names = select_parameters(self.model, self.adapted, own)
        if self.per_step_norms is not None:
            names = self.per_step_norms.others(names)
        return {name: params[name] for name in names}

    def _trained(self) -> Params:
        """Return the parameters of the model that require grad, with the values that they have now.

        In a ``functional_call`` tensors are in their places that need not require grad: the parameters say.
        """
        current = dict(self.model.named_parameters())
        if all(is_a(p, nn.Parameter) for p in current.values()):
            self.__dict__["_own_parameters"] = current
        own = {name: self._own_parameters.get(name, p) for name, p in current.items()}
        return {name: p for name, p in current.items() if p.requires_grad or own[name].requires_grad}

    def _check(self) -> None:
        """Raise for attributes that mean nothing, at construction and where they have been assigned since."""
        check_function(f"{type(self).__name__}(model, loss_fn, ...)", "loss_fn", self.loss_fn)
        check_arguments(self.model, self.steps, self.order, self.task_chunk)
        checked_memory("MAML(...)", self.memory)
        check_ends(self.truncate, self.tolerance)
        check_norm(self.model, self.norm, self.steps)
        check_nonfinite(self.nonfinite)


def _weighted(weights: Sequence[float | Tensor] | Tensor | None, results: Evaluation) -> Tensor:
    """Return the weighted sum of the query losses of each task, ``[tasks]``."""
    if weights is None:
        return results.query_losses
    each = [*results.path.unbind(1), results.query_losses]
    terms = zip(list(weights)[-len(each) :], each, strict=True)
    # A weight of 0 leaves out a loss that was not computed.
    return torch.stack([weight * loss for weight, loss in terms if _counts(weight)]).sum(0)


def _counts(weight: float | Tensor) -> bool:
    return isinstance(weight, Tensor) or weight != 0


def _predicted(
    shared: list[tuple[Place, Tensor]],
    predict: Callable[[Params, Nested], Nested],
    params: Params,
    x: Nested,
) -> Nested:
    """Predict with the shared parameters and buffers as they were during adaptation."""
    with placed(shared):
        return predict(params, x)


@dataclass(frozen=True)
class LearnedRule:
    """A rule whose learned hyper-parameters are parameters of a module.

    A learned hyper-parameter exists once, as a parameter of the module, so that replacing it there
    (``functional_call``, ``load_state_dict(assign=True)``, ``parametrize``, an assignment) changes the rule.

    Attributes:
        template: The rule, with tensors without memory in place of the learned hyper-parameters.
        names: Of the parameters of the module, in the order of ``hyperparameters_in``; None for other tensors.
    """

    template: Rule
    names: tuple[str | None, ...]

    def of(self, module: nn.Module) -> Rule:
        """Return the rule with the parameters as the module has them."""
        if not any(self.names):
            return self.template
        names = iter(self.names)

        def current(tensor: Tensor) -> Tensor:
            name = next(names)
            return tensor if name is None else getattr(module, name)

        return with_hyperparameters(self.template, current)


def register_learned(module: nn.Module, rule: Rule) -> LearnedRule:
    """Make the hyper-parameters of a rule that are :class:`torch.nn.Parameter` parameters of a module."""
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


def check_steps(call: str, steps: object) -> None:
    """Refuse what is not an int of 0 or more."""
    if not is_integer(steps):
        raise TypeError(f"{call}: steps must be an int, got {type(steps).__name__}.")
    if steps < 0:
        raise ValueError(f"{call}: steps must be 0 or more, got {steps}.")


def check_arguments(
    model: object, steps: int, order: int, task_chunk: int | None, name: str = "MAML"
) -> None:
    """Refuse arguments of MAML that mean nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}(model, ...): model must be a torch.nn.Module, got {type(model).__name__}.")
    refuse_wrapped(f"{name}(model, ...)", model)
    check_substitutable(f"{name}(model, ...)", model.modules())
    check_steps("MAML(..., steps)", steps)
    if order not in (1, 2):
        raise ValueError(f"MAML(..., order): expected 1 (first-order MAML) or 2, got {order!r}.")
    if task_chunk is not None and (not is_integer(task_chunk) or task_chunk < 1):
        raise ValueError(
            f"{name}(..., task_chunk): expected None (all tasks together) or an int of 1 or more, got {task_chunk!r}."
        )


def check_trained(params: Params) -> None:
    """Refuse a model of which nothing can be adapted."""
    if not params:
        raise ValueError(
            "MAML(model, ...): no parameter of the model requires grad, so nothing can be adapted."
        )


def check_ends(truncate: int | None, tolerance: float | None) -> None:
    """Refuse numbers of steps and norms that mean nothing."""
    if truncate is not None and (not is_integer(truncate) or truncate < 1):
        raise ValueError(
            f"MAML(..., truncate): expected None (all steps) or an int of 1 or more, got {truncate!r}. "
            "For none at all, pass order=1."
        )
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"MAML(..., tolerance): expected None or a norm of at least 0, got {tolerance!r}.")


def refuse_transforms(params: list[Tensor]) -> None:
    """Raise for torch.func transforms in which gradients of the parameters cannot be taken on the tape."""
    if is_transformed() and not is_on_the_tape(params):
        raise RuntimeError(
            "MAML(batch): of torch.func, reverse mode (grad, vjp, jacrev) with respect to all parameters that are "
            "adapted is taken, as in grad(lambda p: functional_call(maml, p, (batch,)).loss)(params). Instead of "
            "vmap, call it batch by batch; instead of jvp, or for a part of the parameters, differentiate "
            "maml(batch).loss by torch.autograd.grad."
        )
