"""Closed-form curvature of losses in the output, against dense torch.func Hessians and against expectations."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.curvature.likelihoods import (
    Bernoulli,
    BernoulliProbability,
    Categorical,
    Gaussian,
    evaluate,
    is_affine_in,
)
from tests.draws import randn

torch.manual_seed(0)


def rand(*shape):
    return torch.rand(shape, dtype=torch.float64)


def classes(*shape, num=4):
    return torch.randint(num, shape)


def ignoring(target):
    target = target.clone()
    target.view(-1)[::3] = -100
    return target


VARIANCE = rand(5, 3) + 0.5
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)

# (name, loss, output, target, the class that it is)
CASES = [
    ("indices", F.cross_entropy, randn(5, 4), classes(5), Categorical),
    ("unbatched", F.cross_entropy, randn(4), torch.tensor(2), Categorical),
    ("sequence", F.cross_entropy, randn(3, 4, 6), classes(3, 6), Categorical),
    ("image", F.cross_entropy, randn(2, 4, 3, 2), classes(2, 3, 2), Categorical),
    ("module", nn.CrossEntropyLoss(reduction="sum"), randn(5, 4), classes(5), Categorical),
    ("partial", functools.partial(F.cross_entropy, weight=WEIGHT), randn(5, 4), classes(5), Categorical),
    ("lambda", lambda z, y: F.cross_entropy(z, y, label_smoothing=0.3), randn(5, 4), classes(5), Categorical),
    ("log-probabilities", lambda z, y: F.nll_loss(z.log_softmax(-1), y), randn(5, 4), classes(5), Categorical),
    ("squares", F.mse_loss, randn(5, 3), randn(5, 3), Gaussian),
    ("vector of squares", nn.MSELoss(reduction="sum"), randn(5), randn(5), Gaussian),
    ("weighted squares", functools.partial(F.mse_loss, weight=rand(5, 3)), randn(5, 3), randn(5, 3), Gaussian),
    ("Gaussian", lambda z, y: F.gaussian_nll_loss(z, y, var=VARIANCE), randn(5, 3), randn(5, 3), Gaussian),
    ("Gaussian by rows", lambda z, y: F.gaussian_nll_loss(z, y, VARIANCE[:, 0]), randn(5, 3), randn(5, 3), Gaussian),
    ("Gaussian, number", lambda z, y: F.gaussian_nll_loss(z, y, 0.5), randn(5, 3), randn(5, 3), Gaussian),
    ("binary", F.binary_cross_entropy_with_logits, randn(5, 3), rand(5, 3), Bernoulli),
    ("binary, 0-d", F.binary_cross_entropy_with_logits, randn(), rand(), Bernoulli),
    (
        "weighted binary",
        nn.BCEWithLogitsLoss(weight=rand(3), pos_weight=rand(3) * 3, reduction="sum"),
        randn(5, 3),
        rand(5, 3).round(),
        Bernoulli,
    ),
    ("probabilities", F.binary_cross_entropy, rand(5, 3), rand(5, 3), BernoulliProbability),
    (
        "weighted probabilities",
        nn.BCELoss(weight=rand(5, 1), reduction="sum"),
        rand(5, 3),
        rand(5, 3).round(),
        BernoulliProbability,
    ),
]  # fmt: skip


# Every pair of values of two options, classes that are ignored and probabilities for targets apart.
for reduction, weight, smoothing, ignored, soft in [
    ("mean", None, 0.0, True, False),
    ("mean", WEIGHT, 0.2, False, True),
    ("sum", None, 0.2, False, True),
    ("sum", WEIGHT, 0.0, True, False),
    ("mean", WEIGHT, 0.2, True, False),
    ("sum", None, 0.0, False, True),
    ("mean", None, 0.0, False, False),
    ("sum", WEIGHT, 0.2, False, False),
]:
    targets = classes(3, 2) if not soft else rand(3, 4, 2)
    CASES.append(
        (
            f"cross-entropy {reduction} weight={weight is not None} {smoothing=} {ignored=} {soft=}",
            nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing),
            randn(3, 4, 2),
            ignoring(targets) if ignored else targets,
            Categorical,
        )
    )


def known(loss_fn, output, target):
    leaf = output.clone().requires_grad_()
    return evaluate(loss_fn, leaf.view_as(leaf), target).known


def identity_like(output):
    return torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)


def matrix(rows):
    return rows.detach().reshape(len(rows), -1).t()


def test_hessian_and_scores():
    for case in CASES:
        check_loss(*case)


def check_loss(name, loss_fn, output, target, kind):
    loss = known(loss_fn, output, target)
    assert type(loss) is kind
    z = loss.output.detach()
    of_z = F.nll_loss if name == "log-probabilities" else loss_fn
    of_z = (lambda z, y: F.cross_entropy(z, y)) if name == "log-probabilities" else of_z
    expected = torch.func.jacrev(torch.func.jacrev(lambda z: of_z(z, target)))(z).reshape(
        z.numel(), z.numel()
    )
    got = matrix(loss.hessian_product(identity_like(z)))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        loss.hessian_product(identity_like(z)[0]).flatten(), expected[0], rtol=1e-9, atol=1e-12
    )
    generator, count = torch.Generator().manual_seed(0), 800
    scores = torch.stack([loss.score(generator).detach().flatten() for _ in range(count)])
    expected = matrix(loss.fisher_product(identity_like(output)))
    spread = expected.diagonal().clamp(min=0).sqrt()
    outer = scores.unsqueeze(2) * scores.unsqueeze(1)
    # Six standard errors of each entry, and what the rarest events that 800 draws may miss amount to.
    allowed = 6 * outer.std(0) / count**0.5 + 0.02 * spread.max() ** 2 + 1e-12
    assert (outer.mean(0) - expected).abs().le(allowed).all(), name
    assert scores.mean(0).abs().le(6 * scores.std(0) / count**0.5 + 0.02 * spread.max() + 1e-12).all()


def test_scores_are_bits_of_the_generator():
    loss = known(F.cross_entropy, randn(50, 4), classes(50))
    first, second = (loss.score(torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, loss.score(torch.Generator().manual_seed(4)))


DIFFERENTIATED = {"indices", "weighted squares", "Gaussian", "weighted binary", "weighted probabilities"}


@pytest.mark.parametrize(
    ("loss_fn", "output", "target"), [pytest.param(*c[1:4], id=c[0]) for c in CASES if c[0] in DIFFERENTIATED]
)
def test_products_can_be_differentiated_in_the_output(loss_fn, output, target):
    vector = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)

    def product(z):
        return known_at(loss_fn, z, target).hessian_product(vector)

    def known_at(loss_fn, z, target):
        return evaluate(loss_fn, z.view_as(z), target).known

    z = output.clone().requires_grad_()
    assert mg.gradcheck(lambda z: product(z) + 0 * z, (z,), order=2, directions=1)


OTHERS = [
        ("a multiple", lambda z, y: 0.5 * F.mse_loss(z, y), randn(5, 4)),
        ("a multiple in place", lambda z, y: F.mse_loss(z, y).mul_(0.5), randn(5, 4)),
        ("a sum with something", lambda z, y: F.mse_loss(z, y) + z.square().sum(), randn(5, 4)),
        ("a function", lambda z, y: (z - y).square().mean(), randn(5, 4)),
        ("another loss", F.smooth_l1_loss, randn(5, 4)),
        ("a target that depends on the output", lambda z, y: F.mse_loss(z, z.sin()), randn(5, 4)),
        ("a variance that does", lambda z, y: F.gaussian_nll_loss(z[:, :2], y, z[:, 2:].exp()), randn(5, 2)),
        ("an output that is broadcast", lambda z, y: F.mse_loss(z[:, None], y.expand(5, 2, 4)), randn(5, 1, 4)),
        ("no reduction", lambda z, y: F.mse_loss(z, y, reduction="none"), randn(5, 4)),
        ("what is no log-probability", F.nll_loss, classes(5)),
        ("what does not depend on the output", lambda z, y: F.mse_loss(y.clone().requires_grad_(), y), randn(5, 4)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_not_the_loss_itself_is_not_recognised():
    for name, loss_fn, target in OTHERS:
        assert known(loss_fn, randn(5, 4), target) is None, name


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_deprecated_arguments_are_left_to_autodiff():
    assert known(functools.partial(F.mse_loss, reduce=True), randn(5, 4), randn(5, 4)) is None


def test_learned_targets_and_weights_are_no_hindrance():
    target = rand(5, 4).requires_grad_()
    assert isinstance(known(F.cross_entropy, randn(5, 4), target.softmax(1)), Categorical)


def test_everything_ignored_has_no_curvature():
    loss = known(functools.partial(F.cross_entropy, reduction="sum"), randn(2, 4), torch.full((2,), -100))
    assert not loss.hessian_product(torch.ones(2, 4, dtype=torch.float64)).any()


FACTOR = randn(4).requires_grad_()
FUNCTIONS = [
    (True, lambda z: z),
    (True, lambda z: z.transpose(1, 2).reshape(-1, 2).float()),
    (True, lambda z: z[:, :, :-1].permute(2, 0, 1).contiguous().flatten()),
    (True, lambda z: z.mT.unsqueeze(0).squeeze().expand(2, -1, -1, -1)),
    (True, lambda z: 2 * (z @ torch.eye(4, 3).double()).mean(1) + 1),
    (False, lambda z: z.exp()),
    (False, lambda z: z.relu()),
    (False, lambda z: z * FACTOR),
    (False, lambda z: z + FACTOR),
    (False, lambda z: FACTOR * 2),
    (False, lambda z: torch.ones(3)),
]


def test_affine_functions_of_the_output():
    leaf = randn(3, 2, 4).requires_grad_()
    output = leaf.view_as(leaf)
    for affine, function in FUNCTIONS:
        assert is_affine_in(function(output), [output]) is affine


def test_probabilities_of_zero_and_one_stay_finite():
    z = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    loss = known(F.binary_cross_entropy, z, torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    assert loss.hessian_product(torch.ones_like(z)).isfinite().all()
    assert loss.fisher_product(torch.ones_like(z)).isfinite().all()
    assert loss.score(None).isfinite().all()
