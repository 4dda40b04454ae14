"""Cross entropy over large vocabularies and attention over long sequences, in chunks that are recomputed."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from metagrad.autograd.recompute.checkpoint import checkpoint
from metagrad.core._torch import broadcast_shapes, functorch_is_active, split
from metagrad.core.checks import check_choice, check_count, check_number, refuse
from metagrad.core.tree import widened

_FEWEST_CLASSES = 256  # of a chunk, unless the vocabulary is smaller


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int = 2**21,
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.T + bias`` without the whole matrix of logits.

    The loss and its derivatives of every order are the same as with :func:`torch.nn.functional.cross_entropy`. At
    every order, the logits of one chunk are in memory at a time. The graph stores ``hidden`` and ``weight``. Each
    differentiation computes the logits again.

    Args:
        hidden: Inputs of the last layer, of shape ``[..., features]``.
        weight: Weight of the last layer, of shape ``[classes, features]``.
        labels: Classes as integers, of shape ``[...]``.
        bias: Bias of the last layer, of shape ``[classes]``, or None.
        reduction: ``"mean"`` over the labels that count, ``"sum"``, or ``"none"`` for the shape of ``labels``.
        ignore_index: Label whose loss is zero and does not count in the mean.
        label_smoothing: Share of the target distribution that is uniform over the classes, in ``[0, 1)``.
        chunk: Number of logits that are in memory at a time. The default takes 8 MiB in float32.

    Returns:
        The loss, in float32 or wider.

    Raises:
        ValueError: The shapes or dtypes do not match, or a label is not a class.
        TypeError: ``labels`` are not integers.

    Example:
        >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> metagrad.autograd.linear_cross_entropy(hidden, weight, torch.tensor([0, 1])).item()
        0.67
        >>> torch.nn.functional.cross_entropy(hidden @ weight.T, torch.tensor([0, 1])).item()
        0.67

    References:
        Wijmans et al., "Cut your losses in large-vocabulary language models", arXiv:2411.09009 (first order).
    """
    call = "linear_cross_entropy(hidden, weight, labels, ...)"
    check_choice(f"{call}: reduction", reduction, ("mean", "sum", "none"))
    check_number(f"{call}: label_smoothing", label_smoothing, 0, 1)
    check_count(f"{call}: chunk", chunk)
    _check_shapes(call, hidden, weight, labels, bias)
    rows, flat = hidden.flatten(0, -2), labels.flatten().long()
    counts = flat != ignore_index
    _check_labels(call, flat[counts] if not functorch_is_active() else flat[:0], len(weight))
    most = max(1, chunk // min(_FEWEST_CLASSES, max(len(weight), 1)))
    parts = zip(split(rows, most), split(flat, most), strict=True)
    log_totals, picked = torch.cat([_log_totals(h, weight, y, bias, chunk) for h, y in parts], 1)
    if label_smoothing:
        means = widened(rows @ weight.mean(0) + (0 if bias is None else bias.mean()))
        picked = torch.lerp(picked, means, label_smoothing)
    # This lookup of zeros raises under vmap, where labels cannot be read, for a label that is no class.
    zeros = picked.new_zeros(1).expand(len(weight)).gather(0, flat.where(counts, 0))
    losses = torch.where(counts, log_totals - picked + zeros, 0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    chunk: int = 2**21,
) -> Tensor:
    r"""Compute attention without the whole matrix of scores, differentiable any number of times.

    .. math:: \mathrm{softmax}(s\, Q K^T + M)\, V

    The fused kernels of :func:`torch.nn.functional.scaled_dot_product_attention` cannot be differentiated twice. Its
    other implementation stores all scores. Here, the scores of one chunk of queries are in memory at a time, at every
    order. Each differentiation computes them again.

    Args:
        query: Tensor of shape ``[..., queries, features]``.
        key: Tensor of shape ``[..., keys, features]``.
        value: Tensor of shape ``[..., keys, outputs]``.
        mask: Tensor that broadcasts to ``[..., queries, keys]``, or None. A boolean mask is True for the keys that a
            query attends to. Another mask is added to the scores, and -inf excludes a key.
        is_causal: If True, query i attends to the keys 0 to i.
        scale: Factor of the scores. None is :math:`1 / \sqrt{\text{features}}`.
        chunk: Number of scores that are in memory at a time. The default takes 8 MiB in float32.

    Returns:
        The outputs, of shape ``[..., queries, outputs]``. They are zero for a query that attends to no key.

    Raises:
        ValueError: The shapes do not match.
        TypeError: ``mask`` has integers.

    Example:
        >>> query, key, value = torch.eye(2), torch.eye(2), torch.tensor([[1.0], [3.0]])
        >>> metagrad.autograd.attention(query, key, value, is_causal=True)
        tensor([[1.0],
                [2.3]])

    References:
        Rabe, Staats, "Self-attention does not need O(n^2) memory", arXiv:2112.05682.
    """
    call = "attention(query, key, value, ...)"
    check_count(f"{call}: chunk", chunk)
    shape = _shape_of_scores(call, query, key, value, mask)
    size = max(1, chunk // max(1, shape[:-2].numel() * key.shape[-2]))
    factor = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], *shape[-2:])
    outputs: list[Tensor] = []
    first = 0
    for queries in split(query, size, -2):
        last = first + queries.shape[-2]
        keys = slice(None, last) if is_causal else slice(None)
        own = None if mask is None else mask[..., first:last, keys]
        causal = first if is_causal else None
        outputs.append(
            checkpoint(_attended, queries * factor, key[..., keys, :], value[..., keys, :], own, causal)
        )
        first = last
    return torch.cat(outputs, -2)


def _log_totals(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """Return the log of the sum of exponentials of all logits, and the logit of the label, ``[2, rows]``."""
    size, first = max(1, chunk // max(1, len(hidden))), 0
    parts: list[Tensor] = []
    biases = [None] * len(weight) if bias is None else split(bias, size)
    for rows, part in zip(split(weight, size), biases, strict=False):
        parts.append(checkpoint(_part_of_totals, hidden, rows, labels - first, part))
        first += len(rows)
    log_totals, picked = torch.stack(parts, 1)
    return torch.stack([log_totals.logsumexp(0), picked.sum(0)])


def _part_of_totals(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.mT
    is_closed = torch.zeros((), dtype=torch.bool, device=hidden.device)
    if bias is not None:  # logsumexp of nothing but -inf has no derivative
        is_closed = (bias == -math.inf).all()
        logits = logits + bias.masked_fill(is_closed, 0)
    logits = widened(logits)
    is_inside = (labels >= 0) & (labels < len(weight))
    own = logits.gather(1, labels.clamp(0, len(weight) - 1).unsqueeze(1)).squeeze(1)
    log_total, own = (x.masked_fill(is_closed, -math.inf) for x in (logits.logsumexp(1), own))
    return torch.stack([log_total, torch.where(is_inside, own, 0)])


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int | None) -> Tensor:
    scores = query @ key.mT
    if mask is not None and mask.dtype != torch.bool:
        scores, mask = scores + mask, mask != -math.inf
    if first is not None:
        places = [torch.arange(n, device=query.device) for n in scores.shape[-2:]]
        causal = places[0].unsqueeze(1) + first >= places[1]
        mask = causal if mask is None else mask & causal
    if mask is None:
        return scores.softmax(-1) @ value
    attends = mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask, -math.inf).masked_fill(~attends, 0).softmax(-1)
    return (weights * attends).to(value.dtype) @ value


def _shape_of_scores(call: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> torch.Size:
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"{call}: mask must be boolean, or be added to the scores as floating point, got {mask.dtype}. "
            "Pass mask.bool() if it is 1 for the keys that a query attends to."
        )
    masks = [] if mask is None else [mask]
    sizes = torch.Size((*query.shape[-2:-1], *key.shape[-2:-1]))
    try:
        lead = broadcast_shapes(*(x.shape[:-2] for x in (query, key, value, *masks)))
        fits = all(broadcast_shapes(x.shape[-2:], sizes) == sizes for x in masks)
    except RuntimeError:
        lead, fits = torch.Size(), False
    features = (query.shape[-1:], key.shape[-2:-1]) == (key.shape[-1:], value.shape[-2:-1])
    if not fits or not features or min(query.ndim, key.ndim, value.ndim) < 2:
        expected = "shapes [..., queries, features], [..., keys, features] and [..., keys, outputs]"
        expected += ", and for a mask one that broadcasts to [..., queries, keys]" * len(masks)
        refuse(call, expected, [tuple(x.shape) for x in (query, key, value, *masks)])
    return torch.Size((*lead, *sizes))


def _check_shapes(call: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"{call}: labels must be classes as integers, got {labels.dtype}. Pass labels.long()."
        )
    fits = weight.ndim == 2 and hidden.shape == (*labels.shape, weight.shape[1]) and hidden.ndim > 1
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [tuple(x.shape) for x in (hidden, weight, labels) + (() if bias is None else (bias,))]
        refuse(call, "shapes [..., features], [classes, features], [...] and [classes] for a bias", shapes)
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        refuse(f"{call}: weight", f"{hidden.dtype} as hidden, or torch.autocast", weight.dtype)


def _check_labels(call: str, labels: Tensor, classes: int) -> None:
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        refuse(
            call, f"labels from 0 to {classes - 1}, or ignore_index", [int(labels.min()), int(labels.max())]
        )
