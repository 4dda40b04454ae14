import torch

from experiments.studies import hypergradients as program
from metagrad import hypergrad


def test_the_closed_form_is_what_exact_methods_find_and_cost_is_in_gradients():
    problem = program.ridge(d=6, n=12)
    truth, unit = problem.derivative(), program.gradient_cost(problem)
    cost, error = program.measure(problem, hypergrad.Exact(), truth, unit)
    assert error < 1e-12
    assert 6 <= cost <= 20
    cost, error = program.measure(problem, hypergrad.CG(steps=1), truth, unit)
    assert cost <= 6
    assert error > 1e-3


def test_every_method_has_a_row():
    rows = program.methods(None, 0.1, d=6, longest=64)
    known = {type(method).__name__ for row in rows.values() for method in row}
    assert known == {
        name
        for name in hypergrad.__all__
        if hasattr(getattr(hypergrad, name), "estimate") and name != "HypergradientMethod"
    }


def test_the_minimum_is_one():
    problem = program.ridge(d=5, n=10)
    params = {name: p.requires_grad_() for name, p in problem.minimum(problem.log_penalty).items()}
    (slope,) = torch.autograd.grad(problem.inner(params, {"log_penalty": problem.log_penalty}), params["w"])
    assert slope.norm() < 1e-12
