"""Loading the items of tasks: here, or in other processes that work ahead."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from metagrad.core._torch import from_numpy
from metagrad.core.tree import tree_map
from metagrad.tasks.batch import Batch, Examples
from metagrad.tasks.fewshot.episodes import Members

if TYPE_CHECKING:
    from collections.abc import Hashable


class Plan(NamedTuple):
    """Say what a batch of tasks consists of, before anything is loaded.

    Args:
        support: Items and labels.
        query: Items and labels.
        seeds: Of the random numbers that loading a task takes, [tasks] int64.
    """

    support: Members
    query: Members
    seeds: Tensor


Draw = Callable[[int, torch.Generator], Plan]


class Items(Dataset[Any]):
    """The inputs of a data set, each after a transform, which draws the same random numbers for the same seed.

    Args:
        dataset: A map-style data set of pairs (x, label).
        transform: Maps x to a tensor, or None.
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any] | None) -> None:
        self.dataset: Any = dataset
        self.transform = transform

    def __getitem__(self, index: int) -> Tensor:
        """Return one input, from random numbers that depend on its position alone."""
        with seeded(index):
            return self.read(index)

    def read(self, index: int) -> Tensor:
        """Return one input as a tensor."""
        x = self.dataset[index][0]
        x = x if self.transform is None else self.transform(x)
        if isinstance(x, Tensor):
            return x
        if isinstance(x, (np.ndarray, np.generic, int, float)):
            return torch.as_tensor(x, device="cpu")
        raise TypeError(
            f"FewShot(dataset, transform=...): x of item {index} must be a tensor or an array, got a "
            f"{type(x).__name__}. Pass a transform that returns one."
        )


class Batches(Dataset[Any]):
    """Batches of tasks by their plans: a data set whose indices are plans."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __getitem__(self, plan: Plan) -> Batch:
        """Load all examples of a batch, task by task."""
        plan = tree_map(torch.as_tensor, plan)
        rows = zip(plan.support.items.tolist(), plan.query.items.tolist(), plan.seeds.tolist(), strict=True)
        support, query = zip(*(self._task(*row) for row in rows), strict=True)
        parts = zip((support, query), (plan.support.labels, plan.query.labels), strict=True)
        return Batch(*(Examples(_padded_stack(tasks), labels) for tasks, labels in parts))

    def _task(self, support: list[int], query: list[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Load what is no padding, which is at the end."""
        with seeded(seed):
            return tuple([self.items.read(i) for i in part if i >= 0] for part in (support, query))  # type: ignore[return-value]


class Ahead:
    """Loads batches in worker processes, and beside the one that is asked for those that would follow it.

    What follows is known, since a generator in a given state draws the same tasks: workers load what a copy of
    the generator draws. Where the generator that comes next is in another state, or another number of tasks is
    asked for, that work is dropped.

    Args:
        batches: What loads a plan.
        draw: Draws a plan.
        workers: Number of processes.
        prefetch: How many batches each of them loads ahead.
    """

    def __init__(self, batches: Batches, draw: Draw, *, workers: int, prefetch: int) -> None:
        self._plans = _Plans(draw)
        self._loader = DataLoader(
            batches,
            sampler=self._plans,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            collate_fn=as_it_is,
            generator=torch.Generator(),
        )
        self._iterator: Iterator[Batch] | None = None
        self._expected: tuple[int, Tensor] | None = None

    def next(self, num_tasks: int, generator: torch.Generator) -> Batch:
        """Return the batch that the generator gives in its state, and put it into the state after it."""
        state = generator.get_state()
        if (
            self._expected is None
            or self._expected[0] != num_tasks
            or not torch.equal(self._expected[1], state)
        ):
            self._plans.restart(num_tasks, state)
            self._iterator = iter(self._loader)
        assert self._iterator is not None
        self._expected = None  # should a worker fail
        batch = next(self._iterator)
        self._expected = (num_tasks, self._plans.states.popleft())
        generator.set_state(self._expected[1])
        return batch


class _Plans(Sampler):
    """The plans of one batch after the other, without an end, and the states that the generator has after each."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.states: deque[Tensor] = deque()

    def restart(self, num_tasks: int, state: Tensor) -> None:
        self.num_tasks, self.states = num_tasks, deque()
        self.generator = torch.Generator()
        self.generator.set_state(state)

    def __iter__(self) -> Iterator[Plan]:
        generator, states = self.generator, self.states
        while True:
            plan = self.draw(self.num_tasks, generator)
            states.append(generator.get_state())
            yield tree_map(Tensor.numpy, plan)  # by value, where tensors would be shared memory


def load_all(items: Items, indices: list[int], workers: int) -> Tensor:
    """Load items into one tensor, [items, ...]."""
    loader = DataLoader(
        items,
        sampler=indices,
        batch_size=None,
        num_workers=workers,
        collate_fn=as_it_is,
        generator=torch.Generator(),
    )
    loaded = iter(loader)
    first = next(loaded)
    everything = torch.empty(len(indices), *first.shape, dtype=first.dtype, device="cpu")
    everything[0] = first
    for place, x in zip(everything[1:], loaded, strict=True):
        place.copy_(_of_shape(x, first.shape))
    return everything


@contextlib.contextmanager
def seeded(seed: int) -> Generator[None]:
    """Set the random numbers of torch (on the CPU), NumPy and Python, and put them back in the end."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def as_it_is(value: Any) -> Any:
    """Return the argument; a module-level function, which can be pickled for worker processes."""
    return value


def _padded_stack(tasks: Sequence[list[Tensor]]) -> Tensor:
    """Stack the inputs of tasks, [tasks, examples, ...], with zeros after the shorter ones."""
    first = tasks[0][0]
    x = torch.zeros(len(tasks), max(map(len, tasks)), *first.shape, dtype=first.dtype, device="cpu")
    for row, task in zip(x, tasks, strict=True):
        for place, value in zip(row, task, strict=False):
            place.copy_(_of_shape(value, first.shape))
    return x


def _of_shape(x: Tensor, shape: torch.Size) -> Tensor:
    if x.shape != shape:
        raise ValueError(
            f"FewShot: all inputs must have one shape, got {list(shape)} and {list(x.shape)}. Pass a transform that "
            "resizes or crops them."
        )
    return x


ATTRIBUTES = ("targets", "labels")  # where torchvision's data sets, and many others, keep labels


class Labels(NamedTuple):
    """Hold the classes of a data set.

    Args:
        codes: The class of each item, [items] int64, as a position in `classes`.
        classes: The classes, sorted: the names of the data set where it has them, else the labels themselves.
    """

    codes: Tensor
    classes: list[Hashable]


def read_labels(call: str, dataset: Any, given: Any = None) -> Labels:
    """Return the class of each item of a data set.

    Args:
        call: How errors begin.
        dataset: A map-style data set.
        given: The labels, [items]; None reads them: of a `Subset` or a `TensorDataset`, from the attributes
            `targets` or `labels`, else from all the items (x, label), one by one.

    Raises:
        ValueError: The data set has no labels, or not one for each item.
    """
    labels = np.asarray(_plain(_found(call, dataset) if given is None else given))
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iubUSO":
        raise ValueError(
            f"{call}: labels must be one integer or name for each of the {len(dataset)} items, got shape "
            f"{labels.shape} of {labels.dtype}."
        )
    if not len(labels):
        raise ValueError(f"{call}: the data set is empty.")
    values, codes = np.unique(labels, return_inverse=True)
    return Labels(from_numpy(codes.reshape(-1)), _named(dataset, values.tolist()))


def _found(call: str, dataset: Any) -> Any:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return dataset.tensors[-1]
    if isinstance(dataset, Subset):
        return np.asarray(_plain(_found(call, dataset.dataset)))[np.asarray(dataset.indices)]
    for name in ATTRIBUTES:
        if (labels := getattr(dataset, name, None)) is not None:
            return labels
    return [_label_of(call, dataset[i]) for i in range(len(dataset))]


def _label_of(call: str, item: Any) -> Any:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ValueError(
            f"{call}: items of the data set must be (x, label), got a {type(item).__name__}. Pass labels=, one for "
            "each item, if there are any: tasks are made of classes."
        )
    label = item[1]
    return label.item() if isinstance(label, torch.Tensor) and label.numel() == 1 else label


def _plain(labels: Any) -> Any:
    return labels.cpu().numpy() if isinstance(labels, torch.Tensor) else labels


def _named(dataset: Any, values: list[Hashable]) -> list[Hashable]:
    """Return the names that a data set has for its labels, where these are positions among the names."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if isinstance(names, Sequence) and all(isinstance(v, int) and 0 <= v < len(names) for v in values):
        return [names[value] for value in values]  # type: ignore[index]
    return values
