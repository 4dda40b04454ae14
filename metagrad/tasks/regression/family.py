"""The base class of regression tasks: draws of functions, inputs and noisy targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from metagrad.core.checks import check_number, is_list_or_tuple, is_number
from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks.batch import Batch, Examples

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[float, float]


class Functions(Protocol):
    """The true functions of a batch of tasks."""

    @property
    def num_tasks(self) -> int:
        """Number of functions."""
        ...

    def evaluate(self, x: Tensor) -> Tensor:
        """Return the values of each task at its points, [tasks, points, 1].

        Args:
            x: Points, [tasks, points, 1], or [points, 1] for the same points in each task.
        """
        ...


class Curves(NamedTuple):
    """Functions with one formula and one set of parameters per task.

    Args:
        formula: Maps points [tasks, points, 1], and keyword arguments for the parameters, to values.
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
        """Number of curves."""
        return len(next(iter(self.parameters.values())))

    def evaluate(self, x: Tensor) -> Tensor:
        """Return the values of each curve at its points, [tasks, points, 1].

        Args:
            x: Points, [tasks, points, 1], or [points, 1] for the same points in each task.

        Raises:
            ValueError: x has another shape.
        """
        check_points("Curves.evaluate(x)", x, self.num_tasks)
        return self.formula(x, **{name: value[:, None, None] for name, value in self.parameters.items()})


class Regression:
    """Regression tasks with one input and one output: a random function, inputs U[x], and noisy targets.

    A subclass defines a `formula`, whose parameters are uniform in `ranges`, as `Sinusoid` does. Alternatively it
    defines `sample_functions`, which may call `uniform_curves`.

    Args:
        shots: Number of support examples of a task.
        queries: Number of query examples of a task.
        ranges: Lowest and highest value of each parameter of the formula.
        x: Lowest and highest input.
        noise: Standard deviation of the normal noise of support and query targets.
        dtype: Floating-point type of every tensor. None means torch's default type.
        device: Device of the tasks. None means torch's default device.

    Raises:
        ValueError: A number or a range is invalid, or dtype is not a floating-point type.

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

    def __repr__(self) -> str:
        sizes = f"shots={self.shots}, queries={self.queries}, noise={self.noise}"
        return f"{type(self).__name__}({sizes}, x={self.x}, ranges={self.ranges})"

    def sample_functions(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Any:
        """Draw true functions without examples, for example to plot them.

        Args:
            num_tasks: Number of functions.
            generator: Source of random numbers. None means torch's global generator.

        Returns:
            The functions, for `sample_examples`.

        Raises:
            ValueError: num_tasks is below one, or the generator is on another device.
        """
        if self.formula is None:
            raise NotImplementedError(
                f"{type(self).__name__}: a family must have a formula, or define sample_functions."
            )
        return self.uniform_curves(self.formula, self.ranges, num_tasks, generator)

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks and their examples.

        Args:
            num_tasks: Number of functions.
            generator: Source of random numbers. None means torch's global generator.

        Returns:
            A batch. x and y are [tasks, shots, 1] in support and [tasks, queries, 1] in query.

        Raises:
            ValueError: num_tasks is below one, or the generator is on another device.
        """
        functions = self.sample_functions(num_tasks, generator=generator)
        return self.sample_examples(functions, generator=generator)

    def sample_examples(self, functions: Functions, *, generator: torch.Generator | None = None) -> Batch:
        """Draw support and query examples of given functions.

        Args:
            functions: The functions, as `sample_functions` returns them.
            generator: Source of random numbers. None means torch's global generator.

        Returns:
            A batch with one task for each function.

        Raises:
            ValueError: The generator is on another device.
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
        """Draw curves of one formula, with uniform and independent parameters.

        Args:
            formula: Maps points [tasks, points, 1], and keyword arguments for the parameters, to values.
            ranges: Lowest and highest value of each parameter. Parameters are drawn in this order.
            num_tasks: Number of curves.
            generator: Source of random numbers. None means torch's global generator.
        """
        check_counts(f"{type(self).__name__}.sample", {"num_tasks": num_tasks})
        drawn = {name: self.uniform(ends, (num_tasks,), generator) for name, ends in ranges.items()}
        return Curves(formula, drawn)

    def uniform(self, ends: Range, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw uniform random numbers from a range."""
        low, high = ends
        return low + (high - low) * self._draw(torch.rand, shape, generator)

    def normal(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw standard normal random numbers."""
        return self._draw(torch.randn, shape, generator)

    def _draw(
        self, draw: Callable[..., Tensor], shape: tuple[int, ...], generator: torch.Generator | None
    ) -> Tensor:
        check_generator(f"{type(self).__name__}.sample", generator, self.device)
        return draw(shape, generator=generator, dtype=self.dtype, device=self.device)


def check_points(call: str, x: Tensor, num_tasks: int) -> None:
    """Raise ``ValueError`` unless points have the shape [points, 1] or [tasks, points, 1]."""
    if x.shape[-1:] != (1,) or x.dim() not in (2, 3) or x.shape[:-2] not in ((), (num_tasks,)):
        raise ValueError(f"{call}: x must be [points, 1] or [{num_tasks}, points, 1], got {list(x.shape)}.")


def checked_range(call: str, name: str, ends: Range) -> Range:
    """Return a range. Raise ``ValueError`` unless it is two finite numbers in ascending order."""
    numbers = [end for end in ends if is_number(end)] if is_list_or_tuple(ends) else []
    if len(numbers) != 2 or len(ends) != 2 or not -math.inf < numbers[0] <= numbers[1] < math.inf:
        raise ValueError(f"{call}: {name} must be (lowest, highest), finite and ascending, got {ends}.")
    return ends[0], ends[1]
