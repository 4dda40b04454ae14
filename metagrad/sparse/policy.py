"""Sparse or dense: the rule by which a kernel chooses, and statistics of what the kernels did."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from metagrad.core.checks import check_choice, check_type, is_number, refuse

T = TypeVar("T")
P = ParamSpec("P")
Layout = Literal["auto", "gather"]
Kind = Literal["product", "segment sum", "conversion"]
WIDE = 32  # columns of the dense operand in the products that thresholds are measured on
REPEATS = 5  # of what is timed
_PACKAGES = tuple(os.path.dirname(path) + os.sep for path in (__file__, torch.__file__))


@dataclass(frozen=True)
class SparsePolicy:
    r"""Decide from density and size whether a product is computed densely.

    .. math::
        \frac{\mathrm{nnz}}{n m} \ge \mathrm{threshold} \cdot \max\!\left(1, \frac{32}{\mathrm{width}}\right)

    chooses dense if also ``nnz >= min_nnz`` and the n x m matrix fits into ``max_dense_bytes``. A narrow product
    needs a higher density, for its few multiplications must pay for making the matrix dense. Only the way of
    computing changes: the result is the same up to rounding, and a gradient stays on its pattern. Such a choice
    is counted by :func:`metagrad.sparse.stats`.

    The defaults are measured (float32, x86 CPU, one thread, MKL; a product and a sampled product of n x n matrices,
    n = 128 to 2048). At density 0.5 the dense products were 1.0 to 1.25 times faster at width 32 and 1.2 to 1.7
    times at width 128; at density 0.3 they were slower at nearly every size and width. Below 4096 entries either
    takes microseconds. In float64 the two met between 0.15 and 0.3, and in bfloat16, which has no CSR kernels, at
    0.025; other devices were not measured: :func:`calibrate` finds the threshold of a device and dtype.

    Args:
        threshold: Density from which a product of width 32 or more is dense; ``math.inf`` is never.
        min_nnz: Matrices with fewer entries stay sparse.
        layout: The sparse kernels: "auto" takes torch's CSR products (MKL, cuSPARSE) for float32 and float64;
            "gather" gathers and adds slices of bounded size, for any dtype and device.
        max_dense_bytes: The largest dense matrix that may be made.

    Raises:
        ValueError: A number is negative or not a number, or the layout is unknown.

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
        """Return whether a matrix should be made dense.

        Args:
            shape: Its rows and columns.
            nnz: How many of its cells are stored.
            dtype: The dtype of its values.
            width: The columns of the dense operand it is multiplied by; None for a matrix that stays dense.
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
    """Return the policy that kernels ask now."""
    return _POLICIES[-1]


@contextlib.contextmanager
def use_policy(policy: SparsePolicy) -> Generator[SparsePolicy]:
    """Make the kernels ask a policy inside a ``with`` block, in all threads: backward passes run in others.

    Args:
        policy: The policy that decides.

    Raises:
        TypeError: It is not a :class:`SparsePolicy`.

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
        # Not pop(): another thread may have opened one in between.
        del opened[next(i for i, held in enumerate(opened) if held is value)]


@dataclass
class Densified:
    """The dense matrices made at one place."""

    count: int = 0
    nbytes: int = 0


class KernelStats:
    """What the kernels did while :func:`stats` was open; ``print`` shows a table.

    Attributes:
        calls: How many products, segment sums and conversions ran.
        seconds: How long they took, without what is counted inside them.
        nbytes: Bytes of the results of products.
        dense_nbytes: Bytes of the same results, had they been dense.
        merges: How many merges of patterns were "done", and how many "avoided".
        densified: Dense matrices by the line outside metagrad that called for them.
        dense_work: Multiplications of dense products, by device and dtype.
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
        """Estimate the time of the products, had they been dense: their work at the rate measured here."""
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
    """Seconds of the timings that the current one contains."""

    seconds = 0.0


_STATS: list[KernelStats] = []
_INSIDE = _Inside()
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def stats() -> Generator[KernelStats]:
    """Count what the sparse kernels do inside a ``with`` block, in all threads: backward passes run in others.

    The result has numbers as attributes, and prints as a table:

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
    the device. When nothing is open, a kernel pays for one look-up (0.1 microseconds). Statistics inside others are
    counted in both.

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
    """Time a block, without the timings inside it, if statistics are open."""
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
    """Time the calls of a function while statistics are open."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            with timing(kind):
                return function(*args, **kwargs)

        return counted

    return decorate


def count_product(shape: tuple[int, int], width: int, result: Tensor) -> None:
    """Count a product; a vector of values would be a matrix if it were dense."""
    cells = shape[0] * shape[1]
    for found in _STATS:
        found.nbytes += result.nbytes
        found.dense_nbytes += cells * result.itemsize if result.ndim == 1 else result.nbytes
        found.dense_work[result.device, result.dtype] += cells * width


def count_merge(kind: Literal["done", "avoided"]) -> None:
    """Count a merge of two patterns, or one that was not needed."""
    for found in _STATS:
        found.merges[kind] += 1


def count_densified(nbytes: int) -> None:
    """Count a dense matrix, at the place of the caller outside this package."""
    for found in _STATS:
        place = found.densified.setdefault(_caller(), Densified())
        place.count += 1
        place.nbytes += nbytes


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


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
