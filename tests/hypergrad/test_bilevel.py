import functools

import pytest
import torch

import metagrad as mg
from metagrad import hypergrad
from tests.hypergrad.ridge import ridge

SGD = mg.optim.rules.sgd(lr=0.3)
START = {"w": torch.zeros(6, dtype=torch.float64)}


def run(problem, **options):
    settings = {"inner": SGD, "outer": mg.optim.rules.sgd(lr=1.0), "steps": 3, "inner_steps": 40, **options}
    return mg.bilevel(problem.outer, problem.inner, START, problem.hyper, **settings)


def test_outer_steps_follow_the_derivative_of_the_closed_form():
    problem = ridge()
    found = run(problem)
    log = problem.hyper["log_penalty"]
    for loss in found.outer_losses:
        assert loss.item() == pytest.approx(problem.closed(log).item(), abs=1e-9)
        log = log - torch.func.grad(problem.closed)(log)
    assert torch.allclose(found.hyper["log_penalty"], log, atol=1e-7)
    assert torch.equal(problem.hyper["log_penalty"], ridge().hyper["log_penalty"])
    assert torch.equal(START["w"], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("inner", "outer", "steps"),
    [
        (functools.partial(torch.optim.SGD, lr=0.3), functools.partial(torch.optim.SGD, lr=1.0), 40),
        (mg.optim.NewtonCG, mg.optim.rules.sgd(lr=1.0), 8),
    ],
    ids=["torch.optim", "mg.optim"],
)
def test_optimizers_of_torch_do_what_rules_do(inner, outer, steps):
    problem = ridge()
    found, expected = run(problem, inner=inner, outer=outer, inner_steps=steps), run(problem)
    assert torch.allclose(found.hyper["log_penalty"], expected.hyper["log_penalty"], atol=1e-6)
    assert torch.allclose(found.params["w"], expected.params["w"], atol=1e-6)
    assert torch.equal(problem.hyper["log_penalty"], ridge().hyper["log_penalty"])


@pytest.mark.parametrize(
    "inner", [SGD, functools.partial(torch.optim.SGD, lr=0.3)], ids=["rule", "torch.optim"]
)
def test_without_grad_mode_it_is_the_same(inner):
    problem = ridge()
    expected = run(problem, inner=inner)
    with torch.no_grad():
        found = run(problem, inner=inner)
    assert torch.equal(found.hyper["log_penalty"], expected.hyper["log_penalty"])


@pytest.mark.filterwarnings("ignore:.*left a residual")
def test_without_a_warm_start_each_outer_step_begins_again():
    problem = ridge()
    seen = []
    for warm_start in (True, False):
        seen.clear()
        run(
            problem,
            outer=mg.optim.rules.sgd(lr=0.0),
            inner_steps=2,
            warm_start=warm_start,
            callback=lambda step, params, hyper, loss: seen.append(params["w"]),
        )
        assert torch.equal(seen[0], seen[1]) is not warm_start


def test_batches_go_round():
    seen = {"inner": [], "outer": []}

    def inner(params, hyper, batch):
        if params["w"].requires_grad and torch.is_grad_enabled():
            seen["inner"].append(batch)
        return (params["w"] - hyper["lam"]).square().sum()

    def outer(params, hyper, batch):
        if torch.is_grad_enabled():
            seen["outer"].append(batch)
        return params["w"].square().sum()

    mg.bilevel(
        outer,
        inner,
        {"w": torch.zeros(1)},
        {"lam": torch.ones(1)},
        inner=SGD,
        outer=SGD,
        steps=2,
        inner_steps=2,
        inner_batches=[0, 1, 2, 3],
        outer_batches=["a", "b"],
    )
    assert seen == {"inner": [0, 1, 2, 3, 0, 1], "outer": ["a", "b"]}


def test_edge_weights_and_tables_are_learned():
    pattern = mg.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
    hyper = {
        "edges": mg.sparse.SparseTensor(pattern, torch.ones(2)),
        "table": torch.ones(5, 1),
    }

    def inner(params, hyper):
        rows = mg.sparse.embedding(torch.tensor([0, 3]), hyper["table"])
        return (params["w"] - hyper["edges"] @ rows).square().sum()

    def outer(params, hyper):
        return params["w"].square().sum()

    def outer_optimizer(tensors):
        return torch.optim.SGD(tensors, lr=0.1)

    settings = {"inner": SGD, "steps": 2, "inner_steps": 20}
    found = mg.bilevel(outer, inner, {"w": torch.zeros(2, 1)}, hyper, outer=outer_optimizer, **settings)
    assert isinstance(found.hyper["edges"], mg.sparse.SparseTensor)
    assert (found.hyper["edges"].values < 1).all()
    assert (found.hyper["table"] < 1).flatten().tolist() == [True, False, False, True, False]
    with pytest.raises(TypeError, match="RowSparse, and this rule moves every row"):
        mg.bilevel(
            outer, inner, {"w": torch.zeros(2, 1)}, hyper, outer=mg.optim.rules.adam(lr=0.1), **settings
        )


def test_parameters_are_drawn_for_each_outer_step():
    """The steps equal a loop of hypergradients, one from each start."""
    problem, method = ridge(), hypergrad.Unroll(SGD, steps=3)
    starts = [{"w": torch.full((6,), float(i), dtype=torch.float64)} for i in range(3)]
    settings = {"inner": SGD, "outer": mg.optim.rules.sgd(lr=1.0), "inner_steps": 0, "method": method}
    found = mg.bilevel(
        problem.outer, problem.inner, starts.__getitem__, problem.hyper, steps=3, warm_start=False, **settings
    )
    hyper = problem.hyper
    for start in starts:
        slopes = mg.hypergradient(problem.outer, problem.inner, start, hyper, method=method)
        hyper = {name: value - slopes[name] for name, value in hyper.items()}
    torch.testing.assert_close(found.hyper, hyper, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"such as dict\(model.named_parameters\(\)\), got Linear"):
        mg.bilevel(problem.outer, problem.inner, torch.nn.Linear(1, 1), problem.hyper, steps=3, **settings)
    with pytest.raises(ValueError, match=r"a function as params starts again .* Pass warm_start=False"):
        mg.bilevel(problem.outer, problem.inner, starts.__getitem__, problem.hyper, steps=3, **settings)
