"""The schemas of optimizers: every key and its type.

Values are the defaults of the class that is built, but for those in `conf/optimizer/`, which says why they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from hydra.utils import get_object
from omegaconf import MISSING

from experiments.schema import SGD, Adam, FirstOrder, Optimizer, key


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
    adjust_lr_fn: str | None = MISSING
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
    boundary_steps: int = MISSING


@dataclass
class LBFGS(NeedsClosure):
    """metagrad.optim.LBFGS."""

    max_iter: int = MISSING
    history_size: int = MISSING
    line_search_fn: str | None = MISSING
    max_eval: int | None = MISSING


def with_defaults(schema: type[Optimizer], target: str) -> type[Optimizer]:
    """Return a schema whose keys have the defaults of the class that is built."""
    arguments = inspect.signature(get_object(target)).parameters
    defaults = {"_target_": target, **{name: argument.default for name, argument in arguments.items()}}
    types = get_type_hints(schema)
    keys = [
        (one.name, types[one.name], _field(defaults[one.name], one.metadata))
        for one in fields(schema)
        if defaults.get(one.name, inspect.Parameter.empty) is not inspect.Parameter.empty
    ]
    return make_dataclass(schema.__name__, keys, bases=(schema,))


def _field(default: Any, metadata: Mapping[Any, Any]) -> Any:
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


CATALOGUE: dict[str, type[Optimizer]] = {
    "adam": with_defaults(Adam, "torch.optim.Adam"),
    "sgd": with_defaults(SGD, "torch.optim.SGD"),
    "adamw": with_defaults(AdamW, "torch.optim.AdamW"),
    "lion": with_defaults(Lion, "metagrad.optim.Lion"),
    "muon": with_defaults(Muon, "metagrad.optim.Muon"),
    "adahessian": with_defaults(AdaHessian, "metagrad.optim.AdaHessian"),
    "sophia_h": with_defaults(SophiaH, "metagrad.optim.SophiaH"),
    "sophia_g": with_defaults(SophiaG, "metagrad.optim.SophiaG"),
    "shampoo": with_defaults(Shampoo, "metagrad.optim.Shampoo"),
    "soap": with_defaults(SOAP, "metagrad.optim.SOAP"),
    "kfac": with_defaults(KFAC, "metagrad.optim.KFAC"),
    "newton_cg": with_defaults(Damped, "metagrad.optim.NewtonCG"),
    "gauss_newton": with_defaults(Damped, "metagrad.optim.GaussNewton"),
    "natural_gradient": with_defaults(NaturalGradient, "metagrad.optim.NaturalGradient"),
    "cubic_newton": with_defaults(CubicNewton, "metagrad.optim.CubicNewton"),
    "trust_region_newton": with_defaults(TrustRegionNewton, "metagrad.optim.TrustRegionNewton"),
    "lbfgs": with_defaults(LBFGS, "metagrad.optim.LBFGS"),
}
"""Schemas by the name of the file in `conf/optimizer/`."""
