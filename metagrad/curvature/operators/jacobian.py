"""The Jacobian of a function of one example, at all examples, as a rectangular operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from metagrad.autograd.derivatives.recorded import Recorded, checked_leaves
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import check_function, is_a
from metagrad.core.norms import composite_norms, unfused_attention
from metagrad.core.tree import Params, tensors_in
from metagrad.curvature.operators.space import Parameters, ParameterSpace
from metagrad.memory.tracker import hooks_aside

CALL = "jacobian(fn, params, data)"


def jacobian(fn: Callable[..., Tensor], params: Params, data: Any, *, chunk: Bytes = "64MiB") -> Jacobian:
    r"""Make the operator of the Jacobian of a function of one example, at N examples.

    .. math:: J = \frac{\partial f(\theta, x_n)_k}{\partial \theta_i}, \qquad [N K, n]

    Products use the graph of all values. ``rows()`` differentiates one example at a time, by ``torch.func.vmap``.

    Args:
        fn: ``fn(params, *example)`` returns the values of one example, a tensor of any shape. It may differentiate
            with respect to the example, by ``torch.func.grad`` or ``torch.func.jacrev``. For a module it is
            ``lambda params, x: torch.func.functional_call(model, params, (x,))``.
        params: Dense parameters by name. They need not require grad.
        data: The arguments of ``fn`` after the parameters, for N examples: a tensor ``[N, ...]``, or a tuple of
            tensors or pytrees whose tensors all have N first.
        chunk: Working memory of rows that are computed together, in bytes or as ``"64MiB"``.

    Raises:
        TypeError: ``fn`` does not return a floating point tensor, or ``params`` is not a dict of tensors.
        ValueError: The tensors of ``data`` differ in their first dimension, or the values do not depend on a
            parameter.

    Example:
        Two features of a linear model, and its neural tangent kernel:

        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> J = metagrad.curvature.jacobian(lambda p, x: p["w"] @ x, {"w": torch.zeros(2)}, data)
        >>> J.rows(), J @ torch.tensor([1.0, 0.0]), J.T @ torch.tensor([1.0, 0.0])
        (tensor([[1., 2.],
                [3., 4.]]), tensor([1., 3.]), tensor([1., 2.]))
        >>> metagrad.curvature.trace(J.gram()).value
        tensor(30.)

    References:
        Jacot, Gabriel, Hongler, "Neural tangent kernel", NeurIPS 2018, for ``gram``.
    """
    check_function(CALL, "fn", fn)
    space = ParameterSpace(params, call=CALL)
    return Jacobian(space, Examples(CALL, fn, data), params, checked_bytes(CALL, "chunk", chunk))


class Examples:
    """A function of parameters and one example, with the examples.

    Args:
        call: Name of the caller in error messages.
        fn: ``fn(params, *example)``.
        data: As for :func:`jacobian`.

    Attributes:
        count: Number of examples, N.
    """

    def __init__(self, call: str, fn: Callable[..., Tensor], data: Any) -> None:
        self.call = call
        self.data: tuple[Any, ...] = data if is_a(data, tuple) else (data,)
        self.fn = fn
        tensors = tensors_in(self.data)
        sizes = {tensor.shape[:1] for tensor in tensors}
        if len(sizes) != 1 or sizes <= {(), (0,)}:
            raise ValueError(
                f"{call}: data must be tensors whose first dimension counts the same examples, 1 or more, got shapes "
                f"{[list(tensor.shape) for tensor in tensors]}."
            )
        self.count: int = len(tensors[0])
        self._may_have_norms = True
        self._refusal = (
            f"{call}: fn uses torch.autograd.graph.saved_tensors_hooks, as torch.utils.checkpoint does, which "
            "torch.func.vmap does not support. Call metagrad.checkpoint, or leave it out."
        )

    def values(self, params: Parameters) -> Tensor:
        """Evaluate all examples, ``[N, *values]``."""
        return self._mapped(self.fn, None, params)

    def rows(
        self, params: Params, num_rows: int, chunk: int, fixed: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Return the rows of the Jacobian ``[num_rows, n]``, without a graph.

        Args:
            params: The parameters to differentiate with respect to, by name.
            num_rows: Number of values of all examples.
            chunk: Working memory, in bytes.
            fixed: Other parameters that ``fn`` takes.
        """
        leaves = {name: p.detach() for name, p in params.items()}
        num_values = num_rows // self.count

        def one(own: Params, *example: Any) -> Tensor:
            found = self.fn({**(fixed or {}), **own}, *example)
            return found.reshape(()) if num_values == 1 else found.reshape(-1)

        derivative = torch.func.grad(one) if num_values == 1 else torch.func.jacrev(one)
        size = sum(p.numel() * p.element_size() for p in leaves.values())
        # A row passes through several tensors of its size, one for each step of the inner derivatives.
        with hooks_aside():
            found = self._mapped(derivative, max(1, chunk // (8 * num_values * size)), leaves)
        return torch.cat([found[name].reshape(num_rows, -1) for name in leaves], 1)

    def _mapped(self, fn: Callable[..., Any], at_once: int | None, params: Any) -> Any:
        mapped = torch.func.vmap(fn, (None, *(0 for _ in self.data)), chunk_size=at_once)
        with contextlib.ExitStack() as stack, unfused_attention():
            with contextlib.suppress(RuntimeError):  # hooks of the caller, as a MemoryTracker has
                stack.enter_context(disable_saved_tensors_hooks(self._refusal))
            if not self._may_have_norms:  # a function mode costs as much as a small operation
                return mapped(params, *self.data)
            with composite_norms() as norms:
                try:
                    found = mapped(params, *self.data)
                except RuntimeError as error:
                    if type(error) is not RuntimeError:
                        raise
                    raise RuntimeError(
                        f"{self.call}: torch.vmap over the examples raises: {error} If fn draws random numbers, as "
                        "dropout does, call model.eval()."
                    ) from error
        self._may_have_norms = norms.has_handled
        return found


class Jacobian:
    """The Jacobian of a function of one example, as :func:`jacobian` returns it.

    Attributes:
        values: The values of the function, ``[N, *values]``.
        shape: ``(N K, n)``, for K values of an example and n parameters.
        space: The parameters.
    """

    def __init__(self, space: ParameterSpace, examples: Examples, params: Params, chunk: int) -> None:
        self.space = space
        self._examples, self._chunk = examples, chunk
        self._leaves = {
            name: p if p.requires_grad else p.detach().requires_grad_() for name, p in params.items()
        }
        with torch.enable_grad():
            values: object = examples.values(self._leaves)
        if not is_a(values, Tensor) or not values.is_floating_point() or not values.requires_grad:
            got = f"{values.dtype} without a graph" if is_a(values, Tensor) else type(values).__name__
            raise TypeError(
                f"{CALL}: fn must return a floating point tensor that depends on params, got {got}."
            )
        self._recorded = Recorded(CALL, [values], checked_leaves(CALL, self._leaves))
        self.values: Tensor = values.detach()
        self.shape: tuple[int, int] = (values.numel(), space.size)
        self.dtype: torch.dtype = values.dtype
        self.device: torch.device = values.device

    def __matmul__(self, v: Tensor | Params) -> Tensor:
        """Multiply a flat vector ``[n]``, a dict by name, or rows ``[k, n]``. Returns ``[N K]`` or ``[k, N K]``."""
        flat = v if isinstance(v, Tensor) else self.space.flatten(v)
        _check(flat, self.shape[1], "J @ v")
        with torch.no_grad():
            return self._recorded.push(flat)

    @property
    def T(self) -> TransposedJacobian:  # noqa: N802
        """The transpose, for products ``J.T @ u``."""
        return TransposedJacobian(self._recorded)

    def rows(self) -> Tensor:
        """Materialize the matrix, ``[N K, n]``."""
        self._recorded.refuse_moved()
        return self._examples.rows(self._leaves, self.shape[0], self._chunk)

    def gram(self) -> Gram:
        """Return the linear map :math:`J J^T` of vectors ``[N K]``, whose spectrum is the tangent kernel's."""
        return Gram(self)

    def __repr__(self) -> str:
        return f"Jacobian({self.shape[0]} values, {self.shape[1]} parameters)"


class TransposedJacobian:
    """The transpose of a :class:`Jacobian`."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def __matmul__(self, u: Tensor) -> Tensor:
        """Multiply ``[N K]`` or rows ``[k, N K]``. Returns ``[n]`` or ``[k, n]``."""
        _check(u, self._recorded.outputs.numel(), "J.T @ u")
        with torch.no_grad():
            return self._recorded.pull(u)


class Gram:
    """The linear map of rows :math:`J J^T`, for estimators and solvers."""

    def __init__(self, of: Jacobian) -> None:
        self._of = of
        self.shape: tuple[int, int] = (of.shape[0], of.shape[0])
        self.dtype: torch.dtype = of.dtype
        self.device: torch.device = of.device

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, N K]``."""
        return self._of @ (self._of.T @ vectors)


def _check(vector: Tensor, size: int, what: str) -> None:
    if vector.ndim not in (1, 2) or vector.shape[-1] != size:
        raise ValueError(f"{what}: expected [{size}] or rows [k, {size}], got {list(vector.shape)}.")
