"""Wrong inputs of every public function: one table of calls, and how their errors begin."""

from __future__ import annotations

import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad import curvature, hypergrad

NET, X, Y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
PARAMS, BATCH = dict(NET.named_parameters()), (X, Y)
W, THREE, INF = torch.ones(3, requires_grad=True), torch.ones(3), float("inf")
CG, DICT, AT, LAM = hypergrad.CG(), {"w": W}, {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}
SGD = mg.optim.rules.sgd(lr=0.1)
UNROLL = hypergrad.Unroll(SGD, steps=1)


def cube(params, *batch):
    return (params["w"] ** 3).sum()


def inner(params, hyper):
    return (params["phi"] - hyper["lam"]) ** 2


def outer(params, hyper):
    return params["phi"] ** 2


def operator(**change):
    made = {
        "shape": (3, 3),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "multiply": lambda rows: 2 * rows,
    }
    return SimpleNamespace(**{**made, **change})


def hessian(loss=cube, params=DICT, *data, **options):
    return mg.hessian(loss, params, *data, **options)


def ggn(model=NET, loss_fn=F.mse_loss, params=PARAMS, data=BATCH, **options):
    return mg.ggn(model, loss_fn, params, data, **options)


def fisher(model=NET, loss_fn=F.mse_loss, params=PARAMS, data=BATCH, **options):
    return mg.fisher(model, loss_fn, params, data, **options)


def solve(b=THREE, on=None, **options):
    return curvature.solve(operator() if on is None else on, b, **options)


def hypergradient(outer=outer, inner=inner, params=AT, hyper=LAM, **options):
    return mg.hypergradient(outer, inner, params, hyper, **options)


def bilevel(outer=outer, inner_loss=inner, params=AT, hyper=LAM, **options):
    options = {"inner": SGD, "outer": SGD, "steps": 1, "inner_steps": 1, **options}
    return mg.bilevel(outer, inner_loss, params, hyper, **options)


def implicit_diff(inner=lambda params: params["phi"] ** 2, params=AT, method=CG):
    return hypergrad.implicit_diff(inner, params, method=method)


def unrolled(rule):
    return hypergradient(method=hypergrad.Unroll(rule, steps=1))


def product(v):
    return hessian() @ v


lazy = nn.LazyLinear(2)
density, trace_of, draw = curvature.spectral_density, curvature.trace_of, curvature.sample_probes

# How the errors begin, and the calls.
CALLS = {
    "hessian(loss, params): ": [
        lambda: hessian("loss"),
        lambda: hessian(params=[W]),
        lambda: hessian(params=NET.parameters()),
        lambda: hessian(params={}),
        lambda: hessian(params={"w": None}),
        lambda: hessian(params={"w": torch.ones(3, dtype=torch.long)}),
        lambda: hessian(params={"w": W, "v": W.double()}),
        lambda: hessian(params=dict(lazy.named_parameters())),
        lambda: hessian(lambda params: 1.0),
        lambda: hessian(lambda params: params["w"] ** 2),
        lambda: hessian(lambda params: (params["w"] * 1j).sum()),
        lambda: hessian(lambda params: torch.ones(())),
        lambda: hessian(W.detach().sum()),
        lambda: hessian(W.sin().sum(), DICT, BATCH),
        lambda: hessian(W.sin().sum(), {"a": W, "b": W}),
        lambda: hessian(chunk=-1),
        lambda: hessian(cube, DICT, [(X,), (X,)], reduction="avg"),
        lambda: hessian(cube, DICT, iter([BATCH])),
    ],
    "H @ v: ": [
        lambda: product(torch.ones(2)),
        lambda: product(torch.ones(3, 1, 1)),
        lambda: product("v"),
        lambda: product([1.0, 2.0, 3.0]),
        lambda: product({"v": THREE}),
        lambda: product({"w": torch.ones(2)}),
        lambda: product({"w": 1.0}),
    ],
    "H.multiply(vectors): ": [lambda: product(THREE.double()), lambda: product(THREE.long())],
    "H[": [lambda: hessian()["v"], lambda: hessian()[0]],
    "c * H: ": [lambda: hessian() * THREE],
    "H.preconditioned(root): ": [lambda: hessian().preconditioned(2.0)],
    "H.solve(b): ": [lambda: hessian().solve({"v": THREE})],
    "ggn(model, loss_fn, params, data): ": [
        lambda: ggn("model"),
        lambda: ggn(nn.Linear),
        lambda: ggn(loss_fn="mse"),
        lambda: ggn(params={"q": W}),
        lambda: ggn(params={"weight": torch.ones(5, 5)}),
        lambda: ggn(lazy, params=dict(lazy.named_parameters())),
        lambda: ggn(data=X),
        lambda: ggn(data=None),
        lambda: ggn(data=[(X, Y, Y)]),
        lambda: ggn(data=[BATCH], reduction=3),
        lambda: ggn(loss_fn=lambda z, y: z),
        lambda: ggn(lambda params, x: x[:, :2], params=PARAMS),
    ],
    "fisher(model, loss_fn, params, data): ": [
        lambda: fisher(kind="true"),
        lambda: fisher(kind=None),
        lambda: fisher(loss_fn=F.l1_loss),
        lambda: fisher(kind="sampled", samples=0),
        lambda: fisher(kind="sampled", samples=2.5),
    ],
    "trace(operator, ...": [
        lambda: curvature.trace(torch.eye(3)),
        lambda: curvature.trace(None),
        lambda: curvature.trace(operator(shape=(3, 2))),
        lambda: curvature.trace(operator(shape=3)),
        lambda: curvature.trace(operator(dtype=torch.int64)),
        lambda: curvature.trace(operator(dtype="float32")),
        lambda: curvature.trace(operator(multiply=lambda rows: rows[:, :2])),
        lambda: curvature.trace(operator(multiply=lambda rows: None)),
        lambda: curvature.trace(operator(), method="hutch"),
        lambda: curvature.trace(operator(), method=["hutchinson"]),
        lambda: curvature.trace(operator(), probes=0),
        lambda: curvature.trace(operator(), probes=2.5),
        lambda: curvature.trace(operator(), method="xtrace", probes=1),
        lambda: curvature.trace(operator(), method="hutch++", probes=2),
        lambda: curvature.trace(operator(), rtol=INF),
        lambda: curvature.trace(operator(), rtol="1 %"),
        lambda: curvature.trace(operator(), distribution="gauss"),
        lambda: curvature.trace(operator(), generator=0),
        lambda: curvature.trace(operator(), method="hutchinson", chunk="all"),
        lambda: curvature.trace(operator(dtype=torch.bfloat16), method="xtrace"),
    ],
    "diagonal(operator, ...": [
        lambda: curvature.diagonal(torch.eye(3)),
        lambda: curvature.diagonal(operator(), method="exact"),
        lambda: curvature.diagonal(operator(), method="xdiag", probes=1),
        lambda: curvature.diagonal(operator(), rtol=-1.0),
        lambda: curvature.diagonal(operator(), chunk="all"),
        lambda: curvature.diagonal(operator(dtype=torch.bfloat16), method="xdiag"),
    ],
    "eigenvalues(operator, k): ": [
        lambda: curvature.eigenvalues(torch.eye(3), 1),
        *(lambda k=k: curvature.eigenvalues(operator(), k) for k in (0, 4, 1.5, "3")),
        lambda: curvature.eigenvalues(operator(), 1, which="LA"),
        *(lambda r=rtol: curvature.eigenvalues(operator(), 1, rtol=r) for rtol in (2, -1, float("nan"), "1")),
        *(lambda m=most: curvature.eigenvalues(operator(), 1, max_basis=m) for most in (1, 2.5)),
        lambda: curvature.eigenvalues(operator(), 1, max_matvecs=1),
        lambda: curvature.eigenvalues(operator(), 1, generator=3),
    ],
    "spectral_density(operator): ": [
        lambda: density(torch.eye(3)),
        *(lambda s=sigma: density(operator(), sigma=s) for sigma in (0, float("nan"), "a")),
        lambda: density(operator(), steps=1.5),
        lambda: density(operator(), probes=0),
    ],
    "density": [
        lambda: density(operator())(torch.arange(3)),
        lambda: density(operator())(3.0),
        lambda: density(operator()).grid(1),
        lambda: density(operator()).moment(-1),
    ],
    "trace_of(operator, function): ": [
        lambda: trace_of(operator(), "sqrt"),
        lambda: trace_of(operator(), lambda values: None),
        lambda: trace_of(operator(), torch.sqrt, steps=0),
        lambda: trace_of(operator(), torch.sqrt, rtol=0.0),
        lambda: trace_of(operator(), torch.sqrt, distribution="cauchy"),
        lambda: trace_of(operator(), torch.sqrt, chunk="much"),
    ],
    "log_determinant(operator): ": [
        lambda: curvature.log_determinant(torch.eye(3)),
        *(lambda d=d: curvature.log_determinant(operator(), damping=d) for d in (-1, float("nan"), "a")),
        lambda: curvature.log_determinant(operator(), steps=0),
    ],
    "nystrom(": [
        *(lambda r=rank: curvature.nystrom(operator(), rank=r) for rank in (0, 9, "a")),
        lambda: curvature.nystrom(operator(), damping=-1.0),
    ],
    "Nystrom.inverse(damping): ": [
        lambda: curvature.nystrom(operator(), rank=2).inverse(0.0),
        lambda: curvature.nystrom(operator(), rank=2).inverse("a"),
    ],
    "solve(": [
        lambda: solve(on=torch.eye(3)),
        lambda: solve(on=operator(shape=(2, 3))),
        lambda: solve(on=operator(multiply=lambda rows: rows.sum(1)), check_symmetry=False),
        lambda: solve(torch.ones(2)),
        lambda: solve(torch.ones(1, 1, 3)),
        lambda: solve([1.0, 1.0, 1.0]),
        lambda: solve(THREE.double()),
        lambda: solve(torch.ones(3, device="meta")),
        lambda: solve(THREE / 0),
        *(lambda m=method: solve(method=m) for method in ("lu", None, curvature.solvers.cg.CG, "pcg")),
        lambda: solve(method="cg", preconditioner=THREE),
        lambda: solve(method="neumann", preconditioner=THREE),
        *(lambda r=rtol: solve(rtol=r) for rtol in (-1, float("nan"), "a")),
        lambda: solve(atol=-1.0),
        *(lambda n=steps: solve(max_steps=n) for steps in (0, 2.5)),
        lambda: solve(order=0),
        *(lambda d=d: solve(damping=d) for d in (-0.1, INF, 1j, torch.ones(2))),
        *(lambda p=p: solve(preconditioner=p) for p in (2.0, torch.ones(2), lambda rows: rows[:, :1])),
        lambda: solve(x0=torch.ones(2)),
        lambda: solve(x0=THREE / 0),
        lambda: solve(method="dense", on=operator(dtype=torch.float16), b=THREE.half()),
    ],
    "sample_probes(": [
        *(lambda n=count: draw(n, 3) for count in (0, 1.5)),
        lambda: draw(1, -3),
        lambda: draw(1, 3, dtype=torch.int64),
        lambda: draw(1, 3, distribution="cauchy"),
    ],
    "ParameterSpace(params): ": [
        lambda: curvature.ParameterSpace([W]),
        lambda: curvature.ParameterSpace({"w": W * 1j}),
        lambda: curvature.ParameterSpace({"w": W.to_sparse()}),
        lambda: curvature.ParameterSpace({"a": W, "b": torch.ones(2, device="meta")}),
    ],
    "unflatten(vectors): ": [lambda: curvature.ParameterSpace(DICT).unflatten(torch.ones(2))],
    "Averaged(operator, group): ": [lambda: curvature.Averaged(torch.eye(3))],
    "hypergradient(": [
        lambda: hypergradient(outer="loss"),
        lambda: hypergradient(inner=None),
        lambda: hypergradient(params=[W]),
        *(lambda h=hyper: hypergradient(hyper=h) for hyper in ({}, {"lam": 3.0}, None)),
        *(lambda m=m: hypergradient(method=m) for m in ("cg", hypergrad.CG, curvature.solvers.cg.CG())),
        lambda: hypergradient(outer=lambda params, hyper: torch.ones(2)),
        lambda: hypergradient(outer=lambda params, hyper: None),
        lambda: hypergradient(outer=lambda params, hyper: torch.ones(())),
        lambda: hypergradient(inner=lambda params, hyper: (params["phi"] - 3) ** 2),
        lambda: hypergradient(inner=lambda params, hyper: -inner(params, hyper)),
        lambda: hypergradient(method=hypergrad.Neumann(), create_graph=True),
        *(lambda r=rule: unrolled(r) for rule in (torch.optim.SGD, "sgd", lambda hyper: None)),
    ],
    "CG(": [
        lambda: curvature.solvers.cg.CG(progress=-1.0),
        lambda: hypergrad.CG(steps=0), lambda: hypergrad.CG(damping=-1.0), lambda: hypergrad.CG(rtol="a")],
    "Neumann(": [lambda: hypergrad.Neumann(scale=0), lambda: hypergrad.Neumann(scale="a")],
    "Nystrom(": [lambda: hypergrad.Nystrom(rank=0), lambda: hypergrad.Nystrom(damping=0)],
    "Exact(": [lambda: hypergrad.Exact(damping=-1.0)],
    "FirstOrder(": [lambda: hypergrad.FirstOrder(scale=-1.0)],
    "FiniteDifference(": [
        lambda: hypergrad.FiniteDifference(lr=-1.0),
        lambda: hypergrad.FiniteDifference(0.1, epsilon=0),
    ],
    "Unroll(": [
        lambda: hypergrad.Unroll(SGD, steps=0),
        lambda: hypergrad.Unroll(SGD, steps=1, memory="all"),
        *(lambda n=n: hypergrad.Unroll(SGD, steps=2, truncate=n) for n in (3, 1.5)),
    ],
    "implicit_diff(inner_loss, params): ": [
        *(lambda m=m: implicit_diff(method=m) for m in ("cg", UNROLL, hypergrad.FirstOrder())),
        lambda: implicit_diff(None),
        lambda: implicit_diff(params=[W]),
        lambda: implicit_diff(lambda params: (params["phi"] ** 2).expand(2, 2)),
        lambda: implicit_diff(lambda params: None),
    ],
    "bilevel(outer_loss, inner_loss, params, hyper): ": [
        lambda: bilevel(steps=0),
        lambda: bilevel(inner_steps=-1),
        lambda: bilevel(inner="sgd"),
        lambda: bilevel(inner=torch.optim.SGD([W], lr=0.1)),
        lambda: bilevel(params=lambda step: AT),
        lambda: bilevel(callback=3),
        lambda: bilevel(inner_loss=lambda params, hyper, batch: inner(params, hyper), inner_batches=[]),
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
