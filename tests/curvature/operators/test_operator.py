"""The algebra of operators, their products in every form, and their estimates and solutions."""

import numpy as np
import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.sparse import SparseTensor
from tests.frames import frames_of
from tests.meta.checks.test_preflight import Detached, Wrong


class Dense(Operator):
    """A matrix on two parameters."""

    def __init__(self, matrix, space=None):
        super().__init__(space or space_of(matrix.dtype))
        self.matrix = matrix
        self.freed = 0

    def _products(self, vectors):
        return vectors @ self.matrix

    def _free(self):
        self.freed += 1


def space_of(dtype=torch.float64):
    return ParameterSpace({"a.w": torch.zeros(2, 2, dtype=dtype), "b": torch.zeros(2, dtype=dtype)})


def matrix(seed=0, dtype=torch.float64):
    half = torch.randn(6, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return half @ half.t() / 6


A, B = matrix(0), matrix(1)


def test_products_in_every_form():
    H, v = Dense(A), torch.randn(6, dtype=torch.float64)
    assert (H.shape, H.dtype, H.device) == ((6, 6), torch.float64, torch.device("cpu"))
    torch.testing.assert_close(H @ v, A @ v)
    columns = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(H @ columns, A @ columns)
    torch.testing.assert_close(H @ SparseTensor.from_dense(columns), A @ columns)
    torch.testing.assert_close(H.multiply(columns.t()), (A @ columns).t())
    tree = H @ H.space.unflatten(v)
    assert tree["a.w"].shape == (2, 2)
    torch.testing.assert_close(H.space.flatten(tree), A @ v)
    stack = H @ H.space.unflatten(columns.t())
    torch.testing.assert_close(H.space.flatten(stack), (A @ columns).t())
    torch.testing.assert_close(H.to_dense(), A)
    assert (H @ columns[:, :0]).shape == (6, 0)


def test_sums_scalings_damping_and_blocks():
    left, right = Dense(A), Dense(B)
    eye = torch.eye(6, dtype=torch.float64)
    for operator, expected in [
        (left + right, A + B),
        (left - right, A - B),
        (-left, -A),
        (2 * left, 2 * A),
        (left * 0.5, 0.5 * A),
        (torch.tensor(3.0) * left, 3 * A),
        (left / 4, A / 4),
        (left.damped(0.1), A + 0.1 * eye),
        ((left + right) + (left - 2 * right), 2 * A - B),
        (left["a.w"], A[:4, :4]),
        (left["a"], A[:4, :4]),
        ((left + 2 * right)["b"], (A + 2 * B)[4:, 4:]),
        (left["b"].damped(1.0), A[4:, 4:] + eye[:2, :2]),
    ]:
        torch.testing.assert_close(operator.to_dense(), expected)


def test_factors_can_be_differentiated():
    def products(factor, delta, v):
        return (factor * Dense(A)).damped(delta) @ v

    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, 0.3)]
    v = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert mg.gradcheck(products, (*inputs, v), order=2)


def test_operators_on_other_parameters_do_not_add():
    other = Operator(ParameterSpace({"c": torch.zeros(6, dtype=torch.float64)}))
    with pytest.raises(ValueError, match=r"A \+ B: .* on the same parameters.*a.w, b.*, got .*c\)"):
        Dense(A) + other
    for operation in (lambda: Dense(A) + 1.0, lambda: Dense(A) - 1.0, lambda: Dense(A) * None):
        with pytest.raises(TypeError, match="unsupported operand"):
            operation()


def test_a_damping_is_one_number():
    with pytest.raises(
        TypeError, match=r"H\.damped\(delta\): delta: expected a number or a tensor, got 'str'"
    ):
        Dense(A).damped("0.1")
    with pytest.raises(ValueError, match=r"H\.damped\(delta\): delta: expected a number .*, got \(2,\)"):
        Dense(A).damped(torch.ones(2))


def test_what_is_not_finite_is_named():
    broken = A.clone()
    broken[5, 5] = torch.inf
    with pytest.raises(ValueError, match="the product has nan or inf in the entry of 'b'"):
        Dense(broken) @ torch.ones(6, dtype=torch.float64)
    v = torch.ones(6, dtype=torch.float64)
    v[1] = torch.nan
    with pytest.raises(ValueError, match=r"v has nan or inf in the entry of 'a\.w'"):
        Dense(A) @ v


def test_closing_frees_the_parts_once():
    left, right = Dense(A), Dense(B)
    with (2 * left + right).damped(1.0)["b"] as block:
        assert not block.is_closed
    assert (left.freed, right.freed) == (1, 1)
    block.close()
    assert left.freed == 1
    for closed in (left, block):
        with pytest.raises(ValueError, match="H is closed, and its graph is freed"):
            closed @ torch.zeros(closed.shape[0], dtype=torch.float64)
    with pytest.raises(KeyError), Dense(A) as H:
        raise KeyError
    assert H.is_closed


def test_scipy():
    from scipy.sparse.linalg import cg, eigsh

    operator = Dense(A).damped(0.1).to_scipy()
    dense = (A + 0.1 * torch.eye(6)).numpy()
    b = np.arange(6.0)
    assert operator.dtype == np.float64
    np.testing.assert_allclose(operator @ b, dense @ b)
    np.testing.assert_allclose(operator @ np.eye(6)[:, :2], dense[:, :2])
    np.testing.assert_allclose(operator.T @ b, dense @ b)
    np.testing.assert_allclose(operator @ b[::-1], dense @ b[::-1])  # of a negative stride
    np.testing.assert_allclose(operator @ np.broadcast_to(1.0, 6), dense.sum(1))  # read-only
    np.testing.assert_allclose(
        cg(operator, b, rtol=1e-12)[0], np.linalg.solve(dense, b), rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(eigsh(operator, 2)[0], np.linalg.eigvalsh(dense)[-2:])
    assert Dense(A.float()).to_scipy().dtype == np.float32
    with pytest.raises(ValueError, match=r"NumPy has no torch\.bfloat16"):
        Dense(A.bfloat16()).to_scipy()


# Estimates and solutions


def test_estimates_and_solutions():
    H = Dense(A).damped(0.5)
    dense = A + 0.5 * torch.eye(6)
    generator = torch.Generator().manual_seed(0)
    for estimate, expected in [
        (H.trace(method="hutchinson", probes=64, generator=generator), dense.trace()),
        (H.log_determinant(probes=64, generator=generator), dense.logdet()),
    ]:
        low, high = estimate.interval(0.9999)  # its coverage is tested with the estimators
        assert low < expected < high
    pairs = H.eigenvalues(2)
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(dense).flip(0)[:2])
    assert H.space.unflatten(pairs.vectors)["a.w"].shape == (2, 2, 2)
    assert H.density(probes=2).n == 6


def test_solutions_have_the_form_of_the_right_hand_side():
    H, b = Dense(A), torch.arange(6.0).double()
    expected = torch.linalg.solve(A + 0.1 * torch.eye(6), b)
    torch.testing.assert_close(H.solve(b, damping=0.1, rtol=1e-12).value, expected, rtol=1e-6, atol=1e-9)
    tree = H.space.unflatten(b)
    solution = H.solve(
        tree, damping=0.1, rtol=1e-12, x0=tree, preconditioner=lambda rows: rows / A.diagonal()
    )
    torch.testing.assert_close(H.space.flatten(solution.value), expected, rtol=1e-6, atol=1e-9)


def test_preconditioned_operators_have_the_eigenvalues_of_the_quotient():
    root = torch.linalg.cholesky(B + torch.eye(6, dtype=torch.float64))
    symmetric = root @ root.mT
    quotient = torch.linalg.eigvals(symmetric @ symmetric @ A).real.sort()[0]
    H = Dense(A).preconditioned(lambda rows: rows @ symmetric)
    torch.testing.assert_close(torch.linalg.eigvalsh(H.to_dense()), quotient)
    torch.testing.assert_close(H.trace(method="exact").value, torch.trace(symmetric @ symmetric @ A))
    d = torch.arange(1.0, 7.0, dtype=torch.float64)
    expected = d[:, None] * A * d
    for diagonal in (d, space_of().unflatten(d)):
        torch.testing.assert_close(Dense(A).preconditioned(diagonal).to_dense(), expected)


def test_roots_of_preconditioners_are_checked():
    call = r"H.preconditioned\(root\): "
    with pytest.raises(ValueError, match=call + r"root must be symmetric, .* Take the symmetric root"):
        Dense(A).preconditioned(lambda rows: rows @ torch.linalg.cholesky(A))
    with pytest.raises(ValueError, match=call + r"expected .* a diagonal \[6\] of .*, got \[5\] of"):
        Dense(A).preconditioned(torch.ones(5, dtype=torch.float64))


class Quartic(nn.Module):
    """The output is w^2, and the Hessian of the sum of its squares 12 scale w^2."""

    gain: torch.Tensor

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.scale = 1.0
        self.register_buffer("gain", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.scale**0.5 * self.gain * self.w**2 * x


def quartic(kind, model, x):
    params = dict(model.named_parameters())
    if kind == "ggn":
        return mg.ggn(model, lambda output, y: output.square().sum(), params, (x, x))
    return mg.hessian(model(x).square().sum(), params)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_a_product_after_a_step_mixed_two_points(kind):
    model, x = Quartic(), torch.ones(2, dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)

    def write():
        with torch.no_grad():
            model.w.add_(1.0)

    for step in (write, lambda: nn.utils.vector_to_parameters(model.w.detach() + 1.0, [model.w])):
        with quartic(kind, model, x) as H:
            H @ ones
            step()
            with pytest.raises(ValueError, match=r"w'.* was written since"):
                H @ ones
    with quartic(kind, model, x) as H:
        H @ ones
        x.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            H @ ones


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_a_product_after_the_module_changed_is_of_the_module_as_it_was(kind):
    model, x = Quartic(), torch.ones(2, dtype=torch.float64)
    with quartic(kind, model, x) as H:
        model.gain.add_(1.0)
        model.scale = 5.0
        expected = (8 if kind == "ggn" else 12) * model.w.detach() ** 2
        torch.testing.assert_close(H @ torch.ones(2, dtype=torch.float64), expected)


def test_a_product_is_six_frames_away():
    def is_reached(frame, event, function):
        return event == "call" and frame.f_code is torch.autograd.grad.__code__

    w = torch.ones(2, requires_grad=True)
    with mg.hessian((w**3).sum(), {"w": w}) as H:
        assert 0 < len(frames_of(lambda: H @ torch.ones(2), is_reached)) <= 6


class Hooked(nn.Module):
    """A network whose hidden features have a hook on their gradient."""

    def __init__(self, hook):
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(3, 4), nn.Linear(4, 3), hook

    def forward(self, x):
        features = torch.tanh(self.first(x))
        features.register_hook(self.hook)
        return self.last(features)


HOOKS = {  # whether the gradient stays a linear function of the cotangent
    "looks": (True, lambda g: None),
    "scales": (True, lambda g: 0.3 * g),
    "masks": (True, lambda g: g * torch.tensor([0, 1, 0, 1])),
    "detaches": (False, lambda g: 0.3 * g.detach()),
    "clips": (False, lambda g: g.clamp(-1e-3, 1e-3)),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_operators_of_graphs_with_hooks_are_symmetric_or_an_error(hook):
    is_linear, function = HOOKS[hook]
    torch.manual_seed(0)
    model = Hooked(function).double()
    params = dict(model.named_parameters())
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    cross_entropy = nn.functional.cross_entropy
    for make in (
        lambda: mg.ggn(model, cross_entropy, params, (x, y)),
        lambda: mg.fisher(model, cross_entropy, params, (x, y), kind="empirical"),
        lambda: mg.hessian(cross_entropy(model(x), y), params),
        lambda: mg.hessian(lambda p: cross_entropy(torch.func.functional_call(model, p, (x,)), y), params),
    ):
        vectors = torch.randn(2, make().shape[0], dtype=torch.float64)
        for use in (
            lambda H: H.to_dense(),
            lambda H: H.multiply(vectors),  # noqa: B023
            lambda H: [H @ v for v in vectors],  # noqa: B023
            lambda H: H.trace(method="hutchinson", probes=2),
        ):
            if is_linear:
                use(make())
            else:
                with pytest.raises(ValueError, match=r"H @ v: H is not symmetric: .* A hook"):
                    use(make())


@pytest.mark.parametrize("function", [Detached, Wrong], ids=lambda f: f.__name__)
def test_a_custom_function_is_named_before_it_is_differentiated_twice(function):
    w, x = torch.randn(3, requires_grad=True), torch.randn(4, 3)

    def loss(params):
        return function.apply(x @ params["w"]).sum()

    for use in (
        lambda: mg.hessian(loss({"w": w}), {"w": w}),
        lambda: mg.hessian(loss, {"w": w}),
        lambda: mg.autograd.linearize(loss({"w": w}), {"w": w}),
        lambda: (
            mg.ggn(lambda p, x: function.apply(x @ p["w"]), nn.functional.mse_loss, {"w": w}, (x, x[:, 0]))
            @ w
        ),
    ):
        with pytest.warns(UserWarning, match=rf"custom autograd.Function {function.__name__}, which"):
            use()


def test_products_of_functions_leave_buffers_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    params, x, y = dict(model.named_parameters()), torch.randn(6, 3), torch.randint(3, (6,))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def predict(params, x):
        return torch.func.functional_call(model, params, (x,))

    def loss(params, x, y):
        return nn.functional.cross_entropy(predict(params, x), y)

    v = {name: torch.ones_like(p) for name, p in params.items()}
    for data in ((x, y), [(x, y), (x, y)]):
        mg.hessian(loss, params, data) @ v
        for network in (model, predict):
            mg.ggn(network, nn.functional.cross_entropy, params, data) @ v
            mg.fisher(network, nn.functional.cross_entropy, params, data, kind="empirical") @ v
    mg.hvp(loss, params, v, x, y)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    model(x)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
