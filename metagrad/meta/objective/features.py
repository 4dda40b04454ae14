"""The leading layers of a chain that no task changes, whose features are computed once for all inner steps.

They may be kept where a layer is a function of its input and its parameters alone. Such are the layers of torch in
:data:`FUNCTIONS`, and modules whose class says so by an attribute ``is_function = True``, if all modules within are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.meta.objective.norms import Norms
from metagrad.meta.objective.vmap import ELEMENTWISE, is_plain, layers_of

FUNCTIONS = (ELEMENTWISE - {nn.Dropout}) | {
    getattr(nn, f"{kind}{axes}d")
    for axes in (1, 2, 3)
    for kind in (
        "AdaptiveAvgPool",
        "AdaptiveMaxPool",
        "AvgPool",
        "CircularPad",
        "ConstantPad",
        "Conv",
        "ConvTranspose",
        "MaxPool",
        "ReflectionPad",
        "ReplicationPad",
        "ZeroPad",
    )
}
FUNCTIONS |= {
    nn.ChannelShuffle,
    nn.Embedding,
    nn.Flatten,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Linear,
    nn.LocalResponseNorm,
    nn.PReLU,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.RMSNorm,
    nn.Sequential,
    nn.Softmax,
    nn.Unflatten,
    nn.Upsample,
}
"""Layers of torch that draw no random numbers and change nothing."""

_NORMS = (_torch.BatchNorm, _torch.InstanceNorm)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class SplitLayers(NamedTuple):
    """The layers of a chain.

    Attributes:
        shared: The first ones, which compute the same at every inner step.
        adapted: The others.
    """

    shared: tuple[nn.Module, ...]
    adapted: tuple[nn.Module, ...]


def split_layers(
    model: nn.Module, adapted: Collection[int], norms: Norms | None = None
) -> SplitLayers | None:
    """Split the layers of a chain before the first that depends on adapted parameters; None if there is none before.

    Args:
        model: The model.
        adapted: The ids of the parameters that adapt.
        norms: Whose statistics normalise, if not those that the model takes.
    """
    layers, kept = layers_of(model), _followers(norms)
    for number, layer in enumerate(layers):
        is_shared = not any(id(p) in adapted for p in layer.parameters())
        if not is_shared or not all(_is_function(m) and m not in kept for m in layer.modules()):
            own = layers[number:] if _only_reads(layer) else [_COPY, *layers[number:]]
            return SplitLayers(tuple(layers[:number]), tuple(own)) if number else None
    return None


def _followers(norms: Norms | None) -> Collection[nn.Module]:
    """Return the modules that keep statistics, or whose result depends on more than their input under a policy."""
    if norms is None:
        return ()
    is_of_the_set = norms.policy == "transductive"
    return {m for m in norms.layers.values() if not is_of_the_set or m._buffers["running_mean"] is not None}


class _Copy(nn.Module):
    """Hands a copy to layers that may write into their input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


_COPY = _Copy()


def _only_reads(layer: nn.Module) -> bool:
    is_known = type(layer) in FUNCTIONS or isinstance(layer, _NORMS)
    return is_known and not getattr(layer, "inplace", False)


def _is_function(module: nn.Module) -> bool:
    """Say whether a module as it is now, without those within, is a function of its input and its parameters."""
    kind = type(module)
    if not is_plain(module):
        return False
    if kind in _DROPOUT:
        return not module.training
    if isinstance(module, _NORMS):
        is_own = kind.__module__.startswith("torch.nn.modules.")
        return is_own and not (module.training and module.track_running_stats)
    if kind is nn.Embedding:
        return module.max_norm is None  # type: ignore[union-attr]
    return kind in FUNCTIONS or kind.__dict__.get("is_function", False) is True
