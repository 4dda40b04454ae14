"""Regression to sinusoids of random amplitude and phase."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks.batch import Batch, Examples

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[float, float]


class SinusoidFunctions(NamedTuple):
    """Hold the true curves of a batch of tasks, y = amplitude * sin(x - phase).

    Args:
        amplitude: [tasks].
        phase: [tasks], in radians.

    Examples:
        >>> functions = SinusoidFunctions(torch.tensor([2.0, 3.0]), torch.tensor([0.0, math.pi]))
        >>> functions.evaluate(torch.tensor([[math.pi / 2]])).flatten()
        tensor([ 2., -3.])
    """

    amplitude: Tensor
    phase: Tensor

    @property
    def num_tasks(self) -> int:
        """The number of curves."""
        return self.amplitude.shape[0]

    def evaluate(self, x: Tensor) -> Tensor:
        """Return every task's curve at its points.

        Args:
            x: Points [tasks, points, 1], or [points, 1] to evaluate all tasks at the same points.

        Returns:
            Values [tasks, points, 1].

        Raises:
            ValueError: When x has another shape.
        """
        if x.shape[-1:] != (1,) or x.dim() not in (2, 3) or x.shape[:-2] not in ((), (self.num_tasks,)):
            raise ValueError(
                f"SinusoidFunctions.evaluate(x): x must be [points, 1] or [{self.num_tasks}, points, 1], "
                f"got {list(x.shape)}."
            )
        return self.amplitude[:, None, None] * torch.sin(x - self.phase[:, None, None])


class Sinusoid:
    r"""Regression tasks y = amplitude * sin(x - phase), each with its own amplitude and phase.

    .. math::
        y = A \sin(x - \varphi), \quad A \sim U[0.1, 5], \; \varphi \sim U[0, \pi], \; x \sim U[-5, 5]

    Args:
        shots: Support examples of a task.
        queries: Query examples of a task.
        amplitude: Lowest and highest amplitude.
        phase: Lowest and highest phase, in radians.
        x: Lowest and highest input.
        dtype: Floating-point type of every tensor; None is torch's default type.
        device: Where tasks are drawn; None is torch's default device.

    Raises:
        ValueError: For counts below one, a range that does not ascend, a type that is not floating.
        TypeError: For a count that is not an int.

    Targets carry no noise.

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
        x: Range = (-5.0, 5.0),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_counts("Sinusoid", {"shots": shots, "queries": queries})
        for name, ends in (("amplitude", amplitude), ("phase", phase), ("x", x)):
            _check_range(name, ends)
        self.shots, self.queries = shots, queries
        self.amplitude, self.phase, self.x = amplitude, phase, x
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = torch.get_default_device() if device is None else torch.device(device)
        check_float_dtype("Sinusoid", self.dtype)

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks, and examples of each.

        Args:
            num_tasks: Number of curves.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            A batch; x and y are [tasks, shots, 1] and [tasks, queries, 1].

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        return self.sample_examples(
            self.sample_functions(num_tasks, generator=generator), generator=generator
        )

    def sample_functions(
        self, num_tasks: int, *, generator: torch.Generator | None = None
    ) -> SinusoidFunctions:
        """Draw the true curves alone, as a plot needs them beside their examples.

        Args:
            num_tasks: Number of curves.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            The curves, for `sample_examples` and `SinusoidFunctions.evaluate`.

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        check_counts("Sinusoid.sample", {"num_tasks": num_tasks})
        amplitude = self._uniform(self.amplitude, (num_tasks,), generator)
        return SinusoidFunctions(amplitude, self._uniform(self.phase, (num_tasks,), generator))

    def sample_examples(
        self, functions: SinusoidFunctions, *, generator: torch.Generator | None = None
    ) -> Batch:
        """Draw support and query examples of given curves.

        Args:
            functions: The curves, as `sample_functions` returns them.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            A batch with one task for each curve.

        Raises:
            ValueError: When the generator is on another device.
        """
        inputs = self._uniform(self.x, (functions.num_tasks, self.shots + self.queries, 1), generator)
        parts = inputs.split([self.shots, self.queries], dim=1)
        return Batch(*(Examples(x, functions.evaluate(x)) for x in parts))

    def _uniform(self, ends: Range, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        check_generator("Sinusoid.sample", generator, self.device)
        low, high = ends
        unit = torch.rand(shape, generator=generator, dtype=self.dtype, device=self.device)
        return low + (high - low) * unit


def _check_range(name: str, ends: Range) -> None:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"Sinusoid: {name} must be (lowest, highest), finite and ascending, got {ends}.")
