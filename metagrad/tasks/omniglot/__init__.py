"""Few-shot classification of Omniglot's handwritten characters."""

from metagrad.tasks.omniglot.dataset import Omniglot

__all__ = ["Omniglot"]
