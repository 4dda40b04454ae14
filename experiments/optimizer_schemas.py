"""The schemas of optimizers beyond Adam and SGD: every key and its type. Values live in `conf/optimizer/`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from experiments.schema import Adam, FirstOrder, Optimizer, key


@dataclass
class AdamW(Adam):
    """torch.optim.AdamW."""


@dataclass
class Lion(FirstOrder):
    """metagrad.optim.Lion."""

    betas: list[float] = MISSING


@dataclass
class Muon(FirstOrder):
    """metagrad.optim.Muon for the matrices of hidden layers, and another optimizer for the `rest`."""

    momentum: float = MISSING
    nesterov: bool = MISSING
    adjust_lr_fn: str = MISSING
    rest: Adam = field(default_factory=Adam)


@dataclass
class AdaHessian(FirstOrder):
    """metagrad.optim.AdaHessian."""

    betas: list[float] = MISSING
    eps: float = MISSING
    hessian_power: float = MISSING
    samples: int = MISSING
    spatial_average: bool = MISSING


@dataclass
class SophiaH(FirstOrder):
    """metagrad.optim.SophiaH."""

    betas: list[float] = MISSING
    gamma: float = MISSING
    eps: float = MISSING
    curvature_every: int = MISSING
    samples: int = MISSING


@dataclass
class Shampoo(FirstOrder):
    """metagrad.optim.Shampoo."""

    momentum: float = MISSING
    decay: float = MISSING
    eps: float = MISSING
    graft: str | None = MISSING
    graft_decay: float = MISSING
    block_size: int = MISSING
    root_every: int = MISSING


@dataclass
class SOAP(FirstOrder):
    """metagrad.optim.SOAP."""

    betas: list[float] = MISSING
    eps: float = MISSING
    shift: float = MISSING
    basis_every: int = MISSING
    max_size: int = MISSING


@dataclass
class NeedsClosure(Optimizer):
    """An optimizer that sees how a loss is computed, or computes it again."""


@dataclass
class SophiaG(SophiaH, NeedsClosure):
    """metagrad.optim.SophiaG."""


@dataclass
class KFAC(FirstOrder, NeedsClosure):
    """metagrad.optim.KFAC."""

    momentum: float = MISSING
    damping: float = MISSING
    decay: float = MISSING
    curvature_every: int = MISSING
    inverse_every: int = MISSING
    kl_clip: float | None = MISSING
    eigen: bool = MISSING
    fisher: str = MISSING


@dataclass
class Newton(NeedsClosure):
    """A Newton method; its curvature is that of the first `curvature_batch` examples of a batch, null of all."""

    curvature_batch: int | None = key(
        "Examples of a batch whose curvature is taken; null is all. experiments.optimizers."
    )
    max_steps: int = MISSING


@dataclass
class Damped(Newton):
    """metagrad.optim.NewtonCG or GaussNewton."""

    damping: float = MISSING
    warm_start: float = MISSING
    adapt: bool = MISSING
    change: float = MISSING
    progress: float | None = MISSING


@dataclass
class NaturalGradient(Damped):
    """metagrad.optim.NaturalGradient."""

    max_divergence: float | None = MISSING


@dataclass
class CubicNewton(Newton):
    """metagrad.optim.CubicNewton."""

    cubic: float = MISSING
    adapt: bool = MISSING


@dataclass
class TrustRegionNewton(Newton):
    """metagrad.optim.TrustRegionNewton."""

    radius: float = MISSING
    max_radius: float = MISSING
    accept: float = MISSING
    progress: float | None = MISSING


@dataclass
class LBFGS(NeedsClosure):
    """metagrad.optim.LBFGS."""

    max_iter: int = MISSING
    history_size: int = MISSING
    line_search_fn: str | None = MISSING
    max_eval: int = MISSING


CATALOGUE: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
    "adahessian": AdaHessian,
    "sophia_h": SophiaH,
    "sophia_g": SophiaG,
    "shampoo": Shampoo,
    "soap": SOAP,
    "kfac": KFAC,
    "newton_cg": Damped,
    "gauss_newton": Damped,
    "natural_gradient": NaturalGradient,
    "cubic_newton": CubicNewton,
    "trust_region_newton": TrustRegionNewton,
    "lbfgs": LBFGS,
}
"""Schemas by the name of the file in `conf/optimizer/`."""
