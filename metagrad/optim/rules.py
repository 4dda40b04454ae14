"""Rules: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.curvature import (
    Curvature,
    Diagonal,
    KnownDiagonal,
    Kronecker,
    LayerCurvature,
    needs_curvature,
    needs_layers,
)
from metagrad.optim.diagonal.adahessian import AdaHessian, AdaHessianState, adahessian
from metagrad.optim.diagonal.sophia import Sophia, SophiaState, sophia_g, sophia_h
from metagrad.optim.first_order.adadelta import Adadelta, AdadeltaState, adadelta
from metagrad.optim.first_order.adagrad import Adagrad, AdagradState, adagrad
from metagrad.optim.first_order.adam import Adam, AdamState, adam, adamw
from metagrad.optim.first_order.lion import Lion, LionState, lion
from metagrad.optim.first_order.rmsprop import RMSprop, RMSpropState, rmsprop
from metagrad.optim.first_order.rowwise import Rowwise, RowwiseState, rowwise
from metagrad.optim.first_order.sgd import SGD, SGDState, sgd
from metagrad.optim.kronecker.kfac import KFAC, KFACState, kfac
from metagrad.optim.kronecker.layer_objective import LayerObjective
from metagrad.optim.kronecker.muon import Muon, MuonState, muon
from metagrad.optim.kronecker.shampoo import Shampoo, ShampooState, shampoo
from metagrad.optim.kronecker.soap import SOAP, SOAPState, soap
from metagrad.optim.newton.cubic_newton import CubicNewton, CubicNewtonState, cubic_newton
from metagrad.optim.newton.damped import DampedState
from metagrad.optim.newton.gauss_newton import GaussNewton, gauss_newton
from metagrad.optim.newton.lbfgs import LBFGS, LBFGSState, lbfgs
from metagrad.optim.newton.natural_gradient import NaturalGradient, natural_gradient
from metagrad.optim.newton.newton_cg import NewtonCG, newton_cg
from metagrad.optim.newton.trust_region_newton import TrustRegionNewton, TrustRegionState, trust_region_newton
from metagrad.optim.objective import Objective, TapeObjective
from metagrad.optim.rule import Hyperparameter, Params, Rule, Transform, with_batch_ndim
from metagrad.optim.tape_curvature import TapeCurvature
from metagrad.optim.transforms.chain import Chain, ChainState, chain
from metagrad.optim.transforms.clip import ClipByNorm, ClipByValue, ClipState, clip_by_norm, clip_by_value
from metagrad.optim.transforms.lookahead import Lookahead, LookaheadState, lookahead
from metagrad.optim.transforms.mask import Mask, MaskState, mask
from metagrad.optim.transforms.schedule import Schedule, ScheduleState, schedule

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
