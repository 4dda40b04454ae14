"""Curvature along training: the Hessian of MAML's objective, densities that are written and read, a small run."""

import json

import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.studies.curvature import density_of, measure, row_of, sinusoid, smoothed, study
from tests.conftest import SEED

TINY = (
    "preset=small",
    "iterations=4",
    "count=3",
    "tasks=3",
    "measure.probes=6",
    "measure.density_steps=6",
    "measure.density_probes=2",
)


def test_the_hessian_is_that_of_the_maml_objective(configured):
    """Against a loop in float64, on a matrix of a few hundred columns of the whole."""
    problem = sinusoid(configured(study, *TINY), 0)
    params = [p.detach().double().requires_grad_() for p in problem.params.values()]
    own = torch.Generator().manual_seed(1 - SEED)  # the program's, which METAGRAD_TEST_SEED does not move
    batch = mg.tasks.Sinusoid(shots=10, queries=10).sample(3, generator=own).to(dtype=torch.float64)

    def network(weights, x):
        w1, b1, w2, b2, w3, b3 = weights
        return torch.relu(torch.relu(x @ w1.T + b1) @ w2.T + b2) @ w3.T + b3

    losses = []
    for (xs, ys), (xq, yq) in ((one.support, one.query) for one in map(batch_of(batch), range(3))):
        weights = params
        for _ in range(5):
            slopes = torch.autograd.grad(F.mse_loss(network(weights, xs), ys), weights, create_graph=True)
            weights = [w - 0.01 * g for w, g in zip(weights, slopes, strict=True)]
        losses.append(F.mse_loss(network(weights, xq), yq))
    gradient = torch.autograd.grad(sum(losses) / 3, params, create_graph=True)
    v = [
        torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) for p in params
    ]
    expected = torch.autograd.grad(gradient, params, v)
    named = dict(zip(problem.params, (one.float() for one in v), strict=True))
    with mg.hessian(problem.measured(), problem.params) as H:
        found = H @ named
    for name, value in zip(problem.params, expected, strict=True):
        torch.testing.assert_close(
            found[name].double(), value, rtol=1e-3, atol=1e-3 * value.abs().max().item()
        )


def batch_of(batch):
    return lambda i: batch._replace(
        support=type(batch.support)(batch.support.x[i], batch.support.y[i]),
        query=type(batch.query)(batch.query.x[i], batch.query.y[i]),
    )


def test_a_measurement_has_traces_of_layers_and_eigenvalues_in_order(configured):
    config = configured(study, *TINY)
    problem = sinusoid(config, 0)
    with mg.hessian(problem.measured(), problem.params) as H:
        metrics, density = measure(H, config.measure, 0)
    layers = {f"trace/{name}" for name in ("total", "0", "2", "4")}
    assert layers <= set(metrics)
    assert metrics["eigenvalue/1"] >= metrics["eigenvalue/2"] >= metrics["eigenvalue/lowest_seen"]
    read = density_of(json.loads(json.dumps(row_of(density))))
    assert torch.equal(read.nodes, density.nodes.double())
    assert smoothed(read).sigma >= read.sigma
