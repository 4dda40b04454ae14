from __future__ import annotations

import inspect

import torch.nn.functional as F
from torch import nn

import metagrad as mg


def test_maml_is_an_algorithm_and_a_model_is_not():
    model = nn.Linear(2, 3)
    assert isinstance(
        mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=1), mg.meta.Algorithm
    )
    assert not isinstance(model, mg.meta.Algorithm)


def test_maml_has_few_arguments():
    assert len(inspect.signature(mg.MAML).parameters) <= 10
