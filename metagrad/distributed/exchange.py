"""One exchange of gradients: in buckets, some of which start before the backward pass has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metagrad.core.budget import device_of
from metagrad.core.modules import is_sharded
from metagrad.distributed import buckets, rows
from metagrad.distributed.agreement import Agreement, Layout, Own, agree
from metagrad.distributed.averaged import note_average
from metagrad.distributed.traffic import Traffic
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Plan:
    """What all processes send, in one order, before they have agreed on anything.

    Attributes:
        buckets: The parameters of each bucket, by number.
        params: The parameters that it was made for, by name.
        total: The expected sum of the weights. Gradients are divided by it before they are sent, so that sums do not
            overflow, and corrected if the sum turns out to be another one.
    """

    buckets: Sequence[list[int]] = ()
    params: Mapping[str, Tensor] = field(default_factory=dict)
    total: float = 1.0

    def fits(self, params: Mapping[str, Tensor]) -> bool:
        """Say whether these are the parameters that it was made for."""
        return list(params) == list(self.params) and all(params[name] is p for name, p in self.params.items())


class Exchange:
    """An exchange of the gradients of one backward pass.

    Every process starts the buckets of the plan, in their order, whatever gradients it has. Then the processes agree
    on what each has, and exchange what was not in the plan, or was not final when it was sent.

    Args:
        call: In errors.
        named: The parameters by name, the same ones in every process.
        weight: Of this process.
        limit: Of a bucket, in bytes.
        group: The processes.
        plan: What is sent first; None is nothing.
    """

    def __init__(
        self,
        call: str,
        named: Mapping[str, Tensor],
        weight: float,
        limit: int,
        group: ProcessGroup,
        plan: Plan | None = None,
    ) -> None:
        self._call, self._named, self._weight, self._limit, self._group = call, named, weight, limit, group
        self._params = list(named.values())
        self._plan = plan if plan is not None and plan.fits(named) else Plan()
        self._missing = [set(bucket) for bucket in self._plan.buckets]
        self._place = {number: place for place, bucket in enumerate(self._plan.buckets) for number in bucket}
        self._begun: list[buckets.Bucket] = []
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        self._arrived: dict[int, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Start each bucket when the backward pass inside has accumulated all of its gradients."""
        handles = [
            param.register_post_accumulate_grad_hook(lambda _, number=number: self._arrive(number))
            for number, param in enumerate(self._params)
            if param.requires_grad and param.is_leaf
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def complete(self) -> tuple[Traffic, Plan]:
        """Exchange what is left, write the means, and return the plan of the next exchange.

        Raises:
            ValueError, RuntimeError: As :func:`~metagrad.distributed.agreement.agree`.
        """
        early = sum(one.flat.nbytes for one in self._begun)
        agreed = self._agree()
        late = self._start_late(agreed)
        gathered, counts = self._average_tables(agreed)
        correction = self._plan.total / agreed.total
        for one in self._begun:
            self._write(buckets.finish(one, self._params, correction), agreed)
        for one in late:
            self._write(buckets.finish(one, self._params), agreed)
        for param, layout in zip(self._params, agreed.layouts, strict=True):
            if layout is None:  # of a process with weight 0
                param.grad = None
            if param.grad is not None:
                note_average(param.grad, self._weight / agreed.total)
        every = [*self._begun, *late]
        traffic = Traffic(
            processes=self._group.size(),
            dense=sum(one.flat.nbytes for one in every),
            rows=gathered,
            agreement=agreed.nbytes,
            counts=counts,
            buckets=len(every),
            early=early,
        )
        return traffic, self._next_plan(agreed)

    @torch.no_grad()
    def fail(self) -> None:
        """Take part without gradients, so that no process waits for this one."""
        self._weight = 0.0
        self._agree(failed=True)

    @torch.no_grad()
    def _arrive(self, number: int) -> None:
        self._arrived.setdefault(number, len(self._arrived))
        if number in self._place and self._plain(number) is not None:
            self._missing[self._place[number]].discard(number)
        while len(self._begun) < len(self._missing) and not self._missing[len(self._begun)]:
            self._start_next()

    def _start_next(self) -> None:
        self._begun.append(self._start(self._plan.buckets[len(self._begun)], self._plan.total))

    def _start(self, numbers: list[int], total: float) -> buckets.Bucket:
        gradients = {number: self._plain(number) for number in numbers}
        for number, gradient in gradients.items():
            self._sent[number] = gradient, 0 if gradient is None else gradient._version
        return buckets.start(numbers, gradients, self._params, self._weight / total, self._group)

    def _plain(self, number: int) -> Tensor | None:
        """Return a gradient that can be sent in a bucket."""
        gradient = self._params[number].grad
        return gradient if _is_plain(gradient) else None

    def _agree(self, *, failed: bool = False) -> Agreement:
        """Send what is left of the plan, agree, and wait for all of it."""
        last = len(self._params)
        places = [self._arrived.get(number, last) for number in range(last)]
        again = [number for number, sent in self._sent.items() if self._has_changed(number, *sent)]
        while len(self._begun) < len(self._plan.buckets):
            self._start_next()
        try:
            own = Own(self._weight, places, again, failed)
            return agree(self._call, self._named, own, device_of(self._params), self._group)
        finally:
            for one in self._begun:
                one.work.wait()

    def _has_changed(self, number: int, sent: Tensor | None, version: int) -> bool:
        gradient = self._plain(number)
        return gradient is not sent or (gradient is not None and gradient._version != version)

    def _start_late(self, agreed: Agreement) -> list[buckets.Bucket]:
        """Send the strided gradients that were not in the plan, or have changed since."""
        planned = self._place.keys() - agreed.again
        dense = [number for number in agreed.dense() if number not in planned]
        return [self._start(bucket, agreed.total) for bucket in self._in_buckets(dense)]

    def _average_tables(self, agreed: Agreement) -> tuple[int, int]:
        """Average row-sparse gradients, and return the bytes of rows and values, and of their numbers."""
        layouts = dict(zip(self._named, agreed.layouts, strict=True))
        tables = {
            name: param
            for name, param in self._named.items()
            if layouts[name] in (Layout.COO, Layout.ROW_SPARSE)
        }
        if not tables:
            return 0, 0
        share = self._weight / agreed.total
        parts = [
            rows.part_of(param.grad) if share and param.grad is not None else None
            for param in tables.values()
        ]
        counts = rows.exchange_counts(parts, device_of(list(tables.values())), self._group)
        begun = [
            rows.start(self._call, name, part, param, share, counts[:, number], self._group)
            for number, ((name, param), part) in enumerate(zip(tables.items(), parts, strict=True))
        ]
        for (name, param), gathering in zip(tables.items(), begun, strict=True):
            mean = rows.finish(gathering)
            param.grad = mean.to_coo() if layouts[name] is Layout.COO else mean
        return sum(gathering.nbytes for gathering in begun), counts[0].nbytes

    def _write(self, means: Mapping[int, Tensor], agreed: Agreement) -> None:
        for number, mean in means.items():
            if agreed.layouts[number] is Layout.STRIDED:
                self._params[number].grad = mean

    def _next_plan(self, agreed: Agreement) -> Plan:
        """Return the plan as it was, if it had all strided gradients; or one in the order of this exchange."""
        dense = agreed.dense()
        planned = self._plan.buckets if self._place.keys() == set(dense) else self._in_buckets(dense)
        return Plan(planned, self._named, agreed.total)

    def _in_buckets(self, numbers: Sequence[int]) -> list[list[int]]:
        filled = buckets.buckets_of([self._params[number] for number in numbers], self._limit)
        return [[numbers[place] for place in bucket] for bucket in filled]


def _is_plain(gradient: Tensor | None) -> bool:
    """Say whether a gradient is there, and can be sent in a bucket."""
    return (
        gradient is not None
        and not isinstance(gradient, RowSparse)
        and gradient.layout is torch.strided
        and not gradient.requires_grad
        and not is_sharded(gradient)
    )
