"""Groups of items (classes or tasks): their splits, and random draws of their members."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=Hashable)

SHARES = {"train": 0.64, "validation": 0.16, "test": 0.20}  # as in published splits of 100 classes
_OTHER_NAMES = {"training": "train", "val": "validation", "valid": "validation", "testing": "test"}


@functools.lru_cache
def published_splits() -> dict[str, dict[str, Any]]:
    """Return the published splits by the name of the data set and the name of the split."""
    return json.loads(Path(__file__).with_name("published_splits.json").read_text(encoding="utf-8"))


def split_name(name: str) -> str:
    """Return the canonical name of a split: `val` and `valid` become `validation`."""
    return _OTHER_NAMES.get(name.lower(), name.lower())


def choose_split(
    call: str,
    argument: str,
    known: Sequence[T],
    wanted: Sequence[T] | Mapping[str, Sequence[T]] | None,
    split: str | None,
) -> list[T]:
    """Return the groups of a data set that tasks are made of.

    Args:
        call: Name of the caller in error messages.
        argument: Name of the groups in error messages, such as `"classes"`.
        known: All groups of the data set.
        wanted: Groups to use, or lists of groups by the name of the split. None uses all groups.
        split: Name of the split, or None. Without lists in `wanted`, :func:`dealt` splits the groups.

    Raises:
        ValueError: A group or a split does not exist, or a group occurs twice.
    """
    if isinstance(wanted, Mapping):
        return _from_mapping(call, argument, known, wanted, split)
    if wanted is not None:
        if split is not None:
            raise ValueError(
                f"{call}: split={split!r} needs {argument}= by split, as {{'train': [...], 'test': [...]}}, "
                "got one list. Leave one of them out."
            )
        return _checked(call, argument, known, wanted)
    return list(known) if split is None else dealt(call, known, split)


def dealt(call: str, known: Sequence[T], split: str) -> list[T]:
    """Return the groups of one split: 64, 16 or 20 %, in an order that depends only on the number of groups."""
    name = split_name(split)
    if name not in SHARES:
        raise ValueError(f"{call}: split must be one of {', '.join(map(repr, SHARES))}, got {split!r}.")
    order = np.random.default_rng(0).permutation(len(known))
    ends = np.round(np.cumsum([0, *SHARES.values()]) * len(known)).astype(int)
    number = list(SHARES).index(name)
    return [known[i] for i in sorted(order[ends[number] : ends[number + 1]])]


def _from_mapping(
    call: str, argument: str, known: Sequence[T], wanted: Mapping[str, Sequence[T]], split: str | None
) -> list[T]:
    splits = {split_name(name): groups for name, groups in wanted.items()}
    if len(splits) < len(wanted):
        names = ", ".join(map(repr, wanted))
        raise ValueError(
            f"{call}: {argument} must have every split once, got {names}: two of these mean the same."
        )
    if split is None or split_name(split) not in splits:
        names = ", ".join(map(repr, splits))
        raise ValueError(f"{call}: split must be one of {names}, as {argument} are by split, got {split!r}.")
    homes: dict[T, str] = {}
    for name, groups in splits.items():
        for group in groups:
            if homes.setdefault(group, name) != name:
                raise ValueError(
                    f"{call}: {group!r} is in the splits {homes[group]!r} and {name!r} of {argument}, which must "
                    "have nothing in common."
                )
    return _checked(call, argument, known, splits[split_name(split)])


def _checked(call: str, argument: str, known: Sequence[T], wanted: Sequence[T]) -> list[T]:
    there = set(known)
    unknown = [group for group in wanted if group not in there]
    if unknown:
        raise ValueError(
            f"{call}: {argument} has {unknown[0]!r}{_and_more(len(unknown))}, which the data do not have; there "
            f"are {len(known)}: {listed(known)}."
        )
    twice = next((group for group, count in Counter(wanted).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{call}: {argument} has {twice!r} twice.")
    return list(wanted)


def listed(values: Sequence[object], most: int = 5) -> str:
    """Return the first values as text for an error."""
    return ", ".join(map(repr, values[:most])) + (", ..." if len(values) > most else "")


def _and_more(number: int) -> str:
    return f" and {number - 1} more" if number > 1 else ""


class Groups:
    """The members of groups, which may differ in size.

    Args:
        codes: Number of the group of each item, [items] int64. Items of no group have a negative number.
        num_groups: Number of groups.
        device: Device of the random draws.
    """

    def __init__(self, codes: Tensor, num_groups: int, device: torch.device) -> None:
        kept = (codes >= 0).nonzero().squeeze(1)
        order = codes[kept].argsort(stable=True)
        sizes = torch.bincount(codes[kept], minlength=num_groups)
        self.num_groups: int = num_groups
        self.largest: int = int(sizes.max())
        self.items: Tensor = kept[order].to(device)
        self.sizes: Tensor = sizes.to(device)
        self.starts: Tensor = (sizes.cumsum(0) - sizes).to(device)

    @property
    def device(self) -> torch.device:
        """Device of the random draws."""
        return self.sizes.device

    def draw_members(self, groups: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw distinct members of groups. If a group has fewer members, the remaining items are arbitrary.

        Args:
            groups: Numbers of groups, [...].
            count: Number of members to draw from each group, at most the size of the largest group.
            generator: Source of random numbers. None means torch's global generator.

        Returns:
            Positions of the items, [..., count] int64.
        """
        members = draw_distinct(self.sizes[groups], self.largest, count, generator)
        places = self.starts[groups].unsqueeze(-1) + members
        return self.items[places.clamp(max=len(self.items) - 1)]


def draw_distinct(sizes: Tensor, largest: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw distinct integers from 0 to `size - 1` for each size. If there are fewer, larger integers follow.

    Draw n independent uniform keys. The positions of the k largest keys are then k distinct numbers in uniform
    order. So one call of `topk` draws a whole batch. The keys are float64, which makes ties negligible.

    Args:
        sizes: [...], int64.
        largest: Upper bound of the sizes.
        count: Number of integers to draw for each size.
        generator: Source of random numbers. None means torch's global generator.

    Returns:
        [..., count] int64.
    """
    shape = (*sizes.shape, largest)
    keys = torch.rand(shape, generator=generator, dtype=torch.float64, device=sizes.device)
    beyond = torch.arange(largest, device=sizes.device) >= sizes.unsqueeze(-1)
    return keys.masked_fill_(beyond, -1.0).topk(count, dim=-1).indices
