"""States in a folder: the same bits, resumed after an interruption, and clear errors for other files."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg

STEPS = 130


class Interrupted(Exception):
    """Raised at a chosen call of the loss."""


class Loss:
    """A loss that raises, or ends the process, at a chosen call."""

    def __init__(self, last=None, end=None, smoothing=0.0):
        self.calls, self.last, self.end, self.smoothing = 0, last, end, smoothing

    def __call__(self, output, y):
        self.calls += 1
        if self.calls == self.last:
            if self.end is None:
                raise Interrupted
            self.end()
        return F.cross_entropy(output, y, label_smoothing=self.smoothing)


def gradient(loss_fn, offload=None, seed=0, **given):
    """Train with dropout and batch norm, and return scores."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Dropout(0.2), nn.Linear(5, 3))
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    rule = mg.optim.rules.sgd(lr=0.1, momentum=0.9)
    training = mg.Training(net, loss_fn, (x, y), optimizer=rule, batch_size=4, steps=STEPS, seed=seed)
    weights = torch.ones(12, requires_grad=True)
    trained = training(weights, offload=offload, **given)
    return torch.autograd.grad(F.cross_entropy(trained(x), y), weights)[0]


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_interrupted_training_resumes_to_the_same_bits(tmp_path):
    expected, whole = gradient(counted := Loss()), Loss()
    assert torch.equal(gradient(whole, tmp_path / "whole"), expected)
    assert whole.calls == counted.calls
    folder, calls = tmp_path / "parts", 0
    for last in (80, 90, 110):  # in the forward pass, and twice in the backward pass
        loss = Loss(last)
        with pytest.raises(Interrupted):
            gradient(loss, folder)
        calls += loss.calls
    loss = Loss()
    assert torch.equal(gradient(loss, folder), expected)
    assert loss.calls < counted.calls - 60
    assert not list(folder.glob("*.part"))
    assert not (folder / "reverse.pt").exists()


def test_a_backward_pass_of_other_tensors_begins_anew(tmp_path):
    torch.manual_seed(0)
    x, y, rule, loss = torch.randn(8, 2), torch.arange(8) % 3, mg.optim.rules.sgd(lr=0.1), Loss(STEPS + 60)
    training = mg.Training(nn.Linear(2, 3), loss, (x, y), optimizer=rule, batch_size=4, steps=STEPS)
    with pytest.raises(Interrupted):
        training(torch.ones(8, requires_grad=True), memory="step", offload=tmp_path)(x)[:, 0].sum().backward()
    assert (tmp_path / "reverse.pt").exists()
    own = x.clone().requires_grad_()
    runs = (training(data=(own, y), memory="step", offload=folder) for folder in (tmp_path, None))
    found = [torch.autograd.grad(trained(x)[:, 0].sum(), own)[0] for trained in runs]
    assert torch.equal(*found)


def test_a_folder_belongs_to_one_loss(tmp_path):
    with pytest.raises(Interrupted):
        gradient(Loss(80), tmp_path)
    with pytest.raises(RuntimeError, match=r"step 0 had the loss .* a folder belongs to one training"):
        gradient(Loss(smoothing=0.5), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("last", [60, 180, 260])
def test_a_killed_process_resumes_to_the_same_bits(tmp_path, last):
    program = (
        f"from {__name__} import Loss, gradient, kill; import torch; torch.set_num_threads(1)\n"
        f"gradient(Loss({last}, kill), {str(tmp_path)!r})"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    module = os.path.splitext(os.path.basename(__file__))[0]
    program = program.replace(__name__, module)
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert torch.equal(gradient(Loss(), tmp_path), gradient(Loss()))


def test_a_folder_holds_few_states(tmp_path):
    kept = []

    class Watched(Loss):
        def __call__(self, output, y):
            kept.append(len(list(tmp_path.glob("state_*.pt"))))
            return super().__call__(output, y)

    gradient(Watched(), tmp_path, states=5)
    assert max(kept) == 6


@pytest.mark.parametrize("kind", ["another training", "flipped bits", "cut off"])
def test_other_files_are_errors(tmp_path, kind):
    with pytest.raises(Interrupted):
        gradient(Loss(100), tmp_path)
    last = max(tmp_path.glob("state_*.pt"))
    data = bytearray(last.read_bytes())
    if kind == "flipped bits":
        data[len(data) // 2] ^= 1
    last.write_bytes(data[: len(data) - 9 * (kind == "cut off")])
    message = "belongs to another training" if kind == "another training" else f"{last} is damaged"
    with pytest.raises(ValueError, match=message):
        gradient(Loss(), tmp_path, seed=int(kind == "another training"))


def smoothed(smoothing):
    return lambda output, y: F.cross_entropy(output, y, label_smoothing=smoothing)


def network(activation=nn.Tanh, frozen=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 2), activation(), nn.Linear(2, 2))
    nn.init.constant_(net[0].weight, frozen).requires_grad_(False)
    return net


class Scaled(nn.Module):
    """A loss with a learned factor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, output, y):
        return F.cross_entropy(self.factor * output, y)


rules, order = mg.optim.rules, torch.arange(12).view(6, 2) % 4
OTHERS = {
    "option of the optimizer": [
        {"optimizer": rules.sgd(0.1, momentum=0.9, nesterov=on)} for on in (False, True)
    ],
    "middle of the order": [{"order": order}, {"order": order[[0, 2, 1, 3, 4, 5]]}],
    "activation": [{"model": network()}, {"model": network(nn.ReLU)}],
    "frozen weight": [{"model": network(frozen=factor)} for factor in (1.0, 2.0)],
    "loss": [{"loss_fn": F.cross_entropy}, {"loss_fn": smoothed(0.1)}, {"loss_fn": smoothed(0.2)}],
    "argument of the loss": [{"loss_fn": partial(F.cross_entropy, label_smoothing=s)} for s in (0.1, 0.2)],
    "parameter of the loss": [{"loss_fn": Scaled(factor)} for factor in (1.0, 2.0)],
    "transform": [{"transform": f} for f in (lambda x, y: (x, y), lambda x, y: (x + 1, y))],
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_a_folder_of_other_settings_is_refused(tmp_path, settings):
    x, y = torch.linspace(-1, 1, 4).unsqueeze(1), torch.tensor([0, 1, 1, 0])

    def train(own):
        length = {} if "order" in own else {"steps": 6}
        own = {"model": network(), "loss_fn": F.cross_entropy, "optimizer": rules.sgd(0.1), **length, **own}
        model, loss_fn = own.pop("model"), own.pop("loss_fn")
        return mg.Training(model, loss_fn, (x, y), batch_size=2, **own)(offload=tmp_path).params

    first, again = train(settings[0]), train(settings[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    for own in settings[1:]:
        with pytest.raises((ValueError, RuntimeError), match=r"belongs to (another|one) training"):
            train(own)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        gradient(Loss(), tmp_path / "file" / "folder")


def test_pinned_memory_needs_an_accelerator():
    with pytest.raises(ValueError, match=r"Training\(...\)\(offload\): .* on the host already"):
        gradient(Loss(), "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_in_pinned_memory_are_the_same_bits():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).cuda()
    x, y = torch.randn(12, 4, device="cuda"), torch.randint(0, 3, (12,), device="cuda")
    rule = mg.optim.rules.adam(lr=0.01)
    training = mg.Training(net, F.cross_entropy, (x, y), optimizer=rule, batch_size=4, steps=20)

    def scores(offload):
        weights = torch.ones(12, device="cuda", requires_grad=True)
        return torch.autograd.grad(training(weights, offload=offload)(x).square().sum(), weights)[0]

    assert torch.equal(scores("cpu"), scores(None))
