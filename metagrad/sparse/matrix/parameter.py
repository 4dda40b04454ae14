"""Sparse parameters of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import Module
from metagrad.core.checks import is_a
from metagrad.sparse.matrix.tensor import Operators, SparseTensor
from metagrad.sparse.operations.entries import like
from metagrad.sparse.pattern import Pattern

_PATTERN_KEY = "_extra_state"  # torch's name for what get_extra_state returns


class Parameter(Operators, Module):
    """A sparse matrix as a parameter of a module.

    Assign it to a module instead of a dense weight. Optimizers, ``functional_call`` and ``metagrad.MAML`` see the
    dense vector ``weight.values``. Copies share the pattern. The pattern moves with the values and is part of the
    ``state_dict``. Operators and functions of :mod:`metagrad.sparse` accept a parameter like a :class:`SparseTensor`.
    Other methods are available on :attr:`tensor`.

    The pattern is fixed. Loading a ``state_dict`` with another pattern raises an error before any value is loaded.
    ``torch.optim.SparseAdam`` and ``Muon`` do not support dense vectors, so they do not support this parameter.

    Args:
        a: Initial matrix. The parameter shares its values, as ``nn.Parameter`` shares its data.
        requires_grad: True to train the values.

    Raises:
        ValueError: ``a`` was computed from other tensors. The parameter would not depend on these tensors.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> layer = torch.nn.Module()
        >>> a = metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]]))
        >>> layer.weight = metagrad.sparse.Parameter(a)
        >>> [name for name, _ in layer.named_parameters()]
        ['weight.values']
        >>> (layer.weight @ torch.tensor([1.0, 10.0])).square().sum().backward()
        >>> layer.weight.tensor.grad
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([400.,   6.]))
    """

    pattern: Pattern
    values: Tensor

    def __init__(self, a: SparseTensor, requires_grad: bool = True) -> None:
        call = "Parameter(a)"
        if not is_a(a, SparseTensor):
            raise TypeError(
                f"{call}: a must be a SparseTensor, got {type(a).__name__}. SparseTensor.from_dense(tensor) converts."
            )
        if not a.is_leaf:
            raise ValueError(
                f"{call}: a was computed from other tensors, and its parameter would not be connected to them. "
                "Use Parameter(a.detach())."
            )
        super().__init__()
        self.pattern = a.pattern
        self.values = nn.Parameter(a.values, requires_grad)

    @property
    def tensor(self) -> SparseTensor:
        """The matrix with the current values of the module, differentiable."""
        return like(SparseTensor, self.pattern, self.values)

    @property
    def _matrix(self) -> SparseTensor:
        return self.tensor

    @property
    def shape(self) -> torch.Size:
        """Numbers of rows and columns."""
        return self.tensor.shape

    def extra_repr(self) -> str:
        """Return a description of the matrix without its values."""
        return f"shape={self.pattern.shape}, nnz={self.pattern.nnz}, dtype={self.values.dtype}"

    def get_extra_state(self) -> Tensor:
        """Return the pattern as one tensor, int64 [2, 1 + nnz]: its shape, then the row and column of each entry."""
        shape = self.pattern.row.new_tensor(self.pattern.shape)
        return torch.cat([shape[:, None], torch.stack([self.pattern.row, self.pattern.col])], 1)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing.

        The pattern is fixed, and loading has already compared the pattern of the ``state_dict``.
        """

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        pattern = state_dict.get(prefix + _PATTERN_KEY)
        own = self.get_extra_state()
        is_same = isinstance(pattern, Tensor) and torch.equal(pattern.to(own.device), own)
        if pattern is not None and not is_same:
            error_msgs.append(
                f"Parameter.load_state_dict(state_dict): {prefix}{_PATTERN_KEY} is another pattern than this "
                f"parameter's, {self.pattern}: values would be put into the wrong cells. Make the parameter on the "
                "pattern that was saved."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.pattern = self.pattern.to(self.values.device)  # load_state_dict(assign=True) may move the values

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Parameter:
        super()._apply(fn, recurse)
        self.pattern = self.pattern.to(self.values.device)
        return self
