"""Gradients of several processes beside the curvature of one: parameters would drift apart, and none would say so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.distributed import average_gradients
from metagrad.optim import KFAC, LBFGS, AdaHessian, GaussNewton, NewtonCG, SophiaG
from tests.distributed.threads import in_threads
from tests.optim.torch_optim.cases import closure_of

MAKES = [AdaHessian, SophiaG, NewtonCG, GaussNewton, LBFGS, KFAC]


def made(make, model, **options):
    return make(model if make is KFAC else model.parameters(), **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("make", MAKES)
def test_averaged_gradients_are_refused(make):
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]

    def process(group):
        model = models[group.rank()]
        opt = made(make, model)
        before = copy.deepcopy(model.state_dict())

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            average_gradients(model, group=group)
            return loss

        with pytest.raises(ValueError, match=f"{make.__name__}.step: the gradients are means over several"):
            opt.step(closure)
        assert all(map(torch.equal, before.values(), model.state_dict().values()))

    in_threads(2, process)


@pytest.mark.parametrize("make", MAKES)
def test_a_wrapper_that_averages_gradients_by_itself_is_refused(make):
    x, y, (group,) = torch.randn(4, 2), torch.randn(4, 1), in_threads(1, lambda group: group)
    model = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    opt = made(make, model)
    closure = closure_of(opt, lambda: F.mse_loss(wrapped(x), y))
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        opt.step(closure)
    with wrapped.no_sync():
        opt.step(closure)


def test_lbfgs_without_a_closure_takes_averaged_gradients():
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    models = [network() for _ in range(3)]

    def steps(model, examples, group=None):
        opt = LBFGS(model.parameters(), lr=0.1, line_search_fn=None)
        for _ in range(3):
            opt.zero_grad()
            F.mse_loss(model(x[examples]), y[examples]).backward()
            if group is not None:
                average_gradients(model, weight=float(len(x[examples])), group=group)
            opt.step()
        return [p.detach() for p in model.parameters()]

    expected = steps(models[2], slice(None))
    shares = slice(0, 2), slice(2, 6)
    for found in in_threads(2, lambda group: steps(models[group.rank()], shares[group.rank()], group)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [AdaHessian, NewtonCG])
def test_sharded_parameters_are_refused(make):
    w = torch.zeros(2, 2, requires_grad=True)
    w.device_mesh = "as a DTensor has"
    with pytest.raises(ValueError, match=rf"{make.__name__}\(params\): the parameter 'w' is a DTensor"):
        make([("w", w)])
