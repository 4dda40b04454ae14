"""What is often taught, beside ours: `python -m experiments.studies.overhead.listings`.

1. A least-squares loss, its gradient with create_graph=True, and the gradient of the sum of that.
2. MAML that copies its parameters into fast weights, but computes the inner loss with the module's own parameters,
   and the query loss before the fast weights are anywhere: its meta-gradient is that of a model that never adapts.
3. A Hessian product by a difference of gradients: its error over the step, on a smooth network and on one with kinks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.allocations import held_bytes, peak_bytes
from experiments.studies.overhead.rows import markdown
from metagrad.tasks import Batch, Examples

TASKS, SHOTS, FEATURES, STEPS, RATE = 4, 20, 10, 5, 0.01
SEEDS, OUTER_STEPS, OUTER_RATE, JUDGED = 3, 100, 0.03, 20
STRIDES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


def text(seed: int = 0) -> str:
    """Return all three as markdown."""
    parts = [
        ["# Listings", "", "## A second derivative", "", *second_derivative(seed)],
        ["", "## MAML", "", *fast_weights(seed)],
        ["", "## Differences of gradients", "", *differences(seed)],
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def second_derivative(seed: int) -> list[str]:
    """Weigh the gradient of the sum of a gradient, of least squares on 1000 examples of 500 features."""
    torch.manual_seed(seed)
    x, y = torch.randn(1000, 500), torch.randn(1000)
    w = torch.zeros(500, requires_grad=True)

    def loss() -> Tensor:
        return (x @ w - y).square().mean()

    def first(create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(loss(), w, create_graph=create_graph)[0]

    def linearized() -> mg.autograd.Linearization:
        return mg.linearize(loss(), w)

    listed = torch.autograd.grad(first(create_graph=True).sum(), w)[0]
    ours = linearized().hvp(torch.ones(500))
    expected = 2 / 1000 * x.T @ (x @ torch.ones(500))
    body = [
        ["gradient", *_weighed(first, first), ""],
        [
            "create_graph=True, gradient of the sum",
            *_weighed(
                lambda: first(create_graph=True),
                lambda: torch.autograd.grad(first(create_graph=True).sum(), w),
            ),
            _distance(listed, expected),
        ],
        [
            "mg.linearize(loss, w).hvp(ones)",
            *_weighed(linearized, lambda: linearized().hvp(torch.ones(500))),
            _distance(ours, expected),
        ],
    ]
    return markdown(["", "KiB held", "KiB at the peak", "off from 2/n X'X 1 by"], body)


def _weighed(hold, run) -> list[str]:
    run()
    return [f"{held_bytes(hold) / 1024:.1f}", f"{peak_bytes(run) / 1024:.1f}"]


def tasks(seed: int) -> Batch:
    """Draw regressions: two with large inputs, which a few steps fit, and two with small ones, of other weights.

    A model that never adapts does best near the weights of the first two, one that adapts near those of the others.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kinds = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
    scales, means = kinds.T[..., None, None]
    weights = means + 0.1 * draw(TASKS, FEATURES, 1)
    x, query_x = scales * draw(2, TASKS, SHOTS, FEATURES)
    return Batch(Examples(x, x @ weights), Examples(query_x, query_x @ weights))


def listed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the query loss of the listing; its fast weights are unused, which allow_unused=True passes over."""
    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        fast = [p.clone() for p in model.parameters()]
        for _ in range(STEPS):
            loss = F.mse_loss(model(x), y)
            grads = torch.autograd.grad(loss, fast, create_graph=True, allow_unused=True)
            fast = [p if g is None else p - RATE * g for p, g in zip(fast, grads, strict=True)]
        losses.append(F.mse_loss(model(query_x), query_y))
    return torch.stack(losses).mean()


def fast_weights(seed: int) -> list[str]:
    """Compare meta-gradients, and what is learned by them, for three seeds."""
    header = [
        "seed", "listing's from that of the plain loss", "listing's from MAML's", "their cosine",
        "loss after training by the listing", "by MAML",
    ]  # fmt: skip
    body = [[str(number), *_compared(number)] for number in range(seed, seed + SEEDS)]
    line = (
        f"Distances are relative. The loss is that after {STEPS} inner steps, on new tasks, of what {OUTER_STEPS} "
        f"steps of Adam at {OUTER_RATE:g} have learned."
    )
    return [*markdown(header, body), "", line]


def _compared(seed: int) -> list[str]:
    torch.manual_seed(seed)
    batch, model = tasks(seed), nn.Linear(FEATURES, 1).double()
    maml = mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=RATE), steps=STEPS)

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    plain = gradient(F.mse_loss(model(batch.query.x), batch.query.y))
    exact, listed = gradient(maml(batch).loss), gradient(listed_loss(model, batch))
    cosine = F.cosine_similarity(listed, exact, dim=0).item()
    learned = [f"{trained(seed, is_listed=is_listed):.4g}" for is_listed in (True, False)]
    return [_distance(listed, plain), _distance(listed, exact), f"{cosine:.2f}", *learned]


def trained(seed: int, *, is_listed: bool) -> float:
    """Return the query loss of adapted models, on new tasks, after training by either meta-gradient."""
    torch.manual_seed(seed)
    model = nn.Linear(FEATURES, 1).double()
    maml = mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=RATE), steps=STEPS)
    outer = torch.optim.Adam(model.parameters(), lr=OUTER_RATE)
    for step in range(OUTER_STEPS):
        batch = tasks(10_000 * seed + step)
        outer.zero_grad()
        (listed_loss(model, batch) if is_listed else maml(batch).loss).backward()
        outer.step()
    with torch.no_grad():
        judged = [maml(tasks(10_000 * seed + OUTER_STEPS + draw)).loss for draw in range(JUDGED)]
    return torch.stack(judged).mean().item()


def differences(seed: int) -> list[str]:
    """Compare central differences of gradients in float32 with products of the tape in float64."""
    body = []
    for name, activation in (("tanh", nn.Tanh), ("ReLU", nn.ReLU)):
        torch.manual_seed(seed)
        model = mg.models.MLP([FEATURES, 50, 50, 50, 1], activation=activation)
        x, y = torch.randn(100, FEATURES), torch.randn(100, 1)
        params = {n: p.detach() for n, p in model.named_parameters()}
        v = {n: torch.randn_like(p) for n, p in params.items()}
        scale = torch.cat([part.flatten() for part in v.values()]).norm()
        v = {n: part / scale for n, part in v.items()}

        def loss(params, x, y, model=model):
            return F.mse_loss(torch.func.functional_call(model, params, (x,)), y)

        double = [{n: p.double() for n, p in tree.items()} for tree in (params, v)]
        exact = _flat(mg.hvp(loss, *double, x.double(), y.double()).product)
        errors = [
            _distance(_flat(difference(loss, params, v, x, y, stride)).double(), exact) for stride in STRIDES
        ]
        body.append([name, *errors])
    return markdown(["step along a unit vector", *(f"{stride:g}" for stride in STRIDES)], body)


def difference(loss, params, v, x, y, stride: float) -> dict[str, Tensor]:
    """Return the central difference of two gradients."""
    slope = torch.func.grad(loss)
    ends = [slope({n: p + sign * stride * v[n] for n, p in params.items()}, x, y) for sign in (1, -1)]
    return {n: (ends[0][n] - ends[1][n]) / (2 * stride) for n in params}


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in tree.values()])


def _distance(got: Tensor, expected: Tensor) -> str:
    return f"{((got - expected).norm() / expected.norm()).item():.2g}"


if __name__ == "__main__":
    print(text(), end="")
