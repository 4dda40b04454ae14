"""Meta-learning algorithms: MAML."""

from metagrad.meta.algorithm import Adapted, Algorithm, MetaOutput
from metagrad.meta.algorithms.meta_curvature import MetaCurvature
from metagrad.meta.algorithms.meta_sgd import MetaSGD
from metagrad.meta.algorithms.proto_maml import ProtoMAML
from metagrad.meta.inner.prototypes import Prototypes
from metagrad.meta.maml import MAML

__all__ = [
    "MAML",
    "Adapted",
    "Algorithm",
    "MetaCurvature",
    "MetaOutput",
    "MetaSGD",
    "ProtoMAML",
    "Prototypes",
]
