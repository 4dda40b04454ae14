"""L-BFGS against torch's: the same number of calls of the closure for the same loss."""

import pytest
import torch
import torch.nn.functional as F

from metagrad.optim import LBFGS
from metagrad.optim.newton.lbfgs import History
from tests.optim.second_order.problems import rosenbrock
from tests.optim.torch_optim.cases import classification, closure_of, network, run

F64 = torch.float64


def beale(w):
    x, y = w
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def at(*start):
    return [torch.tensor(start, dtype=F64, requires_grad=True)]


def of_one(loss, *start):
    params = at(*start)
    return params, lambda: loss(params[0])


def of_network():
    model = network(F64)
    return list(model.parameters()), classification(model, F64)


def logistic():
    """Separable, so that the loss has no minimum."""
    generator = torch.Generator().manual_seed(0)
    x, truth = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((100, 8), (8,)))
    layer = torch.zeros(8, dtype=F64, requires_grad=True)
    return [layer], lambda: F.binary_cross_entropy_with_logits(x @ layer, (x @ truth > 0).double())


PROBLEMS = {
    "beale": (lambda: of_one(beale, 1.0, 1.0), 20),
    "rosenbrock": (lambda: of_one(rosenbrock, -1.2, 1.0), 20),
    "a quadratic": (
        lambda: of_one(lambda w: (w * torch.tensor([1.0, 30.0], dtype=F64)).square().sum(), 3.0, 1.0),
        3,
    ),
    "logistic": (logistic, 2),
    "network": (of_network, 1),
}


def spent(make, problem, steps, **options):
    params, loss_of = problem()
    opt, calls = make(params, line_search_fn="strong_wolfe", **options), []
    closure = closure_of(opt, loss_of)
    for _ in range(steps):
        opt.step(lambda: calls.append(0) or closure())
    return float(loss_of().detach()), len(calls)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_it_ends_where_torch_does_after_as_many_closures(name, lr):
    """Within a tenth: rounding differs, and stops that are met at a knife's edge."""
    problem, steps = PROBLEMS[name]
    loss, calls = spent(LBFGS, problem, steps, lr=lr)
    expected, allowed = spent(torch.optim.LBFGS, problem, steps, lr=lr)
    assert calls <= 1.1 * allowed + 1
    assert loss <= 1.1 * expected + 1e-8


def test_a_step_at_the_minimum_calls_the_closure_once():
    params, loss_of = of_one(lambda w: w.square().sum(), 0.0, 0.0)
    opt, calls = LBFGS(params), []
    opt.step(closure_of(opt, lambda: calls.append(0) or loss_of()))
    assert len(calls) == opt.stats["evaluations"] == 1
    assert opt.stats["iterations"] == 0


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"max_iter": 3}, 3),
        ({"max_eval": 4}, 3),
        ({"tolerance_grad": 1e3}, 0),
        ({"tolerance_change": 1e3}, 1),
    ],
)
def test_what_ends_a_step(options, iterations):
    params, loss_of = of_one(lambda w: (w - 1).pow(4).sum() + 3 * w.square().sum(), 2.0, 0.5)
    opt = LBFGS(params, **{"tolerance_change": 0.0, **options})
    run(opt, loss_of, 1)
    # A slope below tolerance_change begins no search, and evaluations may run out within one.
    assert opt.stats["iterations"] <= iterations
    assert opt.stats["evaluations"] <= options.get("max_eval", 25)
    assert opt.stats["iterations"] == iterations or "tolerance_change" in options


def test_without_a_line_search_a_step_iterates_as_torchs_does():
    results = []
    for make in (LBFGS, torch.optim.LBFGS):
        params, loss_of = of_network()
        opt = make(params, lr=0.3, max_iter=5, line_search_fn=None)
        for _ in range(3):
            opt.step(closure_of(opt, loss_of))
        results.append(torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-10)


def test_directions_of_a_window_that_slides_over_its_buffers():
    """Directions equal dense BFGS with the last pairs. Returned pairs are never overwritten."""
    torch.manual_seed(0)
    n, most = 5, 3
    root = torch.randn(n, n, dtype=F64)
    hessian = root @ root.T + torch.eye(n, dtype=F64)
    history, given = History.empty(torch.zeros(n, dtype=F64)), []
    for _ in range(30):
        s, g = torch.randn(2, n, dtype=F64)
        history.add(s, hessian @ s, most=most)
        history.add(s, -hessian @ s, most=most)  # has no positive curvature
        H = (s @ hessian @ s) / (hessian @ s).square().sum() * torch.eye(n, dtype=F64)
        for move, change in zip(history.moves, history.changes, strict=True):
            V = torch.eye(n, dtype=F64) - torch.outer(change, move) / (move @ change)
            H = V.T @ H @ V + torch.outer(move, move) / (move @ change)
        torch.testing.assert_close(history.direction(g), -H @ g, rtol=1e-8, atol=1e-10)
        again = History(history.moves, history.changes, history.products)
        assert torch.equal(history.direction(g), again.direction(g))
        given.append((history.moves, history.moves.clone()))
    assert len(history.moves) == most
    assert all(torch.equal(*pair) for pair in given)


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_a_closure_may_write_gradients_by_itself(line_search_fn):
    results = []
    for by in ("loss.backward", "torch.autograd.backward", "torch.func"):
        (w,), loss_of = of_one(rosenbrock, -1.2, 1.0)
        opt = LBFGS([w], max_iter=6, line_search_fn=line_search_fn, lr=0.01)

        def closure(opt=opt, w=w, loss_of=loss_of, by=by):
            opt.zero_grad()
            if by == "torch.func":
                w.grad, loss = torch.func.grad_and_value(rosenbrock)(w.detach())
                return loss
            loss = loss_of()
            if by == "loss.backward":
                loss.backward()
            else:
                torch.autograd.backward(loss)
            return loss

        for _ in range(2):
            opt.step(closure)
        results.append((w.detach(), opt.stats["iterations"]))
    assert results[0][1] == 6
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_a_closure_that_returns_no_loss_is_refused():
    (w,), loss_of = of_one(rosenbrock, -1.2, 1.0)
    opt = LBFGS([w])
    with pytest.raises(RuntimeError, match=r"LBFGS.step\(closure\): the closure must return its loss.*got"):
        opt.step(lambda: loss_of().backward())
    assert w.tolist() == [-1.2, 1.0]


def test_a_loss_that_is_not_finite_bounds_the_line_search():
    """The first length leads where the logarithm ends."""
    params, loss_of = of_one(lambda w: (w - w.log()).sum() + 4 * w.square().sum(), 0.9, 0.8)
    opt = LBFGS(params, lr=3.0)
    run(opt, loss_of, 3)
    torch.testing.assert_close(
        params[0].detach(), torch.full((2,), (33**0.5 - 1) / 16, dtype=F64), rtol=1e-5, atol=0
    )
