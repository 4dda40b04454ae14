"""Symmetric linear operators on the parameters of a model, the base of Hessian, Gauss-Newton and Fisher operators."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.autograd.derivatives.recorded import BatchedVjp, Recorded
from metagrad.core import _torch
from metagrad.core.checks import check_scalar, check_type, is_a, is_mapping, refuse
from metagrad.core.tree import HALF
from metagrad.curvature.estimators import trace as traces
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.operators.space import ParameterSpace, Vectors
from metagrad.curvature.rows import dot, norm
from metagrad.curvature.solvers.solution import Solution
from metagrad.curvature.solvers.solve import check_symmetric
from metagrad.curvature.solvers.solve import solve as solve_flat
from metagrad.curvature.spectrum import quadrature
from metagrad.curvature.spectrum.eigenvalues import eigenvalues as compute_eigenvalues
from metagrad.distributed.exchange import joined, refuse_differences, sums_over
from metagrad.sparse.matrix.tensor import SparseTensor

O = TypeVar("O", bound="Operator")  # noqa: E741


class Operator:
    """A symmetric linear operator on named parameters, given by its matrix-vector products.

    ``H @ v`` takes and returns a dict of the parameters, a flat vector ``[n]``, or columns ``[n, k]``. The entries of
    a dict may be stacks, with one more dimension in front.

    ============================ =====================================================================
    ``A + B``, ``2 * A``         sums and multiples
    ``A.damped(delta)``          ``A + delta * I``
    ``H["head.weight"]``         the diagonal block of a parameter
    ``H["head"]``                the diagonal block of all parameters below a name
    ============================ =====================================================================

    An operator is a context manager. Leaving the ``with`` block frees its graph.

    A subclass implements ``_products`` and, if it holds resources, ``_free``.

    Args:
        space: The parameters.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
        ...     H.shape, H @ torch.ones(2), (2 * H).damped(1.0) @ {"w": torch.ones(2)}
        ((2, 2), tensor([ 6., 12.]), {'w': tensor([13., 25.])})
    """

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space
        self.is_closed: bool = False
        self._pairs: list[tuple[Tensor, Tensor]] | None = []  # the first vectors and their products

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n), where n is the number of coordinates of all parameters."""
        return self.space.size, self.space.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters, vectors and products."""
        return self.space.dtype

    @property
    def device(self) -> torch.device:
        """The device of parameters, vectors and products."""
        return self.space.device

    # Products

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply a vector ``[n]``, or each row of ``[k, n]``. The result has the same shape.

        Raises:
            ValueError: The operator is closed, a shape or dtype differs, a product is not finite, or a parameter was
                written since the operator was made (the error names it). It is also raised if the operator is not
                symmetric: ``u @ (H @ v)`` and ``v @ (H @ u)`` are compared for the first two vectors.
        """
        self._refuse_closed()
        if vectors.ndim > 2 or vectors.shape[-1] != self.space.size or vectors.dtype != self.dtype:
            raise ValueError(
                f"H.multiply(vectors): expected rows [k, {self.space.size}] of {self.dtype}, got "
                f"{tuple(vectors.shape)} of {vectors.dtype}."
            )
        if not len(vectors):
            return vectors
        products = self._product(vectors) if vectors.ndim == 1 else self._products(vectors)
        self._refuse_nonfinite(vectors, products)
        if self._pairs is not None and not _torch.functorch_is_active():
            self._compare(vectors.detach(), products.detach(), self._pairs)
        return products

    def _products(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, n]`` of the right shape and dtype."""
        raise NotImplementedError

    def _product(self, v: Tensor) -> Tensor:
        """Multiply one vector ``[n]``."""
        return self._products(v.unsqueeze(0)).squeeze(0)

    @overload
    def __matmul__(self, vectors: Tensor | SparseTensor) -> Tensor: ...
    @overload
    def __matmul__(self, vectors: Vectors) -> dict[str, Tensor | SparseTensor]: ...

    def __matmul__(
        self, vectors: Tensor | SparseTensor | Vectors
    ) -> Tensor | dict[str, Tensor | SparseTensor]:
        """Multiply a dict, a flat vector ``[n]``, or columns ``[n, k]``, which may be a SparseTensor."""
        if isinstance(vectors, Mapping):
            flat = self.space.flatten(vectors, call="H @ v")
            return self.space.unflatten(self.multiply(flat))
        if isinstance(vectors, SparseTensor):
            vectors = vectors.to_dense()  # this tensor has the size of the result
        if not is_a(vectors, Tensor):
            raise TypeError(
                "H @ v: v must be a dict of parameters, a vector [n] or a matrix [n, k], got "
                f"{type(vectors).__name__}."
            )
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.space.size:
            raise ValueError(
                f"H @ v: H is {self.shape}, so v must have shape [{self.space.size}] or [{self.space.size}, k], got "
                f"{list(vectors.shape)}."
            )
        return self.multiply(vectors) if vectors.ndim == 1 else self.multiply(vectors.t()).t()

    def to_dense(self) -> Tensor:
        """Return the matrix ``[n, n]``. It costs n products, so use it for few parameters."""
        matrix = self.multiply(torch.eye(self.space.size, dtype=self.dtype, device=self.device)).t()
        if not _torch.functorch_is_active():
            self._refuse_asymmetric(matrix.detach(), matrix.detach().t(), matrix.detach().abs().max())
        return matrix

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator`` that multiplies NumPy arrays on the CPU, without a graph.

        The operator must stay open while the result is in use.

        Raises:
            ValueError: NumPy lacks the dtype, such as bfloat16.

        Example:
            >>> w = torch.ones(2, requires_grad=True)
            >>> with metagrad.curvature.hessian(1.5 * (w**2).sum(), {"w": w}) as H:
            ...     H.to_scipy() @ [1.0, 2.0]
            array([3., 6.], dtype=float32)
        """
        linalg: Any = importlib.import_module("scipy.sparse.linalg")
        if self.dtype == torch.bfloat16:
            raise ValueError(
                "H.to_scipy(): NumPy has no torch.bfloat16. Convert the model and its data with .float() first."
            )
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype

        def matmat(columns: Any) -> Any:
            # A copy: torch has no negative strides.
            rows = _torch.from_numpy(np.array(columns.T, dtype)).to(self.device)
            return self.multiply(rows).detach().cpu().t().numpy()

        def matvec(column: Any) -> Any:
            return matmat(column.reshape(-1, 1))[:, 0]

        return linalg.LinearOperator(
            self.shape, matvec, rmatvec=matvec, matmat=matmat, rmatmat=matmat, dtype=dtype
        )

    # Estimates and solutions: functions of a linear map, as methods

    trace = traces.trace
    # A diagonal and eigenvectors are flat. H.space.unflatten returns them by name.
    diagonal = traces.diagonal
    eigenvalues = compute_eigenvalues
    density = quadrature.spectral_density
    log_determinant = quadrature.log_determinant

    def solve(self, b: Tensor | Vectors, **options: object) -> Solution:
        """Solve ``H x = b`` by :func:`metagrad.curvature.solve`, with all of its options.

        ``b``, ``x0`` and a diagonal ``preconditioner`` may be dicts of the parameters. If ``b`` is a dict, the
        solution is a dict.
        """
        flat: dict[str, Any] = {
            key: self.space.flatten(value, call=f"H.solve({key})") if is_mapping(value) else value
            for key, value in {"b": b, **options}.items()
        }
        solution = solve_flat(self, **flat)
        if not isinstance(b, Mapping):
            return solution
        return dataclasses.replace(solution, value=self.space.unflatten(solution.value))

    # Algebra

    def __add__(self, other: Operator) -> Operator:
        if not is_a(other, Operator):
            return NotImplemented
        if not self.space.is_same(other.space):
            refuse("A + B", f"operators on the same parameters, {self.space}", other.space)
        return DerivedOperator(
            self.space, lambda rows: self.multiply(rows) + other.multiply(rows), self, other
        )

    def __sub__(self, other: Operator) -> Operator:
        return self + -1.0 * other if is_a(other, Operator) else NotImplemented

    def __neg__(self) -> Operator:
        return -1.0 * self

    def __mul__(self, factor: float | Tensor) -> Operator:
        if not is_a(factor, int, float, Tensor):
            return NotImplemented
        scalar = check_scalar("c * H: c", factor)
        return DerivedOperator(self.space, lambda rows: self.multiply(rows) * scalar, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Operator:
        return self * (1 / divisor)

    def damped(self, delta: float | Tensor) -> Operator:
        """Return ``H + delta I``. ``delta`` may be a tensor with one element that requires grad."""
        scalar = check_scalar("H.damped(delta): delta", delta)
        return DerivedOperator(self.space, lambda rows: self.multiply(rows) + scalar * rows, self)

    def preconditioned(self, root: Rows | Tensor | Vectors) -> Operator:
        r"""Return :math:`R H R`, with the eigenvalues of :math:`P^{-1} H` for a preconditioner :math:`P = R^{-2}`.

        Its trace is :math:`\mathrm{tr}\, P^{-1} H`. If u is an eigenvector of :math:`R H R`, then :math:`R u` is an
        eigenvector of :math:`P^{-1} H`.

        Args:
            root: R, symmetric. A map of rows ``[k, n]``, or a diagonal as a vector ``[n]`` or a dict of parameters.

        Raises:
            ValueError: A diagonal does not have the shape and dtype of the parameters, or a map is not symmetric.

        Example:
            >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
            >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
            ...     H.preconditioned({"w": torch.tensor([2.0, 0.5])}).to_dense()
            tensor([[24.,  0.],
                    [ 0.,  3.]])
        """
        multiply = self._root(root)
        return DerivedOperator(self.space, lambda rows: multiply(self.multiply(multiply(rows))), self)

    def _root(self, root: Rows | Tensor | Vectors) -> Rows:
        """Return a symmetric map, or the map of a diagonal."""
        call, n = "H.preconditioned(root)", self.space.size
        if callable(root):
            fix = "Take the symmetric root of the inverse, by torch.linalg.eigh for a matrix."
            check_symmetric(call, "root", self, root, fix=fix)
            return root
        diagonal = self.space.flatten(root, call=call) if isinstance(root, Mapping) else root
        if not is_a(diagonal, Tensor) or diagonal.shape != (n,) or diagonal.dtype != self.dtype:
            is_tensor = is_a(diagonal, Tensor)
            got = f"{list(diagonal.shape)} of {diagonal.dtype}" if is_tensor else type(diagonal).__name__
            raise ValueError(
                f"{call}: expected a map of rows, or a diagonal [{n}] of {self.dtype}, got {got}."
            )
        return lambda rows: rows * diagonal

    def __getitem__(self, name: str) -> Operator:
        """Return the diagonal block of one parameter, or of all parameters below a name: ``H["head"]``."""
        return self.restricted(self.space.block(name))

    def restricted(self, block: ParameterSpace) -> Operator:
        """Return the diagonal block of some parameters. Rows are padded with zeros to rows of all parameters."""
        places = self.space.places(block)

        def products(rows: Tensor) -> Tensor:
            whole = rows.new_zeros(len(rows), self.space.size).index_copy(1, places, rows)
            return self.multiply(whole).index_select(1, places)

        return DerivedOperator(block, products, self)

    # Lifetime

    def close(self) -> None:
        """Free the memory of the operator.

        Later products raise. Sums, multiples and blocks also close their parts.
        """
        if not self.is_closed:
            self._free()
            self._pairs, self.is_closed = None, True

    def _free(self) -> None:
        """Free the memory that is specific to this class."""

    def __enter__(self: O) -> O:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise ValueError(
                "H @ v: H is closed, and its graph is freed. Make the products inside the with block."
            )

    def _refuse_nonfinite(self, vectors: Tensor, products: Tensor) -> None:
        # Inside a transform values cannot be read.
        if _torch.functorch_is_active() or math.isfinite(products.detach().sum().item()):
            return
        if bool(products.isfinite().all()):  # the sum overflowed
            return
        if not bool(vectors.isfinite().all()):
            raise ValueError(f"H @ v: v has nan or inf in the entry of {self._first_nonfinite(vectors)}.")
        raise ValueError(
            f"H @ v: the product has nan or inf in the entry of {self._first_nonfinite(products)}."
        )

    def _compare(self, vectors: Tensor, products: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Compare u^T A v with v^T A u for the first two vectors. This costs no product."""
        n = self.space.size
        pairs += zip(*(x.reshape(-1, n)[:2].clone() for x in (vectors, products)), strict=True)
        if len(pairs) > 1:
            self._pairs = None
            (u, image_u), (v, image_v), *_ = pairs
            forms, transposed = dot(u, image_v), dot(v, image_u)
            scale = (norm(u) * norm(image_v) + norm(v) * norm(image_u)) / self.space.size**0.5
            self._refuse_asymmetric(forms, transposed, scale)

    def _refuse_asymmetric(self, forms: Tensor, transposed: Tensor, scale: Tensor) -> None:
        """Raise ``ValueError`` if forms differ by more than rounding. In float32, rounding may come from autocast."""
        if self.dtype == torch.float64:
            bound = 10 * torch.finfo(self.dtype).eps ** 0.5 * scale
        else:
            bound = torch.maximum(0.05 * scale, 0.1 * torch.maximum(forms.abs(), transposed.abs()))
        difference = (forms - transposed).abs()
        if self.dtype not in HALF and bool((difference > bound).any()):
            raise ValueError(
                f"H @ v: H is not symmetric: u^T H v and v^T H u differ by {float(difference.max()):.3g}. A hook or "
                "an autograd.Function in the graph changes gradients: it clips, detaches or draws numbers. Remove it "
                "while the loss is computed."
            )

    def _first_nonfinite(self, rows: Tensor) -> str:
        bad = (~rows.reshape(-1, self.space.size).isfinite()).any(0).nonzero()
        return repr(self.space.name_at(int(bad[0])))


class DerivedOperator(Operator):
    """An operator whose products are computed from the products of other operators, and that is closed with them."""

    def __init__(self, space: ParameterSpace, products: Rows, *parts: Operator) -> None:
        super().__init__(space)
        self._from_parts, self.parts = products, parts

    def _products(self, vectors: Tensor) -> Tensor:
        return self._from_parts(vectors)

    def _free(self) -> None:
        for part in self.parts:
            part.close()


class Averaged(DerivedOperator):
    r"""The mean of the operators of all ranks, :math:`\frac{1}{W} \sum_w A_w`.

    A product costs one all-reduce. A second all-reduce, of three numbers, checks that all ranks multiply the same
    vector. Each rank makes its operator from its own data, at the same parameters. All ranks make the same products
    in the same order, so estimators need generators in the same state on all ranks. Products are not differentiable.

    Args:
        operator: The operator of this rank.
        group: The process group. None means the default group.

    Raises:
        TypeError: ``operator`` is not an :class:`~metagrad.curvature.Operator`.
        ValueError: In a product, the ranks multiply different vectors.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
        ...     metagrad.curvature.Averaged(H) @ torch.ones(2)  # one process: nothing changes
        tensor([ 6., 12.])
    """

    def __init__(self, operator: Operator, group: dist.ProcessGroup | None = None) -> None:
        check_type("Averaged(operator, group)", operator, Operator)
        super().__init__(operator.space, self._mean, operator)
        self.group = group

    def _mean(self, vectors: Tensor) -> Tensor:
        products = self.parts[0].multiply(vectors).detach()
        if (group := joined(self.group)) is None:
            return products
        what = "Averaged(operator, group): vectors, for which estimators need generators with the same seed"
        refuse_differences(group, what, [vectors])
        return sums_over(group, [products], [products])[0] / group.size()


class GraphOperator(Operator):
    """The operator of one batch, whose products come from a stored graph.

    A subclass implements ``_product`` and ``gradient``.

    Args:
        space: The parameters.
        loss: The loss of the batch.
        recorded: The outputs with their graph. Loss and gradient are differentiable if its products are.
        chunk: Working memory of products that are computed together, in bytes.

    Attributes:
        loss: The loss at the parameters.
        count: Divisor of the mean of the batch. None if the loss is a sum.
    """

    is_symmetric: ClassVar[bool]
    """True if the outputs are a gradient, so their Jacobian is symmetric."""

    def __init__(self, space: ParameterSpace, loss: Tensor, recorded: Recorded, *, chunk: int) -> None:
        super().__init__(space)
        self.loss: Tensor = loss if recorded.create_graph else loss.detach()
        self.count: float | Tensor | None = None
        self._recorded = recorded
        self._chunk = chunk
        self._batched = BatchedVjp()
        self._blocks: list[Operator] = []

    @property
    def gradient(self) -> Tensor:
        """The flat gradient of the loss. ``H.space.unflatten(H.gradient)`` returns its parts by name."""
        raise NotImplementedError

    @property
    def num_together(self) -> int:
        """Number of products that are computed together."""
        return self._batched.most(self._chunk, self.device)

    def _product(self, v: Tensor) -> Tensor:
        """Multiply one vector ``[n]``, or rows ``[k, n]`` in one backward pass."""
        raise NotImplementedError

    def _products(self, vectors: Tensor) -> Tensor:
        return self._batched.rows(self._product, vectors, self._chunk, on_tape=self._recorded.on_tape)

    def restricted(self, block: ParameterSpace) -> GraphOperator:
        """Return the diagonal block of some parameters. Its backward passes end at these parameters."""
        self._refuse_closed()
        places = [self.space.names.index(name) for name in block.names]
        part = copy.copy(self)
        part.space, part._pairs, part._blocks, part._batched = block, [], [], BatchedVjp()
        part._recorded = self._recorded.block(places, is_symmetric=self.is_symmetric)
        self._blocks.append(part)
        return part

    def _free(self) -> None:
        for block in self._blocks:
            block.close()
        self.loss = self.loss.detach()
        del self._recorded
