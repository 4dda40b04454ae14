"""Meta-learning algorithms: MAML."""

from metagrad.meta.algorithm import Adapted, Algorithm, MetaOutput
from metagrad.meta.maml import MAML

__all__ = ["MAML", "Adapted", "Algorithm", "MetaOutput"]
