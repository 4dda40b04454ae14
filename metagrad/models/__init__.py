"""Small reference models."""

from metagrad.models.conv4 import Conv4
from metagrad.models.mlp import MLP

__all__ = ["MLP", "Conv4"]
