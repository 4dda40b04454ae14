"""Rules: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.kfac.objective import LayerObjective
from metagrad.optim.rules.adadelta import Adadelta, AdadeltaState, adadelta
from metagrad.optim.rules.adagrad import Adagrad, AdagradState, adagrad
from metagrad.optim.rules.adahessian import AdaHessian, AdaHessianState, adahessian
from metagrad.optim.rules.adam import Adam, AdamState, adam, adamw
from metagrad.optim.rules.chain import Chain, ChainState, chain
from metagrad.optim.rules.clip import ClipByNorm, ClipByValue, ClipState, clip_by_norm, clip_by_value
from metagrad.optim.rules.cubic_newton import CubicNewton, CubicNewtonState, cubic_newton
from metagrad.optim.rules.curvature import (
    Curvature,
    Diagonal,
    KnownDiagonal,
    Kronecker,
    LayerCurvature,
    needs_curvature,
    needs_layers,
)
from metagrad.optim.rules.damped import DampedState
from metagrad.optim.rules.gauss_newton import GaussNewton, gauss_newton
from metagrad.optim.rules.kfac import KFAC, KFACState, kfac
from metagrad.optim.rules.lbfgs import LBFGS, LBFGSState, lbfgs
from metagrad.optim.rules.lion import Lion, LionState, lion
from metagrad.optim.rules.lookahead import Lookahead, LookaheadState, lookahead
from metagrad.optim.rules.mask import Mask, MaskState, mask
from metagrad.optim.rules.muon import Muon, MuonState, muon
from metagrad.optim.rules.natural_gradient import NaturalGradient, natural_gradient
from metagrad.optim.rules.newton_cg import NewtonCG, newton_cg
from metagrad.optim.rules.objective import Objective, TapeObjective
from metagrad.optim.rules.rmsprop import RMSprop, RMSpropState, rmsprop
from metagrad.optim.rules.rowwise import Rowwise, RowwiseState, rowwise
from metagrad.optim.rules.rule import Hyperparameter, Params, Rule, Transform, with_batch_ndim
from metagrad.optim.rules.schedule import Schedule, ScheduleState, schedule
from metagrad.optim.rules.sgd import SGD, SGDState, sgd
from metagrad.optim.rules.shampoo import Shampoo, ShampooState, shampoo
from metagrad.optim.rules.soap import SOAP, SOAPState, soap
from metagrad.optim.rules.sophia import Sophia, SophiaState, sophia_g, sophia_h
from metagrad.optim.rules.tape_curvature import TapeCurvature
from metagrad.optim.rules.trust_region_newton import TrustRegionNewton, TrustRegionState, trust_region_newton

__all__ = [
    "KFAC",
    "LBFGS",
    "SGD",
    "SOAP",
    "AdaHessian",
    "AdaHessianState",
    "Adadelta",
    "AdadeltaState",
    "Adagrad",
    "AdagradState",
    "Adam",
    "AdamState",
    "Chain",
    "ChainState",
    "ClipByNorm",
    "ClipByValue",
    "ClipState",
    "CubicNewton",
    "CubicNewtonState",
    "Curvature",
    "DampedState",
    "Diagonal",
    "GaussNewton",
    "Hyperparameter",
    "KFACState",
    "KnownDiagonal",
    "Kronecker",
    "LBFGSState",
    "LayerCurvature",
    "LayerObjective",
    "Lion",
    "LionState",
    "Lookahead",
    "LookaheadState",
    "Mask",
    "MaskState",
    "Muon",
    "MuonState",
    "NaturalGradient",
    "NewtonCG",
    "Objective",
    "Params",
    "RMSprop",
    "RMSpropState",
    "Rowwise",
    "RowwiseState",
    "Rule",
    "SGDState",
    "SOAPState",
    "Schedule",
    "ScheduleState",
    "Shampoo",
    "ShampooState",
    "Sophia",
    "SophiaState",
    "TapeCurvature",
    "TapeObjective",
    "Transform",
    "TrustRegionNewton",
    "TrustRegionState",
    "adadelta",
    "adagrad",
    "adahessian",
    "adam",
    "adamw",
    "chain",
    "clip_by_norm",
    "clip_by_value",
    "cubic_newton",
    "gauss_newton",
    "kfac",
    "lbfgs",
    "lion",
    "lookahead",
    "mask",
    "muon",
    "natural_gradient",
    "needs_curvature",
    "needs_layers",
    "newton_cg",
    "rmsprop",
    "rowwise",
    "schedule",
    "sgd",
    "shampoo",
    "soap",
    "sophia_g",
    "sophia_h",
    "trust_region_newton",
    "with_batch_ndim",
]
