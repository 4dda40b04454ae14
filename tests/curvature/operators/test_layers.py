"""The Hessian of every layer against finite differences of the gradient, or its error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from metagrad.curvature.operators.hessian import hessian
from metagrad.curvature.operators.space import ParameterSpace
from tests.losses import loss_of

# Losses made of every layer that torch has with a second derivative, as functions of their parameters.


class Case(NamedTuple):
    """A loss of one layer, as a function of its parameters: a chain of a map before the layer, and the layer."""

    name: str
    loss_fn: Callable[..., Tensor]
    params: dict[str, Tensor]
    batch: tuple[Tensor, Tensor]


class Scale(nn.Module):
    """A map before a layer, so that derivatives with respect to the layer's input are needed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(1 + 0.1 * draw(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Apply(nn.Module):
    def __init__(self, fn: Callable[..., Tensor], *args: Tensor) -> None:
        super().__init__()
        self.fn = fn
        self.args = args

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.args)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def contracted(output: Tensor | tuple, _: Tensor | None = None) -> Tensor:
    """A smooth number in which every element of the output has a weight and a curvature of its own."""
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return (weights * output + 0.3 * output.square()).sin().mean()


def case(name: str, x: Tensor, *modules: nn.Module, loss_fn: Callable[..., Tensor] = contracted) -> Case:
    model = nn.Sequential(*modules).double()
    params = {key: p.detach() + 0.1 * torch.randn_like(p) for key, p in model.named_parameters()}
    return Case(name, loss_of(model, loss_fn), params, (x, x.new_zeros(1)))


def of_module(name: str, make: Callable[[], nn.Module], x: Tensor) -> Case:
    return case(name, x, Scale(x.shape[-1]), make())


def of_function(name: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Case:
    return case(name, x, nn.Linear(x.shape[-1], x.shape[-1]), Apply(fn))


def of_loss(name: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Case:
    return case(name, x, nn.Linear(x.shape[-1], x.shape[-1]), loss_fn=lambda z, _: fn(z))


def of_table(name: str, fn: Callable[[Tensor, Tensor], Tensor]) -> Case:
    ids = torch.tensor([[1, 4, 1], [0, 6, 4]])
    params = {"table": draw(7, 2), "head": draw(2, 2)}
    return Case(
        name,
        lambda params, ids, _: contracted(fn(ids, params["table"]) @ params["head"]),
        params,
        (ids, draw(1)),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(x, x, x, need_weights=False)[0]


class SDPA(nn.Module):
    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(x, x, x)


class Bilinear(nn.Module):
    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.inner, self.other = nn.Bilinear(4, other.shape[-1], 2), other

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.other)


def cases() -> list[Case]:
    torch.manual_seed(0)
    image, signal, volume = draw(2, 4, 5, 5), draw(2, 4, 6), draw(2, 2, 3, 3, 3)
    rows, sequence = draw(5, 4), draw(2, 3, 4)
    classes, targets = torch.tensor([0, 3, 1, 1, 2]), draw(5, 4)
    signs, probabilities = targets.sign(), targets.sigmoid()
    modules: list[tuple[str, Callable[[], nn.Module], Tensor]] = [
        ("Linear", lambda: nn.Linear(4, 3), rows),
        ("Conv1d", lambda: nn.Conv1d(4, 3, 3, padding=1), signal),
        ("Conv2d", lambda: nn.Conv2d(4, 2, 3, stride=2), image),
        ("Conv2d groups, dilation", lambda: nn.Conv2d(4, 4, 2, groups=2, dilation=2), image),
        ("Conv3d", lambda: nn.Conv3d(2, 2, 2), volume),
        ("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 2, 3, stride=2), signal),
        ("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 2, 3), image),
        ("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 2, 2), volume),
        ("BatchNorm1d train", lambda: nn.BatchNorm1d(4), rows),
        ("BatchNorm2d train", lambda: nn.BatchNorm2d(4), image),
        ("BatchNorm3d train", lambda: nn.BatchNorm3d(2), volume),
        ("BatchNorm2d without statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), image),
        ("BatchNorm2d eval", lambda: nn.BatchNorm2d(4).eval(), image),
        ("GroupNorm", lambda: nn.GroupNorm(2, 4), image),
        ("LayerNorm", lambda: nn.LayerNorm(4), rows),
        ("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), image),
        ("RMSNorm", lambda: nn.RMSNorm(4), rows),
        ("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), image),
        ("RNN", lambda: nn.RNN(4, 3), sequence),
        ("LSTM", lambda: nn.LSTM(4, 3), sequence),
        ("GRU", lambda: nn.GRU(4, 3), sequence),
        ("LSTM bidirectional, 2 layers", lambda: nn.LSTM(4, 2, num_layers=2, bidirectional=True), sequence),
        ("MultiheadAttention MATH", Attention, sequence),
        ("attention MATH", lambda: SDPA(SDPBackend.MATH), sequence.unsqueeze(0)),
        ("attention flash", lambda: SDPA(SDPBackend.FLASH_ATTENTION), sequence.unsqueeze(0)),
        ("PReLU", nn.PReLU, rows),
        ("Dropout", lambda: nn.Dropout(0.4), rows),
        ("Dropout2d", lambda: nn.Dropout2d(0.4), image),
        ("AlphaDropout", lambda: nn.AlphaDropout(0.4), rows),
        ("MaxPool1d", lambda: nn.MaxPool1d(2), signal),
        ("MaxPool2d", lambda: nn.MaxPool2d(2), image),
        ("MaxPool3d", lambda: nn.MaxPool3d(2), volume),
        ("AvgPool1d", lambda: nn.AvgPool1d(2), signal),
        ("AvgPool2d", lambda: nn.AvgPool2d(2), image),
        ("AvgPool3d", lambda: nn.AvgPool3d(2), volume),
        ("LPPool2d", lambda: nn.LPPool2d(3, 2), image.abs() + 0.1),
        ("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(2), image),
        ("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d(2), image),
        ("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3), image),
        ("Upsample bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), image),
        ("Upsample bicubic", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), image),
        ("PixelShuffle", lambda: nn.PixelShuffle(2), image),
        ("Unfold", lambda: nn.Unfold(2), image),
        ("ReflectionPad2d", lambda: nn.ReflectionPad2d(1), image),
        ("ReplicationPad2d", lambda: nn.ReplicationPad2d(1), image),
    ]  # fmt: skip
    activations = [
        nn.ReLU(), nn.LeakyReLU(), nn.RReLU().eval(), nn.ReLU6(), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(),
        nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Softsign(), nn.Tanh(), nn.Sigmoid(),
        nn.LogSigmoid(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.Softshrink(), nn.Hardshrink(),
        nn.Tanhshrink(), nn.Threshold(0.1, 0.0), nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.GLU(),
    ]  # fmt: skip
    losses: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("cross_entropy", lambda z: F.cross_entropy(z, classes, label_smoothing=0.1)),
        ("nll_loss", lambda z: F.nll_loss(z.log_softmax(1), classes)),
        ("mse_loss", lambda z: F.mse_loss(z, targets)),
        ("l1_loss", lambda z: F.l1_loss(z.sin(), targets)),
        ("smooth_l1_loss", lambda z: F.smooth_l1_loss(z, targets)),
        ("huber_loss", lambda z: F.huber_loss(z, targets)),
        ("binary_cross_entropy", lambda z: F.binary_cross_entropy(z.sigmoid(), probabilities)),
        ("bce_with_logits", lambda z: F.binary_cross_entropy_with_logits(z, probabilities)),
        ("kl_div", lambda z: F.kl_div(z.log_softmax(1), targets.softmax(1), reduction="batchmean")),
        ("poisson_nll_loss", lambda z: F.poisson_nll_loss(z, targets.abs())),
        ("gaussian_nll_loss", lambda z: F.gaussian_nll_loss(z, targets, 1 + z.square())),
        ("cosine_embedding_loss", lambda z: F.cosine_embedding_loss(z, targets, signs[:, 0])),
        ("hinge_embedding_loss", lambda z: F.hinge_embedding_loss(z.sin(), signs)),
        ("margin_ranking_loss", lambda z: F.margin_ranking_loss(z.sin(), targets, signs)),
        ("soft_margin_loss", lambda z: F.soft_margin_loss(z, signs)),
        ("triplet_margin_loss", lambda z: F.triplet_margin_loss(z, targets, z.flip(0))),
        ("multilabel_soft_margin_loss", lambda z: F.multilabel_soft_margin_loss(z, probabilities)),
        ("multi_margin_loss", lambda z: F.multi_margin_loss(z.sin(), classes)),
        ("ctc_loss", lambda z: F.ctc_loss(z.log_softmax(1).unsqueeze(1), torch.tensor([[1, 2]]), [5], [2])),
        ("cdist", lambda z: contracted(torch.cdist(z, targets))),
        ("norm", lambda z: contracted(z.norm(dim=1))),
        ("logsumexp", lambda z: contracted(z.logsumexp(1))),
        ("cumsum, sort", lambda z: contracted(z.cumsum(1).sort(1).values)),
        ("einsum", lambda z: contracted(torch.einsum("ij,kj->ik", z.tanh(), z.sin()))),
    ]  # fmt: skip
    tables = [
        ("Embedding", lambda ids, table: F.embedding(ids, table)),
        ("EmbeddingBag", lambda ids, table: F.embedding_bag(ids, table)),
    ]
    return [
        *(of_module(*module) for module in modules),
        case("Bilinear", rows, Scale(4), Bilinear(draw(5, 3))),
        *(of_function(repr(activation), activation, rows) for activation in activations),
        *(of_loss(name, fn, rows) for name, fn in losses),
        *(of_table(name, fn) for name, fn in tables),
    ]


CASES = {case.name: case for case in cases()}

# The gradient of torch.cdist has a derivative from torch 2.14 on.
DISTANCES = {"cdist"} if torch.__version__ < "2.14" else set()
REFUSED = {"attention flash", "Hardsigmoid()", "multi_margin_loss", "ctc_loss", "EmbeddingBag", *DISTANCES}


def differences(fn, point, vector, h=1e-5):
    """The derivative along a vector, of fourth order in h."""
    ahead, behind = (fn(point + h * vector), fn(point - h * vector))
    far_ahead, far_behind = fn(point + 2 * h * vector), fn(point - 2 * h * vector)
    return (8 * (ahead - behind) - (far_ahead - far_behind)) / (12 * h)


def directions(space):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, space.size, dtype=torch.float64, generator=generator)


@functools.cache
def expected_products(name):
    case = CASES[name]
    space = ParameterSpace(case.params)

    def gradient(point):
        torch.manual_seed(0)
        point = point.detach().requires_grad_()
        loss = case.loss_fn(space.unflatten(point), *case.batch)
        return torch.autograd.grad(loss, point)[0]

    return torch.stack([differences(gradient, space.flatten(case.params), v) for v in directions(space)])


@pytest.mark.parametrize("names", [list(CASES)[i::6] for i in range(6)], ids=range(6))
def test_second_and_third_derivatives_of_every_layer(names):
    for name in names:
        check_layer(name)


def check_layer(name):
    case = CASES[name]
    space = ParameterSpace(case.params)
    vectors = directions(space)
    params = {key: p.clone().requires_grad_() for key, p in case.params.items()}
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"derivative|order [23]|row-sparse"):
            hessian(case.loss_fn, params, case.batch).multiply(vectors)
        return
    expected, repeats = expected_products(name), 5  # as many as are computed together
    torch.manual_seed(0)
    with hessian(case.loss_fn, case.params, case.batch) as H:
        found = H.multiply(vectors.repeat(repeats, 1))
    scale = 1 + float(expected.abs().max())
    assert (found - expected.repeat(repeats, 1)).abs().max() <= 1e-7 * scale, name

    def contraction(point):
        torch.manual_seed(0)
        with hessian(case.loss_fn, space.unflatten(point), case.batch) as H:
            return (H @ vectors[0]).pow(3).sum()

    third = differences(contraction, space.flatten(case.params), vectors[1])
    torch.manual_seed(0)
    with hessian(case.loss_fn, params, case.batch, create_graph=True) as H:
        product = H @ vectors[0]
        assert H.gradient.requires_grad
        assert product.requires_grad or not third  # of a quadratic loss it is constant
        if third:
            found = mg.grad(product.pow(3).sum(), params, materialize_grads=True)
            assert abs(space.flatten(found) @ vectors[1] - third) <= 1e-4 * abs(third) + 1e-6, name
