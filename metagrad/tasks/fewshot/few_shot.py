"""Few-shot classification tasks from any labeled data."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from metagrad.core._torch import to_list
from metagrad.core.checks import check_choice, check_count, is_list_or_tuple
from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks._groups import Groups, choose_split
from metagrad.tasks.batch import Batch, Examples
from metagrad.tasks.fewshot.episodes import Composition, Count, draw_episodes
from metagrad.tasks.fewshot.loading import Batches, Items, Plan, Prefetcher, is_vector, load_all, read_labels

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor
    from torch.utils.data import Dataset

MAX_LEVEL = 255  # maximum of images in uint8, which are divided by it


class FewShot:
    r"""Few-shot classification tasks from the classes of a data set.

    A task has `ways` distinct classes, labeled 0 to ways - 1 in random order. It has `shots` support items and
    `queries` other query items of each class. Examples are ordered by label.

    | where items are stored | how |
    | --- | --- |
    | in memory, on the device | `FewShot((x, labels))`, or any data set with `in_memory=True` |
    | outside, loaded when they are drawn | `FewShot(dataset)`, or with `workers=` to load ahead in other processes |

    Only the generator determines the tasks and the random numbers of a transform (from torch, NumPy or Python). The
    tasks do not depend on where items are stored or on the number of workers.

    **Labels.** The label of an item is the second element of the item (x, label). A `targets` or `labels` attribute
    is used only if it agrees with the items. Up to 64 items are compared at once, and each other item when it is
    loaded.

    **Imbalanced tasks.** `ways=(5, 50)` draws the number of classes for each task. `shots=(1, 10)` draws the number
    of support examples for each class. Shorter tasks are padded at their end, x with zeros and y with the label
    -100. `F.cross_entropy` ignores this label, and `batch.support.mask` is False there. Padding changes the loss of
    a task only if its examples see each other, as in BatchNorm with the statistics of the batch. The model needs
    outputs for the largest number of ways.

    Args:
        dataset: A map-style `torch.utils.data.Dataset` or a list, of pairs (x, label). A tuple (x, labels) of tensors
            or arrays, [items, ...] and [items], is also accepted.
        ways: Number of classes of a task, or its bounds.
        shots: Number of support examples of each class, or its bounds.
        queries: Number of query examples of each class.
        classes: Classes to use, or lists of them by the name of the split, `{"train": [...], "test": [...]}`. A class
            is a label, or a name if the data set has `classes`. None uses the `splits` of the data set, or all.
        split: The split of the classes. Without lists in `classes`, 64, 16 and 20 % of the classes form `"train"`,
            `"validation"` and `"test"`, which are the same in every call.
        labels: Labels of the items, which replace the labels in the data set.
        transform: Maps x of an item to a tensor each time the item is drawn.
        on_small: `"raise"` raises an error if a class has too few items, `"skip"` leaves the class out.
        in_memory: True to load all items at once, without the transform.
        workers: Number of processes that load items. 0 loads them in this process.
        prefetch: Number of batches that each worker loads ahead. Give `sample` a generator that nothing else uses:
            batches loaded ahead are discarded if the state of the generator changes.
        device: Device of the tasks and of items in memory. None means torch's default device.
        dtype: Floating-point type of x. None means torch's default dtype for images, and the dtype of x for other
            data. Images in uint8 are divided by 255. Other integers are ids and keep their type.

    Attributes:
        classes: Labels or names of the classes that tasks are made of.
        skipped: Labels or names of the classes that were left out because they are too small.

    Raises:
        ValueError: An argument is out of range, an item has no label, or there are too few classes or items.
        TypeError: `dataset`, `labels` or a number has another type.

    Examples:
        >>> x, labels = torch.randn(100, 8), torch.arange(100) % 10
        >>> tasks = FewShot((x, labels), ways=5, shots=1, queries=4, classes=[0, 1, 2, 3, 4, 5])
        >>> batch = tasks.sample(32, generator=torch.Generator().manual_seed(0))
        >>> batch.support.x.shape, batch.query.y.shape
        (torch.Size([32, 5, 8]), torch.Size([32, 20]))
        >>> padded = FewShot((x, labels), ways=(2, 5), shots=(1, 3), queries=4).sample(32)
        >>> torch.equal(padded.query.mask.sum(1) // 4, padded.query.y.amax(1) + 1)
        True

    References:
        Vinyals et al., Matching Networks for One Shot Learning, 2016, section 4.1.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[tuple[Any, Any]] | tuple[Any, Any],
        ways: Count = 5,
        shots: Count = 1,
        queries: int = 15,
        *,
        classes: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        split: str | None = None,
        labels: Any = None,
        transform: Callable[[Any], Any] | None = None,
        on_small: str = "raise",
        in_memory: bool = False,
        workers: int = 0,
        prefetch: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._call = call = type(self).__name__
        self.composition: Composition = Composition(
            _checked_count(call, "ways", ways), _checked_count(call, "shots", shots), queries
        )
        check_counts(call, {"queries": queries, "prefetch": prefetch})
        check_count(f"{call}(workers)", workers, 0)
        check_choice(f"{call}(on_small)", on_small, ("raise", "skip"))
        if dtype is not None:
            check_float_dtype(call, dtype)
        self.split = split
        self.dtype = dtype
        self.device: torch.device = torch.get_default_device() if device is None else torch.device(device)
        is_pair = isinstance(dataset, tuple)
        if labels is not None and not is_vector(labels):
            raise TypeError(f"{call}(labels): expected one label for each item, got {type(labels).__name__}.")
        if is_pair and labels is not None:
            raise ValueError(
                f"{call}: labels are given twice, by the pair (x, labels) and by labels=. Leave one out."
            )
        self.dataset, labels = _of_pair(call, dataset) if is_pair else (_map_style(call, dataset), labels)
        self._find_classes(labels, classes, on_small)
        self._find_items(transform, is_pair=is_pair, in_memory=in_memory, workers=workers, prefetch=prefetch)

    @property
    def num_classes(self) -> int:
        """Number of classes that tasks are made of."""
        return len(self.classes)

    def __repr__(self) -> str:
        return f"<{self.protocol_description}>"

    @property
    def protocol_description(self) -> str:
        """Description of the tasks. Print it next to a result, so that others can compare it."""
        ways, shots, queries = self.composition
        split = "" if self.split is None else f"{self.split} split: "
        name = type(self.dataset).__name__ if self._x is None else f"{len(self._x)} items in memory"
        return (
            f"{self._call} {_words(ways)}-way {_words(shots)}-shot, {queries} queries per class, {split}"
            f"{self.num_classes} classes of {name}"
        )

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks.

        Args:
            num_tasks: Number of tasks.
            generator: Source of random numbers, on the device of items in memory, else on the CPU. None means torch's
                global generator.

        Returns:
            A batch. support.x is [tasks, ways * shots, ...] and support.y is [tasks, ways * shots] int64. query.x
            and query.y have `queries` instead of `shots`. No item is in both support and query.

        Raises:
            ValueError: num_tasks is below one, or the generator is on another device.
        """
        check_counts(f"{self._call}.sample", {"num_tasks": num_tasks})
        check_generator(f"{self._call}.sample", generator, self._groups.device)
        if self._x is not None:
            parts = draw_episodes(self._groups, num_tasks, self.composition, generator)
            return Batch(*(Examples(self._gather(part.items), part.labels) for part in parts))
        generator = torch.default_generator if generator is None else generator
        if self._prefetcher is not None:
            batch = self._prefetcher.next(num_tasks, generator)
        else:
            batch = self._batches[self._plan(num_tasks, generator)]
        batch = batch.to(device=self.device)
        return Batch(*(part._replace(x=self._converted(part.x)) for part in batch))

    def _find_classes(self, labels: Any, wanted: Any, on_small: str) -> None:
        """Group items by class. Raise `ValueError` if there are too few classes or items."""
        call, fewest = self._call, self.composition.fewest_examples
        codes, known, self._labels = read_labels(call, self.dataset, labels)
        if wanted is None and self.split is not None:
            wanted = getattr(self.dataset, "splits", None) or None
        chosen = choose_split(call, "classes", known, wanted, self.split)
        counts = dict(zip(known, to_list(torch.bincount(codes, minlength=len(known))), strict=True))
        self.skipped: list[Hashable] = [name for name in chosen if counts[name] < fewest]
        if self.skipped and on_small == "raise":
            raise ValueError(_too_small(call, self.skipped, len(chosen), counts, self.composition))
        self.classes: list[Hashable] = [name for name in chosen if counts[name] >= fewest]
        _check_ways(call, self.composition, self.num_classes, self.split)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._codes = torch.tensor([numbers.get(name, -1) for name in known], device="cpu")[codes]

    def _find_items(
        self,
        transform: Callable[[Any], Any] | None,
        *,
        is_pair: bool,
        in_memory: bool,
        workers: int,
        prefetch: int,
    ) -> None:
        """Store items in memory, or prepare to load them when they are drawn."""
        self._x: Tensor | None = None
        self._prefetcher: Prefetcher | None = None
        x = self.dataset.tensors[0] if is_pair else None
        if in_memory and x is None:
            drawn = to_list((self._codes >= 0).nonzero().squeeze(1))
            x = load_all(Items(self.dataset, None, self._labels), drawn, workers)
            self._codes = self._codes[drawn]
            self.dataset, self._labels = TensorDataset(x, self._codes), None
        if x is not None and transform is None:
            self._x = x.to(self.device)
        where = torch.device("cpu") if self._x is None else self.device
        self._groups = Groups(self._codes, self.num_classes, where)
        self._batches = Batches(Items(self.dataset, transform, self._labels))
        # Not a method of self: a reference cycle would be freed late, with workers that wait for seconds.
        self._plan = functools.partial(_plan, self._groups, self.composition)
        if workers and self._x is None:
            self._prefetcher = Prefetcher(self._batches, self._plan, workers=workers, prefetch=prefetch)

    def _gather(self, items: Tensor) -> Tensor:
        """Return inputs by their positions, [tasks, examples, ...]. Padding is zero."""
        assert self._x is not None
        x = self._x.index_select(0, items.clamp(min=0).flatten())
        x = self._converted(x).view(*items.shape, *x.shape[1:])
        if self.composition.is_balanced:
            return x
        return x.masked_fill_((items < 0).view(*items.shape, *[1] * (x.ndim - 2)), 0)

    def _converted(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return x.to(self.dtype or torch.get_default_dtype()).div_(MAX_LEVEL)
        return x.to(self.dtype) if x.is_floating_point() and self.dtype is not None else x


def _plan(groups: Groups, composition: Composition, num_tasks: int, generator: torch.Generator) -> Plan:
    """Draw a batch. Seeds come from the state before the draw: items in memory draw the same tasks without seeds."""
    state = generator.get_state().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=6).digest(), "little")
    support, query = draw_episodes(groups, num_tasks, composition, generator)
    return Plan(support, query, seed + torch.arange(num_tasks, device="cpu"))


def _map_style(call: str, dataset: Any) -> Any:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset
    raise TypeError(
        f"{call}: dataset must be a map-style data set, with __getitem__ and __len__, or a pair (x, labels), got a "
        f"{type(dataset).__name__}."
    )


def _of_pair(call: str, pair: Sequence[Any]) -> tuple[TensorDataset, Any]:
    """Convert a pair (x, labels) to a data set. Return the data set and its labels."""
    if len(pair) != 2:
        raise ValueError(f"{call}: dataset must be a data set or a pair (x, labels), got {len(pair)} parts.")
    x, labels = pair
    x = x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device="cpu")
    if not x.ndim or not is_vector(labels):
        raise TypeError(f"{call}: dataset must be (x, labels), inputs and a vector of labels.")
    if len(x) != len(labels):
        raise ValueError(f"{call}: x and labels must have one entry an item, got {len(x)} and {len(labels)}.")
    return TensorDataset(x), labels


def _checked_count(call: str, name: str, count: Any) -> Any:
    if not is_list_or_tuple(count):
        numbers: dict[str, Any] = {name: count}
        check_counts(call, numbers)
        return count
    if len(count) != 2:
        raise ValueError(f"{call}: {name} must be a number or (lowest, highest), got {count}.")
    check_counts(call, {f"{name}[0]": count[0], f"{name}[1]": count[1]})
    if count[0] > count[1]:
        raise ValueError(f"{call}: {name} must be (lowest, highest), got {tuple(count)}.")
    return count[0] if count[0] == count[1] else tuple(count)


def _check_ways(call: str, composition: Composition, num_classes: int, split: str | None) -> None:
    if composition.fewest_ways > num_classes:
        of_split = "" if split is None else f" of split {split!r}"
        raise ValueError(
            f"{call}: ways must be at most {num_classes}, the classes{of_split}, got {_words(composition.ways)}."
        )


def _too_small(
    call: str,
    skipped: list[Hashable],
    num_classes: int,
    counts: dict[Hashable, int],
    composition: Composition,
) -> str:
    described = ", ".join(f"{name!r} has {counts[name]}" for name in skipped[:5])
    return (
        f"{call}: a class must have shots + queries = {composition.fewest_examples} examples, and {len(skipped)} of "
        f"{num_classes} have fewer: {described}{', ...' if len(skipped) > 5 else ''}. Ask for fewer, choose others "
        "by classes=, or pass on_small='skip'."
    )


def _words(count: Count) -> str:
    return f"{count[0]} to {count[1]}" if isinstance(count, tuple) else str(count)
