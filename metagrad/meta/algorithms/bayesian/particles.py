"""Several parameter vectors for each task, as one more axis: their losses, their mixture, their inner loop."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core.checks import checked_positive
from metagrad.core.structured import Nested, restored, structured
from metagrad.core.tree import tree_map
from metagrad.meta.algorithm import Adapted, MetaOutput
from metagrad.meta.execution.executor import TaskExecutor
from metagrad.meta.inner.loop import InnerLoop
from metagrad.meta.maml import MAML
from metagrad.meta.objective.norms import Norm, NormPass, statistical_norms
from metagrad.meta.objective.task_loss import LossFn, TaskLoss, check_labels
from metagrad.meta.objective.tasks import BatchLike, ExamplesLike, Tasks, stacked
from metagrad.meta.objective.vmap import RESULT
from metagrad.meta.selection import Adapt
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.rules import Params, Rule, with_batch_ndim


@dataclass(frozen=True)
class ParticleOutput(MetaOutput):
    """The outcome of a meta-batch of :class:`BMAML`; ``query_outputs`` are the mean over its particles.

    Attributes:
        particle_outputs: What the model returns for the query inputs, of each particle,
            ``[tasks, particles, queries, ...]``.
    """

    particle_outputs: Any = field(kw_only=True)


@dataclass(frozen=True)
class AdaptedParticles(Adapted):
    """Particles that :class:`BMAML` adapts to a batch of tasks; a call returns the mean of what the model returns.

    ``params`` are ``[tasks, particles, ...]``.
    """

    def __call__(self, x: Any) -> Any:
        """Predict for the inputs ``[tasks, n, ...]``, as :class:`Adapted` does, by the mean over the particles."""
        return mean_of_particles(self.particles(x))

    def particles(self, x: Any) -> Any:
        """Return the prediction of each particle, ``[tasks, particles, n, ...]``."""
        return super().__call__(x)


def mean_of_particles(outputs: Any) -> Any:
    """Return the mean over the second axis of every tensor, but of integers."""

    def mean(tensor: Tensor) -> Tensor:
        return tensor.mean(1) if tensor.is_floating_point() or tensor.is_complex() else tensor

    return restored(tree_map(mean, structured(outputs, RESULT)))


@dataclass(frozen=True)
class ParticleObjective(TaskLoss):
    """The loss of the particles ``[particles, ...]`` of each task.

    Attributes:
        particles: Their number.
        sums: Whether their losses are added, by which each has its own gradient.
    """

    particles: int = field(kw_only=True)
    sums: bool = field(default=True, kw_only=True)

    def single(
        self, params: Params, x: Nested, y: Nested, norms: NormPass | None = None
    ) -> tuple[Tensor, Nested]:
        """Return the loss (a scalar, or ``[particles]``) and predictions ``[particles, n, ...]`` of one task."""
        each = (tree_map(operator.itemgetter(m), params) for m in range(self.particles))
        losses, predictions = zip(*(TaskLoss.single(self, own, x, y, norms) for own in each), strict=True)
        return self._reduced(torch.stack(losses)), stacked(predictions)

    def stacked(
        self, params: Params, x: Nested, y: Nested, norms: NormPass | None = None
    ) -> tuple[Tensor, Nested]:
        """Return losses ``[tasks]`` or ``[tasks, particles]``, and predictions ``[tasks, particles, n, ...]``."""
        x, y = self._repeated((x, y))
        losses, predictions = TaskLoss.stacked(self._flat(norms), _flat(params), x, y)
        return self._reduced(self._by_task(losses)), self._by_task(predictions)

    def predict(self, params: Params, x: Nested, chunk: int) -> Nested:
        """Return the predictions ``[tasks, particles, n, ...]``; with a ``chunk`` of 1 one after the other."""
        return self._by_task(
            TaskLoss.predict(self._flat(self.norms), _flat(params), self._repeated(x), chunk)
        )

    def of_one(self) -> TaskLoss:
        """Return the loss of one particle, which tasks do not count."""
        return TaskLoss(**{item.name: getattr(self, item.name) for item in fields(TaskLoss)})

    def check_predictions(self, shape: Sequence[int]) -> None:
        """Refuse labels that are no class of predictions ``[particles, n, ...]``."""
        check_labels(self.labels, shape[1:])

    def _reduced(self, losses: Tensor) -> Tensor:
        return losses.sum(-1) if self.sums else losses

    def _flat(self, norms: NormPass | None) -> TaskLoss:
        """Return the objective, in a pass, of which each particle is a task."""
        if norms is None:
            norms = self.norms
        if norms is not None and norms.reference is not None:
            norms = replace(norms, reference=self._repeated(norms.reference))
        return self.under(norms)

    def _repeated(self, examples: Any) -> Any:
        """Give the examples of a task to each of its particles."""
        return tree_map(lambda tensor: tensor.repeat_interleave(self.particles, 0), examples)

    def _by_task(self, results: Any) -> Any:
        return tree_map(lambda tensor: tensor.unflatten(0, (-1, self.particles)), results)


def _flat(params: Params) -> Params:
    return {name: p.flatten(0, 1) for name, p in params.items()}


def of_mixture(losses: Tensor, temperature: float) -> Tensor:
    r"""Return :math:`-T \log \frac{1}{M} \sum_m e^{-L_m / T}`, the loss of the mixture of particles ``[..., M]``."""
    return -temperature * ((-losses / temperature).logsumexp(-1) - math.log(losses.shape[-1]))


@dataclass(frozen=True)
class ParticleLoop(InnerLoop):
    """An inner loop of particles, which are evaluated as a mixture.

    Attributes:
        temperature: Of the likelihood :math:`e^{-L/T}`.
    """

    objective: ParticleObjective
    temperature: float = field(kw_only=True)

    def of_parts(self, num_parts: int, device: torch.device, *, stacked: bool) -> InnerLoop:
        """Return the loop of one of several parts of the tasks, whose rule has each particle as a task."""
        inner = super().of_parts(num_parts, device, stacked=stacked)
        return replace(inner, rule=with_batch_ndim(self.rule, 1 + stacked))

    def judge(self, adapted: Params, tasks: Tasks) -> tuple[Tensor, Nested]:
        """Return the losses of the mixtures ``[tasks]``, and predictions of query examples."""
        losses, predictions = self.judge_each(adapted, tasks)
        return of_mixture(losses, self.temperature), predictions

    def judge_each(self, adapted: Params, tasks: Tasks) -> tuple[Tensor, Nested]:
        """Return the losses of particles ``[tasks, particles]``, and predictions of query examples."""
        return super().judge(adapted, tasks)

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> tuple[Params, Tensor, Tensor, Tensor]:
        """Take the steps; the losses are the mean over the particles."""
        adapted, losses, used, path = super().run(params, tasks, rule, start)
        return adapted, losses / self.objective.particles, used, path

    def to_query(self, tasks: Tasks) -> InnerLoop:
        """Return the loop with the objective of query examples, which is that of each particle."""
        inner = super().to_query(tasks)
        return replace(inner, objective=replace(inner.objective, sums=False))


class ParticleLearner(MAML):
    """MAML of several parameter vectors for each task, which is evaluated as their mixture.

    A subclass says where they come from: :meth:`_loop`.

    Args:
        model: The model.
        loss_fn: As of :class:`MAML`; over ``temperature`` it is a negative log-likelihood.
        inner: As of :class:`MAML`, any rule that asks for no curvature.
        steps: As of :class:`MAML`.
        particles: Their number.
        temperature: T.
        adapt: As of :class:`MAML`.
        norm: As of :class:`MAML`, without those that keep statistics.
        **arguments: As of :class:`MAML`, without ``start``, ``sparse``, ``query_weights``, ``proximal`` and
            ``hypergradient``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        particles: int,
        temperature: float,
        adapt: Adapt,
        norm: Norm | None,
        **arguments: Any,
    ) -> None:
        self._name = type(self).__name__
        self.num_particles: int = particles
        self.temperature: float = temperature
        super().__init__(
            model,
            loss_fn,
            inner=inner,
            steps=steps,
            adapt=adapt,
            norm=norm,
            start=None,
            sparse=(),
            query_weights=None,
            proximal=None,
            hypergradient=None,
            **arguments,
        )
        self._fix("adapted", "start", "sparse", "query_weights", "proximal", "hypergradient")
        self._check()

    def forward(self, batch: BatchLike | Sequence[Any] | Any, *, steps: int | None = None) -> ParticleOutput:
        """Adapt to every task's support examples and evaluate the mixture on its query examples.

        Args:
            batch: As of :class:`MAML`.
            steps: As of :class:`MAML`.

        Raises:
            ValueError: As of :class:`MAML`, and so the other errors.
        """
        out = super().forward(batch, steps=steps)
        mean = mean_of_particles(out.query_outputs)
        return ParticleOutput(**{**vars(out), "query_outputs": mean}, particle_outputs=out.query_outputs)

    def adapt(
        self, support: ExamplesLike | Sequence[Any] | Any, *, steps: int | None = None
    ) -> AdaptedParticles:
        """Adapt to every task's support examples; takes and raises what :meth:`MAML.adapt` does."""
        return AdaptedParticles(**vars(super().adapt(support, steps=steps)))

    def _loop(self, options: dict[str, Any]) -> ParticleLoop:
        """Return the inner loop of particles, given the fields of :class:`ParticleLoop`."""
        raise NotImplementedError

    def _executor(self, steps: int | None, tasks: Tasks) -> TaskExecutor:
        executor = super()._executor(steps, tasks)
        objective = ParticleObjective(**vars(executor.inner.objective), particles=self.num_particles)
        options = vars(executor.inner) | {"objective": objective, "temperature": self.temperature}
        return replace(executor, inner=self._loop(options), name=self._name)

    def _check(self) -> None:
        """Refuse what particles leave no meaning to, beside what MAML refuses."""
        checked_positive(f"{self._name}(..., temperature)", self.temperature)
        if self.memory == "block":
            raise ValueError(
                f'{self._name}(..., memory="block"): the blocks of a model are of one particle. Use memory="step".'
            )
        if self._compile is not None and self._compile.whole:
            raise ValueError(
                f'{self._name}(..., compile="whole"): there is no graph of a meta-batch. Use compile=True.'
            )
        self._check_norm()
        super()._check()
        if "_learned" in self.__dict__ and needs_curvature(self.inner, 0):
            raise ValueError(
                f"{self._name}(..., inner): the rule asks for curvature, which would mix the particles. Take a "
                "first-order rule, such as rules.sgd."
            )

    def _check_norm(self) -> None:
        if getattr(self, "norm", None) in ("transductive", "support"):
            return
        for name, layer in statistical_norms(self.model).items():
            if layer._buffers["running_mean"] is not None:
                raise ValueError(
                    f"{self._name}(..., norm={self.norm!r}): {type(layer).__name__} ({name or 'the model itself'}) "
                    'would keep the statistics of all particles as one. Take norm="transductive" or "support".'
                )
