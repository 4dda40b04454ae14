"""PLATIPUS: tasks start from samples of a Gaussian whose mean is a gradient step away."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.core.checks import check_count, checked_positive
from metagrad.core.tree import constants
from metagrad.meta.algorithms.bayesian.particles import ParticleLearner, ParticleLoop, of_mixture
from metagrad.meta.inner.loop import Evaluation, gradients_of, phase, start_values
from metagrad.meta.inner.start import to_differentiate
from metagrad.meta.objective.norms import Norm
from metagrad.meta.objective.task_loss import LossFn, TaskLoss
from metagrad.meta.objective.tasks import Tasks, num_tasks
from metagrad.meta.selection import Adapt
from metagrad.optim.rules import Params, Rule


class DiagonalGaussian(NamedTuple):
    """Independent normal distributions of the entries of parameters, ``[tasks, ...]`` or of one task."""

    mean: Params
    log_variance: Params

    def samples(self, noise: Params, axis: int) -> Params:
        """Return samples, which are counted by an axis that means do not have."""
        return {
            name: mean.unsqueeze(axis) + (self.log_variance[name] / 2).exp() * noise[name]
            for name, mean in self.mean.items()
        }

    def divergence(self, other: DiagonalGaussian, num_axes: int) -> Tensor:
        """Return the Kullback-Leibler divergence from another one; of tasks that are an axis, of each."""
        total: list[Tensor] = []
        for name, mean in self.mean.items():
            own, others = self.log_variance[name], other.log_variance[name]
            each = (
                (own - others).exp() + (mean - other.mean[name]).square() / others.exp() - 1 + others - own
            ) / 2
            total.append(each.reshape(*mean.shape[:num_axes], -1).sum(-1))
        return torch.stack(total).sum(0)


class StartDistribution(nn.Module):
    """What is learned of a distribution of starts beside its mean: variances, and the step of the mean.

    Args:
        params: The parameters that are drawn.
        std: The standard deviation of all entries to begin with.
        rate: The step of the mean to begin with.
    """

    def __init__(self, params: Params, std: float, rate: float) -> None:
        super().__init__()
        first = next(iter(params.values()))
        self.rate: nn.Parameter = nn.Parameter(first.detach().new_full((), rate))
        self.log_variances: nn.ParameterList = nn.ParameterList(
            [nn.Parameter(torch.full_like(p.detach(), 2 * math.log(std))) for p in params.values()]
        )

    def about(self, params: Params, grads: Params) -> DiagonalGaussian:
        """Return the distribution whose means are a gradient step from parameters."""
        mean = {name: p - self.rate * grads[name] for name, p in params.items()}
        return DiagonalGaussian(mean, dict(zip(params, self.log_variances, strict=True)))


@dataclass(frozen=True)
class VariationalLoop(ParticleLoop):
    """An inner loop that starts from samples, and whose meta-objective is a variational bound.

    Attributes:
        prior: What is drawn from, given support examples.
        posterior: What is drawn from in training, given query examples.
        infers: Whether it is trained.
    """

    prior: StartDistribution = field(kw_only=True)
    posterior: StartDistribution = field(kw_only=True)
    infers: bool = field(kw_only=True)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules beside model and loss of which something is learned."""
        return [*super().modules, self.prior, self.posterior]

    def start_of(self, params: Params, tasks: Tasks) -> Params:
        """Return samples that support examples lead to."""
        with phase("start"):
            return self._drawn(
                self._after(self.prior, params, tasks.support_x, tasks.support_y), params, tasks
            )

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt, and compute query losses; in training from samples that query examples lead to, and the bound."""
        if not self.infers or not torch.is_grad_enabled():
            return super().evaluate(params, tasks, rule)
        with phase("start"):
            prior = self._after(self.prior, params, tasks.support_x, tasks.support_y)
            posterior = self._after(self.posterior, params, tasks.query_x, tasks.query_y)
            start = self._drawn(posterior, params, tasks)
        adapted, losses, used, path = self.run(params, tasks, rule, start)
        each, predictions = self.judge_each(adapted, tasks)
        divergence = posterior.divergence(prior, int(self.stacked)).reshape(-1)
        bound = each.mean(-1) + self.temperature * divergence
        return Evaluation(losses, used, of_mixture(each, self.temperature), predictions, path, bound)

    def _after(self, distribution: StartDistribution, params: Params, x: Any, y: Any) -> DiagonalGaussian:
        """Return the distribution about a gradient step on examples."""
        create_graph, objective = self.order == 2 and torch.is_grad_enabled(), self.objective.of_one()
        means = start_values(params, {}, self._num_tasks(x), apart=True)
        with torch.enable_grad():
            losses, _ = (objective.stacked if self.stacked else objective.single)(means, x, y)
            grads = gradients_of(losses, means, create_graph)
        return distribution.about(means, grads if create_graph else constants(grads))

    def _drawn(self, gaussian: DiagonalGaussian, params: Params, tasks: Tasks) -> Params:
        samples = gaussian.samples(tasks.noise, int(self.stacked))
        return {name: to_differentiate(value, params[name]) for name, value in samples.items()}

    def _num_tasks(self, x: Any) -> int | None:
        return num_tasks(x) if self.stacked else None

    @property
    def compared(self) -> TaskLoss:
        """The loss of the means, which samples have an axis beside."""
        return self.objective.of_one()


class PLATIPUS(ParticleLearner):
    r"""Probabilistic MAML: tasks start from samples about a gradient step, which are learned by a variational bound.

    .. math::
        \min \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T}
            \mathbb{E}_{\theta \sim q_i} L_i^{\mathrm{query}}(U_i(\theta)) + T \, \mathrm{KL}(q_i \| p_i), \\
        p_i = N\bigl(\mu - \gamma_p \nabla L_i^{\mathrm{support}}(\mu), \sigma_p^2\bigr), \quad
        q_i = N\bigl(\mu - \gamma_q \nabla L_i^{\mathrm{query}}(\mu), \sigma_q^2\bigr)

    for the inner steps :math:`U_i` on the support loss. The meta-parameters are the mean :math:`\mu`, which the model
    has, and the variances of every entry and the steps :math:`\gamma` of prior and posterior (``learner.prior``,
    ``learner.posterior``). The bound takes query examples, and so is taken in training alone: in ``eval()``, under
    ``torch.no_grad()`` and in :meth:`adapt`, samples are those of the prior :math:`p_i`, and the loss is that of
    their mixture, :math:`-T \log \frac{1}{M} \sum_m e^{-L_i^{\mathrm{query}} / T}`, as ``query_losses`` are always.

    ``query_outputs`` and the adapted model are the mean over the samples of what the model returns;
    ``out.particle_outputs`` and ``learner.adapt(support).particles(x)`` have each. The random numbers are drawn once
    for each call, and a recomputation has the same. The gradients at :math:`\mu` are kept beside what ``memory``
    allows.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`. Divided by ``temperature`` it is a negative log-likelihood.
        inner: As of :class:`MAML`, any rule that asks for no curvature; it treats each sample as a task.
        steps: As of :class:`MAML`.
        samples: Their number M for each task; the paper takes one in training.
        std: The standard deviations of all entries, to begin with.
        rate: The steps :math:`\gamma`, to begin with.
        temperature: T: 1 where ``loss_fn`` is a sum over n examples, 1/n where it is their mean.
        generator: Of the samples, on any device; None is that of torch.
        adapt: As of :class:`MAML`; the others are learned, and shared by all tasks and samples.
        norm: As of :class:`MAML`, ``"transductive"`` or ``"support"``; needed where the model keeps statistics.
        **arguments: As of :class:`MAML`, without ``start``, ``sparse``, ``query_weights``, ``proximal`` and
            ``hypergradient``.

    Raises:
        ValueError: As :class:`MAML`; a number is out of range; ``memory="block"`` or ``compile="whole"``; the model
            keeps running statistics; or ``inner`` asks for curvature.
        TypeError: As :class:`MAML`.

    Example:
        >>> learner = metagrad.PLATIPUS(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, samples=3,
        ...                             inner=metagrad.optim.rules.sgd(lr=0.1), steps=5, temperature=0.1)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(4)
        >>> out = learner(batch)
        >>> out.loss.backward()
        >>> out.query_outputs.shape, out.particle_outputs.shape
        (torch.Size([4, 10, 1]), torch.Size([4, 3, 10, 1]))

    References:
        Finn, Xu, Levine, "Probabilistic model-agnostic meta-learning", NeurIPS 2018, section 4, algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        samples: int = 5,
        std: float = 0.1,
        rate: float = 0.01,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        adapt: Adapt = None,
        norm: Norm | None = None,
        **arguments: Any,
    ) -> None:
        check_count("PLATIPUS(..., samples)", samples)
        checked_positive("PLATIPUS(..., std)", std)
        super().__init__(
            model,
            loss_fn,
            inner=inner,
            steps=steps,
            particles=samples,
            temperature=temperature,
            adapt=adapt,
            norm=norm,
            **arguments,
        )
        self.generator = generator
        params = self._adapted_parameters()
        self.prior, self.posterior = (StartDistribution(params, std, rate) for _ in range(2))

    def _with_noise(self, tasks: Tasks) -> Tasks:
        device = None if self.generator is None else self.generator.device

        def drawn(param: Tensor) -> Tensor:
            shape = (tasks.count, self.num_particles, *param.shape)
            where = param.device if device is None else device
            noise = torch.randn(shape, dtype=param.dtype, device=where, generator=self.generator)
            return noise.to(param.device)

        return tasks._replace(noise={name: drawn(p) for name, p in self._adapted_parameters().items()})

    def _loop(self, options: dict[str, Any]) -> ParticleLoop:
        return VariationalLoop(**options, prior=self.prior, posterior=self.posterior, infers=self.training)
