"""Progress bars appear in a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest
import torch
import torch.nn.functional as F

import metagrad
from metagrad.core import checks


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _trained() -> None:
    data = torch.randn(8, 2), torch.randn(8, 1)
    training = metagrad.Training(
        torch.nn.Linear(2, 1),
        F.mse_loss,
        data,
        optimizer=metagrad.optim.rules.sgd(lr=0.1),
        batch_size=4,
        epochs=2,
    )
    trained = training(torch.ones(8, requires_grad=True))
    trained.losses.sum().backward()


@pytest.mark.parametrize(
    ("stream", "expected"), [(_Terminal, ["training", "reverse pass", "0/4"]), (io.StringIO, [])]
)
def test_a_training_shows_its_progress_in_a_terminal(monkeypatch, stream, expected):
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(checks, "_BAR_AFTER", 0.0)
    _trained()
    text = shown.getvalue()
    assert [word for word in ("training", "reverse pass", "0/4") if word in text] == expected


def test_a_short_computation_shows_nothing(monkeypatch):
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    _trained()
    assert shown.getvalue().strip() == ""
