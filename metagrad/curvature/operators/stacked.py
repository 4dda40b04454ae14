"""The Hessians of several losses at once, each in parameters of its own: of tasks, or of the inputs of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.derivatives.linearize import Linearization, linearized
from metagrad.autograd.derivatives.variables import find_variables
from metagrad.core.checks import is_a
from metagrad.core.tree import tree_structure
from metagrad.curvature.solvers.solve import solve as solve_rows

_CALL = "hessians(losses, params)"


def hessians(
    losses: Tensor,
    params: Mapping[str, Tensor],
    *,
    create_graph: bool = False,
    allow_unused: bool = False,
    check_independent: bool = True,
) -> Hessians:
    r"""Make the operator of the Hessians of several losses, each in its own row of stacked parameters.

    .. math:: (H V)_i = \nabla^2_{\theta_i} L_i(\theta_i) \, v_i, \qquad i = 1, \dots, k

    All k products come from one graph by one backward pass, that of the sum of the losses, of which these are the
    diagonal blocks. Solvers run on all rows together, and each ends by itself.

    Args:
        losses: One for each row, ``[k]``, and its graph.
        params: Stacked parameters by name, ``[k, ...]`` each: of tasks, or the inputs of a batch.
        create_graph: Put the gradient and the products on the tape.
        allow_unused: Take parameters that no loss depends on for constants, instead of raising.
        check_independent: Look for derivatives of the losses of even rows in odd ones, by one more backward pass.

    Returns:
        An operator, which is a context manager: ``products`` of rows ``[k, n]``, the ``gradient`` as such rows, and
        ``solve``.

    Raises:
        ValueError: The losses are not one for each row, not connected to a parameter, or depend on each other's
            rows, as through BatchNorm in training; or a second derivative is missing or wrong in torch.

    Example:
        :math:`L_i = \sum_j x_{ij}^3` has the Hessian :math:`\mathrm{diag}(6 x_i)`:

        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        >>> with metagrad.curvature.hessians((x**3).sum(1), {"x": x}) as H:
        ...     H.num_matrices, H.gradient, H.products(torch.ones(2, 2))
        (2, tensor([[ 3., 12.],
                [27., 48.]]), tensor([[ 6., 12.],
                [18., 24.]]))

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994.
    """
    if not is_a(losses, Tensor) or losses.ndim != 1:
        got = tuple(losses.shape) if is_a(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{_CALL}: expected one loss for each row, [k], got {got}. Do not sum over the rows; for one loss, "
            "call hessian."
        )
    made = stacked(_CALL, losses, params, create_graph=create_graph, allow_unused=allow_unused)
    if check_independent:
        _check_independent(losses, params)
    return made


def stacked(
    call: str,
    losses: Tensor,
    params: Mapping[str, Tensor],
    *,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> Hessians:
    """Make the operator of losses ``[k]``, or of one number, whose parameters are one row as they are."""
    if not is_a(losses, Tensor) or losses.ndim > 1 or not losses.requires_grad:
        got = tuple(losses.shape) if is_a(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{call}: the losses must be one number, or one for each task, with a graph, got {got}."
        )
    for name, p in params.items():
        if losses.ndim and p.shape[:1] != losses.shape:
            raise ValueError(
                f"{call}: there are {len(losses)} losses, so parameters must be [{len(losses)}, ...], but {name!r} "
                f"is {tuple(p.shape)}."
            )
    params, total = dict(params), losses.sum()
    variables = find_variables(call, total, params, ())
    lin = linearized(call, total, variables, tree_structure(params), allow_unused, create_graph)
    return Hessians(losses if create_graph else losses.detach(), params, lin)


class Hessians:
    """The Hessians of several losses; :func:`hessians` makes it.

    A linear map for :func:`metagrad.curvature.solve`. A row that is not finite does not affect the others.

    Attributes:
        losses: ``[k]``.
        num_matrices: k.
        shape: (n, n), of each.
    """

    def __init__(self, losses: Tensor, params: dict[str, Tensor], lin: Linearization) -> None:
        first = next(iter(params.values()))
        self.losses: Tensor = losses
        self.num_matrices: int = len(losses) if losses.ndim else 1
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self._shapes = {name: p.shape for name, p in params.items()}
        self._sizes = [p.numel() // self.num_matrices for p in params.values()]
        self._lin = lin
        self.shape: tuple[int, int] = (sum(self._sizes), sum(self._sizes))

    @property
    def gradient(self) -> Tensor:
        """The gradient of each loss, ``[k, n]``; on the tape with ``create_graph``."""
        return self.flatten(self._lin.gradient)

    def gradient_on_tape(self) -> Tensor:
        """Return the gradients with their graph, whatever ``create_graph`` is, ``[k, n]``."""
        return self._join(self._lin.gradient_on_tape())

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply each row of ``vectors``, ``[k, n]``, with its own matrix.

        Raises:
            ValueError: The operator is closed, or the rows have another shape.
        """
        expected = [self.num_matrices, self.shape[0]]
        if list(vectors.shape) != expected:
            raise ValueError(
                f"hessians.products(vectors): expected one row for each loss, {expected}, got {list(vectors.shape)}."
            )
        parts = [part[None] for part in self._split(vectors)]
        on_tape = self._lin.create_graph and torch.is_grad_enabled()
        ((_, products),) = self._lin.pieces(parts, chunk=1, create_graph=on_tape)
        return self._join([product[0] for product in products])

    solve = solve_rows

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return tensors like the parameters as rows ``[k, n]``."""
        return self._join([tensors[name] for name in self._shapes])

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`flatten`."""
        return dict(zip(self._shapes, self._split(rows), strict=True))

    def close(self) -> None:
        """Free the graph; products raise from now on."""
        self._lin.close()
        self.losses = self.losses.detach()

    def __enter__(self) -> Hessians:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Hessians({self.num_matrices} of shape {self.shape}, dtype={self.dtype})"

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(self.num_matrices, -1) for part in parts], 1)

    def _split(self, rows: Tensor) -> list[Tensor]:
        pieces = zip(rows.split_with_sizes(self._sizes, 1), self._shapes.values(), strict=True)
        return [part.reshape(shape) for part, shape in pieces]


def _check_independent(losses: Tensor, params: Mapping[str, Tensor]) -> None:
    """Refuse losses of even rows that have derivatives in odd ones."""
    is_odd = torch.arange(len(losses), device=losses.device) % 2 == 1
    found = graph_vjp([losses], list(params.values()), [(~is_odd).to(losses.dtype)], retain_graph=True)
    for name, g in zip(params, found, strict=True):
        # A cotangent of 0 is NaN behind an infinite derivative, which says nothing of other rows.
        if g is not None and bool(g[is_odd].nan_to_num(0.0, 0.0, 0.0).any()):
            raise ValueError(
                f"{_CALL}: the losses depend on each other's rows of {name!r}, so these Hessians are not all of the "
                "second derivative. Take BatchNorm out of training, or call hessian on the sum."
            )
