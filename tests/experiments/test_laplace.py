"""The Laplace approximation against Bayesian linear regression in closed form."""

import math

import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.examples import laplace

F64 = torch.float64


def test_a_linear_model_has_the_closed_form():
    """Unit noise, a prior of precision 2: evidence, its derivative, and the variance of a prediction."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator, dtype=F64)
    y = x @ torch.arange(5.0, dtype=F64) + torch.randn(60, generator=generator, dtype=F64)
    model = torch.nn.Linear(5, 1, bias=False, dtype=F64)
    prior = torch.tensor(2.0, dtype=F64)

    def of(log_prior):
        """Return the evidence without constants, by the marginal distribution of y."""
        covariance = torch.eye(60, dtype=F64) + x @ x.T / log_prior.exp()
        return -(y @ torch.linalg.solve(covariance, y)) / 2 - torch.linalg.slogdet(covariance)[1] / 2

    A = x.T @ x + prior * torch.eye(5, dtype=F64)
    w = torch.linalg.solve(A, x.T @ y)
    params = {"weight": w[None]}

    def half(out, target):
        return F.mse_loss(out, target) / 2

    # F.mse_loss has no factor of 1/2, so its Fisher matrix has the scale of half the noise.
    K = mg.kfac(model, F.mse_loss, params, (x * 0.5**0.5, y[:, None]), fisher="exact")
    log_prior = prior.log().requires_grad_()
    loss = 60 * half(x @ w[:, None], y[:, None])
    own = laplace.evidence(K, loss, w.square().sum(), 60, log_prior)
    expected = of(log_prior)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    # At its maximum over w, the loss has no derivative by the prior through w.
    torch.testing.assert_close(
        *(torch.autograd.grad(e, log_prior)[0] for e in (own, expected)), rtol=1e-10, atol=1e-12
    )
    points = torch.randn(3, 5, generator=generator, dtype=F64)
    mean, cov = laplace.predictive(model, params, K, prior, 60, points)
    torch.testing.assert_close(mean[:, 0], points @ w)
    torch.testing.assert_close(
        cov[:, 0, 0], (points @ torch.linalg.inv(A) * points).sum(1), rtol=1e-12, atol=1e-14
    )


def test_a_picture_is_turned():
    picture = torch.zeros(1, 784)
    picture[0, 28 * 3 + 14] = 1.0
    around = laplace.turned(picture, 180.0).view(28, 28)
    assert int(around.argmax()) in (28 * 24 + 13, 28 * 24 + 14)
    torch.testing.assert_close(laplace.turned(picture, 0.0), picture, rtol=0, atol=1e-5)
    assert math.isclose(float(around.sum()), 1.0, rel_tol=0.1)
