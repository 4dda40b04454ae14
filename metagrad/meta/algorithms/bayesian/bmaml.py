"""BMAML: particles that adapt by Stein variational gradients, and chase those that have seen more."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import manual_seed
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_count, checked_positive, is_a
from metagrad.meta.algorithms.bayesian.particles import ParticleLearner, ParticleLoop
from metagrad.meta.algorithms.bayesian.stein import SVGD
from metagrad.meta.inner.loop import Evaluation
from metagrad.meta.inner.trajectories import joined
from metagrad.meta.maml import check_arguments
from metagrad.meta.objective.norms import Norm
from metagrad.meta.objective.task_loss import LossFn
from metagrad.meta.objective.tasks import Tasks, task_squares
from metagrad.meta.selection import Adapt, select_parameters
from metagrad.optim.rules import Params, Rule, chain


@dataclass(frozen=True)
class ChaserLoop(ParticleLoop):
    """An inner loop whose meta-objective is how far its particles have still to go.

    Attributes:
        leader_steps: How many further steps the leaders take, on all examples; with 0, the query loss counts.
    """

    leader_steps: int = field(kw_only=True)

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt, compute query losses, and the distances to the leaders."""
        adapted, losses, used, path = self.run(params, tasks, rule)
        query_losses, predictions = self.judge(adapted, tasks)
        if not self.leader_steps or not torch.is_grad_enabled():
            return Evaluation(losses, used, query_losses, predictions, path)
        distances = self._distances(adapted, self._leaders(params, adapted, tasks))
        return Evaluation(losses, used, query_losses, predictions, path, distances)

    def _leaders(self, params: Params, adapted: Params, tasks: Tasks) -> Params:
        """Return where further steps lead, as constants."""
        inner = replace(self, steps=self.leader_steps, tolerance=None)
        every = joined(tasks, self.stacked)
        if _torch.functorch_is_active():  # which wants variables of its own: the tape stays on
            leaders, *_ = inner.run(params, every, start=adapted)
        else:
            with torch.no_grad():
                start = {name: p.detach().requires_grad_() for name, p in adapted.items()}
                leaders, *_ = inner.run(params, every, start=start)
        return {name: p.detach() for name, p in leaders.items()}

    def _distances(self, adapted: Params, leaders: Params) -> Tensor:
        """Return the sum of the squared distances of all particles, ``[tasks]``."""
        moves = (p - leaders[name] for name, p in adapted.items())
        return task_squares(moves, int(self.stacked)).reshape(-1)


class BMAML(ParticleLearner):
    r"""Bayesian MAML: particles that adapt by Stein variational gradients, and are learned to come to a posterior.

    .. math::
        \min_\Theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \sum_m
            \bigl| \theta_i^{n,m} - \mathrm{sg}(\theta_i^{n+s,m}) \bigr|^2, \qquad
        \theta^m \leftarrow \theta^m - \alpha \frac{1}{M} \sum_j \bigl( k(\theta^j, \theta^m) \nabla L(\theta^j)
            - T \nabla_{\theta^j} k(\theta^j, \theta^m) \bigr)

    for the particles :math:`\Theta = (\theta^1, \dots, \theta^M)`, which are the meta-parameters, after the n =
    ``steps`` inner steps on the support loss (the chasers) and s = ``leader_steps`` more on the loss of support and
    query examples (the leaders, constants). The kernel is :math:`k(a, b) = e^{-|a - b|^2 / h}` with
    :math:`h = \mathrm{med}^2 / \log M` for the median distance of two particles. The steps sample from the density
    :math:`e^{-L/T}`. With ``leader_steps=0``, in ``eval()`` and under ``torch.no_grad()``, the loss is that of the
    mixture, :math:`-T \log \frac{1}{M} \sum_m e^{-L_i^{\mathrm{query}}(\theta_i^m) / T}` (Bayesian fast adaptation),
    as ``query_losses`` are always. With one particle that is MAML.

    The model is copied: the parameters of ``learner.model`` that adapt have an axis of particles in front, and
    :meth:`particle` returns a model of one. ``query_outputs`` and the adapted model are the mean over the particles
    of what the model returns; ``out.particle_outputs`` and ``learner.adapt(support).particles(x)`` have each. The
    model is vmapped over tasks and particles at once, or runs one after the other where that cannot be done.

    Args:
        model: As of :class:`MAML`; its parameters are those of the first particle.
        loss_fn: As of :class:`MAML`. Divided by ``temperature`` it is a negative log-likelihood, with a prior where
            it has one.
        inner: As of :class:`MAML`, any rule that asks for no curvature; it is given the directions above, and treats
            each particle as a task.
        steps: As of :class:`MAML`.
        particles: Their number M, the others of which are copies of the model with new draws, by ``reset_parameters``
            of its modules; or models of the same parameters, all of them.
        leader_steps: s; a rule with a state begins anew there.
        temperature: T: 1 where ``loss_fn`` is a sum over n examples, 1/n where it is their mean.
        bandwidth: h, a number; None is that of the median.
        generator: Of the draws; None is that of torch.
        adapt: As of :class:`MAML`: parameters that do not adapt are those of the first model, for all particles.
        norm: As of :class:`MAML`, ``"transductive"`` or ``"support"``; needed where the model keeps statistics.
        **arguments: As of :class:`MAML`, without ``start``, ``sparse``, ``query_weights``, ``proximal`` and
            ``hypergradient``; ``order=1`` takes inner gradients as constants, not the kernel.

    Raises:
        ValueError: As :class:`MAML`; there is no particle, two are equal, or their models differ; a number is out of
            range; ``memory="block"`` or ``compile="whole"``; the model keeps running statistics; or ``inner`` asks
            for curvature.
        TypeError: As :class:`MAML`.

    Example:
        >>> learner = metagrad.BMAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, particles=3,
        ...                          inner=metagrad.optim.rules.sgd(lr=0.1), steps=5, temperature=0.1)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(4)
        >>> out = learner(batch)
        >>> out.loss.backward()
        >>> out.query_outputs.shape, out.particle_outputs.shape, learner.model.weight.grad.shape
        (torch.Size([4, 10, 1]), torch.Size([4, 3, 10, 1]), torch.Size([3, 1, 1]))

    References:
        Yoon, Kim, Dia, Kim, Bengio, Ahn, "Bayesian model-agnostic meta-learning", NeurIPS 2018, section 3,
        algorithms 2 and 3.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        particles: int | Sequence[nn.Module] = 5,
        leader_steps: int = 1,
        temperature: float = 1.0,
        bandwidth: float | None = None,
        generator: torch.Generator | None = None,
        adapt: Adapt = None,
        norm: Norm | None = None,
        **arguments: Any,
    ) -> None:
        check_arguments(model, steps, 2, None, "BMAML")
        models = _models(model, particles, generator)
        check_count("BMAML(..., leader_steps)", leader_steps, 0)
        if bandwidth is not None:
            checked_positive("BMAML(..., bandwidth)", bandwidth)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = select_parameters(model, adapt, trained)
        self.leader_steps: int = leader_steps
        self.bandwidth: float | None = bandwidth
        super().__init__(
            _stacked(models, names),
            loss_fn,
            inner=inner,
            steps=steps,
            particles=len(models),
            temperature=temperature,
            adapt=names,
            norm=norm,
            **arguments,
        )
        _check_distinct(self._adapted_parameters())

    def particle(self, number: int) -> nn.Module:
        """Return a copy of the model with the parameters of one particle."""
        adapted = self._adapted_parameters()
        return _exchanged(
            self.model, {name: nn.Parameter(p[number].detach().clone()) for name, p in adapted.items()}
        )

    def _callable_model(self) -> nn.Module:
        return self.particle(0)

    def _loop(self, options: dict[str, Any]) -> ParticleLoop:
        rule = chain(SVGD(self.temperature, self.bandwidth), options.pop("rule"))
        return ChaserLoop(**options, rule=rule, leader_steps=self.leader_steps if self.training else 0)


def _models(
    model: nn.Module, particles: int | Sequence[nn.Module], generator: torch.Generator | None
) -> list[nn.Module]:
    """Return a model for each particle."""
    if not isinstance(particles, int):
        models = list(particles)
        if not models or not all(is_a(one, nn.Module) for one in models):
            raise TypeError(f"BMAML(..., particles): expected a number, or models, got {particles!r}.")
        _check_alike([model, *models])
        return models
    check_count("BMAML(..., particles)", particles)
    others = [copy.deepcopy(model) for _ in range(particles - 1)]
    with contextlib.nullcontext() if generator is None else RandomState().restored():
        if generator is not None:
            manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        for part in (part for other in others for part in other.modules()):
            getattr(part, "reset_parameters", _nothing)()
    return [model, *others]


def _nothing() -> None:
    """Reset a module that has no parameters of its own."""


def _check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse models of other parameters than those of the first."""
    first, *others = ({name: p.shape for name, p in one.named_parameters()} for one in models)
    for number, shapes in enumerate(others):
        if shapes != first:
            different = sorted(name for name in {*first, *shapes} if first.get(name) != shapes.get(name))
            raise ValueError(
                f"BMAML(..., particles): the models must have the parameters of model=, but {different[0]!r} of "
                f"number {number} is {shapes.get(different[0])}, not {first.get(different[0])}."
            )


def _stacked(models: Sequence[nn.Module], names: Sequence[str]) -> nn.Module:
    """Return a copy of the first model, with the parameters of some names of all models, ``[particles, ...]``."""
    each = [dict(model.named_parameters()) for model in models]
    return _exchanged(
        models[0], {name: nn.Parameter(torch.stack([own[name].detach() for own in each])) for name in names}
    )


def _exchanged(model: nn.Module, params: dict[str, nn.Parameter]) -> nn.Module:
    """Return a copy of a model that has other parameters, of any shape; tied ones stay tied."""
    own = dict(model.named_parameters())
    # What is in the memo of a copy is not copied.
    return copy.deepcopy(model, {id(own[name]): p for name, p in params.items()})


def _check_distinct(params: Params) -> None:
    """Refuse particles that are the same, and would stay so."""
    flat = torch.cat([p.detach().unsqueeze(-1).flatten(1).double() for p in params.values()], 1)
    for number, place in enumerate(flat):
        same = (flat[:number] == place).all(1)
        if bool(same.any()):
            raise ValueError(
                f"BMAML(..., particles): number {number} equals number {int(same.nonzero()[0])}, and would stay so. "
                "Pass models that were drawn apart, as particles=[make() for _ in range(5)]; a number draws by the "
                "reset_parameters of the modules, which this model lacks."
            )
