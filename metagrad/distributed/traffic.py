"""How many bytes an average takes."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    r"""The bytes that one process hands over, and sends, in an average over N processes.

    A ring all-reduce of b bytes sends :math:`2 b (N - 1) / N` from each process, a ring all-gather of b bytes from
    each sends :math:`b (N - 1)`.

    Attributes:
        processes: N.
        dense: Bytes of strided tensors, which are all-reduced.
        rows: Bytes of rows and of their values, which are all-gathered; processes with fewer rows than another one
            are filled up to as many.
        agreement: Bytes by which the processes agree on weights and layouts, which are all-reduced.
        counts: Bytes by which they exchange how many rows there are, which are all-gathered.
        buckets: How many all-reduces the strided tensors took.
        early: Bytes of strided tensors that were on their way before the backward pass had ended.

    Example:
        >>> metagrad.distributed.Traffic(processes=4, dense=1000, rows=10).sent
        1530

    References:
        Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """

    processes: int
    dense: int = 0
    rows: int = 0
    agreement: int = 0
    counts: int = 0
    buckets: int = 0
    early: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this process sends."""
        reduced, gathered = self.dense + self.agreement, self.rows + self.counts
        return 2 * reduced * (self.processes - 1) // self.processes + gathered * (self.processes - 1)
