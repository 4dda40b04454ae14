"""The outer loop: optimizers with a closure, and the loss of all predictions."""

import math
from contextlib import nullcontext

import pytest
import torch
from hydra.utils import get_object

import metagrad as mg
from experiments.run import outer
from experiments.run.build import asks_for_closure, build_parts
from experiments.run.loop import Run, outer_step
from experiments.run.schemas import OPTIMIZERS
from tests.marks import fast

CPU = torch.device("cpu")
BY_CLOSURE = [name for name, schema in OPTIMIZERS.items() if asks_for_closure(get_object(schema._target_))]


def outer_run(composed, *overrides):
    torch.manual_seed(0)
    settings = composed("device=cpu", "meta_batch=2", "model.sizes=[1,5,1]", *overrides)
    splits = type("Splits", (), {"train": mg.tasks.Sinusoid(shots=4, queries=3)})()
    return Run(settings, build_parts(settings), splits, CPU, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", fast(("sophia_h", "newton_cg", "lbfgs"), ["adahessian", "sophia_h", "soap", *BY_CLOSURE])
)
def test_the_outer_loop_takes_steps_by_curvature(composed, name):
    run = outer_run(composed, f"optimizer={name}")
    before = [p.detach().clone() for p in run.parts.module.parameters()]
    for _ in range(3):
        outer_step(run, None)
    assert all(not torch.equal(a, b) for a, b in zip(before, run.parts.module.parameters(), strict=True))


def test_a_closure_of_an_optimizer_of_torchs_is_called(composed):
    run = outer_run(composed, "optimizer=custom", "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=1e-3")
    before = next(run.parts.module.parameters()).detach().clone()
    outer_step(run, None)
    assert run.parts.takes_closure
    assert not torch.equal(before, next(run.parts.module.parameters()))


def test_the_loss_of_all_predictions_has_the_gradient_of_the_outer_loss(composed):
    parts = outer_run(composed).parts
    maml, batch = parts.module.double(), mg.tasks.Sinusoid(shots=4, queries=3, dtype=torch.float64).sample(3)
    out = maml(batch)
    whole = outer.known_loss(parts, batch, out)
    params = list(maml.parameters())
    expected = torch.autograd.grad(out.loss, params, retain_graph=True)
    assert whole is not out.loss
    for g, e in zip(torch.autograd.grad(whole, params), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_a_trial_step_that_goes_too_far_is_rejected_and_does_not_end_the_run(composed):
    run = outer_run(composed)
    batch = run.splits.train.sample(2)
    losses_seen = []

    class Tries(torch.optim.SGD):
        def step(self, closure):  # type: ignore[override]
            losses_seen.append(closure().item())
            for p in self.param_groups[0]["params"]:
                p.data.mul_(1e30)
            losses_seen.append(closure().item())

    params = list(run.parts.module.parameters())
    outer.step(
        run.parts._replace(optimizer=Tries(params), takes_closure=True), batch, lambda _: nullcontext()
    )
    assert math.isfinite(losses_seen[0])
    assert losses_seen[1] == math.inf
