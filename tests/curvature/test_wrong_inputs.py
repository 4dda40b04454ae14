"""Wrong inputs of every public function: one table of calls, and how their errors begin."""

import traceback
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad import curvature, hypergrad

NET, X, Y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
PARAMS, BATCH = dict(NET.named_parameters()), (X, Y)
W, THREE = torch.ones(3, requires_grad=True), torch.ones(3)
CG, DICT, AT, LAM = hypergrad.CG(), {"w": W}, {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}
SGD = mg.optim.rules.sgd(lr=0.1)


def cube(params, *batch):
    return (params["w"] ** 3).sum()


def inner(params, hyper):
    return (params["phi"] - hyper["lam"]) ** 2


def outer(params, hyper):
    return params["phi"] ** 2


def operator(**change):
    made = {"shape": (3, 3), "dtype": torch.float32, "device": torch.device("cpu"), "multiply": torch.clone}
    return SimpleNamespace(**{**made, **change})


MAP = operator()


def hessian(loss=cube, params=DICT, data=None, **options):
    return mg.hessian(loss, params, data, **options)


def product(v):
    return hessian() @ v


def block(name):
    return hessian()[name]


def ggn(model=NET, loss_fn=F.mse_loss, params=PARAMS, data=BATCH, **options):
    return mg.ggn(model, loss_fn, params, data, **options)


def fisher(loss_fn=F.mse_loss, **options):
    return mg.fisher(NET, loss_fn, PARAMS, BATCH, **options)


def on(function, *arguments):
    """Apply a function of ``curvature`` to an operator, or to something in its place."""
    return lambda map=MAP, **options: function(map, *arguments, **options)


def solve(b=THREE, map=MAP, **options):
    return curvature.solve(map, b, **options)


def hypergradient(outer=outer, inner=inner, params=AT, hyper=LAM, **options):
    return mg.hypergradient(outer, inner, params, hyper, **options)


def unrolled(rule):
    return hypergradient(method=hypergrad.Unroll(rule, steps=1))


def implicit_diff(inner=lambda params: params["phi"] ** 2, params=AT, method=CG):
    return hypergrad.implicit_diff(inner, params, method=method)


def bilevel(inner_loss=inner, params=AT, **options):
    options = {"inner": SGD, "outer": SGD, "steps": 1, "inner_steps": 1, **options}
    return mg.bilevel(outer, inner_loss, params, LAM, **options)


def each(function, /, **values):
    """Return calls with one wrong argument each."""
    return [partial(function, **{name: value}) for name, several in values.items() for value in several]


lazy, NAN = nn.LazyLinear(2), float("nan")
LAZY = dict(lazy.named_parameters())
density, draw, nystrom = curvature.spectral_density, curvature.sample_probes, curvature.nystrom
MAPS = [torch.eye(3), None, *(operator(shape=shape) for shape in ((3, 2), 3))]
MAPS += [operator(dtype=torch.int64), operator(dtype="float32")]
MAPS += [operator(multiply=lambda rows: rows[:, :2]), operator(multiply=lambda rows: None)]
HALF = [operator(dtype=torch.bfloat16)]

# How the errors begin, and the calls.
CALLS = {
    "hessian(loss, params): ": [
        *each(hessian, params=[[W], NET.parameters(), {}, {"w": None}, {"w": THREE.long()}, LAZY]),
        *each(hessian, params=[{"w": W, "v": W.double()}], chunk=[-1], data=[iter([BATCH])]),
        *each(hessian, loss=["loss", lambda p: 1.0, lambda p: p["w"] ** 2, lambda p: (p["w"] * 1j).sum()]),
        *each(hessian, loss=[lambda p: torch.ones(()), W.detach().sum(), NET]),
        partial(hessian, W.sin().sum(), DICT, BATCH),
        partial(hessian, W.sin().sum(), {"a": W, "b": W}),
        partial(hessian, data=[(X,), (X,)], reduction="avg"),
    ],
    "H @ v: ": [
        *each(product, v=[torch.ones(2), torch.ones(3, 1, 1), "v", [1.0]]),
        *each(product, v=[{"v": THREE}, {"w": torch.ones(2)}, {"w": 1.0}]),
    ],
    "H.multiply(vectors): ": each(product, v=[THREE.double(), THREE.long()]),
    "H[": each(block, name=["v", 0]),
    "c * H: ": [lambda: hessian() * THREE],
    "H.preconditioned(root): ": [lambda: hessian().preconditioned(2.0)],
    "H.solve(b): ": [lambda: hessian().solve({"v": THREE})],
    "ggn(model, loss_fn, params, data): ": [
        *each(ggn, model=["model", nn.Linear, lambda params, x: x[:, :2]], loss_fn=["mse", lambda z, y: z]),
        *each(ggn, params=[{"q": W}, {"weight": torch.ones(5, 5)}], data=[X, None, [(X, Y, Y)]]),
        partial(ggn, data=torch.utils.data.TensorDataset(X, Y)),
        partial(ggn, lazy, params=LAZY),
        partial(ggn, data=[BATCH], reduction=3),
    ],
    "fisher(model, loss_fn, params, data): ": [
        *each(fisher, kind=["true", None], loss_fn=[F.l1_loss]),
        *each(partial(fisher, kind="sampled"), samples=[0, 2.5]),
    ],
    "trace(operator, ...": [
        *each(on(curvature.trace), map=MAPS, method=["hutch", ["hutchinson"]], probes=[0, 2.5], rtol=[0, "1 %"]),
        *each(on(curvature.trace), distribution=["gauss"], generator=[0]),
        *each(partial(on(curvature.trace), method="hutchinson"), chunk=["all"]),
        *each(partial(on(curvature.trace), method="xtrace"), probes=[1], map=HALF),
        *each(partial(on(curvature.trace), method="hutch++"), probes=[2], map=HALF),
    ],
    "diagonal(operator, ...": [
        *each(on(curvature.diagonal), map=MAPS, rtol=[-1.0], chunk=["all"]),
    ],
    "eigenvalues(operator, k): ": [
        *each(partial(curvature.eigenvalues, MAP), k=[0, 4, 1.5, "3"]),
        *each(on(curvature.eigenvalues, 1), map=MAPS, which=["LA"], rtol=[2, -1, NAN, "1"], max_basis=[1, 2.5]),
        *each(on(curvature.eigenvalues, 1), max_matvecs=[1], generator=[3]),
    ],
    "spectral_density(operator): ": each(on(density), map=MAPS, sigma=[0, NAN, "a"], steps=[1.5], probes=[0]),
    "density": [
        *each(density(MAP), grid=[torch.arange(3), 3.0]),
        *each(density(MAP).grid, num_points=[1]),
    ],
    "trace_of(operator, function): ": [
        *each(partial(curvature.trace_of, MAP), function=["sqrt", lambda values: None]),
        *each(on(curvature.trace_of, torch.sqrt), map=MAPS, steps=[0], rtol=[0.0], generator=[0]),
    ],
    "log_determinant(operator): ": each(on(curvature.log_determinant), map=MAPS, damping=[-1, NAN, "a"], steps=[0]),
    "nystrom(": each(on(nystrom), map=MAPS + HALF, rank=[0, 9, "a"], damping=[-1.0]),
    "Nystrom.inverse(damping): ": each(nystrom(MAP, rank=2).inverse, damping=[0.0, "a"]),
    "solve(": [
        *each(solve, map=MAPS, b=[torch.ones(2), torch.ones(1, 1, 3), [1.0], THREE.double(), THREE / 0]),
        *each(solve, b=[torch.ones(3, device="meta")], method=["lu", None, curvature.solvers.methods.CG, "pcg"]),
        *each(solve, rtol=[-1, NAN, "a"], atol=[-1.0], max_steps=[0, 2.5], order=[0], x0=[torch.ones(2), THREE / 0]),
        *each(solve, damping=[-0.1, float("inf"), 1j, torch.ones(2)]),
        *each(solve, preconditioner=[2.0, torch.ones(2), lambda rows: rows[:, :1]]),
        *each(partial(solve, preconditioner=THREE), method=["neumann", "dense"]),
        partial(solve, THREE.bfloat16(), *HALF, method="dense"),
    ],
    "sample_probes(": [
        *each(partial(draw, n=3), count=[0, 1.5]),
        *each(partial(draw, 1, 3), dtype=[torch.int64], distribution=["cauchy"]),
        partial(draw, 1, -3),
    ],
    "ParameterSpace(params): ": each(
        curvature.ParameterSpace,
        params=[[W], {"w": W * 1j}, {"w": W.to_sparse()}, {"a": W, "b": torch.ones(2, device="meta")}],
    ),
    "unflatten(vectors): ": each(curvature.ParameterSpace(DICT).unflatten, vectors=[torch.ones(2)]),
    "Averaged(operator, group): ": each(curvature.Averaged, operator=[torch.eye(3)]),
    "hypergradient(": [
        *each(hypergradient, outer=["loss", lambda p, h: torch.ones(2), lambda p, h: None]),
        *each(hypergradient, outer=[lambda p, h: torch.ones(())]),
        *each(hypergradient, inner=[None, lambda p, h: (p["phi"] - 3) ** 2, lambda p, h: -inner(p, h)]),
        *each(hypergradient, params=[[W]], hyper=[{}, {"lam": 3.0}, None]),
        *each(hypergradient, method=["cg", hypergrad.CG, curvature.solvers.methods.CG()]),
        *each(unrolled, rule=[torch.optim.SGD, "sgd", lambda hyper: None]),
        partial(hypergradient, method=hypergrad.Neumann(), create_graph=True),
    ],
    "CG(": [
        *each(hypergrad.CG, steps=[0], damping=[-1.0], rtol=["a"]),
        *each(curvature.solvers.methods.CG, progress=[-1.0]),
    ],
    "Neumann(": each(hypergrad.Neumann, scale=[0, "a"]),
    "Nystrom(": each(hypergrad.Nystrom, rank=[0], damping=[0]),
    "Exact(": each(hypergrad.Exact, damping=[-1.0]),
    "FirstOrder(": each(hypergrad.FirstOrder, scale=[-1.0]),
    "FiniteDifference(": each(partial(hypergrad.FiniteDifference, lr=0.1), lr=[-1.0], epsilon=[0]),
    "Unroll(": each(partial(hypergrad.Unroll, SGD, steps=2), steps=[0], memory=["all"], truncate=[3, 1.5]),
    "implicit_diff(inner_loss, params): ": [
        *each(implicit_diff, method=["cg", hypergrad.Unroll(SGD, steps=1), hypergrad.FirstOrder()], params=[[W]]),
        *each(implicit_diff, inner=[None, lambda p: (p["phi"] ** 2).expand(2, 2), lambda p: None]),
    ],
    "bilevel(outer_loss, inner_loss, params, hyper): ": [
        *each(bilevel, steps=[0], inner_steps=[-1], inner=["sgd", torch.optim.SGD([W], lr=0.1)], callback=[3]),
        *each(bilevel, params=[lambda step: AT]),
        partial(bilevel, lambda params, hyper, batch: inner(params, hyper), inner_batches=[]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_errors_name_the_call(call):
    for number, wrong in enumerate(CALLS[call]):
        with pytest.raises((ValueError, TypeError, mg.curvature.SolveError)) as caught:
            wrong()
        assert str(caught.value).startswith(call), (number, caught.value)
        last = traceback.extract_tb(caught.tb)[-1].filename
        assert "metagrad" in last, (number, last)


def test_an_input_of_another_dtype_is_named():
    words = r"ggn\(.*parameters are torch.float32 and an input is torch.float64"
    with pytest.raises(ValueError, match=words):
        mg.ggn(NET, F.mse_loss, PARAMS, (X.double(), Y))


@pytest.mark.parametrize("labels", [torch.full((4,), 9), torch.rand(4), torch.zeros(4, dtype=torch.int32)])
@pytest.mark.parametrize("make", [mg.ggn, mg.fisher, mg.kfac])
def test_labels_that_the_loss_cannot_take_are_named(make, labels):
    with pytest.raises(ValueError, match=r"loss_fn\(output, y\) raised .*labels must be int64"):
        make(NET, F.cross_entropy, PARAMS, (X, labels))


def checkpointed(params, x):
    run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    return run(lambda w: torch.tanh(x @ w.T), params["weight"])


def test_a_jacobian_through_the_checkpoint_of_torch_is_an_error():
    params = {"weight": NET.weight}
    with pytest.raises(RuntimeError, match=r"jacobian\(fn, params, data\): .*metagrad.checkpoint"):
        curvature.jacobian(checkpointed, params, X)
    with mg.MemoryTracker(device="cpu"):  # which has hooks of its own
        found = curvature.jacobian(lambda p, x: torch.tanh(x @ p["weight"].T), params, X)
        rows = found.rows()
    torch.testing.assert_close(found.T @ torch.ones(8), torch.ones(8) @ rows)


def test_layers_in_a_checkpointed_call_have_no_factors():
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.head(mg.checkpoint(lambda x: self.body(x).tanh(), x))

    model = Checkpointed()
    params = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"kfac\(.*'body.weight'.*outside of metagrad.checkpoint"):
        mg.kfac(model, F.mse_loss, params, (torch.randn(5, 3), torch.randn(5, 2)))
