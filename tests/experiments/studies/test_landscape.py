"""The landscape along training: preconditioners, edges of stability, objectives in plain torch, one small run."""

import json

import pytest
import torch
from torch import nn

import metagrad as mg
from experiments.studies import landscape

ADAM = {"betas": [0.9, 0.99], "eps": 1e-8}
RUNS = {
    "gd": landscape.RunConfig("", landscape.Method.gd, 0.5),
    "momentum": landscape.RunConfig("", landscape.Method.gd, 0.5, {"momentum": 0.8}),
    "adam": landscape.RunConfig("", landscape.Method.adam, 0.01, ADAM),
    "soap": landscape.RunConfig("", landscape.Method.soap, 0.01, {**ADAM, "weight_decay": 0.0}),
    "kfac": landscape.RunConfig(
        "", landscape.Method.kfac, 0.01, {"kl_clip": None, "fisher": "sampled", "momentum": 0.9}
    ),
}


@pytest.fixture
def small():
    """Return a small problem in float64."""
    torch.manual_seed(0)
    model = mg.models.MLP([4, 3, 2], nn.Tanh).double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.eye(2, dtype=torch.float64).repeat(6, 1)

    return landscape.Problem(model, (x, y), (x, y))


@pytest.mark.parametrize("name", ["adam", "soap", "kfac"])
def test_the_preconditioner_is_that_of_the_step(small, name):
    run = RUNS[name]
    optimizer = landscape.optimizer_of(run, small.model)
    for _ in range(12):
        landscape.take_step(run, small, optimizer)
    squares = sum(p.square().sum() for p in small.params.values()) / 2
    with mg.hessian(small.loss(small.params), small.params) as H, mg.hessian(squares, small.params) as unit:
        values = landscape.preconditioned(H, run, optimizer, small.model).eigenvalues(1, rtol=1e-10).values
        inverse = landscape.preconditioned(unit, run, optimizer, small.model).to_dense()
        expected = torch.linalg.eigvals(inverse @ H.to_dense()).real.max()
        torch.testing.assert_close(values[0], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(inverse, _reference(name, optimizer, small.model), rtol=1e-9, atol=1e-12)


def _reference(name, optimizer, model):
    """Return the inverse preconditioner as a dense matrix, from the formulas of the papers."""
    if name == "kfac":
        states = [optimizer.state[layer.weight] for layer in model if isinstance(layer, nn.Linear)]
        return torch.block_diag(*map(_kronecker, states))
    blocks = []
    for p in model.parameters():
        state = optimizer.state[p]
        square = state["exp_avg_sq" if name == "adam" else "square"]
        steps = int(state["step"])
        diagonal = 1 / ((1 - 0.9**steps) * ((square / (1 - 0.99**steps)).sqrt() + 1e-8))
        basis = torch.eye(p.numel(), dtype=p.dtype)
        if name == "soap" and p.ndim == 2:
            basis = torch.kron(*state["bases"])
        blocks.append(basis @ diagonal.flatten().diag() @ basis.mT)
    return torch.block_diag(*blocks)


def _kronecker(state):
    """Return the inverse of a layer, its weights first and then its biases, as parameters are flat."""
    outputs, inputs = state["output_inverse"], state["input_inverse"]
    number = torch.arange(len(outputs) * len(inputs)).reshape(len(outputs), len(inputs))
    order = torch.cat([number[:, :-1].flatten(), number[:, -1]])
    return torch.kron(outputs, inputs)[order][:, order]


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_steps_on_a_parabola_grow_beyond_the_edge_and_shrink_before_it(name):
    run = RUNS[name]
    beta, averaged = run.options.get("momentum", run.options.get("betas", [0.0])[0]), name == "adam"
    for factor, grows in ((0.95, False), (1.05, True)):
        curvature = factor * landscape.edge(run, 1.0)
        w, v = 1.0, 0.0
        for _ in range(400):
            v = beta * v + (1 - beta if averaged else 1) * curvature * w
            w -= run.lr * v
        assert (abs(w) > 1) is grows


def test_the_objectives_are_those_of_plain_torch(small, monkeypatch):
    params = list(small.params.values())

    def gradient(run):
        return torch.autograd.grad(landscape.objective(run, small), params)

    found = gradient(landscape.RunConfig("", landscape.Method.gd, 0.5, rho=0.1))
    plain = torch.autograd.grad(small.loss(small.params), params, create_graph=True)
    norm = sum(part.square().sum() for part in plain).sqrt().detach()
    moved = [(p + 0.1 * part / norm).detach().requires_grad_() for p, part in zip(params, plain, strict=True)]
    uphill = small.loss(dict(zip(small.params, moved, strict=True)))
    torch.testing.assert_close(found, torch.autograd.grad(uphill, moved), rtol=1e-9, atol=1e-12)

    torch.manual_seed(3)
    found = gradient(landscape.RunConfig("", landscape.Method.gd, 0.5, penalty=0.7))
    torch.manual_seed(3)
    probes = mg.curvature.sample_probes(
        1, sum(p.numel() for p in params), distribution="rademacher", dtype=torch.float64, device="cpu"
    )[0].split([p.numel() for p in params])
    probes = [probe.view_as(p) for probe, p in zip(probes, params, strict=True)]
    loss = small.loss(small.params)
    parts = torch.autograd.grad(loss, params, create_graph=True)
    products = torch.autograd.grad(parts, params, probes, create_graph=True)
    trace = sum((probe * product).sum() for probe, product in zip(probes, products, strict=True))
    torch.testing.assert_close(found, torch.autograd.grad(loss + 0.7 * trace, params), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_small_run_draws_its_table(configured, strokes, tmp_path):
    settings = ("preset=small", "count=2", "steps=4", "every=2", "hidden=[4]")
    text = landscape.study.run(configured(landscape.study, *settings), tmp_path)
    titles = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert titles == [run.title for run in configured(landscape.study).runs.values()]
    result = json.loads((tmp_path / "kfac" / "0" / "result.json").read_text())
    assert [row["step"] for row in result["path"]] == [0, 2, 4]
    assert [row["step"] for row in result["traces"]] == [0, 4]
    assert (tmp_path / "landscape.png").stat().st_size > 0
