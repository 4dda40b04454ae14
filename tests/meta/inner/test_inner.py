"""Truncated inner loops, and tasks that stop early."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import metagrad as mg
from metagrad.core.budget import BudgetError
from metagrad.optim.rules import adam, chain, clip_by_norm, mask, sgd
from tests.marks import slow
from tests.meta.textbook import assert_learns_as, gradients, learner, textbook


def mlp():
    torch.manual_seed(0)
    return mg.models.MLP([2, 8, 3]).double()


@pytest.mark.parametrize(
    ("truncate", "memory", "task_chunk"),
    [(1, "full", None), (1, "step", 1), (3, "step", None), (3, "sqrt", 1), (3, "1MiB", None), (5, "full", 1),
     (9, "sqrt", None)],
)  # fmt: skip
def test_truncated_steps_are_first_order_steps_before_the_last(regression, truncate, memory, task_chunk):
    model = mlp()
    maml = learner(mg.MAML, model, steps=5, truncate=truncate, memory=memory, task_chunk=task_chunk)
    out = maml(regression)
    losses = textbook(model, F.mse_loss, regression, lr=0.1, steps=5, truncate=truncate)
    assert_learns_as(out, losses, model.parameters())
    assert out.support_losses.shape == (4, 5)


@dataclass(frozen=True)
class Alternating:
    """Gradient descent on weights in even steps, and on biases in odd ones."""

    moves: Callable[[torch.Tensor], torch.Tensor] = lambda p: p

    def init(self, params):
        return 0

    def update(self, grads, step, params):
        kind = ("weight", "bias")[step % 2]
        new = {k: p - 0.3 * grads[k] if k.endswith(kind) else self.moves(p) for k, p in params.items()}
        return new, step + 1


UNMOVED = {
    "alternating": (Alternating(), Alternating(torch.clone)),
    "clip and mask": (
        chain(clip_by_norm(0.3), mask(sgd(lr=0.5), "*0.*")),
        chain(clip_by_norm(0.3), mask(sgd(lr=0.5), "*0.*", other=sgd(lr=0.0))),
    ),
    "a learned rate": (
        mask(sgd(lr=torch.tensor(0.5, requires_grad=True)), "*0.*"),
        mask(sgd(lr=torch.tensor(0.5, requires_grad=True)), "*0.*", other=sgd(lr=0.0)),
    ),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("memory", "task_chunk"), [("full", None), ("full", 1), ("step", None), slow("sqrt", 1), slow("log", 1)]
)
@pytest.mark.parametrize("name", UNMOVED)
def test_a_parameter_that_a_rule_returns_unchanged_is_still_a_variable(
    regression, name, memory, task_chunk, order
):
    model = mlp()
    options = {"steps": 3, "order": order, "memory": memory, "task_chunk": task_chunk}
    losses = [learner(mg.MAML, model, inner=rule, **options)(regression).loss for rule in UNMOVED[name]]
    torch.testing.assert_close(
        *(gradients(loss, model.parameters()) for loss in losses), rtol=1e-10, atol=1e-14
    )


def between(norms):
    """Return a tolerance in the widest gap among the middle norms [steps, tasks], so that no rounding decides."""
    ordered = norms.flatten().sort().values[8:-8]
    gap = int((ordered[1:] / ordered[:-1]).argmax())
    return float((ordered[gap] * ordered[gap + 1]).sqrt())


@pytest.mark.parametrize(
    "rule", [slow(sgd(lr=0.1)), sgd(lr=0.05, momentum=0.9), slow(adam(lr=0.05))], ids=repr
)
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_each_task_stops_as_if_it_had_fewer_steps(regression, rule, task_chunk):
    model = mlp()
    norms = []
    for steps in range(7):  # the norm of the gradient before step t, by task
        fast = learner(mg.MAML, model, inner=rule, steps=steps).adapt(regression.support)
        losses = torch.stack(
            [
                F.mse_loss(functional_call(model, {k: p[i] for k, p in fast.params.items()}, (x,)), y)
                for i, (x, y) in enumerate(zip(*regression.support, strict=True))
            ]
        )
        grads = torch.autograd.grad(losses.sum(), list(fast.params.values()))
        norms.append(torch.stack([g.flatten(1).pow(2).sum(1) for g in grads]).sum(0).sqrt())
    tolerance = between(torch.stack(norms[:6]))
    stopped = torch.stack([n <= tolerance for n in norms[:6]] + [torch.ones(4, dtype=torch.bool)])
    expected_steps = stopped.int().argmax(0)
    assert len(expected_steps.unique()) > 1
    out = learner(
        mg.MAML, model, inner=rule, steps=6, tolerance=tolerance, task_chunk=task_chunk, memory="step"
    )(regression)
    assert out.steps.tolist() == expected_steps.tolist()
    shorter = [
        learner(mg.MAML, model, inner=rule, steps=int(n))(regression).query_losses[i]
        for i, n in enumerate(expected_steps)
    ]
    assert_learns_as(out, torch.stack(shorter), model.parameters())


def test_norms_of_float16_are_compared_with_the_tolerance():
    steps = []
    for dtype in (torch.float16, torch.float64):
        model = torch.nn.Linear(4000, 1, bias=False).to(dtype)
        torch.nn.init.zeros_(model.weight)
        x, y = torch.full((2, 4, 4000), 1e-2, dtype=dtype), torch.full((2, 4, 1), 1e-2, dtype=dtype)
        maml = learner(mg.MAML, model, steps=3, tolerance=1e-3)
        steps.append(maml(((x, y), (x, y))).steps)
    assert torch.equal(*steps)


def test_without_a_tolerance_all_steps_are_used(regression):
    maml = learner(mg.MAML, mlp(), steps=3)
    assert maml(regression).steps.tolist() == [3] * 4
    assert maml.adapt(regression.support, steps=0).steps.tolist() == [0] * 4


@pytest.mark.parametrize(("budget", "share"), [(5000, 1250), (2, 1)])
def test_a_budget_is_divided_among_tasks_that_run_one_by_one(regression, budget, share):
    with pytest.raises(BudgetError, match=f"memory={share}\\)"):
        learner(mg.MAML, mlp(), steps=3, memory=budget, task_chunk=1)(regression)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_a_meta_step_can_be_checkpointed(regression, memory):
    """The graph under vmap ends at leaves that the recording created."""
    model = mlp()
    maml = learner(mg.MAML, model, steps=3, memory=memory)
    params = dict(model.named_parameters())
    loss = mg.checkpoint(lambda: maml(regression).loss)
    torch.testing.assert_close(
        mg.grad(loss, params), mg.grad(maml(regression).loss, params), rtol=1e-12, atol=1e-15
    )
