import pytest
import torch
from torch.func import grad, jvp, vmap

import metagrad as mg
from metagrad.sparse import Pattern, Segments
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.kernels import products as kernels
from tests.joint import joint_gradcheck

PATTERN = Pattern(torch.tensor([0, 0, 2, 2, 3]), torch.tensor([0, 2, 0, 1, 2]), (4, 3))
SEGMENTS = Segments(torch.tensor([1, 3, 1, 0]), 5)


def rand(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def dense_of(values):
    flat = values.new_zeros(*values.shape[:-1], 12)
    return flat.index_add(-1, PATTERN.row * 3 + PATTERN.col, values).unflatten(-1, (4, 3))


# (rule, oracle, shapes of the operands without batch dimensions)
RULES = {
    "matmul": (
        lambda v, x: rules.matmul(PATTERN, v, x),
        lambda v, x: dense_of(v) @ x,
        ((5,), (3, 2)),
    ),
    "transposed matmul": (
        lambda v, x: rules.matmul(PATTERN, v, x, transposed=True),
        lambda v, x: dense_of(v).mT @ x,
        ((5,), (4, 2)),
    ),
    "sample": (
        lambda a, b: rules.sample(PATTERN, a, b),
        lambda a, b: (a @ b.mT)[..., PATTERN.row, PATTERN.col],
        ((4, 2), (3, 2)),
    ),
}
LINEAR = {
    "gather": (lambda x: rules.gather(x, SEGMENTS), lambda x: x[SEGMENTS.ids], (5, 2)),
    "segment_sum": (
        lambda v: rules.segment_sum(v, SEGMENTS),
        lambda v: torch.nn.functional.one_hot(SEGMENTS.ids, 5).to(v.dtype).T @ v,
        (4, 2),
    ),
}
every_rule = pytest.mark.parametrize(("rule", "oracle", "shapes"), RULES.values(), ids=RULES)
every_linear_rule = pytest.mark.parametrize(("rule", "oracle", "shape"), LINEAR.values(), ids=LINEAR)


@every_rule
def test_batches_broadcast_at_every_order(rule, oracle, shapes):
    for first, second in [((), ()), ((2,), ()), ((3, 1), (2,)), ((2,), (3, 1)), ((3, 2), (3, 2))]:
        x, y = rand(*first, *shapes[0]).requires_grad_(), rand(*second, *shapes[1]).requires_grad_()
        torch.testing.assert_close(rule(x, y), oracle(x, y))
        assert joint_gradcheck(rule, (x, y), order=3)


@every_rule
@pytest.mark.parametrize("in_dims", [(0, 0), (1, -1), (None, 1), (0, None)], ids=str)
def test_bilinear_rules_under_vmap_of_anything(rule, oracle, shapes, in_dims):
    batched = [
        rand(6, *shape) if dim is not None else rand(*shape)
        for dim, shape in zip(in_dims, shapes, strict=True)
    ]
    operands = [x if d is None else x.movedim(0, d) for x, d in zip(batched, in_dims, strict=True)]

    def slope(function):
        return grad(lambda x, y: (function(x, y) ** 3).sum(), argnums=(0, 1))

    for transform in (
        lambda f: f,
        slope,
        lambda f: slope(lambda x, y: torch.cat(list(map(torch.ravel, slope(f)(x, y))))),
    ):
        got = vmap(transform(rule), in_dims)(*operands)
        torch.testing.assert_close(got, vmap(transform(oracle), in_dims)(*operands))


@every_rule
@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)], ids=str)
def test_bilinear_tangents(rule, oracle, shapes, moving):
    operands = [rand(*shape) for shape in shapes]
    tangents = [rand(*shape, seed=1) for shape in shapes]

    def along(function, operands):
        moved = tuple(x for x, moves in zip(operands, moving, strict=True) if moves)
        steps = tuple(t for t, moves in zip(tangents, moving, strict=True) if moves)

        def of_moving(*moved):
            supply = iter(moved)
            return function(*(next(supply) if m else x for m, x in zip(moving, operands, strict=True)))

        return jvp(of_moving, moved, steps)[1]

    torch.testing.assert_close(along(rule, operands), along(oracle, operands))
    forward_over_forward = lambda f: along(lambda *x: along(f, x) ** 2, operands)  # noqa: E731
    torch.testing.assert_close(forward_over_forward(rule), forward_over_forward(oracle))


@every_linear_rule
def test_linear_rules_at_every_order_and_in_every_transform(rule, oracle, shape):
    x = rand(*shape).requires_grad_()
    assert mg.gradcheck(lambda x: rule(x).tanh(), x, order=3)
    torch.testing.assert_close(rule(x), oracle(x))
    torch.testing.assert_close(rule(x[:, 0]), oracle(x[:, 0]))
    xs = rand(2, *shape)
    slope = lambda f: grad(lambda x: (f(x) ** 3).sum())  # noqa: E731
    for in_dim in range(3):
        moved = xs.movedim(0, in_dim)
        torch.testing.assert_close(vmap(rule, in_dim)(moved), vmap(oracle)(xs))
        torch.testing.assert_close(vmap(slope(rule), in_dim)(moved), vmap(slope(oracle))(xs))
    tangent = jvp(slope(rule), (xs[0],), (xs[1],))[1]
    torch.testing.assert_close(tangent, jvp(slope(oracle), (xs[0],), (xs[1],))[1])
    along = lambda f: lambda x: jvp(f, (x,), (xs[1],))[1]  # noqa: E731
    curved = [along(along(along(lambda x, f=f: f(x**3)))) for f in (rule, oracle)]
    torch.testing.assert_close(curved[0](xs[0]), curved[1](xs[0]))


def test_types_without_csr_kernels_are_gathered_in_slices(monkeypatch):
    monkeypatch.setattr(kernels, "SLICE_NUMBERS", 4)  # two entries of width 2 at a time
    cases = [*RULES.values(), *((rule, oracle, (shape,)) for rule, oracle, shape in LINEAR.values())]
    for rule, oracle, shapes in cases:
        half = [rand(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        exact = [x.detach().double().requires_grad_() for x in half]
        result, expected = rule(*half), oracle(*exact)
        got = torch.autograd.grad((result**2).sum(), half)
        wanted = torch.autograd.grad((expected**2).sum(), exact)
        for a, b in zip((result, *got), (expected, *wanted), strict=True):
            assert a.dtype == torch.bfloat16
            torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05)
