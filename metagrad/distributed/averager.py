"""Gradients, averaged over processes while the backward pass that computes them still runs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.distributed.agreement import checked_weight, joined, named_tensors
from metagrad.distributed.exchange import Exchange, Plan
from metagrad.distributed.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALL = "GradientAverager.averaging()"


class GradientAverager:
    r"""Average gradients over the processes of a group, by buckets that are sent as soon as they are final.

    It computes what :func:`average_gradients` does. From the second backward pass on, the all-reduce of a bucket
    starts when the last of its gradients has been accumulated, while the backward pass goes on to the parameters
    that come later. Buckets are filled in the order in which gradients became final in the first pass, the mean over
    the processes, and sent in the same order everywhere. What could not be foreseen is exchanged when the pass has
    ended: gradients that some process does not have, and those that changed after they were sent. Row-sparse ones,
    of which first the numbers of rows are exchanged, always are.

    How much is hidden depends on when gradients are final. In an ordinary backward pass it is all but the last
    bucket. The gradients of :class:`metagrad.MAML` are final together at the end, when it has looked at all of them;
    by then nothing is left to hide behind, and it costs no more than :func:`average_gradients`.

    Args:
        params: As of :func:`average_gradients`.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Attributes:
        traffic: The bytes of the last exchange.

    Raises:
        TypeError: A parameter is no tensor.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> averager = metagrad.distributed.GradientAverager(model)
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> with averager.averaging(weight=4):
        ...     loss.backward()
        >>> averager.traffic.processes
        1

    References:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, sections 3.2
        and 4.2 (buckets in the order of gradients, and overlap).
    """

    def __init__(
        self,
        params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
        *,
        bucket: Bytes = "25MiB",
        group: ProcessGroup | None = None,
    ) -> None:
        self._params = params
        if not isinstance(params, (nn.Module, Mapping, Tensor)):
            self._params = list(params)
        named_tensors(_CALL, self._params)
        self._limit, self._group = checked_bytes("GradientAverager(params)", "bucket", bucket), group
        self._plan = Plan()
        self.traffic: Traffic = Traffic(1)

    @contextlib.contextmanager
    def averaging(self, *, weight: float = 1.0) -> Generator[None, None, None]:
        """Average the gradients of a backward pass that runs inside; the last one, where several add up.

        All processes enter it as often. An error inside leaves no exchange behind: all processes complete it without
        the gradients of the one that failed, which raises its error; the others raise one of their own, and keep the
        gradients that they had. Interrupts alone do not wait for the others.

        Args:
            weight: Of this process: the number of tasks, or of examples, in its share; 0 leaves its gradients out.

        Raises:
            ValueError: As :func:`average_gradients`.
            RuntimeError: Another process raised an error inside.
        """
        weight, group = checked_weight(_CALL, weight), joined(self._group)
        named = named_tensors(_CALL, self._params)
        if group is None or not named:
            yield
            self.traffic = Traffic(1 if group is None else group.size())
            return
        exchange = Exchange(_CALL, named, weight, self._limit, group, self._plan)
        try:
            with exchange.watching():
                yield
        except Exception:
            with contextlib.suppress(Exception):  # of others, which may have ended: the first error is told
                exchange.fail()
            raise
        self.traffic, self._plan = exchange.complete()
