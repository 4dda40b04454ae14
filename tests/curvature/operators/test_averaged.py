"""An operator averaged over ranks equals the operator of all data. Threads stand for ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from tests.distributed.threads import in_threads


def setting():
    """Return data, and a model for each of two processes and one of all data."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    return torch.randn(6, 3).double(), torch.randint(0, 4, (6,)), [copy.deepcopy(net) for _ in range(3)]


def operator(kind, net, x, y):
    params = dict(net.named_parameters())
    return (
        mg.ggn(net, F.cross_entropy, params, (x, y))
        if kind == "ggn"
        else mg.hessian(F.cross_entropy(net(x), y), params)
    )


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_products_and_estimates_are_those_of_all_data(kind):
    x, y, nets = setting()

    def results(H):
        generator = torch.Generator().manual_seed(0)
        return (
            H.to_dense(),
            H.trace(method="hutchinson", probes=8, generator=generator).value,
            H["0"].to_dense(),
        )

    def process(group):
        share = slice(3) if group.rank() else slice(3, 6)
        return results(mg.curvature.Averaged(operator(kind, nets[group.rank()], x[share], y[share]), group))

    expected = results(operator(kind, nets[2], x, y))
    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vectors_that_differ_between_processes_are_refused():
    x, y, nets = setting()

    def process(group):
        H = mg.curvature.Averaged(operator("ggn", nets[group.rank()], x, y), group)
        H @ torch.full((H.shape[0],), 1.0 + group.rank()).double()

    with pytest.raises(ValueError, match=r"vectors, for which estimators .*: expected the same"):
        in_threads(2, process)
