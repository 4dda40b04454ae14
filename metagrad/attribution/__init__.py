"""Data attribution: the effect of each training example on the trained model, and how well it predicts retraining."""

from metagrad.attribution.baselines import EKFAC, TRAK, Influence, TracIn
from metagrad.attribution.evaluation import Evaluation, Smoothness, auc, lds, loo, metasmoothness, subsets
from metagrad.attribution.retraining import Outcomes, retrain
from metagrad.attribution.scores import AttributionMethod, Replay, Scores, attribute

__all__ = [
    "EKFAC",
    "TRAK",
    "AttributionMethod",
    "Evaluation",
    "Influence",
    "Outcomes",
    "Replay",
    "Scores",
    "Smoothness",
    "TracIn",
    "attribute",
    "auc",
    "lds",
    "loo",
    "metasmoothness",
    "retrain",
    "subsets",
]
