"""Scaled dot-product attention over the entries of a pattern."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from metagrad.core._torch import broadcast_shapes
from metagrad.core.checks import check_type
from metagrad.core.tree import widened
from metagrad.sparse.checks import check_device, check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.segments import largest
from metagrad.sparse.pattern import Pattern

_CALL = "attention(q, k, v, pattern)"
TOGETHER = 1 << 17  # entries: below it one block-diagonal product is faster than a loop over heads (measured)


def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    r"""Attend from each query to the keys that its row of the pattern stores.

    .. math::
        y_i = \sum_{j \in \mathrm{row}\ i} \frac{z_{ij}}{1 - p}
        \frac{e^{s_{ij}}}{\sum_{l \in \mathrm{row}\ i} e^{s_{il}}} \, v_j,
        \qquad s_{ij} = \mathrm{scale} \cdot q_i^\top k_j, \qquad z_{ij} \sim \mathrm{Bernoulli}(1 - p)

    The result equals ``torch.nn.functional.scaled_dot_product_attention`` with the pattern as a boolean mask, and is
    correct at every order. Memory and time of every derivative are proportional to the entries times the heads. The
    forward stores 1 value per entry and head, or 3 with dropout. Half precision is computed in float32.

    Args:
        q: Queries, [..., n, D]. Leading dimensions (batch, heads) broadcast.
        k: Keys, [..., m, D].
        v: Values, [..., m, E].
        pattern: The keys that each query sees, with shape (n, m), for all heads.
        scale: Factor of the scores. None means 1 / sqrt(D).
        dropout_p: Probability of setting a normalized weight to zero. As in torch, it also applies in
            evaluation mode, so pass 0 there. Random numbers come from torch's global generator.

    Returns:
        [..., n, E]. A query without keys gives zeros and has no gradient.

    Raises:
        ValueError: Shapes or devices do not match, or ``dropout_p`` is not a probability.
        TypeError: An operand has another type, or dtypes differ.

    Note:
        A bias on the scores is not supported. Under ``vmap``, dropout needs the argument ``randomness=`` of
        ``vmap``.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), (3, 2))
        >>> q, k, v = torch.zeros(3, 4), torch.zeros(2, 4), torch.tensor([[1.0], [3.0]])
        >>> metagrad.sparse.attention(q, k, v, pattern).tolist()  # the mean of both, one, none
        [[2.0], [3.0], [0.0]]

    References:
        Vaswani et al., "Attention is all you need", arXiv:1706.03762, section 3.2.1. Normalizing the output in
        place of the weights: Dao et al., "FlashAttention", arXiv:2205.14135, section 3.1.
    """
    batch = _check_arguments(q, k, v, pattern)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{_CALL}: dropout_p must be from 0 to 1, got {dropout_p}.")
    dtype, (q, k, v) = q.dtype, map(widened, (q, k, v))
    q = q * (1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale)
    if not batch:
        return _attend(q, k, v, pattern, dropout_p).to(dtype)
    num = batch.numel()
    if not num:
        return v.new_zeros(*batch, pattern.shape[0], v.shape[-1], dtype=dtype)
    q, k, v = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (q, k, v))
    size = _group(num, pattern.nnz)
    q, k, v = (torch.unflatten(x, 0, (-1, size)).flatten(1, 2) for x in (q, k, v))
    cells = pattern if size == 1 else pattern.repeat(size)
    heads = [_attend(*head, cells, dropout_p) for head in zip(q, k, v, strict=True)]
    return torch.stack(heads).reshape(*batch, pattern.shape[0], v.shape[-1]).to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, dropout_p: float) -> Tensor:
    """Attend in one head, scale included in the queries."""
    scores = rules.sample(pattern, q, k)
    # The maximum cancels in the result, so it is a constant for derivatives of every order.
    weights = torch.exp(scores - rules.gather(largest(scores, pattern.rows, pattern.shape[0]), pattern.rows))
    if dropout_p:  # all weights are in the normalization, the remaining weights are in the sum
        total = rules.segment_sum(weights, pattern.rows).unsqueeze(1)
        summed = rules.matmul(pattern, F.dropout(weights, dropout_p), v)
    else:
        both = rules.matmul(pattern, weights, torch.cat([v, v.new_ones(v.shape[0], 1)], dim=1))
        summed, total = both[:, :-1], both[:, -1:]
    is_empty = (pattern.rows.counts == 0).unsqueeze(1)
    return summed / torch.where(is_empty, 1, total)


def _group(num: int, nnz: int) -> int:
    """Choose how many heads to compute together. The number divides ``num``, so all groups share one pattern."""
    most = min(num, max(TOGETHER // max(nnz, 1), 1))
    return next(size for size in range(most, 0, -1) if num % size == 0)


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> torch.Size:
    """Return the broadcast leading dimensions."""
    check_type(f"{_CALL}: pattern", pattern, Pattern)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(_CALL, name, x)
    check_same(_CALL, "q and k", q, k)
    check_same(_CALL, "q and v", q, v)
    check_device(_CALL, "q and pattern", q, pattern)
    n, m = pattern.shape
    shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if (
        min(q.ndim, k.ndim, v.ndim) < 2
        or (q.shape[-2], k.shape[-2], v.shape[-2]) != (n, m, m)
        or q.shape[-1] != k.shape[-1]
    ):
        raise ValueError(
            f"{_CALL}: the pattern is {pattern.shape}, so q must be [..., {n}, D], k [..., {m}, D] and "
            f"v [..., {m}, E], got {shapes}."
        )
    try:
        return broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except RuntimeError as error:
        raise ValueError(
            f"{_CALL}: the leading dimensions of q, k and v must broadcast, got {shapes}."
        ) from error
