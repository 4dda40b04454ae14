"""Reading which class each item of a data set has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from metagrad.core._torch import from_numpy

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

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
