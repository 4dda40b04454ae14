"""Ridge regression with a learned penalty for each weight: a bilevel problem in closed form."""

from typing import NamedTuple

import torch


class Ridge(NamedTuple):
    """Data, a penalty, and the minimum."""

    x: torch.Tensor
    y: torch.Tensor
    query_x: torch.Tensor
    query_y: torch.Tensor
    hyper: dict[str, torch.Tensor]

    def inner(self, params, hyper):
        residual = self.x @ params["w"] - self.y
        return residual.square().mean() / 2 + (hyper["log_penalty"].exp() * params["w"].square()).sum() / 2

    def outer(self, params, hyper):
        residual = self.query_x @ params["w"] - self.query_y
        return residual.square().mean() / 2 + 0.1 * hyper["log_penalty"].sin().sum()

    def solution(self, log_penalty):
        n = len(self.y)
        return torch.linalg.solve(
            self.x.T @ self.x / n + torch.diag(log_penalty.exp()), self.x.T @ self.y / n
        )

    def closed(self, log_penalty):
        """Return the outer loss at the minimum, as a function of the penalty."""
        return self.outer({"w": self.solution(log_penalty)}, {"log_penalty": log_penalty})

    @property
    def params(self):
        return {"w": self.solution(self.hyper["log_penalty"])}

    @property
    def derivative(self):
        return torch.func.grad(self.closed)(self.hyper["log_penalty"])


def ridge(n=20, d=6, seed=0):
    """Make a problem whose Hessian has its eigenvalues between 1.2 and 2.9, whatever the seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    left, right = torch.linalg.qr(draw(n, d))[0], torch.linalg.qr(draw(d, d))[0]
    x = left * (n * torch.linspace(0.5, 1.5, d, dtype=torch.float64)).sqrt() @ right
    return Ridge(x, draw(n), draw(n, d), draw(n), {"log_penalty": 0.3 * draw(d).tanh()})
