"""Test-time training against a loop over tokens, finite differences and closed forms."""

from functools import reduce

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.examples import test_time_training as ttt

F64 = torch.float64
INNER = pytest.mark.parametrize("inner", ["linear", "mlp"])


def layer_and_input(inner, memory="sqrt", length=22):
    """Return a layer with random weights and chunks of 4 tokens. The last chunk is padded."""
    torch.manual_seed(0)
    layer = ttt.TTT(inner, chunk=4, memory=memory, width=6).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return layer, torch.randn(2, length, 12, dtype=F64)


def by_token(layer, x):
    """Train on one sequence with one gradient for each token, and predict with materialized weights."""

    def f(weights, u):
        first, *rest = weights
        return reduce(lambda u, weight: ttt.normalized(F.silu(u)) @ weight, rest, u @ first)

    query, key, value = layer.project(x).chunk(3, -1)
    query, key, rates = ttt.normalized(query), ttt.normalized(key), layer.rate(x).sigmoid()
    start = now = list(layer.weights)
    found = []
    for t in range(len(x)):
        if t % layer.chunk == 0:
            start = now
        grads = torch.func.grad(lambda w, t=t: (f(w, key[t]) - value[t]).square().sum() / 2)(start)
        now = [w - rate * g for w, rate, g in zip(now, rates[t], grads, strict=True)]
        found.append(f(now, query[t]))
    return torch.stack(found)


@INNER
def test_the_dual_form_is_a_loop_over_tokens_also_in_its_gradient(inner):
    layer, x = layer_and_input(inner)
    x.requires_grad_()
    out, expected = layer(x), torch.stack([by_token(layer, row) for row in x])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    into = {"x": x, **dict(layer.named_parameters())}
    got, want = (mg.grad(y.pow(3).sum(), into) for y in (out, expected))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert all(g.abs().max() > 1e-3 for g in got.values())


@INNER
@pytest.mark.parametrize("memory", ["step", "sqrt", "log"])
def test_checkpointing_policies_have_equal_results(inner, memory):
    outs = []
    for layer, x in (layer_and_input(inner, policy) for policy in ("full", memory)):
        out = layer(x)
        outs.append([out, *mg.grad(out.square().sum(), list(layer.parameters()))])
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [lambda: ttt.TTT("linear"), lambda: ttt.TTT("mlp"), ttt.Attention])
@pytest.mark.parametrize("t", [0, 15, 16, 37])
def test_a_token_changes_only_later_outputs(kind, t):
    torch.manual_seed(0)
    model = ttt.Recall(kind())
    tokens, _ = ttt.sequences(2, 16, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, t] = (tokens[:, t] + 1) % ttt.KEYS
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])
    with torch.no_grad():
        assert torch.equal(model(tokens), before)


def test_a_linear_model_recalls_orthonormal_keys():
    keys, values = torch.eye(6, dtype=F64)[None], torch.randn(1, 6, 5, dtype=F64)
    start = torch.zeros(1, 6, 5, dtype=F64, requires_grad=True)
    rates = torch.ones(1, 6, 1, dtype=F64)
    weights, z = ttt.train_on_chunk([start], 0, (keys, keys, values, rates))
    torch.testing.assert_close(weights[0], values, rtol=1e-12, atol=0)
    torch.testing.assert_close(z, values, rtol=1e-12, atol=0)


def test_queries_have_the_values_of_their_keys():
    tokens, values = ttt.sequences(3, 8, torch.Generator().manual_seed(0))
    for row, expected in zip(tokens.tolist(), values.tolist(), strict=True):
        memory = dict(zip(row[:16:2], row[1:16:2], strict=True))
        assert [memory[key] - ttt.KEYS for key in row[16:]] == expected


@pytest.mark.slow
@INNER
def test_it_learns_to_recall(inner):
    torch.manual_seed(0)
    model = ttt.train(ttt.TTT(inner, memory="full"), 300, 0)
    assert ttt.accuracy(model, 16) > 0.5  # chance is 1 / 128
