"""One run: training on all examples, with the sharpness every few steps and the whole spectrum at some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from experiments.run.progress import Progress
from experiments.studies.curvature.measure import measure, row_of
from experiments.studies.curvature.schema import Matrix
from experiments.studies.landscape.problem import Problem, build, optimizer_of, stepper
from experiments.studies.landscape.schema import Method
from experiments.studies.landscape.stability import edge, preconditioned

if TYPE_CHECKING:
    from experiments.studies.landscape.schema import LandscapeConfig, RunConfig
    from experiments.studies.study import Result, Work
    from metagrad.curvature import Operator

DIVERGED = 100  # times the first loss


def train(config: LandscapeConfig, run: RunConfig, work: Work) -> Result:
    """Train, and return what was measured: `path` every few steps, `spectra` at some."""
    problem = build(config, work.seed)
    optimizer = optimizer_of(run, problem.model)
    step = stepper(run, problem, optimizer)
    path, spectra = [], []
    marks = {round(i * config.steps / (config.full - 1)) for i in range(config.full)}
    for number in Progress(range(config.steps + 1), unit="step", leave=False):
        if number:
            refuse_divergence(run, number, step(), path[0]["loss"])
        if number % config.every == 0 or number in marks:
            path.append({"step": number, **along(config, run, problem, optimizer, number)})
            work.log(number, {name: value for name, value in path[-1].items() if value is not None})
        if number in marks:
            spectra.append({"step": number, **spectrum(config, problem, work)})
    return {**path[-1], "path": path, "spectra": spectra}


def refuse_divergence(run: RunConfig, step: int, loss: float, first: float) -> None:
    """Raise an error for a run that has become much worse than it began: its numbers would soon not be finite."""
    if not loss < DIVERGED * first:
        raise ValueError(
            f"landscape: {run.title}: the loss before step {step} is {loss:.3g}, and was {first:.3g} before the "
            f"first. Lower the lr of the run, which is {run.lr:g}."
        )


def along(
    config: LandscapeConfig, run: RunConfig, problem: Problem, optimizer: Any, step: int
) -> dict[str, float | None]:
    """Measure loss, accuracies, the largest eigenvalue of the Hessian and of the preconditioned one, and the edge."""
    with problem.operator(Matrix.hessian) as H:
        norm = torch.linalg.vector_norm(H.gradient).item()  # type: ignore[reportAttributeAccessIssue]
        found = {
            "loss": H.loss.item(),  # type: ignore[reportAttributeAccessIssue]
            "gradient": norm,
            "sharpness": largest(H, config),
            "edge": edge(run, norm),
        }
        own = None  # before the first step there is no preconditioner
        if run.method is Method.gd:
            own = found["sharpness"]
        elif step:
            own = largest(preconditioned(H, run, optimizer, problem.model), config)
        return {**found, "preconditioned": own, **problem.accuracies()}


def largest(operator: Operator, config: LandscapeConfig) -> float:
    """Return the largest eigenvalue."""
    generator = torch.Generator().manual_seed(0)
    pairs = operator.eigenvalues(
        1,
        rtol=config.sharpness_rtol,
        max_products=config.eigenvalues.max_products,
        vectors=False,
        generator=generator,
    )
    return pairs.values.item()


def spectrum(config: LandscapeConfig, problem: Problem, work: Work) -> Result:
    """Measure traces, eigenvalues and the density; every measurement of a seed has the same probes."""
    with problem.operator(Matrix.hessian) as H:
        found = measure(H, config, work.seed)
    return {**found.metrics, "density": row_of(found.density)}
