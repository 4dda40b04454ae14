"""Functional optimizers inside compiled steps, on losses whose gradient is a single operation.

Torch 2.13 fuses ``torch.add(w, x @ y, alpha=a)`` and gets it wrong on a CPU. A formula ``w + a * d`` is correct.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import metagrad as mg

# Torch itself gives these warnings while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
]

rules = mg.optim.rules
RULES = {
    "sgd": rules.sgd(lr=0.1),
    "sgd, options": rules.sgd(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, nesterov=False),
    "sgd, nesterov": rules.sgd(lr=0.1, momentum=0.9, nesterov=True),
    "adam": rules.adam(lr=0.1, amsgrad=True),
    "adamw": rules.adamw(lr=0.1, weight_decay=0.1),
    "adagrad": rules.adagrad(lr=0.1, weight_decay=0.1),
    "rmsprop": rules.rmsprop(lr=0.1, centered=True, momentum=0.5),
    "lion": rules.lion(lr=0.1, weight_decay=0.1),
    "muon": rules.muon(lr=0.1, ns_dtype=None, weight_decay=0.1),
    "shampoo": rules.shampoo(lr=0.1, eps=1e-2),
    "soap": rules.soap(lr=0.1, shift=0.1, weight_decay=0.1),
    "clip": rules.chain(rules.clip_by_norm(0.5), rules.sgd(lr=0.1)),
}
"""Every functional optimizer, with the options that add a term to its formula."""


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


X, IDS, IMAGES = drawn(5, 6), torch.tensor([0, 2, 2, 3, 1]), drawn(2, 3, 5, 5)
LOSSES = {
    "product": ((3, 6), lambda w: F.linear(X, w).tanh().sum()),
    "embedding": ((4, 3), lambda w: F.embedding(IDS, w).tanh().sum()),
    "convolution": ((4, 3, 3, 3), lambda w: F.conv2d(IMAGES, w).tanh().sum()),
}


def step(kinds, state, t, given=None):
    """Update the weights of each loss by each optimizer, which is closed over or an argument."""
    new = {}
    for key, (params, rule_state) in state.items():
        kind, name = key
        rule = RULES[name] if given is None else given[name]
        grads = {"w": grad(LOSSES[kind][1])(params["w"])}
        new[key] = rule.update(grads, rule_state, params)
    return new, None


def outcome(kinds, *given, **options):
    state = {}
    for kind in kinds:
        params = {"w": drawn(*LOSSES[kind][0])}
        for name, rule in RULES.items():
            if kind != "convolution" or name not in ("muon", "soap"):
                state[kind, name] = params, rule.init(params)
    last, _ = mg.unroll(functools.partial(step, kinds), state, *given, steps=2, create_graph=False, **options)
    return {key: params["w"] for key, (params, _) in last.items()}


@pytest.mark.parametrize(
    "given", [(), pytest.param((RULES,), marks=pytest.mark.slow)], ids=["closed over", "an argument"]
)
def test_no_formula_has_the_form_that_torch_compiles_wrongly(given):
    found = set()

    def backend(graph, inputs):
        sums = [node for node in graph.graph.nodes if node.target in (torch.add, torch.sub, "add", "sub")]
        found.update(node.stack_trace for node in sums if "alpha" in node.kwargs)
        return graph

    outcome(["product"], *given, compile={"backend": backend})
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("given", [(), (RULES,)], ids=["closed over", "an argument"])
@pytest.mark.parametrize("kind", LOSSES)
def test_compiled_steps_are_eager_steps(kind, given):
    found, expected = outcome([kind], *given, compile=True), outcome([kind])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
