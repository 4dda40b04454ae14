"""iMAML against a loop over tasks with dense matrices."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad import hypergrad
from metagrad.curvature import SolveError
from metagrad.memory.storages import StorageCounter, StorageMode
from tests.marks import covering, slow
from tests.meta.textbook import Scaled

SGD = mg.optim.rules.sgd(lr=0.1)
LAMBDA = 2.0


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def make(seed=0, **arguments):
    torch.manual_seed(seed)
    options = {"inner": SGD, "steps": 30, "proximal": LAMBDA, **arguments}
    return mg.iMAML(net(), F.mse_loss, **options)


def batch(tasks=3, shots=4):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return (draw(tasks, shots, 2), draw(tasks, shots, 1)), (draw(tasks, shots, 2), draw(tasks, shots, 1))


def conjugate_gradients(A, b, steps):
    x, r = torch.zeros_like(b), b
    p = r
    for _ in range(steps):
        alpha = r @ r / (p @ A @ p)
        x, new = x + alpha * p, r - alpha * A @ p
        p, r = new + new @ new / (r @ r) * p, new
    return x


def textbook(model, examples, solve, *, steps=30, lr=0.1, adapted=None, matrix="hessian"):
    """Return the loss and the meta-gradient of a loop over tasks, by name."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = [name for name in params if adapted is None or name.startswith(adapted)]
    (xs, ys), (xq, yq) = examples
    total, grads = 0.0, {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(len(xs)):

        def regularised(phi, shared, i=i):
            loss = F.mse_loss(torch.func.functional_call(model, {**shared, **phi}, (xs[i],)), ys[i])
            distance = sum((phi[n] - params[n]).square().sum() for n in names)
            return loss + LAMBDA / 2 * distance

        def query(phi, shared, i=i):
            return F.mse_loss(torch.func.functional_call(model, {**shared, **phi}, (xq[i],)), yq[i])

        phi = {name: params[name] for name in names}
        shared = {name: p for name, p in params.items() if name not in names}
        for _ in range(steps):
            slope = torch.func.grad(regularised)(phi, shared)
            phi = {name: phi[name] - lr * slope[name] for name in names}
        total += query(phi, shared) / len(xs)
        c, direct = torch.func.grad(query, argnums=(0, 1))(phi, shared)
        sizes = [params[n].numel() for n in names]

        def flat(v, shared, sizes=sizes, regularised=regularised):
            parts = [a.view(params[n].shape) for n, a in zip(names, v.split(sizes), strict=True)]
            return regularised(dict(zip(names, parts, strict=True)), shared)

        point = torch.cat([phi[n].flatten() for n in names])
        H = torch.func.jacrev(torch.func.jacrev(flat))(point, shared)
        if matrix == "ggn":

            def outputs(v, sizes=sizes, i=i):
                parts = [a.view(params[n].shape) for n, a in zip(names, v.split(sizes), strict=True)]
                return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (xs[i],))

            J = torch.func.jacrev(outputs)(point).flatten(0, 1)
            H = 2 / len(J) * J.T @ J + LAMBDA * torch.eye(len(point), dtype=torch.float64)
        u = solve(H, torch.cat([c[n].flatten() for n in names]))
        for n, part in zip(names, u.split(sizes), strict=True):
            grads[n] += LAMBDA * part.view(params[n].shape) / len(xs)
        mixed = torch.func.grad(lambda s, u=u, flat=flat, point=point: torch.func.grad(flat)(point, s) @ u)(
            shared
        )
        for n in shared:
            grads[n] += (direct[n] - mixed[n]) / len(xs)
    return total, grads


def meta_gradient(maml, examples):
    loss = maml(examples).loss
    maml.zero_grad()
    loss.backward()
    return loss, {name: p.grad for name, p in maml.model.named_parameters()}


def assert_close(found, expected, rtol=1e-9):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=1e-11)


SOLVES = {
    "cg": (hypergrad.CG(steps=3), functools.partial(conjugate_gradients, steps=3)),
    "exact": (hypergrad.Exact(), torch.linalg.solve),
    "identity": (hypergrad.FirstOrder(scale=0.5), lambda A, b: 0.5 * b),
}


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
@pytest.mark.parametrize(
    ("name", "task_chunk"),
    covering(SOLVES, [None, 1, 2], fast=lambda name, chunk: chunk is None or (name, chunk) == ("cg", 1)),
)
@pytest.mark.filterwarnings("ignore:.*left a residual")
def test_the_meta_gradient_is_that_of_a_loop_over_tasks(name, task_chunk, matrix):
    method, solve = SOLVES[name]
    imaml, examples = make(hypergradient=method, task_chunk=task_chunk, matrix=matrix), batch()
    loss, found = meta_gradient(imaml, examples)
    expected_loss, expected = textbook(imaml.model, examples, solve, matrix=matrix)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=0)
    assert_close(found, expected)


def test_shared_parameters_influence_the_minimum():
    imaml, examples = make(hypergradient=hypergrad.Exact(), adapt="2"), batch()
    _, found = meta_gradient(imaml, examples)
    _, expected = textbook(imaml.model, examples, torch.linalg.solve, adapted="2")
    assert_close(found, expected)


@pytest.mark.parametrize("norm", ["transductive", slow("running")])
def test_statistics_of_a_policy_are_those_of_the_minimum(norm):
    """In training both policies use the statistics of the examples, as a module without running statistics does."""

    def gradient(norm):
        torch.manual_seed(0)
        layer = nn.BatchNorm1d(3, track_running_stats=norm is not None)
        model = nn.Sequential(nn.Linear(2, 3), layer, nn.Tanh(), nn.Linear(3, 1)).double()
        rule, method = mg.optim.rules.sgd(lr=0.01), hypergrad.CG(steps=20)
        options = {"inner": rule, "steps": 5, "proximal": 30.0, "hypergradient": method, "norm": norm}
        return meta_gradient(mg.iMAML(model, F.mse_loss, **options), batch())

    assert_close(gradient(norm)[1], gradient(None)[1])


def test_memory_does_not_grow_with_steps():
    def peak(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        imaml = mg.iMAML(model, F.mse_loss, inner=SGD, steps=steps)
        x, y = torch.randn(2, 4, 32, 16), torch.randn(2, 4, 32, 1)
        imaml(((x[0], y[0]), (x[1], y[1]))).loss.backward()
        imaml.zero_grad()
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            imaml(((x[0], y[0]), (x[1], y[1]))).loss.backward()
        counter.close()
        return counter.peak

    assert peak(9) <= 1.05 * peak(2)


def test_a_learned_proximal_weight_and_a_learned_loss_have_gradients():
    def loss_at(weight, scale):
        torch.manual_seed(0)
        imaml = mg.iMAML(
            net(),
            Scaled(),
            inner=SGD,
            steps=120,  # a step shrinks the error to about 0.8 of it
            proximal=nn.Parameter(weight),
            hypergradient=hypergrad.Exact(),
        )
        imaml.loss_fn.scale.data.copy_(scale)
        return imaml, imaml(batch()).loss

    weight, scale = torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    imaml, loss = loss_at(weight, scale)
    loss.backward()
    step = 1e-5
    for at, found in (
        ((step, 0.0), imaml.proximal.grad),
        ((0.0, step), imaml.loss_fn.scale.grad),
    ):
        above, below = (loss_at(weight + s * at[0], scale + s * at[1])[1] for s in (1, -1))
        assert found.item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-4)
    assert "proximal" in dict(imaml.named_parameters())


def test_tables_adapt_by_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    ids, y = torch.randint(0, 10, (3, 4)), torch.randn(3, 4, 1, dtype=torch.float64)
    query, yq = torch.randint(0, 30, (3, 4)), torch.randn(3, 4, 1, dtype=torch.float64)
    examples = ((ids, y), (query, yq))
    options = {"inner": SGD, "steps": 30, "hypergradient": hypergrad.CG(steps=8)}
    whole = mg.iMAML(copy.deepcopy(model), F.mse_loss, **options)
    rows = mg.iMAML(model, F.mse_loss, sparse=["0.weight"], **options)
    loss, expected = meta_gradient(whole, examples)
    again, found = meta_gradient(rows, examples)
    torch.testing.assert_close(again, loss)
    assert isinstance(found["0.weight"], mg.sparse.RowSparse)
    dense = found["0.weight"].to_dense()
    torch.testing.assert_close(dense, expected["0.weight"], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found["2.weight"], expected["2.weight"], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(rows.adapt((ids, y))(query), whole.adapt((ids, y))(query))


def test_adapted_models_are_differentiable():
    imaml, examples = make(), batch()
    fast = imaml.adapt(examples[0])
    F.mse_loss(fast(examples[1][0]), examples[1][1]).backward()
    expected = {name: p.grad.clone() for name, p in imaml.model.named_parameters()}
    assert_close(meta_gradient(imaml, examples)[1], expected)
    with torch.no_grad():
        assert not imaml(examples).loss.requires_grad


def test_a_task_that_is_not_finite_is_named_or_left_out():
    examples = batch()
    examples[1][1][1] = torch.inf
    with pytest.raises(FloatingPointError, match="the loss of task 1 is"):
        make()(examples)
    imaml = make(nonfinite="skip", hypergradient=hypergrad.Exact())
    out = imaml(examples)
    assert out.skipped.tolist() == [False, True, False]
    out.loss.backward()
    rest = tuple(tuple(t[[0, 2]] for t in part) for part in examples)
    _, expected = textbook(imaml.model, rest, torch.linalg.solve)
    assert_close({n: p.grad for n, p in imaml.model.named_parameters()}, expected)


def test_a_second_derivative_is_refused():
    imaml = make()
    params = list(imaml.parameters())
    first = torch.autograd.grad(imaml(batch()).loss, params, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Pass order=2"):
        torch.autograd.grad(first[0].sum(), params)


def test_a_support_loss_that_curves_down_says_which_task():
    def concave(prediction, y):
        return -10 * prediction.square().mean()

    imaml = mg.iMAML(nn.Linear(1, 1, bias=False), concave, inner=mg.optim.rules.sgd(lr=1e-3), steps=1)
    x = torch.ones(2, 3, 1)
    x[0] = 0.1
    with pytest.raises(SolveError, match=r"hypergradient\): .*, of task 1 of 2: It is not positive definite"):
        imaml(((x, x), (x, x))).loss.backward()


def test_a_network_far_from_a_minimum_has_a_gauss_newton_matrix_that_is_positive_definite():
    torch.manual_seed(0)
    model = mg.models.MLP([1, 40, 40, 1])
    examples = mg.tasks.Sinusoid(shots=10, queries=10).sample(25)
    options = {"inner": mg.optim.rules.sgd(lr=0.01), "steps": 1}
    with pytest.raises(SolveError, match="matrix='ggn'"):
        mg.iMAML(model, F.mse_loss, **options)(examples).loss.backward()
    mg.iMAML(model, F.mse_loss, matrix="ggn", **options)(examples).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_transforms_around_it_are_refused():
    imaml = make()
    params = dict(imaml.named_parameters())
    with pytest.raises(ValueError, match=r"iMAML\(batch\): inside a torch\.func transform"):
        torch.func.grad(lambda p: torch.func.functional_call(imaml, p, (batch(),)).loss)(params)
