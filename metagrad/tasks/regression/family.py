"""What all families of curves share: how tasks, their inputs and their noisy targets are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from metagrad.core.checks import check_number
from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks.batch import Batch, Examples

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[float, float]


class Functions(Protocol):
    """The true functions of a batch of tasks."""

    @property
    def num_tasks(self) -> int:
        """The number of functions."""
        ...

    def evaluate(self, x: Tensor) -> Tensor:
        """Return every task's values at its points, [tasks, points, 1].

        Args:
            x: Points [tasks, points, 1], or [points, 1] to evaluate all tasks at the same points.
        """
        ...


class Curves(NamedTuple):
    """Hold functions that are one formula with parameters of each task.

    Args:
        formula: Maps points [tasks, points, 1], and each parameter by its name, to values.
        parameters: Parameters by name, [tasks] each.

    Examples:
        >>> curves = Curves(lambda x, slope: slope * x, {"slope": torch.tensor([2.0, 3.0])})
        >>> curves.evaluate(torch.tensor([[10.0]])).flatten()
        tensor([20., 30.])
    """

    formula: Callable[..., Tensor]
    parameters: Mapping[str, Tensor]

    @property
    def num_tasks(self) -> int:
        """The number of curves."""
        return len(next(iter(self.parameters.values())))

    def evaluate(self, x: Tensor) -> Tensor:
        """Return every task's curve at its points.

        Args:
            x: Points [tasks, points, 1], or [points, 1] to evaluate all tasks at the same points.

        Returns:
            Values [tasks, points, 1].

        Raises:
            ValueError: When x has another shape.
        """
        check_points("Curves.evaluate(x)", x, self.num_tasks)
        return self.formula(x, **{name: value[:, None, None] for name, value in self.parameters.items()})


class Regression:
    """Draw tasks of one input and one output: a function, inputs U[x], and targets with or without noise.

    A family is a subclass with a `formula`, whose parameters are uniform in `ranges`, as `Sinusoid` and `Linear`;
    or with `sample_functions`, which may call `uniform_curves`.

    Args:
        shots: Support examples of a task.
        queries: Query examples of a task.
        ranges: Lowest and highest value of each parameter of the formula.
        x: Lowest and highest input.
        noise: Standard deviation of the normal noise of every target, query ones too.
        dtype: Floating-point type of every tensor; None is torch's default type.
        device: Where tasks are drawn; None is torch's default device.

    Raises:
        ValueError: For counts below one, a range that does not ascend, negative noise, a type that is not
            floating.
        TypeError: For a count that is not an int.

    Examples:
        >>> class Parabola(Regression):
        ...     def sample_functions(self, num_tasks, *, generator=None):
        ...         return self.uniform_curves(lambda x, a: a * x**2, {"a": (1.0, 2.0)}, num_tasks, generator)
        >>> batch = Parabola(shots=5, queries=15).sample(25)
        >>> batch.support.x.shape, batch.query.y.shape
        (torch.Size([25, 5, 1]), torch.Size([25, 15, 1]))
    """

    formula: Callable[..., Tensor] | None = None

    def __init__(
        self,
        shots: int = 10,
        queries: int = 10,
        *,
        ranges: Mapping[str, Range] | None = None,
        x: Range = (-5.0, 5.0),
        noise: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        call = type(self).__name__
        check_counts(call, {"shots": shots, "queries": queries})
        self.shots = shots
        self.queries = queries
        self.noise: float = check_number(f"{call}(noise)", noise, 0)
        self.x: Range = checked_range(call, "x", x)
        self.ranges: dict[str, Range] = {
            name: checked_range(call, name, ends) for name, ends in (ranges or {}).items()
        }
        self.dtype: torch.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device: torch.device = torch.get_default_device() if device is None else torch.device(device)
        check_float_dtype(call, self.dtype)

    def sample_functions(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Any:
        """Draw the true functions alone, as a plot needs them beside their examples.

        Args:
            num_tasks: Number of functions.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            The functions, for `sample_examples`.

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        if self.formula is None:
            raise NotImplementedError(
                f"{type(self).__name__}: a family must have a formula, or define sample_functions."
            )
        return self.uniform_curves(self.formula, self.ranges, num_tasks, generator)

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks, and examples of each.

        Args:
            num_tasks: Number of functions.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            A batch; x and y are [tasks, shots, 1] and [tasks, queries, 1].

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        functions = self.sample_functions(num_tasks, generator=generator)
        return self.sample_examples(functions, generator=generator)

    def sample_examples(self, functions: Functions, *, generator: torch.Generator | None = None) -> Batch:
        """Draw support and query examples of given functions.

        Args:
            functions: The functions, as `sample_functions` returns them.
            generator: Source of the random numbers; None is torch's global one.

        Returns:
            A batch with one task for each function.

        Raises:
            ValueError: When the generator is on another device.
        """
        sizes = [self.shots, self.queries]
        x = self.sample_inputs(functions.num_tasks, generator)
        y = functions.evaluate(x)
        if self.noise:
            y = y + self.noise * self.normal(y.shape, generator)
        parts = zip(x.split_with_sizes(sizes, 1), y.split_with_sizes(sizes, 1), strict=True)
        return Batch(*(Examples(*part) for part in parts))

    def sample_inputs(self, num_tasks: int, generator: torch.Generator | None) -> Tensor:
        """Draw the inputs of support and query examples, [tasks, shots + queries, 1]."""
        return self.uniform(self.x, (num_tasks, self.shots + self.queries, 1), generator)

    def uniform_curves(
        self,
        formula: Callable[..., Tensor],
        ranges: Mapping[str, Range],
        num_tasks: int,
        generator: torch.Generator | None,
    ) -> Curves:
        """Draw the curves of a formula whose parameters are uniform and independent.

        Args:
            formula: Maps points [tasks, points, 1], and each parameter by its name, to values.
            ranges: Lowest and highest value of each parameter, which are drawn in this order.
            num_tasks: Number of curves.
            generator: Source of the random numbers; None is torch's global one.
        """
        check_counts(f"{type(self).__name__}.sample", {"num_tasks": num_tasks})
        drawn = {name: self.uniform(ends, (num_tasks,), generator) for name, ends in ranges.items()}
        return Curves(formula, drawn)

    def uniform(self, ends: Range, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw numbers between two ends."""
        low, high = ends
        return low + (high - low) * self._draw(torch.rand, shape, generator)

    def normal(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw numbers of mean 0 and variance 1."""
        return self._draw(torch.randn, shape, generator)

    def _draw(
        self, draw: Callable[..., Tensor], shape: tuple[int, ...], generator: torch.Generator | None
    ) -> Tensor:
        check_generator(f"{type(self).__name__}.sample", generator, self.device)
        return draw(shape, generator=generator, dtype=self.dtype, device=self.device)


def check_points(call: str, x: Tensor, num_tasks: int) -> None:
    """Raise unless points are those of each task, or of all."""
    if x.shape[-1:] != (1,) or x.dim() not in (2, 3) or x.shape[:-2] not in ((), (num_tasks,)):
        raise ValueError(f"{call}: x must be [points, 1] or [{num_tasks}, points, 1], got {list(x.shape)}.")


def checked_range(call: str, name: str, ends: Range) -> Range:
    """Return a range; raise ``ValueError`` unless it is two finite ends that ascend."""
    if len(ends) != 2 or not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] <= ends[1]):
        raise ValueError(f"{call}: {name} must be (lowest, highest), finite and ascending, got {ends}.")
    return ends[0], ends[1]
