"""Rules: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.rules.adagrad import Adagrad, AdagradState, adagrad
from metagrad.optim.rules.adam import Adam, AdamState, adam
from metagrad.optim.rules.rmsprop import RMSprop, RMSpropState, rmsprop
from metagrad.optim.rules.rowwise import Rowwise, RowwiseState, rowwise
from metagrad.optim.rules.rule import Hyperparameter, Params, Rule
from metagrad.optim.rules.sgd import SGD, SGDState, sgd

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradState",
    "Adam",
    "AdamState",
    "Hyperparameter",
    "Params",
    "RMSprop",
    "RMSpropState",
    "Rowwise",
    "RowwiseState",
    "Rule",
    "SGDState",
    "adagrad",
    "adam",
    "rmsprop",
    "rowwise",
    "sgd",
]
