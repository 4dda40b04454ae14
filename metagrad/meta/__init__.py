"""Meta-learning algorithms: MAML, and heads on a shared embedding."""

from metagrad.meta.algorithm import AdaptedModel, Algorithm, MetaOutput
from metagrad.meta.algorithms.anil import ANIL, BOIL
from metagrad.meta.algorithms.cavia import CAVIA
from metagrad.meta.algorithms.fomaml import FOMAML
from metagrad.meta.algorithms.heads import HeadAlgorithm
from metagrad.meta.algorithms.imaml import iMAML
from metagrad.meta.algorithms.learned_steps import MetaCurvature, MetaSGD
from metagrad.meta.algorithms.maml_plus_plus import MAMLPlusPlus
from metagrad.meta.algorithms.proto_maml import ProtoMAML
from metagrad.meta.algorithms.protonet import ProtoNet
from metagrad.meta.algorithms.reptile import Reptile
from metagrad.meta.algorithms.ridge import R2D2
from metagrad.meta.checks.preflight import preflight
from metagrad.meta.checks.report import Preflight
from metagrad.meta.maml import MAML
from metagrad.meta.options import Options

__all__ = [
    "ANIL",
    "BOIL",
    "CAVIA",
    "FOMAML",
    "MAML",
    "R2D2",
    "AdaptedModel",
    "Algorithm",
    "HeadAlgorithm",
    "MAMLPlusPlus",
    "MetaCurvature",
    "MetaOutput",
    "MetaSGD",
    "Options",
    "Preflight",
    "ProtoMAML",
    "ProtoNet",
    "Reptile",
    "iMAML",
    "preflight",
]
