"""How certain is an adapted model? MAML and BMAML on sinusoids, by the likelihood of points that they have not seen.

    python -m experiments.examples.uncertainty

Five points leave much of a sine wave open. MAML adapts one network, whose errors are taken as normal, with one
standard deviation for all points; BMAML adapts several, which disagree where the points say little, and predicts by
their mixture. The standard deviation is, for either, the best on other tasks than those it is judged on. The inner
steps of BMAML are means over the particles, so that its rate is as many times that of MAML.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.progress import Progress

SIZES = [1, 40, 40, 1]


def trained(learner: mg.MAML, tasks: mg.tasks.Sinusoid, iterations: int, meta_batch: int) -> mg.MAML:
    """Train on meta-batches that are the same for every learner."""
    outer = torch.optim.Adam(learner.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in Progress(range(iterations), unit="step", leave=False):
        outer.zero_grad()
        learner(tasks.sample(meta_batch, generator=generator)).loss.backward()
        outer.step()
    return learner


@torch.no_grad()
def errors(learner: mg.MAML, batch: mg.tasks.Batch) -> Tensor:
    """Return the errors of each adapted model, `[tasks, models, queries, 1]`."""
    fast = learner.adapt(batch.support)
    x, y = batch.query
    outputs = fast.particles(x) if isinstance(fast, mg.meta.AdaptedParticles) else fast(x)[:, None]
    return outputs - y[:, None]


def surprise(errors: Tensor, std: float) -> float:
    """Return the mean negative log-likelihood of points under the mixture of normals about the outputs."""
    each = -(errors / std).square() / 2 - math.log(std * math.sqrt(2 * math.pi))
    return (math.log(errors.shape[1]) - each.logsumexp(1)).mean().item()


def main(arguments: list[str] | None = None) -> None:
    """Train both, and print how they predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=800, help="outer steps")
    parser.add_argument("--meta-batch", type=int, default=10, help="tasks of an outer step")
    parser.add_argument("--steps", type=int, default=3, help="inner steps")
    parser.add_argument("--lr", type=float, default=0.01, help="the rate of the inner steps of MAML")
    parser.add_argument("--particles", type=int, default=5)
    parser.add_argument(
        "--leader-steps", type=int, default=0, help="of the chaser loss; with 0 that of the mixture"
    )
    parser.add_argument("--temperature", type=float, default=5.0, help="of the likelihood exp(-loss/T)")
    parser.add_argument("--judged", type=int, default=500, help="tasks to be judged on, and as many before")
    parsed = parser.parse_args(arguments)
    tasks = mg.tasks.Sinusoid(shots=5, queries=10)
    generator = torch.Generator().manual_seed(2)
    validation, test = (tasks.sample(parsed.judged, generator=generator) for _ in range(2))
    print(f"{'':6} {'mean squared error':>20} {'standard deviation':>20} {'negative log-likelihood':>25}")
    for name in ("MAML", "BMAML"):
        torch.manual_seed(0)
        model, sgd = mg.models.MLP(SIZES), mg.optim.rules.sgd
        if name == "MAML":
            learner = mg.MAML(model, F.mse_loss, inner=sgd(parsed.lr), steps=parsed.steps)
        else:
            learner = mg.BMAML(
                model,
                F.mse_loss,
                inner=sgd(parsed.lr * parsed.particles),
                steps=parsed.steps,
                particles=parsed.particles,
                leader_steps=parsed.leader_steps,
                temperature=parsed.temperature,
            )
        trained(learner, tasks, parsed.iterations, parsed.meta_batch)
        known, new = errors(learner, validation), errors(learner, test)
        std = min((0.02 * 1.1**i for i in range(60)), key=lambda std: surprise(known, std))
        mse = new.mean(1).square().mean().item()
        print(f"{name:6} {mse:20.3f} {std:20.3f} {surprise(new, std):25.3f}", flush=True)


if __name__ == "__main__":
    main()
