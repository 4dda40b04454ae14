"""Compiled loops of `unroll`, with functional optimizers: the values and gradients of eager loops."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import metagrad as mg
from metagrad.autograd.unrolling import compiled
from tests.marks import fast

TRACED = {"backend": "aot_eager"}


def step(state, t, lr, x):
    def loss(w):
        return ((x @ w).tanh() ** 2).sum() + w.square().sum()

    w, count = state
    return (w - lr * grad(loss)(w) / (1 + t), count + 1), loss(w)


def outcome(**options):
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (4, 3)))
    w, lr = w.requires_grad_(), torch.full((options["steps"],), 0.1, dtype=torch.float64, requires_grad=True)
    second = options.pop("second", False)
    (last, count), losses = mg.unroll(step, (w, 0), x, inputs=lr, **options)
    grads = torch.autograd.grad(last.square().sum() + losses.sum(), [w, lr], create_graph=second)
    if second:
        grads = torch.autograd.grad(sum(g.square().sum() for g in grads), [w, lr])
    return last.detach(), count, losses.detach(), *grads


@pytest.mark.parametrize("memory", fast(["full", "step", "2KiB"], ["full", "step", "sqrt", "2KiB"]))
def test_a_compiled_loop_is_an_eager_one(memory):
    found = outcome(steps=4, memory=memory, compile=TRACED)
    torch.testing.assert_close(found, outcome(steps=4), rtol=1e-10, atol=1e-12)


def test_large_steps_keep_the_graphs_of_compiled_code(monkeypatch):
    expected = outcome(steps=3)
    monkeypatch.setattr(compiled, "SMALL", 0)
    torch.testing.assert_close(outcome(steps=3, compile=TRACED), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", fast(["full"], ["full", "step"]))
def test_its_gradient_is_differentiated_again(memory):
    found = outcome(steps=3, memory=memory, compile=TRACED, second=True)
    torch.testing.assert_close(found, outcome(steps=3, second=True), rtol=1e-10, atol=1e-12)


def test_free_tensors_have_their_gradients():
    free = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def scaled(w, t):
        return w - 0.1 * free * w**2, None

    def gradients(**options):
        return torch.autograd.grad(mg.unroll(scaled, w, steps=2, **options)[0].sum(), [w, free])

    for memory in ("full", "step"):
        torch.testing.assert_close(gradients(memory=memory, compile=TRACED), gradients())


def test_what_cannot_be_compiled_runs_eagerly_with_a_warning():
    def branching(w, t):
        return (w * 2 if float(w.detach().sum()) > 0 else w), None

    w = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match=r"unroll\(step, ..., compile\): runs without being compiled"):
        last, _ = mg.unroll(branching, w, steps=2, compile=TRACED)
    assert torch.equal(last, 4 * w)


def test_a_backward_pass_that_cannot_be_compiled_runs_eagerly_with_a_warning():
    w, free, branches = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []

    def scaled(w, t):
        return (w * free.exp() if not branches or float(w.detach().sum()) > 0 else w), None

    found, _ = mg.unroll(scaled, w, steps=2, compile=TRACED)
    branches.append(True)
    with pytest.warns(UserWarning, match=r"unroll\(step, ..., compile\): runs without being compiled"):
        gradient = torch.autograd.grad(found.sum(), free)[0]
    torch.testing.assert_close(gradient, 2 * found.detach())


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


def step_of_rules(kinds, state, t, given=None):
    """Update the weights of each loss by each optimizer, which is closed over or an argument."""
    new = {}
    for key, (params, rule_state) in state.items():
        kind, name = key
        rule = RULES[name] if given is None else given[name]
        grads = {"w": grad(LOSSES[kind][1])(params["w"])}
        new[key] = rule.update(grads, rule_state, params)
    return new, None


def outcome_of_rules(kinds, *given, **options):
    state = {}
    for kind in kinds:
        params = {"w": drawn(*LOSSES[kind][0])}
        for name, rule in RULES.items():
            if kind != "convolution" or name not in ("muon", "soap"):
                state[kind, name] = params, rule.init(params)
    last, _ = mg.unroll(
        functools.partial(step_of_rules, kinds), state, *given, steps=2, create_graph=False, **options
    )
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

    outcome_of_rules(["product"], *given, compile={"backend": backend})
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("given", [(), (RULES,)], ids=["closed over", "an argument"])
@pytest.mark.parametrize("kind", LOSSES)
def test_compiled_steps_are_eager_steps(kind, given):
    found, expected = outcome_of_rules([kind], *given, compile=True), outcome_of_rules([kind])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
