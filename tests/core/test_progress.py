"""Progress bars appear in a terminal, and nowhere else."""

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


def _influence() -> None:
    model, batch = torch.nn.Linear(2, 1), (torch.randn(4, 2), torch.randn(4, 1))
    params = dict(model.named_parameters())
    metagrad.influence(model, F.mse_loss, params, [batch, batch], batch, damping=0.1)


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_trained, ["training", "reverse pass", "0/4"]),
        (_influence, ["influence(", "0/2", "conjugate gradients"]),
    ],
)
def test_progress_is_shown_in_a_terminal_alone(monkeypatch, stream, run, words):
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(checks, "_BAR_AFTER", 0.0)
    run()
    assert [word for word in words if word in shown.getvalue()] == words * (stream is _Terminal)


def test_a_process_may_have_no_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(checks.progress(range(3), "training")) == [0, 1, 2]


def test_a_short_computation_shows_nothing(monkeypatch):
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    _trained()
    assert shown.getvalue().strip() == ""
