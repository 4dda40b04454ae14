"""How many products to compute together: as many as fit into a chunk, where batching is faster and possible."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.memory.storages import Ledger, StorageMode

Product: TypeAlias = Callable[[list[Tensor], bool], list[Tensor]]
"""``product(vectors, together)`` multiplies stacks ``[m, ...]``: by one batched backward pass, or a plain one."""

# On a CPU, products together save the overhead of many small operations, and lose where their operands leave the
# cache. Time of 8 together on one core, relative to one by one, by the memory that one takes: 0.3 at 0.05 MiB, 0.6 to
# 0.8 at 0.25 to 0.5 MiB, 0.9 to 1.1 at 1 MiB, 1.1 to 1.4 at 2 MiB (transformers, MLPs and CNNs of several widths).
_CPU_CACHE = 4 * 2**20
_FEWEST_ON_CPU = 8


class Together:
    """Runs products one by one or in batches; the first one is measured.

    Attributes:
        bytes_each: The working memory of one product at its peak, without its result; None before the first.
        is_legal: False once an operation could not be batched.
    """

    def __init__(self) -> None:
        self.bytes_each: int | None = None
        self.is_legal: bool = True

    def pieces(
        self, product: Product, vectors: Sequence[Tensor], chunk: int, *, one_by_one: bool = False
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Multiply stacks ``[k, ...]`` piece by piece; yield the slice of the k, and its products."""
        count, start = len(vectors[0]), 0
        while start < count:
            measure = self.bytes_each is None and count > 1 and not one_by_one
            most = 1 if measure or one_by_one else self.most(chunk, vectors[0].device)
            size = min(most, count - start)
            place = slice(start, start + size)
            part = [vector[place] for vector in vectors]
            if measure:
                yield place, self._measured(product, part)
            elif size == 1:
                yield place, product(part, False)
            else:
                products = self._batched(product, part)
                if products is None:
                    continue
                yield place, products
            start += size

    def most(self, chunk: int, device: torch.device) -> int:
        """Return how many products to ask for at once; two at first, one of which is measured."""
        if self.bytes_each is None:
            return 2
        on_cpu = device.type == "cpu"
        size = (min(chunk, _CPU_CACHE) if on_cpu else chunk) // max(1, self.bytes_each)
        return size if self.is_legal and size >= (_FEWEST_ON_CPU if on_cpu else 2) else 1

    def _measured(self, product: Product, part: list[Tensor]) -> list[Tensor]:
        with StorageMode(ledger := Ledger(part[0].device)):
            products = product(part, False)
        self.bytes_each = ledger.peak
        ledger.close()
        return products

    def _batched(self, product: Product, part: list[Tensor]) -> list[Tensor] | None:
        """Return None if an operation cannot be batched, or only by a loop of its own, which is slower."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")
            try:
                return product(part, True)
            except (RuntimeError, NotImplementedError, UserWarning):
                # If the error has another cause, it is raised again by the products one by one.
                self.is_legal = False
                return None
