"""Evolution strategies: hypergradients from values alone, by antithetic pairs of perturbed unrolls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core.checks import check_count, checked_positive
from metagrad.hypergrad.problem import Estimate, Problem
from metagrad.hypergrad.unroll import RuleOf, check_comparable, descend, rule_for
from metagrad.optim.rule import Params

_DRAWN = "draws random numbers, and has no graph"


@dataclass(frozen=True)
class EvolutionStrategies:
    r"""The derivative of a smoothed unroll, from pairs of perturbations of ``hyper``.

    .. math::
        \frac{1}{2 N \sigma^2} \sum_{i=1}^N \epsilon_i
            \left( F(\lambda + \epsilon_i) - F(\lambda - \epsilon_i) \right), \qquad
        \epsilon_i \sim \mathcal N(0, \sigma^2 I), \quad F(\lambda) = f(\phi_T(\lambda), \lambda)

    Nothing is differentiated with respect to ``hyper``, so that may be anything that the losses take, chaos of long
    unrolls is smoothed over :math:`\sigma`, and memory is that of one step. For d numbers the relative error is about
    :math:`\sqrt{d / N}`, and a bias of the order :math:`\sigma^2` where the third derivative is not zero.

    Args:
        rule: A rule of :mod:`metagrad.optim.rules`, or a function of ``hyper`` that returns one.
        steps: Of the unroll, from ``params`` on.
        pairs: The number N of antithetic pairs.
        scale: The standard deviation :math:`\sigma`, above 0.
        generator: Draws the perturbations.

    Raises:
        ValueError: A number is out of its range.

    Example:
        Of one number, a pair is a central difference along a line:

        >>> method = metagrad.hypergrad.EvolutionStrategies(
        ...     metagrad.optim.rules.sgd(lr=0.5), steps=1, pairs=100,
        ...     generator=torch.Generator().manual_seed(0),
        ... )
        >>> found = metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(1.0)}, {"lam": torch.tensor(3.0)}, method=method,
        ... )
        >>> abs(found["lam"].item() - 6.0) < 2.0
        True

    References:
        Salimans, Ho, Chen, Sidor, Sutskever, "Evolution strategies as a scalable alternative to reinforcement
        learning", arXiv:1703.03864; Metz et al., "Understanding and correcting pathologies in the training of learned
        optimizers", ICML 2019, section 4.1.
    """

    rule: RuleOf
    steps: int
    _: KW_ONLY
    pairs: int = 10
    scale: float = 0.01
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        _check("EvolutionStrategies", self.steps, self.pairs, self.scale)

    def estimate(self, problem: Problem, carry: Any = None) -> Estimate:
        """Unroll both ends of every pair."""
        check_comparable(problem, "EvolutionStrategies", _DRAWN)
        leaves = [leaf.detach() for leaf in problem.hyper_leaves()]
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for _ in range(self.pairs):
            noise = _noise(leaves, self.scale, self.generator)
            above, below = (self._value(problem, _moved(leaves, noise, sign)) for sign in (1, -1))
            weight = (above - below) / (2 * self.pairs * self.scale**2)
            total = [t + weight * e for t, e in zip(total, noise, strict=True)]
        return Estimate(total)

    def _value(self, problem: Problem, leaves: Sequence[Tensor]) -> Tensor:
        rule = rule_for(self.rule, problem, leaves)
        values, _ = descend(problem.inner, problem.variables(), leaves, rule, self.steps, create_graph=False)
        return _outer(problem, values, leaves)


class Particle(NamedTuple):
    """One end of a pair, on its way through the inner problem."""

    values: Params
    state: Any  # of the rule
    loss: Tensor  # the outer loss where it is


class Particles(NamedTuple):
    """What :class:`PersistentES` carries from one truncation to the next."""

    step: int  # inner steps taken since all began
    ends: list[Particle]  # the first end of each pair, then the second of each
    perturbations: list[list[Tensor]]  # of the first ends, added up since all began


@dataclass(frozen=True)
class PersistentES:
    r"""Persistent evolution strategies: truncated unrolls whose estimate of the whole is not biased.

    .. math::
        \frac{1}{2 N \sigma^2} \sum_{i=1}^N \xi_{i,t} \left( L_t^{+i} - L_t^{-i} \right), \qquad
        \xi_{i,t} = \epsilon_{i,1} + \dots + \epsilon_{i,t}

    Every pair goes on from where it was, with a new perturbation in each truncation t, and each difference is
    weighted by all of its pair so far. :math:`L_t` is by how much the outer loss has changed in the truncation, so
    that the sum over all is the derivative at the end of the unroll.

    :func:`metagrad.hypergradient` runs all truncations of a horizon. :func:`metagrad.bilevel` runs one each outer
    step, with ``hyper`` as it is then, and begins again from its parameters after each horizon.

    Args:
        rule: A rule of :mod:`metagrad.optim.rules`, or a function of ``hyper`` that returns one.
        steps: Of a truncation.
        horizon: Of the whole unroll, a multiple of ``steps``.
        pairs: The number N of antithetic pairs.
        scale: The standard deviation :math:`\sigma` of a perturbation, above 0.
        generator: Draws the perturbations.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> method = metagrad.hypergrad.PersistentES(
        ...     metagrad.optim.rules.sgd(lr=0.25), steps=1, horizon=2, pairs=100,
        ...     generator=torch.Generator().manual_seed(0),
        ... )
        >>> found = metagrad.hypergradient(  # phi = 3/4 lambda + 1/4 after two steps
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(1.0)}, {"lam": torch.tensor(3.0)}, method=method,
        ... )
        >>> abs(found["lam"].item() - 3.75) < 1.25
        True

    References:
        Vicol, Metz, Sohl-Dickstein, "Unbiased gradient estimation in unrolled computation graphs with persistent
        evolution strategies", ICML 2021, algorithm 2, equation 9; appendix on telescoping sums.
    """

    rule: RuleOf
    steps: int
    horizon: int
    _: KW_ONLY
    pairs: int = 10
    scale: float = 0.01
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        _check("PersistentES", self.steps, self.pairs, self.scale)
        check_count("PersistentES(..., horizon)", self.horizon)
        if self.horizon % self.steps:
            raise ValueError(
                f"PersistentES(..., horizon): expected a multiple of steps={self.steps}, got {self.horizon}."
            )

    def begin(self, problem: Problem) -> Particles:
        """Return particles at the parameters of a problem."""
        leaves = [leaf.detach() for leaf in problem.hyper_leaves()]
        values = problem.variables()
        loss = _outer(problem, values, leaves)
        zeros = [[torch.zeros_like(leaf) for leaf in leaves] for _ in range(self.pairs)]
        return Particles(0, [Particle(values, None, loss)] * (2 * self.pairs), zeros)

    def estimate(self, problem: Problem, carry: Particles | None = None) -> Estimate:
        """Run one truncation of particles, or, without any, all of a horizon."""
        check_comparable(problem, "PersistentES", _DRAWN)
        if carry is not None:
            particles = self.begin(problem) if carry.step >= self.horizon else carry
            found, particles = self._truncation(problem, particles)
            return Estimate(found, carry=particles)
        particles = self.begin(problem)
        total: list[Tensor] = []
        for _ in range(self.horizon // self.steps):
            found, particles = self._truncation(problem, particles)
            total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        return Estimate(total)

    def _truncation(self, problem: Problem, particles: Particles) -> tuple[list[Tensor], Particles]:
        leaves = [leaf.detach() for leaf in problem.hyper_leaves()]
        noises = [_noise(leaves, self.scale, self.generator) for _ in range(self.pairs)]
        sums = [
            [a + b for a, b in zip(old, new, strict=True)]
            for old, new in zip(particles.perturbations, noises, strict=True)
        ]
        ends = [
            self._moved(problem, end, _moved(leaves, noise, sign), particles.step)
            for end, (sign, noise) in zip(particles.ends, _signed(noises), strict=True)
        ]
        changes = [new.loss - old.loss for new, old in zip(ends, particles.ends, strict=True)]
        weights = [
            (a - b) / (2 * self.pairs * self.scale**2)
            for a, b in zip(changes[: self.pairs], changes[self.pairs :], strict=True)
        ]
        found = [torch.zeros_like(leaf) for leaf in leaves]
        for weight, of_pair in zip(weights, sums, strict=True):
            found = [g + weight * x for g, x in zip(found, of_pair, strict=True)]
        return found, Particles(particles.step + self.steps, ends, sums)

    def _moved(self, problem: Problem, end: Particle, leaves: Sequence[Tensor], first: int) -> Particle:
        rule = rule_for(self.rule, problem, leaves)
        values, state = descend(
            problem.inner,
            end.values,
            leaves,
            rule,
            self.steps,
            state=end.state,
            first=first,
            create_graph=False,
        )
        return Particle(values, state, _outer(problem, values, leaves))


def _signed(noises: list[list[Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
    for sign in (1, -1):
        yield from ((sign, noise) for noise in noises)


def _noise(leaves: Sequence[Tensor], scale: float, generator: torch.Generator | None) -> list[Tensor]:
    """Draw on the device of the generator, as probes are; of a complex number both parts, each with the scale."""

    def drawn(leaf: Tensor) -> Tensor:
        device = leaf.device if generator is None else generator.device
        # torch's complex normal numbers have the variance 1 in all, a half in each part.
        own = scale * math.sqrt(2) if leaf.is_complex() else scale
        return own * torch.randn(leaf.shape, dtype=leaf.dtype, device=device, generator=generator).to(
            leaf.device
        )

    return [drawn(leaf) for leaf in leaves]


def _moved(leaves: Sequence[Tensor], noise: Sequence[Tensor], sign: int) -> list[Tensor]:
    return [leaf + sign * e for leaf, e in zip(leaves, noise, strict=True)]


def _outer(problem: Problem, values: Params, leaves: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return problem.outer(values, leaves)


def _check(call: str, steps: int, pairs: int, scale: float) -> None:
    check_count(f"{call}(..., steps)", steps)
    check_count(f"{call}(..., pairs)", pairs)
    checked_positive(f"{call}(..., scale)", scale)
