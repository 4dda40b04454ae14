"""Which derivatives of sparse operations are right: `python -m experiments.benchmarks.sparse_support`.

Every cell is found by running it, torch's answer beside ours. t_0 is the sum of squares of an operation's result, and
t_k that of the gradients of t_{k-1} with respect to all operands. At a small size the gradient of order k is compared
with that of a dense formula in float64; at a large one the memory that it takes is read. A cell says

- ok: right, and sparse;
- dense: right, but a tensor of rows x columns was made for it;
- cut: a gradient has no graph, or is missing, so that the next order would be silently wrong;
- wrong: another number than the dense formula's;
- error: torch raised.

The column "kernel" says what ours ran on this device: torch's CSR products, or gathers where there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from experiments.benchmarks.sparse_support.cases import OPERATIONS
from experiments.benchmarks.sparse_support.forms import Form, Forms, Leaf, Setting
from experiments.run.allocations import peak_bytes
from experiments.run.progress import Progress
from metagrad import sparse

ORDERS = (1, 2, 3)
SMALL, LARGE = 6, 2000  # rows
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative


@dataclass(frozen=True)
class Row:
    """An operation in a layout: the answers at orders 1 to 3."""

    operation: str
    layout: str
    device: str
    torch: list[str]
    metagrad: list[str]
    kernel: str


class _CutError(Exception):
    """A gradient cannot be differentiated further, without anybody having said so."""


def capabilities(device: torch.device | str = "cpu") -> list[Row]:
    """Find the answers of torch and of metagrad by running every operation; takes some seconds.

    Args:
        device: Where to run.

    Returns:
        A row for every operation and layout; :func:`table` formats them.
    """
    device = torch.device(device)
    exact = torch.float32 if device.type == "mps" else torch.float64
    small, large = Setting(SMALL, exact, device), Setting(LARGE, torch.float32, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's announcement that a layout is in beta
        return [
            _row(
                operation.name, layout, operation.forms(small, layout), operation.forms(large, layout), large
            )
            for operation in Progress(OPERATIONS, unit="operation", leave=False)
            for layout in operation.layouts
        ]


def table(rows: Sequence[Row]) -> str:
    """Format the answers for a terminal.

    Example:
        >>> row = Row("A @ x", "COO", "cpu", ["dense"] * 3, ["ok"] * 3, "csr")
        >>> print(table([row]))
        operation  layout  torch 1  torch 2  torch 3  ours 1  ours 2  ours 3  kernel
        A @ x      COO     dense    dense    dense    ok      ok      ok      csr
    """
    header = (
        "operation",
        "layout",
        *(f"torch {k}" for k in ORDERS),
        *(f"ours {k}" for k in ORDERS),
        "kernel",
    )
    lines = [header, *((row.operation, row.layout, *row.torch, *row.metagrad, row.kernel) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _row(name: str, layout: str, small: Forms, large: Forms, setting: Setting) -> Row:
    with sparse.stats() as s:
        ours = _answers(small, large, small.metagrad, large.metagrad, setting)
    has_csr = setting.dtype in (torch.float32, torch.float64) and setting.device.type in ("cpu", "cuda")
    return Row(
        operation=name,
        layout=layout,
        device=str(setting.device),
        torch=_answers(small, large, small.torch, large.torch, setting),
        metagrad=ours,
        kernel=("csr" if has_csr else "gather") if s.calls["product"] or s.calls["segment sum"] else "-",
    )


def _answers(
    small: Forms, large: Forms, form: Form | None, large_form: Form | None, setting: Setting
) -> list[str]:
    if form is None or large_form is None:
        return ["-"] * len(ORDERS)
    found = []
    for order in ORDERS:
        answer = _compare(form, small.dense, order)
        if answer == "ok" and large.dense_numbers is not None:
            answer = _weigh(large_form, large.dense_numbers * setting.dtype.itemsize, order, setting.device)
        found.append(answer)
    return found


def _compare(form: Form, dense: Form, order: int) -> str:
    expected = _read(dense, _gradients(dense, order))
    try:
        found = _read(form, _gradients(form, order))
    except _CutError:
        return "cut"
    except Exception:  # whatever torch raises is its answer
        return "error"
    if any(g is None for g in found):
        return "cut"
    want, got = (
        torch.cat([g.flatten() for g in gradients if g is not None]) for gradients in (expected, found)
    )
    error = (got - want).abs().max() / want.abs().max()
    return "ok" if error <= ROUNDING[want.dtype] else "wrong"


def _weigh(form: Form, dense_bytes: int, order: int, device: torch.device) -> str:
    try:
        peak = peak_bytes(lambda: _gradients(form, order), device)
    except Exception:
        return "error"
    return "ok" if peak < dense_bytes // 2 else "dense"


def _gradients(form: Form, order: int) -> list[Tensor | None]:
    """Return the gradients of t_{order - 1}; None where torch sees no dependence."""
    leaves = [leaf.tensor.detach().requires_grad_() for leaf in form.leaves]
    result = form.function(*leaves)
    objective = (result * result).sum()
    gradients: Sequence[Tensor | None] = ()
    for k in range(1, order + 1):
        if not objective.requires_grad:
            raise _CutError
        gradients = torch.autograd.grad(objective, leaves, create_graph=k < order, allow_unused=True)
        if k < order:
            if any(g is not None and not g.requires_grad for g in gradients):
                raise _CutError
            stored = [
                _stored(g, leaf) for g, leaf in zip(gradients, form.leaves, strict=True) if g is not None
            ]
            objective = sum(((g * g).sum() for g in stored), start=objective.new_zeros(()))
    return list(gradients)


def _read(form: Form, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if g is None else leaf.read(g.detach()) for g, leaf in zip(gradients, form.leaves, strict=True)
    ]


def _stored(gradient: Tensor, leaf: Leaf) -> Tensor:
    """Leave out the cells that are not stored, where torch gives a gradient of more of them than the matrix has."""
    if leaf.cells is None:
        return gradient
    if gradient.layout == torch.strided:
        return gradient[leaf.cells]
    assert leaf.ones is not None
    return gradient if gradient._nnz() == leaf.ones._nnz() else gradient * leaf.ones


def main() -> None:
    """Print the table, as text or JSON; the exit status is 1 if an answer of ours is not "ok"."""
    parser = argparse.ArgumentParser(description="Show which derivatives of sparse operations are right.")
    parser.add_argument("--device", default="cpu", help="where to run (cpu)")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one for each row")
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    rows = capabilities(arguments.device)
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else table(rows))
    if any(answer != "ok" for row in rows for answer in row.metagrad):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
