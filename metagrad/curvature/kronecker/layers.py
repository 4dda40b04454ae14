"""The layers that K-FAC supports: their inputs and gradients as rows, one for each example and position."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core._torch import named_modules
from metagrad.core.checks import warn

Layer: TypeAlias = "nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d"

KNOWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def known_layers(call: str, model: nn.Module, own: Collection[Tensor]) -> dict[str, Layer]:
    """Find the layers of a model whose weight is trained, by name.

    Args:
        call: Call that needs the layers, for errors.
        model: The model.
        own: The parameters that are trained.

    Raises:
        ValueError: A trained parameter belongs to a grouped convolution, or to a layer and another module.

    Warns:
        UserWarning: Other modules have parameters. They are updated along the plain gradient.
    """
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, module in named_modules(model):
        for p in module.parameters(recurse=False):
            owners[p].append(name)
    layers, others = dict[str, Any](), list[str]()
    for name, module in named_modules(model):
        params, kind = list(module.parameters(recurse=False)), type(module)
        shared = [other for p in params for other in owners[p] if other != name]
        num_groups = getattr(module, "groups", 1)
        # Subclasses do not count as known layers, because they may compute anything. A weight may be a plain tensor
        # that is computed from parameters, as by ``nn.utils.weight_norm``.
        weight = module.weight if kind in KNOWN else None
        is_known = isinstance(weight, nn.Parameter) and weight.requires_grad
        if is_known and not shared and num_groups == 1:
            layers[name] = module
        elif is_known and any(p in own for p in params):
            if shared:
                raise ValueError(
                    f"{call}: {name!r} shares a parameter with {shared}, and the factors of shared layers are not "
                    "known. Give each a parameter of its own, or leave them out of params= and use another optimizer "
                    "for them."
                )
            raise ValueError(
                f"{call}: {name!r} is a convolution of {num_groups} groups, whose Fisher block is not a Kronecker "
                "product. Use groups=1, or leave it out of params= and give it to another optimizer."
            )
        elif any(p.requires_grad and p in own for p in params):
            others.append(f"{name or 'the model itself'} ({kind.__name__})")
    if others:
        warn(
            f"{call}: these modules are not Linear, Conv1d, Conv2d or Conv3d, and are moved along the plain "
            f"gradient: {', '.join(others)}."
        )
    return layers


def input_rows(layer: Layer | nn.Embedding, value: Tensor, *, has_bias: bool) -> Tensor:
    """Return the vectors that a layer multiplies with its weight, ``[examples, positions, inputs]``.

    The rows of a convolution are patches, in the order of its flat weights. A bias adds a column of ones. The rows of
    an embedding table are indices.
    """
    if isinstance(layer, nn.Embedding):
        return value.reshape(len(value), -1, 1)
    if isinstance(layer, nn.Linear):
        rows = torch.atleast_2d(value)
        rows = rows.reshape(len(rows), math.prod(rows.shape[1:-1]), rows.shape[-1])
    else:
        rows = _patches(layer, value if value.ndim == layer.weight.ndim else value.unsqueeze(0))
    return F.pad(rows, (0, 1), value=1.0) if has_bias else rows


def output_rows(layer: Layer | nn.Embedding, gradient: Tensor) -> Tensor:
    """Return the gradient of a layer's output as ``[examples, positions, outputs]``."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        rows = torch.atleast_2d(gradient)
        return rows.reshape(len(rows), math.prod(rows.shape[1:-1]), rows.shape[-1])
    batched = gradient if gradient.ndim == layer.weight.ndim else gradient.unsqueeze(0)
    return batched.flatten(2).mT


def _patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor) -> Tensor:
    value = _padded(layer, value)
    num_axes = value.ndim - 2
    for axis in range(num_axes):
        size, stride, dilation = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
        value = value.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    # [examples, channels, *positions, *kernel] -> [examples, *positions, channels, *kernel]
    value = value.movedim(1, 1 + num_axes)
    num_positions = math.prod(value.shape[1 : 1 + num_axes])
    return value.reshape(len(value), num_positions, math.prod(value.shape[1 + num_axes :]))


def _padded(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor) -> Tensor:
    widths: list[int] = []
    for axis in reversed(range(value.ndim - 2)):
        if layer.padding == "same":
            total = (layer.kernel_size[axis] - 1) * layer.dilation[axis]
            widths += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            widths += [0, 0]
        else:
            widths += [int(layer.padding[axis])] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(value, widths, mode=mode) if any(widths) else value


def without_base(output: Tensor) -> Tensor:
    """Return a tensor that is no view. The output of a linear layer on sequences is a view.

    A module that writes over a view, such as ``nn.ReLU(inplace=True)``, changes the base and bypasses the view's
    node.
    """
    return output.clone() if output._base is not None else output
