"""Rules: frozen hyper-parameters with a pure ``init`` and ``update``."""

from metagrad.optim.rules.rule import Hyperparameter, Params, Rule
from metagrad.optim.rules.sgd import SGD, SGDState, sgd

__all__ = ["SGD", "Hyperparameter", "Params", "Rule", "SGDState", "sgd"]
