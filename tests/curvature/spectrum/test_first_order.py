"""The first derivative passes, eager and under transforms. A second derivative raises only if it is taken."""

import pytest
import torch

from metagrad.curvature.spectrum.first_order import first_order

# torch builds its forward-mode decompositions with torch.jit, on their first use.


def test_the_first_derivative_passes():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: first_order(x**3, "f(x)") ** 2, x)


def test_the_second_derivative_is_refused():
    x = torch.tensor(2.0, requires_grad=True)
    for linear in (False, True):
        y = first_order(3 * x if linear else x**3, "f(x)")
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        assert float(gradient.detach()) == (3 if linear else 12)
        with pytest.raises(RuntimeError, match=r"f\(x\): the result has first derivatives only"):
            torch.autograd.grad(gradient, x)


def test_constants_stay_constants():
    x = torch.ones(2)
    assert first_order(x, "f(x)") is x


def test_under_vmap_and_forward_mode():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    gradients = torch.func.vmap(torch.func.grad(lambda x: first_order(x**2, "f(x)")))(x)
    torch.testing.assert_close(gradients, 2 * x.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        tangent = torch.autograd.forward_ad.unpack_dual(first_order(dual**2, "f(x)")).tangent
    torch.testing.assert_close(tangent, 2 * x.detach(), check_stride=False)
