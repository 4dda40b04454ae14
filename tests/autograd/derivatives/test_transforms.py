"""Derivatives inside the transforms of torch.func are correct, or raise an error with a suggestion."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import metagrad as mg


def loss_of(p):
    return (p["w"] ** 3).sum() + p["w"].prod()


def hessian_of(w):
    return hessian(lambda w: loss_of({"w": w}))(w)


def penalty(w, v):
    return (hessian_of(w) @ v).square().sum()


def draw(*shape):
    torch.manual_seed(0)
    return torch.randn(2, *shape, dtype=torch.float64)


TRANSFORMS = {
    "vmap": (
        lambda h, w, v: vmap(h)(torch.stack([w, v]), torch.stack([v, w])),
        lambda w, v: torch.stack([hessian_of(w) @ v, hessian_of(v) @ w]),
    ),
    "vmap of v": (
        lambda h, w, v: vmap(h, (None, 0))(w, torch.stack([v, w])),
        lambda w, v: torch.stack([hessian_of(w) @ v, hessian_of(w) @ w]),
    ),
    "grad": (lambda h, w, v: grad(lambda w: h(w, v).square().sum())(w), lambda w, v: grad(penalty)(w, v)),
    "grad in v": (
        lambda h, w, v: grad(lambda v: h(w, v).square().sum())(v),
        lambda w, v: grad(penalty, argnums=1)(w, v),
    ),
    "jacrev": (lambda h, w, v: jacrev(h)(w, v), lambda w, v: jacrev(lambda w: hessian_of(w) @ v)(w)),
    "jacfwd": (lambda h, w, v: jacfwd(h)(w, v), lambda w, v: jacrev(lambda w: hessian_of(w) @ v)(w)),
    "jvp": (
        lambda h, w, v: jvp(lambda w: h(w, v), (w,), (v,))[1],
        lambda w, v: jacrev(lambda w: hessian_of(w) @ v)(w) @ v,
    ),
    "vmap of grad": (
        lambda h, w, v: vmap(grad(lambda w: h(w, v).square().sum()))(torch.stack([w, v])),
        lambda w, v: torch.stack([grad(penalty)(w, v), grad(penalty)(v, v)]),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_hvp_inside_a_transform(transform, mode, create_graph):
    """Without ``create_graph``, a constant would silently have a derivative of zero."""
    w, v = draw(3)
    product = lambda w, v: mg.hvp(loss_of, {"w": w}, {"w": v}, mode=mode, create_graph=create_graph)  # noqa: E731
    run, expected = TRANSFORMS[transform]
    torch.testing.assert_close(run(lambda w, v: product(w, v).product["w"], w, v), expected(w, v))


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_and_linearizations_inside_grad_are_not_constants(create_graph):
    w, v = draw(3)

    def gradient(w):
        return mg.grad(loss_of({"w": w}), w, create_graph=create_graph)

    def product(w):
        with mg.autograd.linearize(loss_of({"w": w}), {"w": w}, create_graph=create_graph) as lin:
            return lin.hvp({"w": v})["w"]

    torch.testing.assert_close(jacrev(gradient)(w), hessian_of(w))
    torch.testing.assert_close(grad(lambda w: product(w).square().sum())(w), grad(penalty)(w, v))


@pytest.mark.parametrize("derivative", [mg.grad, lambda loss, w: mg.autograd.linearize(loss, w).gradient])
@pytest.mark.parametrize("transform", [vmap, jacfwd, lambda f: lambda w: jvp(f, (w,), (w,))])
def test_graphs_inside_vmap_and_forward_mode_say_what_to_do(derivative, transform):
    w = draw(3).requires_grad_()
    message = "no graph inside a torch.func transform.*Call torch.func.grad or metagrad.hvp there"
    with pytest.raises(ValueError, match=message):
        transform(lambda w: derivative(loss_of({"w": w}), w))(w)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_derivatives_that_torch_gets_wrong_are_right(mode, norm):
    """Third derivatives in eager mode and in a transform, and second derivatives of vmapped losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    model[1].train()
    model[1].track_running_stats, model[1].running_mean, model[1].running_var = False, None, None
    x, y = draw(5, 3), draw(5, 2)
    params = {name: p.detach() for name, p in model.named_parameters()}
    v = {name: torch.randn_like(p) for name, p in params.items()}

    def product(params, x, y, **options):
        loss = lambda p, x, y: (functional_call(model, p, (x,)) - y).square().mean()  # noqa: E731
        return mg.hvp(loss, params, v, x, y, mode=mode, **options).product

    together = vmap(product, (None, 0, 0))(params, x, y)
    for i in range(2):
        torch.testing.assert_close({k: p[i] for k, p in together.items()}, product(params, x[i], y[i]))
    names, points = list(params), [p.clone().requires_grad_() for p in params.values()]
    of = lambda points, **o: product(dict(zip(names, points, strict=True)), x[0], y[0], **o)["0.weight"]  # noqa: E731
    assert mg.gradcheck(lambda *p: of(p, create_graph=True), points, order=1, directions=1)
    on_tape = torch.autograd.grad(of(points, create_graph=True).sum(), points[0])[0]
    nested = grad(lambda w: of([w, *points[1:]]).sum())(points[0])
    torch.testing.assert_close(nested, on_tape)
