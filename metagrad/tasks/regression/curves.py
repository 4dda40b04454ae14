"""Families of curves with few parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from metagrad.core.checks import check_number, refuse
from metagrad.tasks.regression.family import Curves, Range, Regression

if TYPE_CHECKING:
    from torch import Tensor


def _sinusoid(x: Tensor, amplitude: Tensor, phase: Tensor) -> Tensor:
    return amplitude * torch.sin(x - phase)


def _line(x: Tensor, slope: Tensor, intercept: Tensor) -> Tensor:
    return slope * x + intercept


def _step(x: Tensor, left: Tensor, right: Tensor, position: Tensor) -> Tensor:
    return torch.where(x < position, left, right)


def _sinusoid_or_line(x: Tensor, mode: Tensor, **parameters: Tensor) -> Tensor:
    sinusoid = _sinusoid(x, parameters["amplitude"], parameters["phase"])
    return torch.where(mode, sinusoid, _line(x, parameters["slope"], parameters["intercept"]))


def _harmonic(
    x: Tensor, frequency: Tensor, phase1: Tensor, phase2: Tensor, amplitude1: Tensor, amplitude2: Tensor
) -> Tensor:
    first = amplitude1 * torch.sin(frequency * x + phase1)
    return first + amplitude2 * torch.sin(2 * frequency * x + phase2)


class Sinusoid(Regression):
    r"""Regression tasks y = amplitude * sin(x - phase), with a random amplitude and phase for each task.

    .. math::
        y = A \sin(x - \varphi), \quad A \sim U[0.1, 5], \; \varphi \sim U[0, \pi], \; x \sim U[-5, 5]

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        amplitude: Lowest and highest amplitude.
        phase: Lowest and highest phase, in radians.
        **arguments: x, noise, dtype and device of `Regression`.

    Raises:
        ValueError: A number or a range is invalid, or dtype is not a floating-point type.

    Examples:
        >>> tasks = Sinusoid(shots=10, queries=5)
        >>> batch = tasks.sample(25, generator=torch.Generator().manual_seed(0))
        >>> batch.support.x.shape, batch.query.y.shape
        (torch.Size([25, 10, 1]), torch.Size([25, 5, 1]))

    References:
        Finn, Abbeel, Levine, Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, 2017,
        section 5.1.
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        amplitude: Range = (0.1, 5.0),
        phase: Range = (0.0, math.pi),
        **arguments: Any,
    ) -> None:
        super().__init__(shots, queries, ranges={"amplitude": amplitude, "phase": phase}, **arguments)

    formula = staticmethod(_sinusoid)


class Lines(Regression):
    r"""Regression tasks y = slope * x + intercept, with a random slope and intercept for each task.

    .. math::
        y = a x + b, \quad a, b \sim U[-3, 3], \; x \sim U[-5, 5]

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        slope: Lowest and highest slope.
        intercept: Lowest and highest value at 0.
        **arguments: x, noise, dtype and device of `Regression`.

    Examples:
        >>> lines = Lines(shots=5, slope=(2.0, 2.0), intercept=(1.0, 1.0))
        >>> support = lines.sample(1).support
        >>> torch.allclose(support.y, 2 * support.x + 1)
        True

    References:
        Finn, Xu, Levine, Probabilistic Model-Agnostic Meta-Learning, 2018, section 5 (the lines of its tasks).
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        slope: Range = (-3.0, 3.0),
        intercept: Range = (-3.0, 3.0),
        **arguments: Any,
    ) -> None:
        super().__init__(shots, queries, ranges={"slope": slope, "intercept": intercept}, **arguments)

    formula = staticmethod(_line)


class StepFunctions(Regression):
    r"""Regression tasks with step functions: two random levels and a random position of the step.

    .. math::
        y = \begin{cases} l & x < s \\ r & x \ge s \end{cases}, \quad
        l, r \sim U[-3, 3], \; s \sim U[-2.5, 2.5], \; x \sim U[-5, 5]

    The ranges do not come from a paper. Gradient-based adaptation has to move the step, which is harder than to
    change its height.

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        left: Lowest and highest level before the step.
        right: Lowest and highest level after the step.
        position: Lowest and highest position of the step.
        **arguments: x, noise, dtype and device of `Regression`.

    Examples:
        >>> steps = StepFunctions(shots=4, left=(0.0, 0.0), right=(1.0, 1.0), position=(2.0, 2.0))
        >>> steps.sample_functions(1).evaluate(torch.tensor([[1.9], [2.0]])).flatten()
        tensor([0., 1.])
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        left: Range = (-3.0, 3.0),
        right: Range = (-3.0, 3.0),
        position: Range = (-2.5, 2.5),
        **arguments: Any,
    ) -> None:
        super().__init__(
            shots, queries, ranges={"left": left, "right": right, "position": position}, **arguments
        )

    formula = staticmethod(_step)


class SinusoidOrLine(Regression):
    r"""Regression tasks of two kinds: half of them are sinusoids, half of them are lines.

    .. math::
        y = \begin{cases} A \sin(x - \varphi) & \text{with probability } 1/2 \\ a x + b & \text{else} \end{cases}
        + \varepsilon, \quad \varepsilon \sim N(0, 0.3^2)

    with :math:`A \sim U[0.1, 5]`, :math:`\varphi \sim U[0, \pi]`, :math:`a, b \sim U[-3, 3]`,
    :math:`x \sim U[-5, 5]`.

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        amplitude: Lowest and highest amplitude of the sinusoids.
        phase: Lowest and highest phase of the sinusoids, in radians.
        slope: Lowest and highest slope of the lines.
        intercept: Lowest and highest value of the lines at 0.
        probability: Probability of a sinusoid.
        noise: Standard deviation of the normal noise of support and query targets.
        **arguments: x, dtype and device of `Regression`.

    Raises:
        ValueError: ``probability`` is not in [0, 1].

    Examples:
        >>> tasks = SinusoidOrLine(shots=5, queries=10)
        >>> tasks.sample(25).query.y.shape
        torch.Size([25, 10, 1])

    References:
        Finn, Xu, Levine, Probabilistic Model-Agnostic Meta-Learning, 2018, section 5 and appendix.
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        amplitude: Range = (0.1, 5.0),
        phase: Range = (0.0, math.pi),
        slope: Range = (-3.0, 3.0),
        intercept: Range = (-3.0, 3.0),
        probability: float = 0.5,
        noise: float = 0.3,
        **arguments: Any,
    ) -> None:
        ranges = {"amplitude": amplitude, "phase": phase, "slope": slope, "intercept": intercept}
        super().__init__(shots, queries, ranges={**ranges, "mode": (0.0, 1.0)}, noise=noise, **arguments)
        if not 0 <= probability <= 1:
            refuse("SinusoidOrLine(probability)", "a number from 0 to 1", probability)
        self.probability = probability

    formula = staticmethod(_sinusoid_or_line)

    def sample_functions(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Curves:
        """Draw true curves without examples, as `Regression.sample_functions`."""
        curves = super().sample_functions(num_tasks, generator=generator)
        modes = {"mode": curves.parameters["mode"] < self.probability}
        return curves._replace(parameters={**curves.parameters, **modes})


class Harmonic(Regression):
    r"""Regression tasks y = a1 sin(w x + b1) + a2 sin(2 w x + b2), with inputs around a random mean for each task.

    .. math::
        w \sim U[5, 7], \; b_1, b_2 \sim U[0, 2 \pi], \; a_1, a_2 \sim N(0, 1), \;
        x \sim N(\mu, 1), \; \mu \sim U[-4, 4]

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        frequency: Lowest and highest angular frequency w of the first sine. The second sine has twice its frequency.
        phase: Lowest and highest phase of both sines, in radians.
        x: Lowest and highest mean of the inputs of a task.
        spread: Standard deviation of the inputs of a task around their mean.
        **arguments: noise, dtype and device of `Regression`.

    Examples:
        >>> batch = Harmonic(shots=10).sample(100)
        >>> batch.support.x.std(1).mean() < batch.support.x.std()
        tensor(True)

    References:
        Lacoste, Oreshkin, Chung, Boquet, Rostamzadeh, Krueger, Uncertainty in Multitask Transfer Learning, 2018
        (arXiv:1806.07528).
    """

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        frequency: Range = (5.0, 7.0),
        phase: Range = (0.0, 2 * math.pi),
        x: Range = (-4.0, 4.0),
        spread: float = 1.0,
        **arguments: Any,
    ) -> None:
        ranges = {"frequency": frequency, "phase1": phase, "phase2": phase}
        super().__init__(shots, queries, ranges=ranges, x=x, **arguments)
        self.spread: float = check_number("Harmonic(spread)", spread, 0)

    formula = staticmethod(_harmonic)

    def sample_functions(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Curves:
        """Draw true curves without examples, as `Regression.sample_functions`."""
        curves = super().sample_functions(num_tasks, generator=generator)
        amplitudes = {name: self.normal((num_tasks,), generator) for name in ("amplitude1", "amplitude2")}
        return curves._replace(parameters={**curves.parameters, **amplitudes})

    def sample_inputs(self, num_tasks: int, generator: torch.Generator | None) -> Tensor:
        """Draw the inputs of each task around its mean."""
        mean = self.uniform(self.x, (num_tasks, 1, 1), generator)
        return mean + self.spread * self.normal((num_tasks, self.shots + self.queries, 1), generator)
