"""Parameters together, large ones in pieces, all compiled: the numbers are those of each by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from metagrad.optim import AdaHessian, Lion, SparseAdam
from metagrad.optim.torch_optim import move
from tests.optim.torch_optim.cases import assert_near, having, optimizer, run, snapshot


def model(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv1d(2, 3, 3, dtype=dtype),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(9, 4, dtype=dtype),
            nn.Tanh(),
            nn.Linear(4, 2, dtype=dtype),
        )


def trained(case, **options):
    net = model()
    x = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    run(optimizer(case, net, **options), lambda: nn.functional.mse_loss(net(x), x[:, :, 0]), 6)
    return snapshot(net)


@having("elementwise")
def test_together_is_each_by_itself(case):
    alone = trained(case, foreach=False)
    for foreach in (True, None):
        assert_near(trained(case, foreach=foreach), alone, rtol=1e-12, atol=1e-14)


@having("elementwise")
def test_in_pieces_is_whole(case, monkeypatch):
    whole = trained(case, foreach=False)
    monkeypatch.setattr(move, "_PIECE", 7)
    assert move.is_large(model()[0].weight)
    assert_near(trained(case), whole, rtol=1e-12, atol=1e-14)


def test_a_compiled_step_moves_a_number():
    """Torch (2.13) compiles away what is written into a 0-d tensor in float64."""
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    opt = Lion([w], lr=0.5, compile={"backend": "aot_eager"})
    w.square().backward()
    opt.step()
    assert w.item() == 1.5
    assert opt.state[w]["mean"].item() == pytest.approx(0.04)


@pytest.mark.slow
@having("elementwise")
def test_compiled_is_each_by_itself(case):
    alone = trained(case, foreach=False)
    assert_near(trained(case, compile={"backend": "eager"}), alone, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@having("elementwise")
def test_compiled_by_inductor_is_each_by_itself(case):
    assert_near(trained(case, compile=True), trained(case, foreach=False), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_square_kernels_are_compiled_by_inductor():
    """It fails (torch 2.13) on a mean of more than 8 numbers in what is then written in place."""
    one, other = (torch.ones(4, 2, 3, 3, requires_grad=True) for _ in range(2))
    for w, compiled in ((one, True), (other, False)):
        opt = AdaHessian([w], lr=0.1, compile=compiled)
        for _ in range(2):
            opt.zero_grad()
            opt.backward((w.cumsum(0) ** 4).sum())
            opt.step()
    assert_near([one], [other], rtol=1e-5, atol=0)


def stepped(opt, param, steps):
    for step in steps:
        param.grad = torch.linspace(-1, 1, param.numel(), dtype=param.dtype) + 0.1 * step
        opt.step()


def vector():
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


class Counted:
    """A backend of torch.compile that runs what it is given, and counts it."""

    graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def test_what_changes_from_step_to_step_is_compiled_once_more_at_most():
    counted, one, other = Counted(), vector(), vector()
    pair = Lion([one], lr=0.1, compile={"backend": counted}), Lion([other], lr=0.1)
    for opt, param in zip(pair, (one, other), strict=True):
        for rate in (0.1, 0.05, 0.02):
            opt.param_groups[0]["lr"] = rate
            stepped(opt, param, range(2))
    assert counted.graphs == 1  # by learning rate and number of the step
    for opt, param in zip(pair, (one, other), strict=True):
        for decay in (0.1, 0.05, 0.02):
            opt.param_groups[0]["weight_decay"] = decay
            stepped(opt, param, range(1))
    assert counted.graphs == 2
    assert_near([one], [other], rtol=1e-12, atol=0)


def test_what_cannot_be_compiled_runs_uncompiled_with_one_warning():
    def refusing(graph, inputs):
        raise NotImplementedError("no such graph.")

    one, other = vector(), vector()
    opt = Lion([one], lr=0.1, compile={"backend": refusing})
    with pytest.warns(
        UserWarning, match=r"Lion\.step: runs without being compiled.*no such graph.*compile=False"
    ):
        stepped(opt, one, range(1))
    stepped(opt, one, range(1))
    uncompiled = Lion([other], lr=0.1)
    for _ in range(2):
        stepped(uncompiled, other, range(1))
    assert torch.equal(one, other)


def test_a_compiled_step_continues_a_state_and_is_continued():
    options = {"backend": "eager"}
    one, other = vector(), vector()
    stepped(SparseAdam([other], lr=0.1), other, range(4))
    opt = SparseAdam([one], lr=0.1)
    stepped(opt, one, range(1))
    again = SparseAdam([one], lr=0.1, compile=options)
    again.load_state_dict({**opt.state_dict(), "param_groups": again.state_dict()["param_groups"]})
    again.param_groups[0]["step"] = 1
    stepped(again, one, range(1, 3))
    last = copy.deepcopy(again)
    (param,) = last.param_groups[0]["params"]
    last.param_groups[0]["compile"] = False
    stepped(last, param, range(3, 4))
    assert_near([param], [other], rtol=1e-12, atol=0)


def test_groups_that_are_replaced_have_the_compiled_steps_of_their_places():
    """`load_state_dict` replaces the dicts of groups; the numbers by which objects are known are used again."""
    options = {"backend": "eager"}
    one, other = vector(), vector()
    opt = Lion([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 1.0}], compile=options)
    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    for _ in range(3):
        opt.step()
        opt.load_state_dict(opt.state_dict())
    made = dict(opt._compiled_steps)
    opt.step()
    assert list(made) == [0, 1]
    assert opt._compiled_steps == made
    opt.param_groups[1]["compile"] = {"backend": "aot_eager"}
    opt.step()
    assert opt._compiled_steps[0] is made[0]
    assert opt._compiled_steps[1] != made[1]
    torch.testing.assert_close(
        [(vector() - one)[0], (vector() - other)[0]], [one.new_tensor(0.5), one.new_tensor(5.0)]
    )


def test_a_table_with_a_sparse_gradient_moves_uncompiled():
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    opt = SparseAdam(table.parameters(), lr=0.1, compile={"backend": "eager"})
    table(torch.tensor([1, 3])).square().sum().backward()
    opt.step()
    assert opt.state[table.weight]["rows"].tolist() == [1, 3]
    assert (table.weight != before).any(1).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("compile", "what"), [("whole", "a step is one graph"), (1, "got 1"), ({"fast": 1}, "backend")]
)
def test_other_values_of_compile_are_refused(compile, what):
    with pytest.raises(ValueError, match=rf"Lion\(params\): compile .*{what}"):
        Lion([vector()], compile=compile)


def test_pieces_of_a_state_do_not_share_memory(monkeypatch):
    """A rule may begin with one tensor of zeros in two slots."""
    monkeypatch.setattr(move, "_PIECE", 2)
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    opt = SparseAdam([w], lr=0.1)
    w.square().sum().backward()
    opt.step()
    state = opt.state[w]
    torch.testing.assert_close(state["mean"], 0.1 * w.grad)
    torch.testing.assert_close(state["square"], 0.001 * w.grad**2)


def bowl(w):
    return ((w - 1) * torch.tensor([1.0, 5.0])).square().sum()


def test_parameters_of_different_age_and_dtype_are_not_mixed():
    a, b = (torch.ones(1, 2, requires_grad=True) for _ in range(2))
    c = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    opt = Lion([a, b, c], lr=0.1, foreach=True)
    run(opt, lambda: bowl(a) * 2, 2)
    run(opt, lambda: bowl(a + 2) + bowl(b + 1) + bowl(c + 1), 1)
    alone = torch.ones(1, 2, requires_grad=True)
    run(Lion([alone], lr=0.1, foreach=False), lambda: bowl(alone + 1), 1)
    torch.testing.assert_close(b, alone)
    torch.testing.assert_close(c.float(), alone)
    assert c.dtype == torch.float64
    assert opt.state[a]["step"] == 3


def test_half_precision_together():
    params = [torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    opt = Lion(params, lr=0.1)
    sum(p.square().sum() for p in params).backward()
    opt.step()
    assert all(opt.state[p]["mean"].dtype == torch.float32 for p in params)
    assert params[0].tolist() == [[pytest.approx(0.9, abs=4e-3)] * 2] * 2
