"""The choice between sparse and dense products, and statistics of the kernels."""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from metagrad.core.checks import caller, check_choice, check_type, is_number, refuse

T = TypeVar("T")
P = ParamSpec("P")
Layout = Literal["auto", "gather"]
Kind = Literal["product", "segment sum", "conversion"]
WIDE = 32  # columns of the dense operand in the products that thresholds are measured on
REPEATS = 5  # timed calls


@dataclass(frozen=True)
class SparsePolicy:
    r"""Rule that chooses sparse or dense products from density and size.

    A product is computed densely if

    .. math::
        \frac{\mathrm{nnz}}{n m} \ge \mathrm{threshold} \cdot \max\!\left(1, \frac{32}{\mathrm{width}}\right)

    and ``nnz >= min_nnz``, and the n x m matrix fits into ``max_dense_bytes``. A narrow product needs a higher
    density, because few multiplications must pay for the dense matrix. The result is the same up to rounding, and a
    gradient stays on its pattern. :func:`metagrad.sparse.stats` counts these products.

    The defaults were measured in float32 with MKL, on one thread of an x86 CPU. The matrices were n x n with n from
    128 to 2048. At density 0.3 dense products were slower at nearly every size and width. Below 4096 entries both
    forms take microseconds. :func:`calibrate` measures the threshold of another device or dtype.

    | dtype | dense is faster from density |
    | --- | --- |
    | float32 | 0.5 |
    | float64 | 0.15 to 0.3 |
    | bfloat16 (no CSR kernels) | 0.025 |

    Args:
        threshold: Minimum density of a dense product with width 32 or more. ``math.inf`` means never.
        min_nnz: Matrices with fewer entries stay sparse.
        layout: Sparse kernels. "auto" uses torch's CSR products (MKL, cuSPARSE) for float32 and float64. "gather"
            gathers and adds slices of bounded size.
        max_dense_bytes: Maximum size of a dense matrix in bytes.

    Raises:
        ValueError: A number is negative or NaN, or the layout is unknown.

    Example:
        >>> policy = metagrad.sparse.SparsePolicy(threshold=0.25, min_nnz=0)
        >>> policy.prefers_dense((8, 8), 16, torch.float32), policy.prefers_dense((8, 8), 16, torch.float32, width=16)
        (True, False)
        >>> policy.prefers_dense((10**6, 10**6), 10**12, torch.float32)
        False
    """

    threshold: float = 0.5
    min_nnz: int = 4096
    layout: Layout = "auto"
    max_dense_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("threshold", "min_nnz", "max_dense_bytes"):
            if not is_number(getattr(self, name)) or not getattr(self, name) >= 0:
                refuse(f"SparsePolicy({name})", "a number of 0 or more", getattr(self, name))
        check_choice("SparsePolicy(layout)", self.layout, Layout)

    def prefers_dense(
        self, shape: Sequence[int], nnz: int, dtype: torch.dtype, *, width: int | None = None
    ) -> bool:
        """Return whether a matrix should be materialized densely.

        Args:
            shape: Numbers of rows and columns.
            nnz: Number of entries.
            dtype: Data type of the values.
            width: Number of columns of the dense operand. None if there is no product.
        """
        cells = shape[0] * shape[1]
        if (
            nnz < self.min_nnz
            or nnz < self.threshold * cells
            or cells * dtype.itemsize > self.max_dense_bytes
        ):
            return False
        return width is None or width >= WIDE or nnz * width >= self.threshold * cells * WIDE


_POLICIES = [SparsePolicy()]


def current_policy() -> SparsePolicy:
    """Return the policy that is in use."""
    return _POLICIES[-1]


@contextlib.contextmanager
def use_policy(policy: SparsePolicy) -> Generator[SparsePolicy]:
    """Use a policy inside a ``with`` block, in all threads, because backward passes may run in other threads.

    Args:
        policy: The policy.

    Raises:
        TypeError: ``policy`` is not a :class:`SparsePolicy`.

    Example:
        >>> never = metagrad.sparse.SparsePolicy(threshold=float("inf"))
        >>> with metagrad.sparse.use_policy(never) as policy:
        ...     policy is never
        True
    """
    check_type("use_policy(policy)", policy, SparsePolicy)
    with _held(_POLICIES, policy):
        yield policy


@contextlib.contextmanager
def _held(opened: list[T], value: T) -> Generator[None]:
    """Append a value to a list inside a ``with`` block."""
    opened.append(value)
    try:
        yield
    finally:
        # Not pop(): another thread may have appended a value in between.
        del opened[next(i for i, held in enumerate(opened) if held is value)]


@dataclass
class Densified:
    """Number and bytes of the dense matrices that one line of code has made."""

    count: int = 0
    nbytes: int = 0


class KernelStats:
    """Statistics of the kernels that ran inside :func:`stats`. ``print`` shows a table.

    Attributes:
        calls: Numbers of products, segment sums and conversions.
        seconds: Time of each kind in seconds, without nested kernels of other kinds.
        nbytes: Bytes of the results of products.
        dense_nbytes: Bytes that dense results would take.
        merges: Numbers of pattern merges that were "done" and "avoided".
        densified: Dense matrices, grouped by the line outside metagrad that caused them.
        dense_work: Multiplications that dense products would take, by device and dtype.
    """

    def __init__(self) -> None:
        self.calls: Counter[Kind] = Counter()
        self.seconds: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
        self.nbytes: int = 0
        self.dense_nbytes: int = 0
        self.merges: Counter[Literal["done", "avoided"]] = Counter()
        self.densified: dict[str, Densified] = {}
        self.dense_work: Counter[tuple[torch.device, torch.dtype]] = Counter()

    def dense_seconds(self) -> float:
        """Return the estimated time of dense products in seconds, from their multiplications."""
        return sum(work / dense_rate(*where) for where, work in self.dense_work.items())

    def __str__(self) -> str:
        dense, total = self.dense_seconds(), sum(self.seconds.values())
        share = self.seconds["conversion"] / max(total, 1e-9)
        ratio = dense / max(self.seconds["product"], 1e-9)
        lines = [
            *(f"{kind:14}{self.calls[kind]:8} calls {1000 * s:11.2f} ms" for kind, s in self.seconds.items()),
            f"{'conversions':14}{100 * share:8.1f} % of the time",
            f"{'dense products':14}{1000 * dense:14.2f} ms estimated, {ratio:.1f}x ours",
            f"{'memory':14}{_size(self.nbytes)} made, {_size(self.dense_nbytes)} if dense",
            f"{'merges':14}{self.merges['done']:8} done, {self.merges['avoided']} avoided",
            f"{'densified':14}{sum(made.count for made in self.densified.values()):8} times",
        ]
        lines += [
            f"    {made.count} x {_size(made.nbytes)} {place}" for place, made in self.densified.items()
        ]
        return "\n".join(lines)


class _Inside(threading.local):
    """Time of the kernels inside the current kernel in seconds, for each thread."""

    seconds = 0.0


_STATS: list[KernelStats] = []
_INSIDE = _Inside()
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def stats() -> Generator[KernelStats]:
    """Collect statistics of the sparse kernels inside a ``with`` block, in all threads.

    | quantity | meaning |
    | --- | --- |
    | memory | bytes of the results of products, and bytes of the same results as dense matrices |
    | time | seconds in products, segment sums and conversions (sorting, pointers, transposes, merges) |
    | estimate | seconds of dense products: their multiplications at the rate of a 512 x 512 product |
    | merges | merges of two patterns that were done, and merges that were avoided (unnecessary or cached) |
    | densified | dense matrices, grouped by the line outside metagrad that caused them |

    The estimate favors dense products, because narrow products do not reach the rate of a 512 x 512 product.
    Elementwise functions of the values and gathers are not timed. On CUDA every timing waits for the device. Outside
    of ``stats()``, the overhead of a kernel is 0.1 microseconds. A kernel inside nested ``stats()`` blocks counts in
    all of them.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0])).requires_grad_()
        >>> with metagrad.sparse.stats() as s:
        ...     (a @ torch.ones(2, 3)).square().sum().backward()
        >>> s.calls["product"], s.nbytes, s.dense_nbytes
        (2, 32, 40)
    """
    found = KernelStats()
    with _held(_STATS, found):
        yield found


def timing(kind: Kind) -> contextlib.AbstractContextManager[None]:
    """Time a block without the kernels nested in it, if statistics are collected."""
    return _timing(kind) if _STATS else _NOTHING


@contextlib.contextmanager
def _timing(kind: Kind) -> Generator[None]:
    outside, _INSIDE.seconds = _INSIDE.seconds, 0.0
    start = clock()
    try:
        yield
    finally:
        elapsed = clock() - start
        for found in _STATS:
            found.calls[kind] += 1
            found.seconds[kind] += elapsed - _INSIDE.seconds
        _INSIDE.seconds = outside + elapsed


def timed(kind: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Time the calls of a function while statistics are collected."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            with timing(kind):
                return function(*args, **kwargs)

        return counted

    return decorate


def count_product(shape: tuple[int, int], width: int, result: Tensor) -> None:
    """Count a product. A result that is a vector of values counts as sparse."""
    cells = shape[0] * shape[1]
    for found in _STATS:
        found.nbytes += result.nbytes
        found.dense_nbytes += cells * result.itemsize if result.ndim == 1 else result.nbytes
        found.dense_work[result.device, result.dtype] += cells * width


def count_merge(kind: Literal["done", "avoided"]) -> None:
    """Count a merge of two patterns that is done or avoided."""
    for found in _STATS:
        found.merges[kind] += 1


def count_densified(nbytes: int) -> None:
    """Count a dense matrix at the line of the caller outside metagrad and torch."""
    for found in _STATS:
        place = found.densified.setdefault(caller()[0], Densified())
        place.count += 1
        place.nbytes += nbytes


def clock() -> float:
    """Return the time in seconds after all CUDA work has finished."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of several calls after one warm-up call."""
    run()
    times: list[float] = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


@functools.lru_cache
def dense_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications per second of a dense product of two 512 x 512 matrices."""
    matrix = torch.ones(512, 512, device=device, dtype=dtype)
    return 512**3 / seconds(lambda: matrix @ matrix)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
