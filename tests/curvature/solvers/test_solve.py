"""Every method on every kind of system, derivatives of solutions, and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metagrad as mg
from metagrad.curvature.solvers.methods import Neumann
from metagrad.curvature.solvers.solution import Result, SolveError
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap, basis, drawn, matrix, seeded

# torch builds its forward-mode decompositions with torch.jit, on their first use.

METHODS = {
    "cg": {"method": "cg"},
    "pcg": {"method": "cg", "preconditioner": lambda rows: rows / 2},
    "jacobi": {"preconditioner": lambda rows: rows / torch.linspace(1, 2, 20, dtype=torch.float64)},
    "neumann": {"method": Neumann(scale=0.4), "max_steps": 2000},
    "dense": {"method": "dense"},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_solves_a_positive_definite_system(name):
    for damping in [0.0, 0.7]:
        A, b = matrix("flat", 20), drawn(20)
        operator = MatrixMap(A)
        solution = solve(operator, b, damping=damping, rtol=1e-9, generator=seeded(), **METHODS[name])
        assert solution.result is Result.CONVERGED
        expected = torch.linalg.solve(A + damping * torch.eye(20), b)
        torch.testing.assert_close(solution.value, expected, rtol=1e-7, atol=1e-8)
        residual = (b - A @ solution.value - damping * solution.value).norm()
        torch.testing.assert_close(solution.stats.residual_norms, residual, rtol=1e-5, atol=1e-14)
        assert solution.stats.residual_norms <= 1.1e-9 * b.norm()
        assert solution.stats.matvecs == operator.matvecs
        assert solution.stats.direction is None


def test_rows_are_solved_as_one_by_one():
    for name in METHODS:
        A, b, x0 = matrix("flat", 20), drawn(4, 20), drawn(4, 20, seed=1)
        b[1], b[2] = 0, A @ x0[2]
        options = {**METHODS[name], "rtol": 1e-8}
        together = solve(MatrixMap(A), b, x0=x0, generator=seeded(), **options)
        assert together.value.shape == b.shape
        for row in range(4):
            alone = solve(MatrixMap(A), b[row], x0=x0[row], generator=seeded(), **options)
            assert alone.result is together.stats.results[row]
            assert alone.stats.steps == together.stats.steps[row]
            assert alone.stats.steps.ndim == alone.stats.residual_norms.ndim == 0
            torch.testing.assert_close(together.value[row], alone.value, rtol=1e-6, atol=1e-9)
        assert together.stats.steps[2] == 0


class Stack:
    """Several matrices as one map. Each matrix has a row."""

    def __init__(self, matrices):
        self.matrices = matrices
        self.num_matrices = len(matrices)
        self.shape, self.dtype, self.device = matrices.shape[1:], matrices.dtype, matrices.device

    def multiply(self, rows):
        assert len(rows) == self.num_matrices
        return torch.einsum("kij,kj->ki", self.matrices, rows)


def test_rows_may_have_matrices_of_their_own():
    for name in ["cg", "neumann", "dense"]:
        matrices = torch.stack([matrix("flat", 8), matrix("step", 8) + torch.eye(8), torch.eye(8).double()])
        b, options = drawn(3, 8), {**METHODS[name], "rtol": 1e-9}
        found = solve(Stack(matrices), b, **options)
        for i in range(3):
            alone = solve(MatrixMap(matrices[i]), b[i], **options)
            torch.testing.assert_close(found.value[i], alone.value, rtol=1e-8, atol=1e-9)
            assert found.stats.steps[i] == alone.stats.steps
        b = b.requires_grad_()
        (slope,) = torch.autograd.grad(solve(Stack(matrices), b, **options).value.sum(), b)
        expected = torch.linalg.solve(matrices, torch.ones(3, 8, 1).double())[..., 0]
        torch.testing.assert_close(slope, expected, rtol=1e-7, atol=1e-8)


def test_each_matrix_has_one_row():
    with pytest.raises(ValueError, match=r"b must be rows \[2, 4\], one for each matrix, got \[3, 4\]"):
        solve(Stack(torch.eye(4).double().expand(2, 4, 4)), drawn(3, 4))


def test_a_factorization_says_what_is_not_positive_definite():
    A = torch.diag(torch.tensor([1.0, -1.0]).double())
    assert solve(MatrixMap(A), drawn(2), method="dense").result is Result.NEGATIVE_CURVATURE
    assert solve(MatrixMap(A * torch.nan), drawn(2), method="dense").result is Result.NON_FINITE
    with pytest.raises(ValueError, match="a factorization needs none"):
        solve(MatrixMap(A), drawn(2), method="dense", preconditioner=lambda rows: rows)


def test_zero_and_the_identity():
    for name in METHODS:
        eye, b = MatrixMap(torch.eye(20).double()), drawn(20)
        zero = solve(eye, torch.zeros(20).double(), generator=seeded(), **METHODS[name])
        assert zero.result is Result.CONVERGED
        assert torch.equal(zero.value, torch.zeros(20).double())
        assert zero.stats.steps == 0
        options = {**METHODS[name], **({"method": Neumann(scale=1.0)} if name == "neumann" else {})}
        if name == "jacobi":
            options = {"preconditioner": lambda rows: rows / 3.0}
        one = solve(eye, b, generator=seeded(), **options)
        torch.testing.assert_close(one.value, b)
        assert one.stats.steps == 1


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 12), k=st.integers(1, 3), seed=st.integers(0, 10**6), log=st.floats(-3, 1))
def test_any_damped_positive_semi_definite_system(n, k, seed, log):
    factor = drawn(n, max(1, n // 2), seed=seed)
    A, b, damping = factor @ factor.t(), drawn(k, n, seed=seed + 1), 10.0**log
    expected = torch.linalg.solve(A + damping * torch.eye(n), b.t()).t()
    for method in ("cg", "dense"):
        solution = solve(MatrixMap(A), b, method=method, damping=damping, rtol=1e-9, generator=seeded())
        torch.testing.assert_close(solution.value, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


def test_no_right_hand_sides():
    solution = solve(MatrixMap(torch.eye(3)), torch.zeros(0, 3))
    assert solution.value.shape == (0, 3)
    assert solution.result is Result.CONVERGED
    assert repr(solution) == "Solution(CONVERGED: 0 steps, 2 products)"


def test_the_absolute_tolerance_holds_for_all_rows():
    A = torch.diag(torch.linspace(1, 100, 20, dtype=torch.float64))
    b = torch.stack([drawn(20), 1e-3 * drawn(20)])
    solution = solve(MatrixMap(A), b, rtol=0.0, atol=1e-2)
    assert (solution.stats.residual_norms <= 1e-2).all()
    assert solution.stats.steps[0] > 3
    assert solution.stats.steps[1] == 0


# How it ends


def test_more_steps_than_allowed():
    solution = solve(MatrixMap(matrix("flat", 30)), drawn(30), max_steps=2)
    assert solution.result is Result.MAX_STEPS
    assert solution.stats.steps == 2
    with pytest.raises(SolveError, match=r"right-hand side 0 of 1, after 2 steps .* max_steps was"):
        solve(MatrixMap(matrix("flat", 30)), drawn(30), max_steps=2, throw=True)


def test_a_residual_of_the_recurrence_alone_is_no_convergence():
    A = (basis(30) * torch.logspace(0, -4, 30, dtype=torch.float64)) @ basis(30).t()
    operator, b = MatrixMap(((A + A.t()) / 2).float()), torch.ones(30)
    solution = solve(operator, b, rtol=1e-7)
    assert solution.result is Result.STAGNATED
    assert solution.stats.residual_norms > 1e-5
    with pytest.raises(SolveError, match="the true residual is larger: rounding errors"):
        solve(operator, b, rtol=1e-7, throw=True)


class Failing(MatrixMap):
    """Gives NaN from a product on."""

    def __init__(self, matrix, after):
        super().__init__(matrix)
        self.after = after

    def multiply(self, vectors):
        products = super().multiply(vectors)
        return products if self.matvecs <= self.after else products * torch.nan


@pytest.mark.parametrize("method", ["cg", Neumann(scale=0.1)])
def test_a_product_that_is_not_finite_ends_with_the_iterate_before(method):
    A, b = matrix("flat", 30), drawn(30)
    solution = solve(Failing(A, after=2), b, method=method, check_symmetry=False)
    assert solution.result is Result.NON_FINITE
    assert solution.stats.steps == 2
    before = solve(MatrixMap(A), b, method=method, max_steps=2)
    torch.testing.assert_close(solution.value, before.value)
    with pytest.raises(SolveError, match=r"A product of the operator .* has NaN or inf"):
        solve(Failing(A, after=0), b, method=method, throw=True)


def test_an_indefinite_preconditioner_is_told():
    signs = torch.tensor([1.0, -1.0, -1.0])
    solution = solve(MatrixMap(torch.eye(3)), torch.ones(3), preconditioner=lambda rows: rows * signs)
    assert solution.result is Result.BREAKDOWN
    assert "preconditioner is not positive definite" in solution.result.value


# Derivatives

N = 4
BASE = (basis(N) * torch.linspace(1, 3, N, dtype=torch.float64)) @ basis(N).t()


def dense(theta, damping):
    A = BASE + theta @ theta.t() + torch.diag(theta.sum(0).square())
    return A + damping * torch.eye(N, dtype=theta.dtype)


def solution_of(theta, b, damping, **options):
    A = dense(theta, 0.0)
    return solve(MatrixMap(A), b, damping=damping, rtol=1e-13, check_symmetry=False, **options).value


def leaves():
    theta, b = 0.3 * drawn(N, N), drawn(2, N, seed=1)
    return [x.requires_grad_() for x in (theta, b, torch.tensor(0.3, dtype=torch.float64))]


def derivatives(value, inputs, order):
    """Gradients of all orders, each of a non-linear contraction of the one before, and of the value."""
    found, level = [], (value**3).sum()
    for _ in range(order):
        gradients = torch.autograd.grad(level, inputs, create_graph=True)
        assert all(g.requires_grad for g in gradients)
        found.extend(gradients)
        level = level + sum((g**3).sum() for g in gradients)
    return found


DIFFERENTIATED = {
    "cg": {"method": "cg"},
    "pcg": {"preconditioner": lambda rows: rows / torch.linspace(1, 2, N, dtype=torch.float64)},
    "neumann": {"method": Neumann(scale=0.1), "max_steps": 2000},
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_are_those_of_the_dense_solve(name):
    theta, b, damping = inputs = leaves()
    options = DIFFERENTIATED[name]
    value = solution_of(theta, b, damping, generator=seeded(), **options)
    expected = torch.linalg.solve(dense(theta, damping), b.t()).t()
    torch.testing.assert_close(value, expected)
    order = 2 if name == "neumann" else 3
    for got, wanted in zip(
        derivatives(value, inputs, order), derivatives(expected, inputs, order), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8 * float(wanted.detach().norm()) + 1e-9)


def test_a_first_derivative_costs_one_solve_and_the_graph_of_one_product():
    theta, b, _ = leaves()
    operator = MatrixMap(dense(theta, 0.0))
    solution = solve(operator, b[0], rtol=1e-13, order=1)
    forward = operator.matvecs
    assert forward == solution.stats.matvecs == 2 + N + 1
    torch.autograd.grad(solution.value.sum(), theta, retain_graph=True)
    assert operator.matvecs - forward == N
    torch.autograd.grad(solution.value.sum(), theta, create_graph=True)
    assert operator.matvecs - forward == 2 * N
    deeper = MatrixMap(dense(theta, 0.0))
    assert solve(deeper, b[0], rtol=1e-13, order=3).stats.matvecs == deeper.matvecs == forward + 2
    before = deeper.matvecs
    torch.autograd.grad(solve(deeper, b[0], rtol=1e-13, order=3).value.sum(), theta)
    assert deeper.matvecs - before == 2 + N + 3 + N


def test_one_derivative_too_many_raises():
    for order in [1, 2]:
        theta, b, damping = leaves()
        level = solution_of(theta, b, damping, order=order)
        for _ in range(order):
            (level,) = torch.autograd.grad((level**3).sum(), theta, create_graph=True)
        with pytest.raises(
            RuntimeError, match=rf"order={order}\): .* differentiated more often .* order={order + 1}"
        ):
            torch.autograd.grad((level**3).sum(), theta)


def test_a_constant_operator_has_any_order():
    _, b, _ = leaves()
    A = BASE
    value = solve(MatrixMap(A), b, rtol=1e-13, order=1).value
    expected = torch.linalg.solve(A, b.t()).t()
    for got, wanted in zip(derivatives(value, [b], 4), derivatives(expected, [b], 4), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


def test_truncated_implicit_derivatives_are_those_of_truncated_solves():
    A = torch.diag(torch.linspace(1, 5, 10, dtype=torch.float64))
    b = drawn(10).requires_grad_()
    options = {"method": Neumann(scale=0.1), "max_steps": 3, "check_symmetry": False}
    x = solve(MatrixMap(A), b, **options).value
    g = drawn(10, seed=1)
    (gradient,) = torch.autograd.grad(x, b, g)
    torch.testing.assert_close(gradient, solve(MatrixMap(A), g, **options).value)


def test_a_value_that_is_no_solution_has_no_implicit_derivative():
    indefinite = solve(MatrixMap(-torch.eye(2)), torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"the value is not a solution.*positive curvature"):
        indefinite.value.sum().backward()


def test_a_solve_that_fails_in_the_backward_pass_raises():
    A = torch.diag(torch.tensor([1.0, -1.0]))
    b = torch.tensor([1.0, 0.0], requires_grad=True)
    x = solve(MatrixMap(A), b, method="cg").value
    with pytest.raises(SolveError, match="the solve of its derivative failed: A direction without positive"):
        x.sum().backward()
    torch.autograd.grad(x[0], b)


def test_a_solve_that_stops_early_in_the_backward_pass_warns():
    A, b = torch.diag(torch.linspace(1, 9, 30)), torch.zeros(30)
    b[0] = 1
    x = solve(MatrixMap(A), b.requires_grad_(), max_steps=2).value
    with pytest.warns(UserWarning, match="the solve of its derivative did not within 2 steps"):
        x.sum().backward()


def test_the_absolute_tolerance_is_relative_in_the_backward_pass():
    A, b = matrix("flat", 20), (1e6 * drawn(20)).requires_grad_()
    x = solve(MatrixMap(A), b, rtol=0.0, atol=1e-2).value
    g = 1e-6 * drawn(20, seed=1)
    (gradient,) = torch.autograd.grad(x, b, g)
    torch.testing.assert_close(gradient, torch.linalg.solve(A, g), rtol=1e-5, atol=1e-13)


# torch.func


def of(name, inputs):
    """A scalar of the solution, of one input."""
    position = ["theta", "b", "damping"].index(name)

    def scalar(solver):
        return lambda x: (solver(*inputs[:position], x, *inputs[position + 1 :]) ** 3).sum()

    return scalar


def reference(theta, b, damping):
    return torch.linalg.solve(dense(theta, damping), b.t()).t()


@pytest.mark.parametrize("name", ["theta", "b", "damping"])
def test_reverse_mode_of_torch_func(name):
    inputs = [x.detach() for x in leaves()]
    scalar, x = of(name, inputs), inputs[["theta", "b", "damping"].index(name)]
    for transform in (
        torch.func.grad,
        lambda f: torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 3).sum()),
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    ):
        torch.testing.assert_close(transform(scalar(solution_of))(x), transform(scalar(reference))(x))


def test_forward_mode_is_an_error():
    for name in ["theta", "b", "damping"]:
        inputs = [x.detach() for x in leaves()]
        x = inputs[["theta", "b", "damping"].index(name)]
        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(of(name, inputs)(solution_of), (x,), (torch.ones_like(x),))


def test_batched_transforms_of_old_and_of_b_are_refused():
    theta, b, damping = leaves()
    value = solution_of(theta, b, damping)
    with pytest.raises(ValueError, match="does not work under is_grads_batched=True"):
        torch.autograd.grad(value, b, torch.ones(3, 2, N).double(), is_grads_batched=True)
    with pytest.raises(ValueError, match=r"b has a dimension of vmap.*Pass rows \[k, 4\]"):
        torch.vmap(lambda b: solution_of(theta, b, damping))(b)


# Operators and preconditioners that are not symmetric


def test_small_asymmetries_are_found_and_rounding_is_not():
    for n in [5, 30, 300]:
        A = matrix("flat", n).float()
        solve(MatrixMap(A), torch.ones(n), max_steps=1)
        skew = torch.randn(n, n, generator=seeded()).triu(1)
        with pytest.raises(ValueError, match="operator must be symmetric"):
            solve(MatrixMap(A + 0.2 * (skew - skew.t()) / n**0.5), torch.ones(n))


def test_a_preconditioner_that_is_not_symmetric_is_refused():
    M = torch.tensor([[2.0, 1.0], [0.0, 2.0]])
    with pytest.raises(ValueError, match="preconditioner must be symmetric"):
        solve(MatrixMap(torch.eye(2)), torch.ones(2), preconditioner=lambda rows: rows @ M)
    with pytest.raises(ValueError, match=r"preconditioner: expected rows .*\(2, 2\).*got \(2,\)"):
        solve(MatrixMap(torch.eye(2)), torch.ones(2), preconditioner=lambda rows: rows.sum(1))


def test_the_check_leaves_random_numbers_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    solve(MatrixMap(torch.eye(2)), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


# Half precision


def test_factorisations_of_half_precision_ended_in_errors_about_kernels():
    for dtype in [torch.float16, torch.bfloat16]:
        w = torch.ones(3, dtype=dtype, requires_grad=True)
        with mg.curvature.hessian((w**2).sum(), {"w": w}) as H:
            with pytest.raises(TypeError, match=f"factorizes a matrix, .* got an operator of {dtype}"):
                solve(H, torch.ones(3, dtype=dtype), method="dense")
            assert torch.equal(solve(H, torch.ones(3, dtype=dtype)).value, torch.full_like(w, 0.5))


def test_norms_out_of_the_range_of_float16_are_scaled():
    for size in [1e-5, 2e4]:
        x = torch.zeros(60, dtype=torch.float16, requires_grad=True)
        with mg.hessian(x.square().sum() / 2, {"x": x}) as H:
            b = torch.full((60,), size, dtype=torch.float16)
            solution = H.solve(b, method="cg")
            assert torch.equal(solution.value, b)
            assert float(solution.stats.residual_norms) == 0.0
            assert not H.solve(torch.zeros(60, dtype=torch.float16), method="cg").value.any()
