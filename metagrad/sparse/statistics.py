"""What the sparse kernels did: memory saved, time, conversions, merges and densifications."""

from __future__ import annotations

import functools
import inspect
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from metagrad.sparse.policy import Scope

Kind = Literal["product", "segment sum", "conversion"]

P = ParamSpec("P")
R = TypeVar("R")
REPEATS = 5  # of what is timed
_PACKAGES = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


@dataclass
class Densified:
    """The dense matrices made at one place."""

    count: int = 0
    nbytes: int = 0


class KernelStats:
    """What the kernels did between opening and closing; :func:`stats` makes it."""

    def __init__(self) -> None:
        self.calls: Counter[Kind] = Counter()
        self.seconds: dict[Kind, float] = cast(Any, Counter())  # a Counter is declared to count in integers
        self.nbytes: int = 0  # of the results of products
        self.dense_nbytes: int = 0  # of the same results, had they been dense
        self.merges: Counter[Literal["done", "avoided"]] = Counter()
        self.densified: dict[str, Densified] = {}
        self._dense_work: Counter[tuple[torch.device, torch.dtype]] = Counter()  # multiplications
        self._inside = 0.0  # seconds of the timings that the current one contains
        self._outer: KernelStats | None = None
        self._was_opened = False

    def __enter__(self) -> KernelStats:
        """Start counting."""
        if self._was_opened:
            raise RuntimeError("stats(): expected statistics that were never opened; call stats() anew.")
        self._was_opened, self._outer = True, _SCOPE.get()
        _SCOPE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and add what was counted to the statistics around these."""
        _SCOPE.set(self._outer)
        if self._outer is not None:
            self._outer._absorb(self)

    @contextmanager
    def timing(self, kind: Kind) -> Generator[None]:
        """Time a block, without the timings inside it."""
        outside, self._inside = self._inside, 0.0
        start = clock()
        try:
            yield
        finally:
            elapsed = clock() - start
            self.calls[kind] += 1
            self.seconds[kind] += elapsed - self._inside
            self._inside = outside + elapsed

    def count_product(self, shape: tuple[int, int], width: int, result: Tensor) -> None:
        """Enter a product: a vector of values would be a matrix if it were dense."""
        cells = shape[0] * shape[1]
        self.nbytes += result.nbytes
        self.dense_nbytes += cells * result.itemsize if result.ndim == 1 else result.nbytes
        self._dense_work[result.device, result.dtype] += cells * width

    def count_densified(self, nbytes: int) -> None:
        """Enter a dense matrix, at the place of the caller outside this package."""
        place = self.densified.setdefault(_caller(), Densified())
        place.count += 1
        place.nbytes += nbytes

    def dense_seconds(self) -> float:
        """Estimate the time of the products, had they been dense: their work at the rate measured here."""
        return sum(work / dense_rate(*where) for where, work in self._dense_work.items())

    def conversion_share(self) -> float:
        """Return which part of the time went into conversions."""
        total = sum(self.seconds.values())
        return self.seconds["conversion"] / total if total else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return every number by name; places of densifications with their counts and bytes."""
        return {
            "calls": dict(self.calls),
            "seconds": dict(self.seconds),
            "dense_product_seconds_estimate": self.dense_seconds(),
            "conversion_share": self.conversion_share(),
            "bytes": self.nbytes,
            "dense_bytes": self.dense_nbytes,
            "bytes_saved": self.dense_nbytes - self.nbytes,
            "merges": self.merges["done"],
            "merges_avoided": self.merges["avoided"],
            "densifications": [
                {"place": place, "count": made.count, "bytes": made.nbytes}
                for place, made in self.densified.items()
            ],
        }

    def __str__(self) -> str:
        return _table(self)

    def _absorb(self, other: KernelStats) -> None:
        for name in ("calls", "seconds", "merges", "_dense_work"):
            getattr(self, name).update(getattr(other, name))
        self.nbytes += other.nbytes
        self.dense_nbytes += other.dense_nbytes
        for place, made in other.densified.items():
            total = self.densified.setdefault(place, Densified())
            total.count += made.count
            total.nbytes += made.nbytes


_SCOPE: Scope[KernelStats] = Scope("stats")
current_stats = _SCOPE.get


def stats() -> KernelStats:
    """Count what the sparse kernels do inside a ``with`` block, in this thread and the backward passes it runs.

    ``print(s)`` shows a table and ``s.as_dict()`` the numbers:

    - *memory*: bytes of the results of products, and of the same results as dense matrices. A product with a
      dense matrix is dense either way; a sampled product, which is what a gradient of values is, is not;
    - *time* in products, in segment sums and in conversions (sorting, pointers, transposes, merges, blocks), and
      an *estimate* of the time that dense products would take: their multiplications at the rate of a dense product
      of two 512 x 512 matrices, measured when the number is first asked for. Narrow products do not reach
      that rate, so the estimate favours dense;
    - *merges* of two patterns, done, and avoided because the patterns were the same or the merge was kept;
    - *densifications* by the line outside metagrad that called for them: ``to_dense``, and the products that the
      policy chose to compute densely.

    Elementwise functions of the values, and gathers, are torch's own and not timed. On CUDA every timing waits for
    the device. When nothing is open, a kernel pays for one look-up (0.1 microseconds).

    Returns:
        The statistics, to be opened once. Opened inside another, they are added to it when they close.

    Raises:
        RuntimeError: They are opened again.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0])).requires_grad_()
        >>> with metagrad.sparse.stats() as s:
        ...     (a @ torch.ones(2, 3)).square().sum().backward()
        >>> s.calls["product"], s.nbytes, s.dense_nbytes
        (2, 32, 40)
    """
    return KernelStats()


def timed(kind: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Time the calls of a function while statistics are open."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            found = current_stats()
            if found is None:
                return function(*args, **kwargs)
            with found.timing(kind):
                return function(*args, **kwargs)

        return counted

    return decorate


def count_merge(kind: Literal["done", "avoided"]) -> None:
    """Count a merge of two patterns, or one that was not needed."""
    found = current_stats()
    if found is not None:
        found.merges[kind] += 1


def count_densified(nbytes: int) -> None:
    """Count a dense matrix of this many bytes."""
    found = current_stats()
    if found is not None:
        found.count_densified(nbytes)


def clock() -> float:
    """Return the seconds now, after the work that CUDA was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of some calls, after one that warms up."""
    run()
    times: list[float] = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


@functools.lru_cache
def dense_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications a second of a dense product of two 512 x 512 matrices."""
    matrix = torch.ones(512, 512, device=device, dtype=dtype)
    return 512**3 / seconds(lambda: matrix @ matrix)


def _caller() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    # A thread of torch's own has no other frames: it runs the backward pass of an accelerator.
    return "a backward pass" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _table(found: KernelStats) -> str:
    products, dense = found.seconds["product"], found.dense_seconds()
    lines = [
        f"{kind:14}{found.calls[kind]:8} calls {1000 * found.seconds[kind]:11.2f} ms"
        for kind in ("product", "segment sum", "conversion")
    ]
    lines += [
        f"{'conversions':14}{100 * found.conversion_share():8.1f} % of the time",
        f"{'dense products':14}{1000 * dense:14.2f} ms estimated, {dense / max(products, 1e-9):.1f}x ours",
        f"{'memory':14}{_size(found.nbytes)} made, {_size(found.dense_nbytes)} if dense",
        f"{'merges':14}{found.merges['done']:8} done, {found.merges['avoided']} avoided",
        f"{'densified':14}{sum(made.count for made in found.densified.values()):8} times",
    ]
    lines += [f"    {made.count} x {_size(made.nbytes)} {place}" for place, made in found.densified.items()]
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
