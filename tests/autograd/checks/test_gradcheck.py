import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

import metagrad as mg
from metagrad.autograd.checks.gradcheck import WrongDerivative


def inputs(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


class WrongOrder(torch.autograd.Function):
    """x**3, with a derivative that is wrong by 1 % from the given order on."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(x)
        ctx.order = order
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if ctx.order == 1:
            return g * 3.03 * x**2, None
        return g * _Square.apply(x, ctx.order), None


class _Square(torch.autograd.Function):
    """3 x**2, whose own derivatives are wrong from one order below."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(x)
        ctx.order = order
        return 3 * x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (6.06 if ctx.order == 2 else 6.0) * (
            x if ctx.order != 3 else x * 1.01 - 0.01 * x.detach()
        ), None


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.tanh(a @ b).sin(),
        lambda a, b: {"one": a.exp(), "two": [b**3, (a @ b).logsumexp(0)]},
        lambda a, b: torch.nn.functional.softmax(a @ b, -1),
    ],
)
def test_right_functions_pass_at_order_three(fn):
    assert mg.gradcheck(fn, inputs((3, 4), (4, 2)), order=3)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_derivative_that_is_wrong_by_one_percent_is_found_at_its_order(order):
    (x,) = inputs(5)
    fn = lambda x: WrongOrder.apply(x, order)  # noqa: E731
    if order > 1:
        assert mg.gradcheck(fn, x, order=order - 1)
    with pytest.raises(GradcheckError, match=rf"order {order} with respect to inputs\[0\]"):
        mg.gradcheck(fn, x, order=3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_finds_the_silent_cut_of_sparse_coo_tensor_that_gradgradcheck_misses():
    indices = torch.tensor([[0, 1, 1], [0, 1, 0]])

    def product(values, dense):
        return torch.sparse_coo_tensor(indices, values, (2, 2)).to_dense() ** 2 * dense

    arguments = inputs(3, (2, 2))
    assert torch.autograd.gradgradcheck(product, tuple(arguments))
    with pytest.raises(GradcheckError, match=r"order 2 with respect to inputs\[0\].*whole graph"):
        mg.gradcheck(product, arguments, order=2)


def test_a_gradient_that_is_constant_need_not_require_grad():
    assert mg.gradcheck(lambda x: x.floor() + 2 * x, inputs(3), order=2)


def test_inputs_are_trees_and_constants_pass_through():
    x, w = inputs((2, 3), (3,))
    assert mg.gradcheck(lambda tree, k: (tree["x"] * tree["w"]) ** k, ({"x": x, "w": w}, 3), order=3)


def test_complex_outputs_one_dict_and_no_grad():
    (x,) = inputs(3)
    with torch.no_grad():
        assert mg.gradcheck(
            lambda tree: torch.complex(tree["x"].sin(), tree["x"].exp()) ** 2, {"x": x}, order=2
        )
        with pytest.raises(GradcheckError, match="order 1"):
            mg.gradcheck(lambda x: torch.complex(x.sin(), x.detach()), x, order=1)


def test_mixed_derivatives_are_checked():
    """d2/dx dy is wrong while d2/dx2 and d2/dy2 are right."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y.detach(), g * x

    with pytest.raises(GradcheckError, match="order 2"):
        mg.gradcheck(Mixed.apply, inputs(3, 3), order=2)


def test_of_several_steps_one_must_agree():
    x = torch.tensor(
        [1e-5, -0.3, 0.4], dtype=torch.float64, requires_grad=True
    )  # a kink within the largest step
    fn = lambda x: torch.relu(x) ** 2 + torch.relu(x)  # noqa: E731
    with pytest.raises(GradcheckError, match="order 1"):
        mg.gradcheck(fn, x, order=2, eps=1e-3)
    assert mg.gradcheck(fn, x, order=2, eps=(1e-3, 1e-6))
    with pytest.raises(WrongDerivative) as caught:
        mg.gradcheck(lambda x: x * x.detach(), x, order=2, eps=[1e-3, 1e-6])
    assert caught.value.order == 1
    assert caught.value.got != pytest.approx(caught.value.expected)
