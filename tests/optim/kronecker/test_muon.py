import pytest
import torch

from metagrad.optim.arithmetic import matrix_norm
from metagrad.optim.rules import adamw, mask, muon, with_batch_ndim
from tests.optim.cases import draw


def polynomial(s, steps, a=3.4445, b=-4.775, c=2.0315):
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_singular_values_go_through_the_polynomial_and_singular_vectors_stay(shape, steps):
    g = draw({"w": shape})["w"]
    rule = muon(1.0, weight_decay=0.0, momentum=0.0, ns_steps=steps, ns_dtype=None)
    params = {"w": torch.zeros_like(g)}
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    expected = -scale * (u * polynomial(s / s.norm(), steps)) @ vh
    torch.testing.assert_close(
        rule.update({"w": g}, rule.init(params), params)[0]["w"], expected, rtol=1e-10, atol=1e-10
    )


def test_the_norm_of_zero_has_derivatives_of_zero():
    x = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]).double().requires_grad_()
    level = matrix_norm(x)
    assert level.flatten().tolist() == [0, 6**0.5]
    for _ in range(3):
        (level,) = torch.autograd.grad((level**2).sum() + level.sum(), x, create_graph=True)
        assert level.isfinite().all()
        assert not level[0].any()


def test_what_is_not_a_matrix_is_refused_with_the_way_out():
    params = draw({"0.weight": (3, 2), "0.bias": (3,)})
    with pytest.raises(ValueError, match=r"muon\(...\).init: '0.bias' must be a matrix, got shape \(3,\)"):
        muon().init(params)
    with pytest.raises(ValueError, match=r"'w' must be a matrix, got shape \(3,\)"):
        with_batch_ndim(muon(), 1).init(draw({"w": (4, 3)}))
    rule = mask(muon(), ["*.weight"], other=adamw())
    rule.update(params, rule.init(params), params)


def test_eps_has_no_elements():
    g = draw({"w": (3, 2)})
    rule = muon(eps={"w": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"muon.*: eps belongs to the matrices.*no elements, got shape \(3"):
        rule.update(g, rule.init(g), g)


def stepped(rule, seed=0):
    """The derivative of the norm of what two steps lead to, in a direction, of float32 parameters."""
    params = draw({"w": (6, 4)}, torch.float32, seed)
    scale = torch.ones((), requires_grad=True)
    state, new = rule.init(params), params
    for _ in range(2):
        new, state = rule.update({"w": scale * (new["w"] ** 2 - params["w"])}, state, new)
    return torch.autograd.grad((new["w"] ** 3).sum(), scale)[0]


def test_iterations_in_a_narrower_dtype_cannot_be_differentiated():
    with pytest.raises(ValueError, match=r"muon\(...\).update: ns_dtype=torch.bfloat16 .*Use ns_dtype=None"):
        stepped(muon(0.5, ns_dtype=torch.bfloat16))


def test_a_narrower_dtype_is_allowed_where_gradients_are_constants():
    params = draw({"w": (6, 4)}, torch.float32)
    w = params["w"].requires_grad_()
    rule = muon(0.5, weight_decay=0.0, ns_dtype=torch.bfloat16)
    new, _ = rule.update({"w": w.detach() ** 2}, rule.init(params), params)
    assert torch.equal(torch.autograd.grad(new["w"].sum(), w)[0], torch.ones(6, 4))
