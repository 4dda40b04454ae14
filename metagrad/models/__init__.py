"""Small reference models, and normalisations that can be differentiated to any order."""

from metagrad.models.conv4 import Conv4
from metagrad.models.mlp import MLP
from metagrad.models.norms import batch_norm, composite_norms, instance_norm, layer_norm

__all__ = ["MLP", "Conv4", "batch_norm", "composite_norms", "instance_norm", "layer_norm"]
