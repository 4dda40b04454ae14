"""Labels of a data set, and loading of its items in this process or ahead in workers."""

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

from metagrad.core.checks import is_list_or_tuple, is_sequence, refuse
from metagrad.core.tree import tree_map
from metagrad.tasks._columns import is_missing
from metagrad.tasks.batch import Batch, Examples
from metagrad.tasks.fewshot.episodes import Members

if TYPE_CHECKING:
    from collections.abc import Hashable


class Plan(NamedTuple):
    """The content of a batch of tasks, before anything is loaded.

    Args:
        support: Items and labels.
        query: Items and labels.
        seeds: Seeds of the random numbers for loading each task, [tasks] int64.
    """

    support: Members
    query: Members
    seeds: Tensor


Draw = Callable[[int, torch.Generator], Plan]


class Items(Dataset[Any]):
    """The inputs of a data set after a transform.

    Args:
        dataset: A map-style data set of pairs (x, label).
        transform: Maps x to a tensor, or None.
        labels: The label that each item must have. If None, labels are not checked.
    """

    def __init__(
        self, dataset: Any, transform: Callable[[Any], Any] | None, labels: list[Any] | None = None
    ) -> None:
        self.dataset: Any = dataset
        self.transform = transform
        self.labels = labels

    def __getitem__(self, index: int) -> Tensor:
        """Return one input. Its random numbers depend only on its position."""
        with seeded(index):
            return self.read(index)

    def read(self, index: int) -> Tensor:
        """Return one input as a tensor."""
        item = self.dataset[index]
        if self.labels is not None and (label := label_of("FewShot", item)) != self.labels[index]:
            raise ValueError(
                f"FewShot: item {index} of the data set has the label {label!r}, {self.labels[index]!r} is stored. "
                "Pass labels=, or remove the attribute of the data set that stores other labels."
            )
        x = item[0]
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
    """A data set of batches. Its indices are plans."""

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
        """Load the items of a task without its padding."""
        with seeded(seed):
            return tuple([self.items.read(i) for i in part if i >= 0] for part in (support, query))  # type: ignore[return-value]


class Prefetcher:
    """Load batches ahead in worker processes.

    A generator in a given state always draws the same tasks. So the workers load the batches that a copy of the
    generator draws. They are discarded if the next call has a generator in a different state, or a different
    number of tasks.

    Args:
        batches: Loads a plan.
        draw: Draws a plan.
        workers: Number of processes.
        prefetch: Number of batches that each process loads ahead.
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
        """Return the batch that the generator draws, and set the generator to its state after the draw."""
        state = generator.get_state()
        if (
            self._expected is None
            or self._expected[0] != num_tasks
            or not torch.equal(self._expected[1], state)
        ):
            self._plans.restart(num_tasks, state)
            self._iterator = iter(self._loader)
        assert self._iterator is not None
        self._expected = None  # if a worker fails
        batch = next(self._iterator)
        self._expected = (num_tasks, self._plans.states.popleft())
        generator.set_state(self._expected[1])
        return batch


class _Plans(Sampler):
    """An endless sequence of plans, and the state of the generator after each."""

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
            yield tree_map(Tensor.numpy, plan)  # arrays are copied, tensors would use shared memory


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
    """Seed torch (on the CPU), NumPy and Python inside a `with` block, and restore their states after it."""
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
    """Return the argument. A function of a module can be pickled for worker processes."""
    return value


def _padded_stack(tasks: Sequence[list[Tensor]]) -> Tensor:
    """Stack the inputs of tasks, [tasks, examples, ...]. Shorter tasks are padded with zeros."""
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


ATTRIBUTES = ("targets", "labels")  # attributes of data sets in torchvision and other packages
COMPARED = 32  # items of different classes, and evenly spaced items, that are compared at once


class Labels(NamedTuple):
    """The classes of a data set.

    Args:
        codes: Position of the class of each item in `classes`, [items] int64.
        classes: Names of the classes in the data set, else their labels, sorted by label.
        of_items: The label that each item must have when it is loaded. None if the user gave the labels.
    """

    codes: Tensor
    classes: list[Hashable]
    of_items: list[Any] | None


def read_labels(call: str, dataset: Any, given: Any = None) -> Labels:
    """Return the class of each item of a data set.

    The label of an item is the second element of ``(x, label)``. A stored list of labels saves reading all items. It
    is used only if it agrees with the labels of some items, which are read. A stored list is wrong if the
    data set transforms its labels, or if a wrapper changes them. :class:`Items` compares the other items when
    they are loaded.

    Args:
        call: Name of the caller in error messages.
        dataset: A map-style data set.
        given: Labels from the user, [items]. They are not compared with the labels of the items.

    Raises:
        ValueError: The data set has no labels, or the label of an item is not an integer or a name.
    """
    stored = None if given is not None else _stored(dataset)
    if stored is not None and not _agree(call, dataset, stored):
        labels, names = _labels_of_items(call, dataset), None
    else:
        labels = _plain(given) if given is not None else stored or _labels_of_items(call, dataset)
        names = None if given is not None else _names(dataset)
    _check_labels(call, labels, len(dataset))
    values = sorted(set(labels))
    places = {value: place for place, value in enumerate(values)}
    if names is not None and isinstance(values[0], int) and 0 <= values[0] <= values[-1] < len(names):
        values = [names[value] for value in values]
    codes = torch.tensor([places[label] for label in labels], device="cpu")
    return Labels(codes, values, None if given is not None else labels)


def label_of(call: str, item: Any) -> Any:
    """Return the label of an item (x, label) as a Python value."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ValueError(
            f"{call}: items of the data set must be (x, label), got a {type(item).__name__}. Pass labels=, one for "
            "each item, if there are any: tasks are made of classes."
        )
    return _plain([item[1]])[0]


def _labels_of_items(call: str, dataset: Any) -> list[Any]:
    with seeded(0):
        return [label_of(call, dataset[i]) for i in range(len(dataset))]


def _stored(dataset: Any) -> list[Any] | None:
    """Return the labels that a data set stores, or None unless there is one for each item."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return _plain(dataset.tensors[-1])
    if isinstance(dataset, Subset):
        stored = _stored(dataset.dataset)
        return None if stored is None else [stored[i] for i in dataset.indices]
    lists = (getattr(dataset, name, None) for name in ATTRIBUTES)
    found = next((_plain(labels) for labels in lists if is_vector(labels)), None)
    return None if found is None or len(found) != len(dataset) else found


def _agree(call: str, dataset: Any, stored: list[Any]) -> bool:
    """Return whether some items have their stored labels: items of different classes, and evenly spaced items."""
    first = {str(label): i for i, label in reversed(list(enumerate(stored)))}
    positions = [*list(first.values())[-COMPARED:], *range(0, len(stored), -(-len(stored) // COMPARED) or 1)]
    with seeded(0):
        return all(label_of(call, dataset[i]) == stored[i] for i in positions)


def is_vector(labels: Any) -> bool:
    """Return whether labels are a list or tuple, or an array of one dimension."""
    return is_list_or_tuple(labels) or getattr(labels, "ndim", 0) == 1


def _plain(labels: Any) -> list[Any]:
    """Return labels as Python values."""
    if isinstance(labels, (Tensor, np.ndarray)):
        return labels.tolist()
    is_array = (Tensor, np.ndarray, np.generic)
    return [label.tolist() if isinstance(label, is_array) else label for label in labels]


def _names(dataset: Any) -> Sequence[Hashable] | None:
    """Return the class names of a data set, or None if there are no names or two classes share a name."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return names if is_sequence(names) and len(set(map(str, names))) == len(names) else None


def _check_labels(call: str, labels: list[Any], num_items: int) -> None:
    if len(labels) != num_items or not labels:
        refuse(call, f"a label for each of the {num_items} items", len(labels))
    kind = type(labels[0]) if isinstance(labels[0], (int, str)) else int
    wrong = next((i for i, label in enumerate(labels) if type(label) is not kind or is_missing(label)), None)
    if wrong is not None:
        raise ValueError(
            f"{call}: labels must be integers, or names, and no mixture, got {labels[wrong]!r} for item {wrong} and "
            f"{labels[0]!r} for item 0. Leave items without a label out by torch.utils.data.Subset, or pass labels=."
        )
