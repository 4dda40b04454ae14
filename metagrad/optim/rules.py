"""Rules are functional optimizers, as in optax: frozen hyperparameters with a pure ``init`` and ``update``."""

from metagrad.optim.first_order.adagrad import adagrad
from metagrad.optim.first_order.adam import adam, adamw
from metagrad.optim.first_order.lion import lion
from metagrad.optim.first_order.rmsprop import rmsprop
from metagrad.optim.first_order.sgd import sgd
from metagrad.optim.kronecker.muon import muon
from metagrad.optim.kronecker.shampoo import shampoo
from metagrad.optim.kronecker.soap import soap
from metagrad.optim.rule import Hyperparameter, Rule, Transform, with_batch_ndim
from metagrad.optim.transforms.axis_products import axis_products
from metagrad.optim.transforms.chain import chain
from metagrad.optim.transforms.clip import clip_by_norm
from metagrad.optim.transforms.mask import mask
from metagrad.optim.transforms.schedule import schedule

__all__ = [
    "Hyperparameter",
    "Rule",
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
