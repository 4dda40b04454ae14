"""Meta-learning algorithms: MAML, and heads on a shared embedding."""

from metagrad.meta.algorithm import Adapted, Algorithm, MetaOutput
from metagrad.meta.algorithms.anil import ANIL, BOIL
from metagrad.meta.algorithms.bayesian.bmaml import BMAML
from metagrad.meta.algorithms.bayesian.particles import AdaptedParticles, ParticleOutput
from metagrad.meta.algorithms.bayesian.platipus import PLATIPUS
from metagrad.meta.algorithms.cavia import CAVIA
from metagrad.meta.algorithms.fomaml import FOMAML
from metagrad.meta.algorithms.heads.base import HeadAlgorithm
from metagrad.meta.algorithms.heads.metaoptnet import MetaOptNet
from metagrad.meta.algorithms.heads.protonet import ProtoNet
from metagrad.meta.algorithms.heads.ridge import LRD2, R2D2
from metagrad.meta.algorithms.imaml import iMAML
from metagrad.meta.algorithms.leap import Leap
from metagrad.meta.algorithms.maml_plus_plus import MAMLPlusPlus
from metagrad.meta.algorithms.meta_curvature import MetaCurvature
from metagrad.meta.algorithms.meta_sgd import MetaSGD
from metagrad.meta.algorithms.proto_maml import ProtoMAML
from metagrad.meta.algorithms.reptile import Reptile
from metagrad.meta.algorithms.warpgrad import WarpGrad
from metagrad.meta.checks.preflight import preflight
from metagrad.meta.checks.report import MemoryCost, ModuleFinding, Preflight
from metagrad.meta.inner.prototypes import Prototypes
from metagrad.meta.maml import MAML

__all__ = [
    "ANIL",
    "BMAML",
    "BOIL",
    "CAVIA",
    "FOMAML",
    "LRD2",
    "MAML",
    "PLATIPUS",
    "R2D2",
    "Adapted",
    "AdaptedParticles",
    "Algorithm",
    "HeadAlgorithm",
    "Leap",
    "MAMLPlusPlus",
    "MemoryCost",
    "MetaCurvature",
    "MetaOptNet",
    "MetaOutput",
    "MetaSGD",
    "ModuleFinding",
    "ParticleOutput",
    "Preflight",
    "ProtoMAML",
    "ProtoNet",
    "Prototypes",
    "Reptile",
    "WarpGrad",
    "iMAML",
    "preflight",
]
