"""Rules: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.rules.adadelta import Adadelta, AdadeltaState, adadelta
from metagrad.optim.rules.adagrad import Adagrad, AdagradState, adagrad
from metagrad.optim.rules.adahessian import AdaHessian, AdaHessianState, adahessian
from metagrad.optim.rules.adam import Adam, AdamState, adam, adamw
from metagrad.optim.rules.chain import Chain, ChainState, chain
from metagrad.optim.rules.clip import ClipByNorm, ClipByValue, ClipState, clip_by_norm, clip_by_value
from metagrad.optim.rules.curvature import Curvature, Diagonal, KnownDiagonal, needs_curvature
from metagrad.optim.rules.lion import Lion, LionState, lion
from metagrad.optim.rules.lookahead import Lookahead, LookaheadState, lookahead
from metagrad.optim.rules.mask import Mask, MaskState, mask
from metagrad.optim.rules.muon import Muon, MuonState, muon
from metagrad.optim.rules.rmsprop import RMSprop, RMSpropState, rmsprop
from metagrad.optim.rules.rowwise import Rowwise, RowwiseState, rowwise
from metagrad.optim.rules.rule import Hyperparameter, Params, Rule, Transform, with_batch_ndim
from metagrad.optim.rules.schedule import Schedule, ScheduleState, schedule
from metagrad.optim.rules.sgd import SGD, SGDState, sgd
from metagrad.optim.rules.sophia import Sophia, SophiaState, sophia_g, sophia_h
from metagrad.optim.rules.tape_curvature import TapeCurvature

__all__ = [
    "SGD",
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
    "Curvature",
    "Diagonal",
    "Hyperparameter",
    "KnownDiagonal",
    "Lion",
    "LionState",
    "Lookahead",
    "LookaheadState",
    "Mask",
    "MaskState",
    "Muon",
    "MuonState",
    "Params",
    "RMSprop",
    "RMSpropState",
    "Rowwise",
    "RowwiseState",
    "Rule",
    "SGDState",
    "Schedule",
    "ScheduleState",
    "Sophia",
    "SophiaState",
    "TapeCurvature",
    "Transform",
    "adadelta",
    "adagrad",
    "adahessian",
    "adam",
    "adamw",
    "chain",
    "clip_by_norm",
    "clip_by_value",
    "lion",
    "lookahead",
    "mask",
    "muon",
    "needs_curvature",
    "rmsprop",
    "rowwise",
    "schedule",
    "sgd",
    "sophia_g",
    "sophia_h",
    "with_batch_ndim",
]
