"""Dense matrices as linear maps, matrices whose spectra are known, and how often intervals cover."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate
from tests.draws import seeded


class MatrixMap:
    """A square matrix as a linear map that counts its products. Differentiable if the matrix is."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.matvecs = 0

    @property
    def shape(self) -> tuple[int, int]:
        return (self.matrix.shape[0], self.matrix.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def multiply(self, vectors: Tensor) -> Tensor:
        assert vectors.dim() == 2, "rows of vectors"
        self.matvecs += vectors.shape[0]
        return vectors @ self.matrix.t()


def exponential(n: int) -> Tensor:
    """0.7^i, i = 0, 1, ...: numerical rank about 100."""
    return 0.7 ** torch.arange(n, dtype=torch.float64)


def step(n: int) -> Tensor:
    """A twentieth of the eigenvalues are 1, and all other eigenvalues 0.001."""
    return torch.where(torch.arange(n) < max(n // 20, 1), 1.0, 1e-3).double()


def polynomial(n: int) -> Tensor:
    """1 / i^2, i = 1, 2, ..."""
    return torch.arange(1, n + 1, dtype=torch.float64) ** -2


def flat(n: int) -> Tensor:
    """From 3 down to 1, evenly."""
    return torch.linspace(3, 1, n, dtype=torch.float64)


def indefinite(n: int) -> Tensor:
    """A bulk in [-1, 1], and outliers on both sides: 10, 20, ..., 100 above and -2, -4, ..., -10 below."""
    above, below = 10 * torch.arange(10, 0, -1), -2 * torch.arange(1, 6)
    return torch.cat([above, torch.linspace(1, -1, n - 15, dtype=torch.float64), below])


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "exponential": exponential,
    "step": step,
    "polynomial": polynomial,
    "flat": flat,
    "indefinite": indefinite,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


@lru_cache
def basis(n: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix, [n, n]."""
    return torch.linalg.qr(drawn(n, n, seed=seed))[0]


def with_spectrum(spectrum: Tensor, seed: int = 0) -> Tensor:
    """Return a symmetric matrix of known eigenvalues in a random basis, in float64."""
    q = basis(len(spectrum), seed)
    dense = (q * spectrum.double()) @ q.t()
    return (dense + dense.t()) / 2


@lru_cache
def matrix(name: str, n: int = 1000, seed: int = 0) -> Tensor:
    """The symmetric matrix of a known spectrum in a random basis, [n, n] in float64. Not to be written to."""
    return with_spectrum(SPECTRA[name](n), seed)


class DiagonalMap(MatrixMap):
    """A diagonal matrix. Rotation invariant probes cannot tell it from one in another basis."""

    def __init__(self, diagonal: Tensor) -> None:
        super().__init__(diagonal.expand(len(diagonal), len(diagonal)))
        self.diagonal = diagonal

    def multiply(self, vectors: Tensor) -> Tensor:
        self.matvecs += vectors.shape[0]
        return vectors * self.diagonal


def coverage(
    estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int, level: float = 0.9
) -> float:
    """The share of intervals, over repeats and elements, that hold the truth."""
    held = []
    for seed in range(repeats):
        low, high = estimate(seeded(seed)).interval(level)
        held.append(((low <= truth) & (truth <= high)).double().mean())
    return torch.stack(held).mean().item()


def covers(
    estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int, level: float = 0.9
) -> bool:
    """Whether independent intervals hold a number as often as they say, within four standard errors."""
    least = level - 4 * math.sqrt(level * (1 - level) / repeats)
    return least <= coverage(estimate, truth, repeats, level) < 1


def median_error(estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int) -> float:
    """The median over repeats of the relative error."""
    values = torch.stack([estimate(seeded(seed)).value for seed in range(repeats)])
    return ((values - truth) / truth).abs().median().item()
