import pytest
import torch

import metagrad as mg
from metagrad import hypergrad
from metagrad.curvature import SolveError
from metagrad.hypergrad import implicit_diff

METHODS = {
    "cg": hypergrad.CG(steps=10),
    "exact": hypergrad.Exact(),
    "neumann": hypergrad.Neumann(steps=400),
}


def problem(tasks=3, n=9, d=4):
    """Return data of ridge regressions with one learned penalty, and their minima as a function of it."""
    x, y = torch.randn(tasks, n, d, dtype=torch.float64), torch.randn(tasks, n, dtype=torch.float64)

    def losses(params, log):
        residual = torch.einsum("tnd,td->tn", x, params["w"]) - y
        return (
            residual.square().mean(1) / 2
            + log.exp() / 2 * (params["w"] - params["b"]).square().sum(1)
            + params["b"].square().sum(1)
        )

    def minima(log):
        # b = lam w / (lam + 2), put into the equation of w
        lam = log.exp()
        A = x.mT @ x / n + (lam - lam**2 / (lam + 2)) * torch.eye(d, dtype=torch.float64)
        w = torch.linalg.solve(A, torch.einsum("tnd,tn->td", x, y) / n)
        return {"w": w, "b": lam * w / (lam + 2)}

    return losses, minima


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_minima_of_stacked_tasks_have_the_derivative_of_the_closed_form(method):
    losses, minima = problem()
    log = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, dtype=torch.float64)
    params = minima(log.detach())
    found = implicit_diff(lambda p: losses(p, log), params, method=method)
    assert all(torch.equal(found[name], params[name]) for name in params)
    scalar = ((found["w"].sin() + found["b"] ** 2) * weights).sum()
    again = minima(log)
    expected = ((again["w"].sin() + again["b"] ** 2) * weights).sum()
    assert torch.allclose(mg.grad(scalar, log), mg.grad(expected, log), rtol=1e-8)


@pytest.mark.parametrize(
    "method",
    [hypergrad.CG(steps=2), hypergrad.Neumann(steps=3, scale=0.1), hypergrad.FirstOrder(0.5)],
    ids=["cg", "neumann", "first order"],
)
@pytest.mark.filterwarnings("ignore:.*left a residual")
def test_tasks_that_run_together_have_what_they_have_alone(method):
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    params = {"w": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(3, 1, dtype=torch.float64)}

    def derivative(of):
        lam = torch.ones(len(of), dtype=torch.float64, requires_grad=True)

        def losses(p):
            values = (torch.einsum("tnd,td->tn", x[of], p["w"]) + p["b"]).square().mean(1)
            return values + lam * (p["w"].square().sum(1) + p["w"].sin().sum(1) / 5)

        found = implicit_diff(losses, {name: p[of] for name, p in params.items()}, method=method)
        return torch.autograd.grad((found["w"].sin().sum() + found["b"].sum()), lam)[0]

    alone = torch.cat([derivative([i]) for i in range(3)])
    assert alone.abs().min() > 0
    assert torch.allclose(derivative([0, 1, 2]), alone, rtol=1e-9)


def test_gradients_flow_to_whatever_the_loss_was_computed_from():
    """The minimum of (phi - s c)^2 is s c. The loss captures s, and c has its own graph."""
    s = torch.tensor(2.0, requires_grad=True)
    root = torch.tensor(3.0, requires_grad=True)
    c = root**2
    found = implicit_diff(
        lambda p: (p["phi"] - s * c) ** 2, {"phi": torch.tensor(18.0)}, method=hypergrad.CG()
    )
    found["phi"].backward()
    assert (s.grad, root.grad) == (torch.tensor(9.0), torch.tensor(12.0))


def test_a_second_derivative_is_refused():
    lam = torch.tensor(3.0, requires_grad=True)
    found = implicit_diff(
        lambda p: (p["phi"] - lam**2) ** 2, {"phi": torch.tensor(9.0)}, method=hypergrad.CG()
    )
    (first,) = torch.autograd.grad(found["phi"], lam, create_graph=True)
    assert first == 6
    with pytest.raises(RuntimeError, match=r"Pass order=2"):
        torch.autograd.grad(first, lam)


def test_dropout_in_the_loss_draws_one_mask_for_all_orders():
    lam = torch.arange(1.0, 9.0, dtype=torch.float64, requires_grad=True)

    def inner(params):
        distance = (params["phi"] - lam**2) ** 2
        return (distance + torch.nn.functional.dropout(distance)).sum()

    found = implicit_diff(inner, {"phi": lam.detach() ** 2}, method=hypergrad.CG(), order=2)
    (first,) = torch.autograd.grad(found["phi"].sum(), lam, create_graph=True)
    torch.testing.assert_close(first, 2 * lam)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), lam)[0], torch.full_like(lam, 2.0))


def test_without_grad_mode_there_is_no_graph():
    lam = torch.tensor(3.0, requires_grad=True)
    with torch.no_grad():
        found = implicit_diff(
            lambda p: (p["phi"] - lam) ** 2, {"phi": torch.tensor(3.0)}, method=hypergrad.CG()
        )
    assert not found["phi"].requires_grad


def test_a_cotangent_that_is_not_finite_stays_with_its_task():
    lam = torch.ones(2, 1, requires_grad=True)
    found = implicit_diff(
        lambda p: ((p["phi"] - lam) ** 2).sum(1), {"phi": torch.ones(2, 1)}, method=hypergrad.CG()
    )
    (gradient,) = torch.autograd.grad((found["phi"] * torch.tensor([[torch.nan], [3.0]])).sum(), lam)
    assert gradient[0].isnan()
    assert gradient[1] == 3


def test_an_indefinite_hessian_names_its_task():
    lam = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    found = implicit_diff(
        lambda p: (lam * p["phi"] ** 2).sum(1), {"phi": torch.ones(2, 1)}, method=hypergrad.CG()
    )
    with pytest.raises(SolveError, match="of task 1 of 2: It is not positive definite"):
        found["phi"].sum().backward()


def test_bad_losses():
    for inner, message in [
        (lambda p: p["phi"].square().sum() * torch.ones(3), "there are 3 losses"),
        (lambda p: torch.zeros(()), "with a graph"),
    ]:
        with pytest.raises(ValueError, match=message):
            implicit_diff(inner, {"phi": torch.ones(2)}, method=hypergrad.CG())


@pytest.mark.parametrize("size", [1e-5, 2e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cotangents_of_any_size_are_solved_for(size, dtype):
    """The squares of small and large ones are zero and infinite in float16, where nothing was left to solve."""
    lam = torch.ones(60, dtype=dtype, requires_grad=True)
    weights = torch.linspace(1, 4, 60).to(dtype)
    params = {"phi": lam.detach()}
    found = implicit_diff(
        lambda p: (weights * (p["phi"] - lam).square()).sum() / 2, params, method=hypergrad.CG()
    )
    (gradient,) = torch.autograd.grad(found["phi"], lam, torch.full((60,), size, dtype=dtype))
    torch.testing.assert_close(gradient, torch.full_like(gradient, size), rtol=5e-2, atol=0)


@pytest.mark.parametrize(
    "method",
    [hypergrad.CG(), hypergrad.Exact(), hypergrad.Neumann(steps=100), hypergrad.FirstOrder(scale=0.5)],
    ids=lambda m: type(m).__name__,
)
def test_a_parameter_that_the_loss_does_not_depend_on_is_a_constant(method):
    lam = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    params = {"none": torch.ones(3, dtype=torch.float64), "phi": lam.detach() ** 2}
    found = implicit_diff(lambda p: (p["phi"] - lam**2).square().sum(), params, method=method)
    (gradient,) = torch.autograd.grad(found["phi"].sum() + found["none"].prod(), lam)
    assert torch.allclose(gradient, 2 * lam)
    assert torch.equal(found["none"], params["none"])


def test_transforms_of_torch_func_are_refused():
    def value(lam):
        found = implicit_diff(lambda p: (p["phi"] - lam) ** 2, {"phi": torch.ones(())}, method=hypergrad.CG())
        return found["phi"]

    with pytest.raises(ValueError, match="transform there is no autograd graph"):
        torch.func.grad(value)(torch.ones(()))


def test_tasks_have_no_nystrom_approximation():
    lam = torch.ones(2, 1, requires_grad=True)
    found = implicit_diff(
        lambda p: ((p["phi"] - lam) ** 2).sum(1), {"phi": torch.ones(2, 1)}, method=hypergrad.Nystrom(1)
    )
    with pytest.raises(ValueError, match="approximates one Hessian, and tasks have one each"):
        found["phi"].sum().backward()
