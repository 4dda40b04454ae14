import math

import pytest
import torch

import metagrad as mg
from metagrad import hypergrad
from metagrad.curvature import Result, SolveError
from metagrad.hypergrad.problem import Problem
from tests.hypergrad.ridge import ridge

RULE = mg.optim.rules.sgd(lr=0.3)
FAST = mg.optim.rules.sgd(lr=0.3, momentum=0.2)

EXACT = {
    "cg": hypergrad.CG(steps=10),
    "exact": hypergrad.Exact(),
    "neumann": hypergrad.Neumann(steps=300),
    "unroll, sqrt": hypergrad.Unroll(FAST, steps=30, memory="sqrt"),
    "unroll, bytes": hypergrad.Unroll(FAST, steps=30, memory="1MiB"),
}


def dense_hessian(function):
    return torch.func.jacrev(torch.func.jacrev(function))


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def found_by(method, problem, params=None, hyper=None, **options):
    params, hyper = problem.params if params is None else params, problem.hyper if hyper is None else hyper
    return mg.hypergradient(problem.outer, problem.inner, params, hyper, method=method, **options)[
        "log_penalty"
    ]


@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT)
def test_exact_methods_give_the_derivative_of_the_closed_form(method):
    problem = ridge()
    assert relative(found_by(method, problem), problem.derivative) < 1e-8


def test_a_product_of_a_mlp_against_dense_matrices():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    params = {name: p.detach() for name, p in model.named_parameters()}
    hyper = {"log": [torch.randn(9, dtype=torch.float64)], "l2": torch.tensor(3.0, dtype=torch.float64)}

    def inner(params, hyper):
        losses = (torch.func.functional_call(model, params, (x,)) - y).square().squeeze(1)
        penalty = sum(p.square().sum() for p in params.values())
        return (hyper["log"][0].sigmoid() * losses).mean() + hyper["l2"] * penalty

    def outer(params, hyper):
        return torch.func.functional_call(model, params, (x.flip(1),)).exp().mean() * hyper["l2"]

    def flat(function):
        def of_vectors(p, h):
            sizes = [v.numel() for v in params.values()]
            parts = [a.view(v.shape) for a, v in zip(p.split(sizes), params.values(), strict=True)]
            return function(dict(zip(params, parts, strict=True)), {"log": [h[:9]], "l2": h[9]})

        return of_vectors

    p = torch.cat([v.flatten() for v in params.values()])
    h = torch.cat([hyper["log"][0], hyper["l2"][None]])
    H = torch.func.jacrev(torch.func.grad(flat(inner)))(p, h)
    mixed = torch.func.jacrev(torch.func.grad(flat(inner)), argnums=1)(p, h)
    along, direct = torch.func.grad(flat(outer), argnums=(0, 1))(p, h)
    expected = direct - mixed.T @ torch.linalg.solve(H, along)
    for method in (hypergrad.CG(steps=40), hypergrad.Exact()):
        found = mg.hypergradient(outer, inner, params, hyper, method=method)
        assert torch.allclose(torch.cat([found["log"][0], found["l2"][None]]), expected, rtol=1e-9)


@pytest.mark.parametrize("method", [hypergrad.CG(steps=10), hypergrad.Exact()], ids=["cg", "exact"])
def test_derivatives_of_the_derivative_are_those_of_the_closed_form_once(method):
    problem = ridge()
    lam = problem.hyper["log_penalty"].clone().requires_grad_()
    first = found_by(method, problem, hyper={"log_penalty": lam}, create_graph=True)
    weights = torch.linspace(1, 2, len(lam), dtype=lam.dtype)
    expected = dense_hessian(problem.closed)(lam.detach()) @ weights
    (second,) = torch.autograd.grad(first @ weights, lam, create_graph=True)
    assert relative(first.detach(), problem.derivative) < 1e-10
    assert relative(second.detach(), expected) < 1e-8
    with pytest.raises(RuntimeError, match="differentiated more often"):
        torch.autograd.grad(second.sum(), lam)


def test_a_derivative_on_the_tape_is_taken_at_the_same_parameters():
    for method in [hypergrad.CG(steps=10), hypergrad.Exact(damping=0.1)]:
        problem = ridge()
        away = {name: p + 0.1 for name, p in problem.params.items()}
        hyper = {name: leaf.clone().requires_grad_() for name, leaf in problem.hyper.items()}
        taped = found_by(method, problem, away, hyper, create_graph=True)
        found = found_by(method, problem, away, hyper)
        assert taped.requires_grad
        torch.testing.assert_close(taped.detach(), found)


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("make", [hypergrad.CG, hypergrad.Exact])
def test_the_derivative_of_a_damped_derivative_is_that_of_its_formula(make, damping):
    """The minimum of p^4 / 4 + (p - lam)^2 / 2 has the derivative 1 / (3 p^2 + 1), for any damping."""

    def inner(params, hyper):
        return params["p"] ** 4 / 4 + (params["p"] - hyper["lam"]) ** 2 / 2

    def outer(params, hyper):
        return params["p"] ** 3 + hyper["lam"] * params["p"]

    p = torch.tensor(0.8, dtype=torch.float64)
    lam = (p**3 + p).requires_grad_()
    found = mg.hypergradient(
        outer, inner, {"p": p}, {"lam": lam}, method=make(damping=damping), create_graph=True
    )["lam"]

    def formula(p):
        lam, curvature = p**3 + p, 3 * p**2 + 1
        return p + (3 * p**2 + lam) / (curvature + damping)

    assert found.item() == pytest.approx(formula(p).item())
    (second,) = torch.autograd.grad(found, lam)
    assert second.item() == pytest.approx((torch.func.grad(formula)(p) / (3 * p**2 + 1)).item())


@pytest.mark.parametrize("memory", ["full", "step"])
def test_unroll_has_derivatives_of_any_order(memory):
    problem = ridge(n=6, d=2)
    method = hypergrad.Unroll(mg.optim.rules.sgd(lr=0.3, momentum=0.5), steps=3, memory=memory)
    start = {"w": torch.ones(2, dtype=torch.float64)}

    def derivative(lam):
        return found_by(method, problem, start, {"log_penalty": lam}, create_graph=True)

    def textbook(lam):
        w, velocity = start["w"], torch.zeros(2, dtype=torch.float64)
        for _ in range(3):
            slope = problem.x.T @ (problem.x @ w - problem.y) / len(problem.y) + lam.exp() * w
            velocity = 0.5 * velocity + slope
            w = w - 0.3 * velocity
        return problem.outer({"w": w}, {"log_penalty": lam})

    lam = problem.hyper["log_penalty"].clone().requires_grad_()
    first = derivative(lam)
    (second,) = torch.autograd.grad(first.square().sum(), lam, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), lam)
    reference = torch.func.grad(textbook)
    of_second = torch.func.grad(lambda h: reference(h).square().sum())
    assert torch.allclose(first, reference(lam.detach()), rtol=1e-10)
    assert torch.allclose(second, of_second(lam.detach()), rtol=1e-10)
    assert torch.allclose(
        third, torch.func.grad(lambda h: of_second(h).square().sum())(lam.detach()), rtol=1e-9
    )


def test_the_rule_of_an_unroll_may_depend_on_hyper():
    problem = ridge()
    start = {"w": torch.zeros(6, dtype=torch.float64)}
    hyper = {**problem.hyper, "lr": torch.tensor(0.2, dtype=torch.float64)}
    method = hypergrad.Unroll(lambda hyper: mg.optim.rules.sgd(lr=hyper["lr"]), steps=1)
    found = mg.hypergradient(problem.outer, problem.inner, start, hyper, method=method)

    def textbook(lr):
        return problem.outer({"w": lr * problem.x.T @ problem.y / len(problem.y)}, problem.hyper)

    assert torch.allclose(found["lr"], torch.func.grad(textbook)(hyper["lr"]), rtol=1e-10)


def test_a_truncated_unroll_is_that_of_its_last_steps():
    """It starts at the minimum, so that the first steps do not move."""
    problem = ridge()
    found = found_by(hypergrad.Unroll(RULE, 8, truncate=3), problem)
    torch.testing.assert_close(found, found_by(hypergrad.Unroll(RULE, 3), problem), rtol=1e-9, atol=1e-12)


def test_a_neumann_series_is_the_sum_of_its_terms():
    problem = ridge()
    H = dense_hessian(lambda w: problem.inner({"w": w}, problem.hyper))(problem.params["w"])
    c = torch.func.grad(lambda w: problem.outer({"w": w}, problem.hyper))(problem.params["w"])
    u, term = torch.zeros_like(c), c
    for _ in range(3):
        u, term = u + 0.2 * term, term - 0.2 * H @ term
    lam, w = problem.hyper["log_penalty"], problem.params["w"]
    with pytest.warns(UserWarning, match="left a residual of"):
        found = found_by(hypergrad.Neumann(steps=3, scale=0.2), problem)
    assert torch.allclose(found, 0.1 * lam.cos() - lam.exp() * w * u, rtol=1e-10)


def test_a_nystrom_approximation_of_full_rank_is_exact():
    problem = ridge()
    found = found_by(hypergrad.Nystrom(rank=6, damping=0.1), problem)
    assert torch.allclose(found, found_by(hypergrad.Exact(damping=0.1), problem), rtol=1e-9)


def test_first_order_methods_are_their_formulas():
    problem = ridge()
    lam, w = problem.hyper["log_penalty"], problem.params["w"]
    c = torch.func.grad(lambda w: problem.outer({"w": w}, problem.hyper))(w)
    direct, t1t2 = 0.1 * lam.cos(), 0.1 * lam.cos() - 0.25 * lam.exp() * w * c
    assert torch.allclose(found_by(hypergrad.FirstOrder(), problem), direct, rtol=1e-10)
    assert torch.allclose(found_by(hypergrad.FirstOrder(scale=0.25), problem), t1t2, rtol=1e-10)
    # The inner loss is quadratic, so differences are exact but for rounding.
    assert torch.allclose(found_by(hypergrad.FiniteDifference(lr=0.25), problem), t1t2, rtol=1e-7)


def test_darts_takes_the_outer_gradient_after_a_step():
    problem = ridge()
    lam, w = problem.hyper["log_penalty"], problem.params["w"] + 0.1
    g = torch.func.grad(lambda w: problem.inner({"w": w}, problem.hyper))(w)
    c = torch.func.grad(lambda w: problem.outer({"w": w}, problem.hyper))(w - 0.25 * g)
    found = found_by(hypergrad.FiniteDifference(lr=0.25), problem, {"w": w})
    assert torch.allclose(found, 0.1 * lam.cos() - 0.25 * lam.exp() * w * c, rtol=1e-6)


def test_darts_does_not_lose_the_direct_derivative_in_large_slopes_of_the_inner_loss():
    """The mixed derivative of b is zero, and its slope 6e5, so a difference must cancel before anything is added."""
    found = mg.hypergradient(
        lambda p, h: p["w"] ** 2 + 1e-3 * h["b"],
        lambda p, h: (p["w"] - 1) ** 2 + 1e5 * h["b"] ** 2,
        {"w": torch.tensor(0.7)},
        {"b": torch.tensor(3.0)},
        method=hypergrad.FiniteDifference(lr=0.1),
    )
    assert found["b"].item() == pytest.approx(1e-3)


# Sparse hyperparameters and embedding tables


def test_edge_weights_have_a_derivative_on_their_pattern():
    torch.manual_seed(0)
    pattern = mg.sparse.Pattern(torch.tensor([0, 0, 1, 2, 3]), torch.tensor([1, 3, 2, 0, 1]), (4, 4))
    edges = mg.sparse.SparseTensor(pattern, torch.rand(5, dtype=torch.float64))
    features, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    params = {"w": torch.randn(3, dtype=torch.float64)}

    def inner(params, hyper):
        return (hyper["edges"] @ features @ params["w"] - y).square().mean() + params["w"].square().sum()

    def outer(params, hyper):
        return (features @ params["w"]).sin().sum() + hyper["edges"].values.square().sum()

    def closed(values):
        dense = torch.zeros(4, 4, dtype=torch.float64).index_put((pattern.row, pattern.col), values)
        A = dense @ features
        w = torch.linalg.solve(A.T @ A / 4 + torch.eye(3, dtype=torch.float64), A.T @ y / 4)
        return outer({"w": w}, {"edges": mg.sparse.SparseTensor(pattern, values)})

    A = edges.to_dense() @ features
    params["w"] = torch.linalg.solve(A.T @ A / 4 + torch.eye(3, dtype=torch.float64), A.T @ y / 4)
    expected = torch.func.grad(closed)(edges.values)
    for method in (hypergrad.CG(), hypergrad.Exact(), hypergrad.Unroll(mg.optim.rules.sgd(lr=0.2), 150)):
        found = mg.hypergradient(outer, inner, params, {"edges": edges}, method=method)["edges"]
        assert isinstance(found, mg.sparse.SparseTensor)
        assert found.pattern is pattern
        assert torch.allclose(found.values, expected, rtol=1e-8)


def test_parameters_may_be_sparse():
    pattern = mg.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
    target = torch.tensor([3.0, 5.0], dtype=torch.float64)
    params = {"a": mg.sparse.SparseTensor(pattern, 2 * target)}
    hyper = {"lam": torch.tensor(2.0, dtype=torch.float64)}

    def inner(params, hyper):  # values = lam * target
        return ((params["a"].values - hyper["lam"] * target) ** 2).sum()

    def outer(params, hyper):
        return (params["a"] @ torch.ones(2, 1, dtype=torch.float64)).square().sum()

    for method in (hypergrad.CG(), hypergrad.Exact(), hypergrad.Unroll(mg.optim.rules.sgd(lr=0.5), 1)):
        found = mg.hypergradient(outer, inner, params, hyper, method=method)
        assert found["lam"].item() == pytest.approx(4 * 34.0)


def test_a_learned_table_has_a_derivative_by_rows():
    table = torch.randn(50, dtype=torch.float64)[:, None]
    ids = torch.tensor([3, 7])

    def inner(params, hyper):
        rows = mg.sparse.embedding(ids, hyper["table"])[:, 0]
        return (params["w"] - rows).square().sum()

    def outer(params, hyper):
        return params["w"].square().sum() / 2

    found = mg.hypergradient(outer, inner, {"w": table[ids, 0].clone()}, {"table": table})["table"]
    expected = torch.zeros_like(table).index_copy(0, ids, table[ids])
    dense = found.to_dense() if found.layout != torch.strided else found
    assert torch.allclose(torch.as_tensor(dense) + torch.zeros(50, 1), expected, rtol=1e-9)


# Failures


def indefinite(params, hyper):
    return hyper["lam"] * (params["w"][0] ** 2 - params["w"][1] ** 2)


def square(params, hyper):
    return params["w"].square().sum() + params["w"].sum()


HYPER = {"lam": torch.tensor(1.0, dtype=torch.float64)}
POINT = {"w": torch.zeros(2, dtype=torch.float64)}


def test_an_indefinite_hessian_is_an_error():
    for method, message in [
        (hypergrad.CG(), "positive definite.*damping"),
        (hypergrad.Exact(), "positive definite.*damping"),
        (hypergrad.Neumann(), "The series diverges"),
    ]:
        with pytest.raises(SolveError, match=message):
            mg.hypergradient(square, indefinite, POINT, HYPER, method=method)


def test_failure_is_a_value_of_an_estimate():
    found = hypergrad.CG().estimate(Problem(square, indefinite, POINT, HYPER))
    assert found.solution is not None
    assert found.solution.result is Result.NEGATIVE_CURVATURE


METHODS = {
    **EXACT,
    "nystrom": hypergrad.Nystrom(rank=2),
    "first order": hypergrad.FirstOrder(scale=0.1),
    "difference": hypergrad.FiniteDifference(lr=0.1),
}


def test_what_no_loss_depends_on_is_refused_by_every_method_with_derivatives():
    for method in METHODS.values():
        with pytest.raises(ValueError, match=r"neither loss depends on hyper\['none'\]"):
            mg.hypergradient(
                square,
                lambda p, h: (p["w"] - h["lam"]).square().sum(),
                {"w": torch.ones(2, dtype=torch.float64)},
                {**HYPER, "none": torch.ones(2)},
                method=method,
            )


def test_derivatives_of_hyperparameters_are_partial_on_the_tape_too():
    for method in [hypergrad.Unroll(RULE, 3), hypergrad.CG(), hypergrad.Exact()]:
        for second in [lambda lam: lam, lambda lam: 2 * lam]:
            lam = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
            hyper = {"a": lam, "b": second(lam)}

            def inner(params, hyper):
                return (params["w"] - hyper["a"] ** 2 - hyper["b"] ** 3).square().sum()

            params = {"w": (hyper["a"] ** 2 + hyper["b"] ** 3).detach().expand(2)}
            found, taped = (
                mg.hypergradient(square, inner, params, hyper, method=method, create_graph=create_graph)
                for create_graph in (False, True)
            )
            assert {name: g.item() for name, g in taped.items()} == pytest.approx(
                {name: g.item() for name, g in found.items()}
            )


def test_inference_mode_is_refused():
    for method in METHODS.values():
        with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch\.inference_mode"):
            mg.hypergradient(square, indefinite, POINT, HYPER, method=method)


def test_a_derivative_has_the_dtypes_of_hyper_and_an_empty_part_an_empty_one():
    for method in METHODS.values():
        hyper = {
            "shift": torch.tensor(0.5),
            "scale": torch.tensor(2.0, dtype=torch.float64),
            "none": torch.zeros(0),
        }

        def inner(params, hyper):
            return (params["w"] - hyper["shift"]).square().sum() * hyper["scale"] + hyper["none"].sum()

        params = {"w": torch.full((2,), 0.5, dtype=torch.float64)}
        found = mg.hypergradient(
            lambda p, h: p["w"].exp().sum() * h["scale"], inner, params, hyper, method=method
        )
        assert [(g.dtype, g.shape) for g in found.values()] == [(h.dtype, h.shape) for h in hyper.values()]


def test_a_solve_that_stops_early_warns():
    problem = ridge()
    with pytest.warns(UserWarning, match=r"left a residual of .* Take more steps, a higher rank"):
        found_by(hypergrad.CG(steps=1), problem)
    with pytest.warns(UserWarning, match=r"left a residual of .* a higher rank"):
        found_by(hypergrad.Nystrom(rank=2, damping=0.01), problem)


def nan(params, hyper):
    return (params["w"] * hyper["lam"] * math.nan).square().sum()


BAD = {
    "nan or inf": (nan, POINT),
    r"inner_loss\(params, hyper\) must return a real scalar, got \(2,\)": (lambda p, h: p["w"], POINT),
    r"does not depend on params\['b'\]": (indefinite, {**POINT, "b": POINT["w"]}),
}


def test_bad_inner_losses():
    for message, (inner, params) in BAD.items():
        with pytest.raises(ValueError, match=message):
            mg.hypergradient(square, inner, params, HYPER)


def test_what_is_not_exact_is_not_differentiated():
    problem, difference = ridge(), METHODS["difference"]
    for method in (hypergrad.Neumann(), hypergrad.Nystrom(), hypergrad.FirstOrder(), difference):
        with pytest.raises(ValueError, match=r"create_graph=True\): .* Take CG, Exact or Unroll"):
            found_by(method, problem, create_graph=True)


def test_a_table_with_sparse_gradients_is_refused():
    for method in [hypergrad.CG(), hypergrad.Unroll(RULE, 1), hypergrad.FiniteDifference(0.1)]:

        def inner(params, hyper):
            rows = mg.sparse.embedding(torch.tensor([0]), params["table"])
            return (rows - hyper["lam"]).square().sum()

        table = {"table": torch.zeros(3, 1, dtype=torch.float64)}
        with pytest.raises(ValueError, match=r"the gradient of .*table.* is (row-)?sparse"):
            mg.hypergradient(lambda p, h: p["table"].sum(), inner, table, HYPER, method=method)


def test_inside_a_transform_it_is_refused():
    problem, lam = ridge(), ridge().hyper["log_penalty"]
    with pytest.raises(ValueError, match=r"inside a torch.func transform there is no autograd graph"):
        torch.func.grad(lambda lam: found_by(hypergrad.CG(), problem, hyper={"log_penalty": lam}).sum())(lam)


class Alternating:
    """Gradient descent on one of two parameters at a time. The other one is returned unchanged."""

    def init(self, params):
        return 0

    def update(self, grads, step, params):
        moving = "ab"[step % 2]
        return {name: p - 0.1 * grads[name] if name == moving else p for name, p in params.items()}, step + 1


def test_a_parameter_that_a_rule_returns_unchanged_is_still_a_variable():
    start = {name: torch.ones(3, dtype=torch.float64, requires_grad=True) for name in "ab"}
    hyper = {"scale": torch.tensor(0.7, dtype=torch.float64, requires_grad=True)}
    inner = lambda p, h: (p["a"] @ p["b"] - 1) ** 2 + h["scale"] * (p["a"] ** 2).sum()  # noqa: E731
    outer = lambda p, h: (p["a"] * p["b"]).sum()  # noqa: E731
    full, step = (
        mg.hypergradient(inner, outer, start, hyper, method=hypergrad.Unroll(Alternating(), 4, memory=memory))
        for memory in ("full", "step")
    )
    torch.testing.assert_close(full, step, rtol=1e-12, atol=0)
