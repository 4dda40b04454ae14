"""Architecture search: hypergradients against the textbook's loop, a whole run."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import metagrad as mg
from experiments.studies.characters import Examples
from experiments.studies.search import (
    BY_HAND,
    EDGES,
    LR,
    METHODS,
    OPERATIONS,
    Data,
    Network,
    Search,
)

pytestmark = pytest.mark.usefixtures("doubles")

CLASSES, SIZE = 3, 6


@pytest.fixture
def problem():
    """Return a small search, and a batch for each of its losses."""
    torch.manual_seed(0)
    parts = [Examples(torch.rand(n, 1, SIZE, SIZE), torch.randint(CLASSES, (n,))) for n in (7, 8, 15, 5)]
    config = SimpleNamespace(products=2)
    search = Search(Network(CLASSES, 4), Data(*parts), config, seed=0)  # type: ignore[reportArgumentType]
    return search, parts[0], parts[1]


def losses(search, training, validation):
    return (
        lambda params, hyper: search.validation_loss(params, hyper, validation),
        lambda params, hyper: search.training_loss(params, hyper, training),
    )


def cross_entropy(search, params, alpha, examples):
    return F.cross_entropy(functional_call(search.network, params, (examples.x, alpha)), examples.y)


def textbook(search, training, alpha, params):
    """Return the training loss, written out."""
    penalty = sum(p.square().sum() for p in params.values())
    return cross_entropy(search, params, alpha, training) + 0.0005 * penalty


def moved(search, training, alpha, params, steps):
    """Take differentiable steps of gradient descent on the training loss."""
    for _ in range(steps):
        slopes = torch.autograd.grad(
            textbook(search, training, alpha, params), list(params.values()), create_graph=True
        )
        params = {name: p - LR * g for (name, p), g in zip(params.items(), slopes, strict=True)}
    return params


def test_the_second_order_hypergradient_is_that_of_the_textbook(problem):
    search, training, validation = problem
    found = mg.hypergradient(*losses(*problem), search.params, search.hyper, method=METHODS["unroll"](2))
    alpha = search.hyper["alpha"].clone().requires_grad_()
    params = {name: p.clone().requires_grad_() for name, p in search.params.items()}
    outer = cross_entropy(search, moved(search, training, alpha, params, 2), alpha, validation)
    torch.testing.assert_close(found["alpha"], torch.autograd.grad(outer, alpha)[0], rtol=1e-9, atol=1e-12)


def test_finite_differences_are_equation_7_of_darts(problem):
    search, training, validation = problem
    found = mg.hypergradient(
        *losses(*problem), search.params, search.hyper, method=METHODS["finite_difference"](1)
    )
    alpha = search.hyper["alpha"].clone().requires_grad_()
    params = {name: p.clone().requires_grad_() for name, p in search.params.items()}
    after = {
        name: p.detach().requires_grad_() for name, p in moved(search, training, alpha, params, 1).items()
    }
    outer = cross_entropy(search, after, alpha, validation)
    direct, *slopes = torch.autograd.grad(outer, [alpha, *after.values()])
    epsilon = 0.01 / torch.cat([g.flatten() for g in slopes]).norm()
    ends = []
    for sign in (1, -1):
        beside = {
            n: (p + sign * epsilon * g).detach() for (n, p), g in zip(params.items(), slopes, strict=True)
        }
        ends.append(torch.autograd.grad(textbook(search, training, alpha, beside), alpha)[0])
    expected = direct - LR * (ends[0] - ends[1]) / (2 * epsilon)
    torch.testing.assert_close(found["alpha"], expected, rtol=1e-8, atol=1e-11)


def test_a_discrete_network_is_the_mixed_one_with_all_weight_on_its_operations():
    mixed, own = Network(CLASSES, 4), Network(CLASSES, 4, BY_HAND)
    names = own.state_dict().keys()
    own.load_state_dict({name: value for name, value in mixed.state_dict().items() if name in names})
    chosen = {(i, j): operation for i, j, operation in BY_HAND}
    alpha = torch.zeros(len(EDGES), len(OPERATIONS))
    for row, edge in zip(alpha, EDGES, strict=True):
        row[OPERATIONS.index(chosen.get(edge, "none"))] = 1000.0
    x = torch.rand(2, 1, SIZE, SIZE)
    torch.testing.assert_close(mixed(x, alpha), own(x))
