"""Values and gradients with respect to an argument, eager and compiled."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from tests.marks import combined

value_and_grad = mg.autograd.value_and_grad
TRACED = {"backend": "aot_eager"}
QUICK = ("energies", "a dict", "a second derivative")


def network(*widths, act=nn.Tanh, seed=0):
    torch.manual_seed(seed)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1]).double()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def energy(net, x):
    """Return the energies of structures ``[batch, atoms, 3]``, as a sum over pairs."""
    squares = (x[:, :, None] - x[:, None]).square().sum(-1)
    distance = (squares + torch.eye(x.shape[1], dtype=x.dtype)).sqrt()
    return net(torch.exp(-(distance[..., None] - torch.linspace(0.5, 3, 4)).square()))[..., 0].sum((1, 2))


def attended(weights, x):
    """Return an attention of sequences, written out."""
    query, key, value = (x @ weight for weight in weights)
    return ((query @ key.mT).softmax(-1) @ value).square().sum((1, 2))


def poisson(net, z):
    """Return the residuals of a differential equation of second order, which contain the Laplacian."""
    slope = lambda z: value_and_grad(lambda z: net(z)[:, 0])(z)[1]  # noqa: E731
    second = [value_and_grad(lambda z, i=i: slope(z)[:, i])(z)[1][:, i] for i in range(z.shape[1])]
    return sum(second) + net(z)[:, 0].square()


def forms():
    """Return functions of a point, the point, and the tensors that they read."""
    small, norms, convs = network(3, 8, 1), network(3, 8, 1, act=nn.SiLU), nn.Conv2d(1, 3, 3).double()
    norms.insert(1, nn.LayerNorm(8).double())
    batch_norm = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double().eval()
    table, weights = drawn(6, 3).requires_grad_(), [drawn(3, 3, seed=i).requires_grad_() for i in range(3)]
    pairs, params = network(4, 8, 1), dict(network(3, 8, 1).named_parameters())
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 5, 2, 2])
    return {
        "a network": (lambda x: small(x)[:, 0], drawn(4, 3), small.parameters()),
        "energies": (functools.partial(energy, pairs), drawn(2, 5, 3), pairs.parameters()),
        "a layer norm": (lambda x: norms(x)[:, 0], drawn(4, 3), norms.parameters()),
        "a batch norm": (lambda x: batch_norm(x).exp(), drawn(4, 3), batch_norm.parameters()),
        "a convolution": (lambda x: convs(x).tanh().sum((1, 2, 3)), drawn(2, 1, 5, 5), convs.parameters()),
        "attention": (functools.partial(attended, weights), drawn(2, 4, 3), weights),
        "a table": (lambda x: (F.embedding(ids, table) * x).sin().sum(1), drawn(4, 3), [table]),
        "a scalar": (lambda x: scale * x.pow(3).logsumexp(0), drawn(7), [scale]),
        "parameters": (
            lambda x: functional_call(small, params, (x,)).square().sum(),
            drawn(4, 3),
            params.values(),
        ),
        "a dict": (
            lambda x: (x["a"] @ x["b"][0]).sin() * scale,
            {"a": drawn(4, 3), "b": [drawn(3)]},
            [scale],
        ),
        "a second derivative": (functools.partial(poisson, small), drawn(4, 3), small.parameters()),
    }


def outcome(way, x, read):
    """Return the value, the gradient, and their derivatives."""
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value, gradient = way(torch.utils._pytree.tree_unflatten(leaves, spec))
    parts = [value, *torch.utils._pytree.tree_leaves(gradient)]
    total = sum((part.sin() * (1 + i)).sum() for i, part in enumerate(parts))
    return *parts, *torch.autograd.grad(total, [*leaves, *read], allow_unused=True, materialize_grads=True)


def shifted(x, by):
    return torch.utils._pytree.tree_map(lambda t: t + by, x)


@pytest.mark.parametrize("name", forms())
def test_the_gradient_is_that_of_torch_func_and_is_differentiated_again(name):
    fn, x, read = forms()[name]
    read = [*read]

    def by_torch(x):
        if name == "a second derivative":  # torch.func does not nest here
            value = fn(x)
            return value, torch.autograd.grad(value.sum(), x, create_graph=True)[0]
        gradient, value = torch.func.grad(lambda x: (fn(x).sum(), fn(x)), has_aux=True)(x)
        return value, gradient

    for found, expected in zip(outcome(value_and_grad(fn), x, read), outcome(by_torch, x, read), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("error:value_and_grad")
@pytest.mark.parametrize(
    ("name", "options"),
    combined(forms(), [TRACED, True], fast=lambda name, o: o is TRACED and name in QUICK),
)
def test_compiled_results_are_eager_ones(name, options):
    fn, x, read = forms()[name]
    read, compiled, eager = [*read], value_and_grad(fn, compile=options), value_and_grad(fn)
    for i in range(4):  # two calls are compared and two are compiled
        point = shifted(x, 0.3 * i)
        for found, expected in zip(outcome(compiled, point, read), outcome(eager, point, read), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [False, TRACED])
def test_other_sizes_and_arguments(options):
    net = network(3, 8, 1)
    penalty = lambda scale, x: (scale * net(x)[:, 0]).sigmoid()  # noqa: E731
    way = value_and_grad(penalty, 1, compile=options)
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    for size in (4, 4, 4, 6, 6, 6, 9, 9, 9):
        x = drawn(size, 3, seed=size)
        _, gradient = way(scale, x)
        expected = torch.func.grad(lambda x: penalty(scale, x).sum())(x)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        leaves = [scale, *net.parameters()]
        found, reference = (
            torch.autograd.grad(g.square().sum(), leaves, allow_unused=True, materialize_grads=True)
            for g in (gradient, expected)
        )
        torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            assert not any(t.requires_grad for t in way(scale, x))


def test_the_laplacian_of_a_polynomial():
    cubic = lambda z: z.pow(3).sum(1)  # noqa: E731
    slope = value_and_grad(cubic)
    second = value_and_grad(lambda z: slope(z)[1].sum())
    z = drawn(5, 2)
    torch.testing.assert_close(second(z)[1], 6 * z)


def wrong(factor):
    """Return a backend of torch.compile whose results are off by a factor from some call on."""

    def backend(module, inputs):
        calls = itertools.count()
        return lambda *args: [r * factor(next(calls)) for r in module(*args)]

    return {"backend": backend}


BATCH_NORM = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
DERIVED = drawn(3).requires_grad_() * 2
REFUSED = {
    "random numbers": (lambda x: F.dropout(x, 0.5).square().sum(), TRACED, "random numbers"),
    "buffers": (lambda x: BATCH_NORM(x).square().sum(), TRACED, "writes buffers"),
    "a computed tensor": (lambda x: (x * DERIVED).sin().sum(), TRACED, "Pass it as an argument"),
    "a branch": (
        lambda x: x.sin().sum() if float(x.detach().sum()) > 9e9 else x.cos().sum(),
        TRACED,
        "compile",
    ),
    "wrong code": (lambda x: x.sin().sum(), wrong(lambda call: 1.01), "differ from eager ones by 0.01"),
    "wrong at the second point": (
        lambda x: x.sin().sum(),
        wrong(lambda call: 1 + call),
        "differ from eager ones by 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_compiled_runs_eagerly_with_one_warning(name, recwarn):
    fn, options, reason = REFUSED[name]
    compiled, eager, x = value_and_grad(fn, compile=options), value_and_grad(fn), drawn(4, 3)
    for i in range(4):
        torch.manual_seed(i)
        found = compiled(x + i)
        torch.manual_seed(i)
        torch.testing.assert_close(found, eager(x + i), rtol=1e-12, atol=1e-12)
    (warning,) = [w for w in recwarn if "value_and_grad" in str(w.message)]
    assert reason in str(warning.message)


def test_a_compiled_result_is_differentiated_once():
    compiled, x = value_and_grad(lambda x: x.pow(3).sum(), compile=TRACED), drawn(3)
    for _ in range(3):
        _, gradient = compiled(x.requires_grad_())
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(gradient.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: value_and_grad(3), TypeError, r"fn must be"),
        (lambda x: value_and_grad(torch.sin, -1), ValueError, r"argnum"),
        (lambda x: value_and_grad(torch.sin, 1)(x), ValueError, r"more than 1 arguments.*got 1"),
        (lambda x: value_and_grad(torch.sin)(torch.tensor([1])), TypeError, r"floating point.*int64"),
        (lambda x: value_and_grad(lambda x: (x, x))(x), TypeError, r"got tuple"),
        (lambda x: value_and_grad(lambda x: x > 0)(x), TypeError, r"got torch.bool"),
        (
            lambda x: value_and_grad(lambda x: x["a"])({"a": x, "b": x}),
            ValueError,
            r"does not depend.*\(3,\)",
        ),
        (lambda x: value_and_grad(torch.sin, compile=3), ValueError, r"compile must be a bool"),
    ],
)
def test_wrong_input_is_a_named_error(call, error, message):
    with pytest.raises(error, match=r"(?s)value_and_grad.*" + message):
        call(drawn(3))
