"""Small reference models, and normalization layers with correct derivatives of every order."""

from metagrad.core.norms import batch_norm, composite_norms, instance_norm, layer_norm
from metagrad.models.context import ContextInput, ContextMLP, FiLM
from metagrad.models.conv4 import Conv4
from metagrad.models.mlp import MLP
from metagrad.models.resnet12 import ResNet12
from metagrad.models.transformer import Transformer

__all__ = [
    "MLP",
    "ContextInput",
    "ContextMLP",
    "Conv4",
    "FiLM",
    "ResNet12",
    "Transformer",
    "batch_norm",
    "composite_norms",
    "instance_norm",
    "layer_norm",
]
