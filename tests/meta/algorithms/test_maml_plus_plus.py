"""MAML++ against a loop over tasks, with its loss, rates, norms and schedules written out."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from tests.marks import slow
from tests.meta.textbook import normed_net

EPS, STEPS = 1e-5, 3


def learner_of(model, **options):
    options = {"steps": STEPS, "lr": 0.1, "multi_step_updates": 4, "first_order_updates": 1, **options}
    return mg.MAMLPlusPlus(model, F.mse_loss, **options)


def textbook(learner, batch, *, order, weights):
    w1, b1, _, _, w2, b2 = learner.model.parameters()
    gains, biases = learner.per_step_norms.parameters()
    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    rates = [
        [getattr(learner, f"inner_lr_{t}_{name.replace('.', '_')}") for name in names] for t in range(STEPS)
    ]

    def predict(p, x, t):
        h = F.linear(x, p[0], p[1])
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + EPS).sqrt() * gains[t] + biases[t]
        return F.linear(torch.tanh(h), p[2], p[3])

    total = 0
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        p = [w1, b1, w2, b2]
        for t in range(STEPS):
            loss = F.mse_loss(predict(p, x, t), y)
            grads = torch.autograd.grad(loss, p, create_graph=order == 2)
            p = [q - rate * g for q, rate, g in zip(p, rates[t], grads, strict=True)]
            total = total + weights[t] * F.mse_loss(predict(p, query_x, t), query_y)
    return total / len(batch.support.x), [w1, b1, w2, b2, gains, biases, *itertools.chain(*rates)]


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("memory", ["full", "step", slow("sqrt"), slow("64KiB")])
@pytest.mark.parametrize(
    ("update", "order", "weights"),
    [(0, 1, [1 / 3, 1 / 3, 1 / 3]), (2, 2, [1 / 6, 1 / 6, 2 / 3]), slow(4, 2, [0, 0, 1])],
)
def test_the_meta_gradient_is_that_of_the_textbook(regression, update, order, weights, memory, task_chunk):
    learner = learner_of(normed_net(), memory=memory, task_chunk=task_chunk)
    for _ in range(update):
        learner.advance()
    assert learner.order == order
    loss, of = textbook(learner, regression, order=order, weights=weights)
    out = learner(regression)
    assert_close(out.loss, loss)
    assert_close(torch.autograd.grad(out.loss, of), torch.autograd.grad(loss, of))


def test_the_weights_anneal_to_the_last_step_alone():
    learner = learner_of(normed_net())
    seen = []
    for _ in range(6):
        seen.append(learner.query_weights)
        learner.advance()
    assert seen[4:] == [None, None]
    for update, weights in enumerate(seen[:4]):
        assert weights == pytest.approx([(1 - update / 4) / 3] * 2 + [1 - 2 * (1 - update / 4) / 3])


def test_what_is_assigned_takes_the_place_of_the_schedule():
    learner = learner_of(normed_net())
    learner.query_weights = [0.0, 0.0, 1.0]
    learner.advance()
    assert learner.query_weights == [0.0, 0.0, 1.0]
    learner.order = 1
    assert learner.order == 1


def test_training_resumes_where_it_was(regression):
    def train(learner, outer, count):
        losses = []
        for _ in range(count):
            outer.zero_grad()
            loss = learner(regression).loss
            loss.backward()
            outer.step()
            learner.advance()
            losses.append(loss.item())
        return losses

    learner = learner_of(normed_net())
    outer = torch.optim.SGD(learner.parameters(), lr=0.1)
    train(learner, outer, 2)
    resumed = learner_of(normed_net())
    resumed.load_state_dict(learner.state_dict())
    copied = copy.deepcopy(learner)
    expected = train(learner, outer, 3)
    for other in (resumed, copied):
        assert train(other, torch.optim.SGD(other.parameters(), lr=0.1), 3) == expected
    assert expected[-1] < expected[0]


def test_models_without_norms_and_calls_without_steps(regression):
    learner = learner_of(mg.models.MLP([2, 4, 3]).double(), norm=None)
    assert learner(regression, steps=0).loss.isfinite()
    assert sum("inner_lr" in name for name, _ in learner.named_parameters()) == 4 * STEPS
    with pytest.raises(ValueError, match=r'"?lr has one value for each of 3 steps'):
        learner(regression, steps=4)
