"""Rules: functional optimizers, as in optax: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.first_order.adagrad import AdagradState, adagrad
from metagrad.optim.first_order.adam import AdamState, adam, adamw
from metagrad.optim.first_order.lion import LionState, lion
from metagrad.optim.first_order.rmsprop import RMSpropState, rmsprop
from metagrad.optim.first_order.sgd import SGDState, sgd
from metagrad.optim.kronecker.muon import MuonState, muon
from metagrad.optim.kronecker.shampoo import ShampooState, shampoo
from metagrad.optim.kronecker.soap import SOAPState, soap
from metagrad.optim.rule import Hyperparameter, Params, Rule, Transform, with_batch_ndim
from metagrad.optim.transforms.axis_products import AxisProducts, axis_products
from metagrad.optim.transforms.chain import Chain, ChainState, chain
from metagrad.optim.transforms.clip import ClipByNorm, ClipState, clip_by_norm
from metagrad.optim.transforms.mask import Mask, MaskState, mask
from metagrad.optim.transforms.schedule import Schedule, ScheduleState, schedule

__all__ = [
    "AdagradState",
    "AdamState",
    "AxisProducts",
    "Chain",
    "ChainState",
    "ClipByNorm",
    "ClipState",
    "Hyperparameter",
    "LionState",
    "Mask",
    "MaskState",
    "MuonState",
    "Params",
    "RMSpropState",
    "Rule",
    "SGDState",
    "SOAPState",
    "Schedule",
    "ScheduleState",
    "ShampooState",
    "Transform",
    "adagrad",
    "adam",
    "adamw",
    "axis_products",
    "chain",
    "clip_by_norm",
    "lion",
    "mask",
    "muon",
    "rmsprop",
    "schedule",
    "sgd",
    "shampoo",
    "soap",
    "with_batch_ndim",
]
