"""Rules: functional optimizers, as in optax: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.curvature import (
    Curvature,
    Diagonal,
    KnownDiagonal,
    Kronecker,
    LayerCurvature,
    needs_curvature,
    needs_layers,
)
from metagrad.optim.diagonal.adahessian import AdaHessianState, adahessian
from metagrad.optim.diagonal.sophia import SophiaState, sophia_g, sophia_h
from metagrad.optim.first_order.adagrad import AdagradState, adagrad
from metagrad.optim.first_order.adam import AdamState, adam, adamw
from metagrad.optim.first_order.lion import LionState, lion
from metagrad.optim.first_order.rmsprop import RMSpropState, rmsprop
from metagrad.optim.first_order.sgd import SGDState, sgd
from metagrad.optim.kronecker.kfac import KFACState, kfac
from metagrad.optim.kronecker.layer_objective import LayerObjective
from metagrad.optim.kronecker.muon import MuonState, muon
from metagrad.optim.kronecker.shampoo import ShampooState, shampoo
from metagrad.optim.kronecker.soap import SOAPState, soap
from metagrad.optim.newton.cubic_newton import CubicNewtonState, cubic_newton
from metagrad.optim.newton.damped import DampedState
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.lbfgs import LBFGSState, lbfgs
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.trust_region_newton import TrustRegionState, trust_region_newton
from metagrad.optim.objective import Objective, TapeObjective
from metagrad.optim.rule import Hyperparameter, Params, Rule, Transform, with_batch_ndim
from metagrad.optim.tape_curvature import TapeCurvature
from metagrad.optim.transforms.axis_products import AxisProducts, axis_products
from metagrad.optim.transforms.chain import Chain, ChainState, chain
from metagrad.optim.transforms.clip import ClipByNorm, ClipState, clip_by_norm
from metagrad.optim.transforms.mask import Mask, MaskState, mask
from metagrad.optim.transforms.schedule import Schedule, ScheduleState, schedule

__all__ = [
    "AdaHessianState",
    "AdagradState",
    "AdamState",
    "AxisProducts",
    "Chain",
    "ChainState",
    "ClipByNorm",
    "ClipState",
    "CubicNewtonState",
    "Curvature",
    "DampedState",
    "Diagonal",
    "Hyperparameter",
    "KFACState",
    "KnownDiagonal",
    "Kronecker",
    "LBFGSState",
    "LayerCurvature",
    "LayerObjective",
    "LionState",
    "Mask",
    "MaskState",
    "MuonState",
    "Objective",
    "Params",
    "RMSpropState",
    "Rule",
    "SGDState",
    "SOAPState",
    "Schedule",
    "ScheduleState",
    "ShampooState",
    "SophiaState",
    "TapeCurvature",
    "TapeObjective",
    "Transform",
    "TrustRegionState",
    "adagrad",
    "adahessian",
    "adam",
    "adamw",
    "axis_products",
    "chain",
    "clip_by_norm",
    "cubic_newton",
    "gauss_newton",
    "kfac",
    "lbfgs",
    "lion",
    "mask",
    "muon",
    "natural_gradient",
    "needs_curvature",
    "needs_layers",
    "newton_cg",
    "rmsprop",
    "schedule",
    "sgd",
    "shampoo",
    "soap",
    "sophia_g",
    "sophia_h",
    "trust_region_newton",
    "with_batch_ndim",
]
