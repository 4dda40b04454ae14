"""Convolutions and normalization with quick second derivatives: torch's at every order, and what is left to torch."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad

import metagrad as mg
from metagrad.autograd import QuickDerivatives
from metagrad.curvature import ggn, hessian
from metagrad.models import composite_norms

D = torch.float64


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=D, generator=generator, requires_grad=True)


def made(function, **options):
    return lambda *inputs: function(*inputs, **options)


def normalized(x, weight=None, bias=None):
    mean, var = drawn(x.shape[1], seed=8).detach(), drawn(x.shape[1], seed=9).detach().square() + 0.5
    return F.batch_norm(x, mean, var, weight, bias)


def by_batch(x, weight=None, bias=None):
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=0.1)


def by_instance(x, weight=None, bias=None):
    return F.instance_norm(x, weight=weight, bias=bias, eps=0.1)


def by_example(x, weight=None, bias=None):
    return F.layer_norm(x, (4, 2), weight, bias, eps=0.1)


def pooled(*window):
    """Round, so that windows hold several maxima, of which the first has the gradient."""
    return lambda x: F.max_pool2d(x + (x.round() - x).detach(), window if len(window) == 2 else window[0])


OURS = "_ConvolutionBackward", "_AffineBackward", "_NormBackward", "_MaxPoolBackward", "ViewBackward0"


def is_ours(out):
    return out.grad_fn.name() in OURS


def derivatives(function, inputs, order):
    """Return the gradients of a non-linear loss, then those of a form in them, and so on."""
    out = function(*inputs)
    loss, found = (out**4 / 8 + out.sin()).sum(), []
    for i in range(order):
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        assert all(g.requires_grad for g in grads)
        found += grads
        loss = sum((g * drawn(*g.shape, seed=20 + i).detach()).sum() for g in grads)
    return found


CASES = {
    "conv1d": (made(F.conv1d, padding=1, dilation=2), [(2, 3, 6), (4, 3, 3)]),
    "conv2d": (
        made(F.conv2d, stride=2, padding=(1, 0), dilation=[1, 2], groups=2),
        [(2, 4, 5, 6), (6, 2, 3, 2), (6,)],
    ),
    "conv3d": (made(F.conv3d, stride=(1, 2, 1)), [(1, 2, 3, 4, 3), (2, 2, 2, 2, 2), (2,)]),
    "transposed": (made(F.conv_transpose2d, stride=2, groups=2), [(1, 4, 3, 2), (4, 3, 2, 3), (6,)]),
    "normalized": (normalized, [(3, 2, 2, 3), (2,), (2,)]),
    "normalized without bias": (normalized, [(3, 2), (2,)]),
    "normalized alone": (normalized, [(3, 2, 4)]),
    "by batch": (by_batch, [(3, 2, 2, 3), (2,), (2,)]),
    "by batch without bias": (by_batch, [(4, 2), (2,)]),
    "by batch alone": (by_batch, [(3, 2, 4)]),
    "by batch with one weight": (lambda x, w: by_batch(x, w.expand(2)), [(4, 2), (1,)]),
    "by instance": (by_instance, [(2, 3, 4), (3,), (3,)]),
    "by instance alone": (by_instance, [(2, 3, 2, 2)]),
    "by instance with a bias to learn": (lambda b: by_instance(drawn(2, 3, 4).detach(), None, b), [(3,)]),
    "by example": (by_example, [(3, 2, 4, 2), (4, 2), (4, 2)]),
    "by example without bias": (by_example, [(4, 2), (4, 2)]),
    "by example alone": (by_example, [(3, 4, 2)]),
    "pooled": (pooled(2), [(8, 33, 17, 15)]),
    "pooled in wide windows": (pooled(3, 2), [(99, 3, 301)]),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_to_the_fourth_order(name):
    function, shapes = CASES[name]
    inputs = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def quick(*args):
        with QuickDerivatives():
            out = function(*args)
        assert is_ours(out)
        return out

    def reference(*args):  # torch's own third derivatives of norms are wrong (2.13)
        with composite_norms():
            return function(*args)

    for ours, theirs in zip(derivatives(quick, inputs, 4), derivatives(reference, inputs, 4), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_third_derivative_of_a_sum_of_gradients():
    """The cotangent of a sum has no strides, and torch's kernels of batch norm (2.13) look at none."""

    def third(context):
        x, weight = drawn(5, 3), drawn(3, seed=1)
        with context:
            y = by_batch(x, weight)
        (of_weight,) = torch.autograd.grad((y**3).sum(), weight, create_graph=True)
        (mixed,) = torch.autograd.grad(of_weight.sum(), x, create_graph=True)
        return torch.autograd.grad(mixed.square().sum(), x)[0]

    torch.testing.assert_close(third(QuickDerivatives()), third(composite_norms()))


def test_a_transposed_convolution_with_output_padding_has_a_third_derivative():
    """Torch has none, so it is compared with finite differences of the second."""

    def quick(x, w):
        with QuickDerivatives():
            return F.conv_transpose1d(x, w, stride=2, output_padding=1)

    inputs = (drawn(1, 2, 2), drawn(2, 1, 2, seed=1))
    assert torch.autograd.gradcheck(lambda *inputs: tuple(derivatives(quick, inputs, 2)), inputs)


def network():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 2, bias=False)
    first, second = convolutions
    layers = [first, nn.BatchNorm2d(3), nn.Tanh(), second, nn.BatchNorm2d(2, affine=False), nn.Tanh()]
    layers += [
        nn.InstanceNorm2d(2),
        nn.LayerNorm(3),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.Flatten(),
    ]
    model = nn.Sequential(*layers, nn.Linear(18, 3)).to(D)
    for layer in layers:
        if getattr(layer, "running_mean", None) is not None:
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return model.eval()


def test_products_one_by_one_and_together_are_those_of_torch():
    model, x, y = network(), drawn(2, 1, 4, 4).detach(), torch.tensor([0, 2])
    params = dict(model.named_parameters())

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    def matrix(of):
        shapes = [p.shape for p in params.values()]
        flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
        with composite_norms():  # torch.func.hessian of torch's own is wrong (2.13)
            return torch.func.hessian(lambda flat: of(unflattened(flat, shapes)))(flat)

    def unflattened(flat, shapes):
        parts = flat.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(params, parts, shapes, strict=True)}

    at = torch.func.functional_call(model, params, (x,)).detach()

    def linearized_loss(p):
        point = {name: value.detach() for name, value in params.items()}
        change = {name: p[name] - point[name] for name in params}
        tangent = torch.func.jvp(lambda q: torch.func.functional_call(model, q, (x,)), (point,), (change,))[1]
        return F.cross_entropy(at + tangent, y)

    with hessian(loss, params, (x, y)) as H, ggn(model, F.cross_entropy, params, (x, y)) as G:
        for operator, expected in ((H, matrix(lambda p: loss(p, x, y))), (G, matrix(linearized_loss))):
            torch.testing.assert_close(operator.to_dense(), expected)
            one_by_one = torch.stack([operator @ row for row in torch.eye(len(expected), dtype=D)[:9]])
            torch.testing.assert_close(one_by_one, expected[:9])


def test_what_is_not_plain_is_left_to_torch():
    x, w = drawn(1, 1, 4, 4), drawn(1, 1, 3, 3, seed=1)
    mean, var = torch.zeros(1, dtype=D), torch.ones(1, dtype=D)
    with QuickDerivatives():
        assert is_ours(F.conv2d(x, w))
        assert is_ours(F.batch_norm(x, mean, var))
        left = [
            F.conv2d(x, w, padding="same"),
            F.conv2d(x[0], w),
            F.batch_norm(x.bfloat16(), mean.float(), var.float()),
            F.conv2d(x.to(torch.complex128), w.to(torch.complex128)),
        ]
        with pytest.raises(RuntimeError, match="weight should contain 1 elements not 2"):
            F.batch_norm(x, mean, var, torch.ones(2, dtype=D, requires_grad=True))
        for statistics in ((mean, None), (mean.clone().requires_grad_(), var)):
            with pytest.raises((ValueError, RuntimeError), match="running_mean"):
                F.batch_norm(x, *statistics, training=True)
        assert F.layer_norm(x[:0], (4,)).shape == (0, 1, 4, 4)
        with torch.autocast("cpu"):
            left.append(F.conv2d(x.float(), w.float()))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(F.conv2d(forward_ad.make_dual(x, torch.ones_like(x)), w)).tangent
        torch.testing.assert_close(tangent, F.conv2d(torch.ones_like(x), w))
        _, tangent = torch.func.jvp(lambda x: F.conv2d(x, w), (x,), (torch.ones_like(x),))
        left.append(tangent)
        compiled = torch.compile(lambda x: F.conv2d(x, w).sum(), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), F.conv2d(x, w).sum())
        with torch.no_grad():
            assert not F.conv2d(x, w).requires_grad
    assert not any(map(is_ours, left))


def test_poolings_that_are_left_to_torch():
    x = drawn(2, 2, 130, 130)
    with QuickDerivatives():
        assert is_ours(F.max_pool2d(x, 2))
        assert is_ours(F.max_pool2d(x, [2, 3], (2, 3)))
        overlapping, padded = F.max_pool2d(x, 3, 2), F.max_pool2d(x, 2, padding=1)
        rounded_up, few = F.max_pool2d(x, 3, ceil_mode=True), F.max_pool2d(x[:1, :1, :4], 2)
        strided = F.max_pool2d(x.to(memory_format=torch.channels_last), 2)
        with_indices, _ = F.max_pool2d(x, 2, return_indices=True)
        dilated = F.max_pool2d(x, 2, dilation=2)
    left = overlapping, padded, rounded_up, few, strided, with_indices, dilated
    assert not any(map(is_ours, left))


@pytest.mark.parametrize("window", [2, (2, 3)])
def test_of_several_nans_in_a_window_the_gradient_is_that_of_torchs(window):
    values = drawn(2, 2, 130, 130).detach()
    values[values > 1] = torch.nan
    found = []
    for context in (QuickDerivatives(), contextlib.nullcontext()):
        x = values.clone().requires_grad_()
        with context:
            y = F.max_pool2d(x, window)
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_in_evaluation_of_half_precision_is_computed_in_float32(dtype):
    """A shift by the mean over the deviation, rounded, would be an error of that size in every activation."""
    values = (
        torch.full((3, 2, 5), 30.0),
        torch.linspace(-1, 1, 30).view(3, 2, 5),
        torch.ones(2),
        torch.ones(2),
    )
    mean, other, weight, bias = (value.to(dtype) for value in values)
    found = []
    for wide in (dtype, D):
        x, w = (value.detach().to(wide).requires_grad_() for value in (mean + other, weight))
        with QuickDerivatives():
            y = F.batch_norm(x, mean[0, :, 0].to(wide) + 1, weight.to(wide) / 3, w, bias.to(wide))
        assert y.dtype == wide
        found.append((y.to(D), torch.autograd.grad(y[..., 1:].sum(), w)[0].to(D)))
    torch.testing.assert_close(*found, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_running_statistics_are_those_of_torch():
    x, found = drawn(3, 2, 5), []
    for context in (QuickDerivatives(), contextlib.nullcontext()):
        mean, var = torch.ones(2, dtype=D), torch.ones(2, dtype=D)
        with context:
            F.batch_norm(x, mean, var, training=True, momentum=0.3)
        found.append((mean, var))
    torch.testing.assert_close(*found)


def test_a_checkpoint_around_it_sees_what_is_read():
    x, w = drawn(1, 1, 4), drawn(1, 1, 2, seed=1)

    def loss(x):
        with QuickDerivatives():
            return F.conv1d(x, w).sin().sum()

    assert mg.grad(mg.checkpoint(loss, x), {"x": x, "w": w}).keys() == {"x", "w"}
    torch.testing.assert_close(mg.grad(mg.checkpoint(loss, x), [x, w]), mg.grad(loss(x), [x, w]))


def test_torchs_checkpoint_inside_it_recomputes_what_it_saved():
    x, w = drawn(3, 4), drawn(4, seed=1)

    def loss(params, checkpoint):
        y = checkpoint(lambda x: F.layer_norm(x, (4,), params["w"]), x)
        return (y**3).sum()

    recomputed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    matrices = [hessian(loss, {"w": w}, (call,)).to_dense() for call in (recomputed, lambda fn, x: fn(x))]
    torch.testing.assert_close(*matrices)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4)])
def test_third_derivatives_through_a_checkpoint_inside_it(norm):
    model, x = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()).to(D), drawn(5, 3).detach()
    params = dict(model.named_parameters())

    def third(call):
        def loss(params):
            return call(lambda x: torch.func.functional_call(model, params, (x,)), x).square().mean()

        with hessian(loss, params, create_graph=True) as H:
            return mg.grad((H @ torch.ones(H.shape[0], dtype=D)).pow(3).sum(), params)

    torch.testing.assert_close(third(mg.checkpoint), third(lambda fn, x: fn(x)))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4)])
def test_third_derivatives_in_a_recomputed_step_that_enters_it(norm):
    """Below the mode of a recording its functions were torch's, and so were the derivatives."""
    w, x, norm = drawn(4, 4), drawn(5, 4, seed=1).detach(), norm.to(D)

    def third(memory):
        def step(w, t):
            with QuickDerivatives():
                return w - norm(x @ w).tanh().square().sum() * w, None

        loss = mg.unroll(step, w, steps=2, memory=memory)[0].sin().sum()
        for _ in range(3):
            loss = torch.autograd.grad(loss, w, create_graph=True)[0].pow(3).sum()
        return loss.detach()

    torch.testing.assert_close(third("step"), third("full"))


@pytest.mark.parametrize("around", [mg.MemoryTracker, torch.device])
def test_third_derivatives_in_other_contexts(around):
    x, w = drawn(5, 4).detach(), drawn(4, seed=1)

    def third(context):
        with context:
            loss = F.layer_norm(x * w.sin(), (4,)).tanh().square().sum()
            for _ in range(3):
                loss = torch.autograd.grad(loss, w, create_graph=True)[0].pow(3).sum()
        return loss.detach()

    with around("cpu"):
        torch.testing.assert_close(third(QuickDerivatives()), third(composite_norms()))
