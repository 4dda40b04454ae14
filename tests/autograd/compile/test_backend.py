"""Graphs that are called again without torch.compile, and what torch.compile is still needed for."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.autograd.compile.backend import Backend
from metagrad.autograd.compile.compiled import Compiled, CompileOptions
from metagrad.autograd.unrolling import compiled as loops
from metagrad.autograd.unrolling.compiled import CompiledStep
from metagrad.core import _torch, _torch_compiler
from tests.marks import slow

OPTIONS = {"backend": "aot_eager"}


@pytest.fixture
def calls(monkeypatch):
    """The functions that were called by way of torch.compile, in their order."""
    names = []
    kept = Compiled.kept  # which each call asks for first

    def counted(self, *args):
        names.append(self._code.co_name.split("_")[1])
        return kept(self, *args)

    monkeypatch.setattr(Compiled, "kept", counted)
    return names


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("memory", ["full", "step", slow("sqrt")])
def test_one_step_of_a_loop_goes_by_torch_compile(calls, memory):
    def step(w, t, lr):
        return w - lr * torch.sin(w) / (1 + t), w.sum()

    w, lr = tensor(1.0, 2.0), tensor(0.5)
    last, _ = mg.unroll(step, w, lr, steps=9, memory=memory, compile=OPTIONS)
    got = torch.autograd.grad(last.square().sum(), (w, lr))
    # Five steps at once, then one, or always one.
    assert calls == (["advance"] * 2 if memory == "full" else ["advance", "pull"])
    last, _ = mg.unroll(step, w, lr, steps=9)
    torch.testing.assert_close(got, torch.autograd.grad(last.square().sum(), (w, lr)), rtol=1e-12, atol=0)


def shrunk(w, t):
    return w * 0.5, None


@pytest.mark.parametrize(
    ("size", "steps", "pieces"), [(4, 12, [5, 5, 1, 1]), (2**19, 6, [1] * 6), (4, 4, [1] * 4)]
)
def test_several_small_steps_are_taken_at_once(size, steps, pieces, monkeypatch):
    taken, advance = [], loops._Loop._advance

    def counted(self, state, piece, shared):
        taken.append(len(piece))
        return advance(self, state, piece, shared)

    monkeypatch.setattr(loops._Loop, "_advance", counted)
    with torch.no_grad():
        last, _ = mg.unroll(shrunk, torch.ones(size), steps=steps, compile={"backend": "eager"})
    assert taken == pieces
    torch.testing.assert_close(last, torch.full((size,), 0.5**steps))


def test_a_step_of_many_functions_is_taken_by_itself(calls):
    def step(w, t):
        for _ in range(60):
            w = torch.sin(w)
        return w, None

    w = tensor(1.0)
    last, _ = mg.unroll(step, w, steps=6, compile=OPTIONS)
    assert calls == ["advance"]
    torch.testing.assert_close(last, mg.unroll(step, w, steps=6)[0])


def test_steps_that_somebody_looks_at_are_taken_one_by_one():
    numbers = []

    def around(number):
        numbers.append(number)
        return contextlib.nullcontext()

    compiled = CompiledStep("looked at", CompileOptions(False, {"backend": "eager"}))
    loops.unroll_compiled(compiled, shrunk, tensor(1.0), (), range(7), "full", owner=shrunk, around=around)
    assert numbers == list(range(7))


def test_every_step_goes_by_torch_compile_where_its_books_cannot_be_read(calls, monkeypatch):
    assert _torch_compiler.changes_objects()  # for nothing is being compiled
    monkeypatch.setattr(_torch_compiler, "changes_objects", lambda: True)
    with torch.no_grad():
        last, _ = mg.unroll(lambda w, t: (w * 3, None), torch.ones(1), steps=4, compile={"backend": "eager"})
    assert last.item() == 81
    assert calls == ["advance"] * 4


class Counter:
    steps = 0

    def as_attribute(self, w, t):
        self.steps += 1
        return w * 2, None


seen: list[int] = []


def into_a_list(w, t):
    seen.append(1)
    return w * 2, None


total = 0


def as_a_global(w, t):
    global total
    total += 1
    return w * 2, None


@pytest.mark.parametrize("kind", ["attribute", slow("list"), slow("global"), "cell"])
def test_what_a_step_does_to_objects_is_done_at_every_step(kind):
    global total
    counter, total, cell = Counter(), 0, 0
    seen.clear()

    def in_a_cell(w, t):
        nonlocal cell
        cell += 1
        return w * 2, None

    steps = {
        "attribute": counter.as_attribute,
        "list": into_a_list,
        "global": as_a_global,
        "cell": in_a_cell,
    }
    with torch.no_grad():
        last, _ = mg.unroll(steps[kind], torch.ones(2), steps=4, compile=OPTIONS)
        last, _ = mg.unroll(steps[kind], last, steps=4, compile=OPTIONS)
    assert last.tolist() == [256.0, 256.0]
    # More than the steps are those that are run as they are before something is compiled.
    assert {"attribute": counter.steps, "list": len(seen), "global": total, "cell": cell}[kind] >= 8


def test_a_tensor_that_stands_twice_in_a_state():
    def step(state, t):
        a, b = state
        return (a * b, b + 1), None

    w = tensor(2.0)
    (a, b), _ = mg.unroll(step, (w, w), steps=3, memory="step", compile=OPTIONS)
    assert (a.item(), b.item()) == (2.0 * 2 * 3 * 4, 5.0)
    (gradient,) = torch.autograd.grad(a, w)
    assert gradient.item() == pytest.approx(24 + 2 * (3 * 4 + 2 * 4 + 2 * 3))


def test_results_that_are_what_a_step_was_handed():
    def step(state, t, x):
        a, b = state
        return (b, a), (x, a)

    a, b, x = tensor(1.0), tensor(2.0), tensor(3.0)
    for steps in (2, 3):
        last, (xs, firsts) = mg.unroll(step, (a, b), x, steps=steps, compile=OPTIONS)
        assert [v.item() for v in last] == ([1.0, 2.0] if steps == 2 else [2.0, 1.0])
        assert xs.flatten().tolist() == [3.0] * steps
        assert firsts.flatten().tolist() == [1.0, 2.0, 1.0][:steps]


def test_what_a_step_reads_besides_is_that_of_its_own_loop():
    class Shifted(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.register_buffer("by", torch.tensor([by], dtype=torch.float64))

        def forward(self, w, t):
            return w + self.by, None

    w = tensor(0.0)
    for by in (1.0, 2.0, 3.0):
        last, _ = mg.unroll(Shifted(by), w, steps=4, memory="step", compile=OPTIONS)
        assert last.item() == 4 * by


@pytest.mark.parametrize("memory", ["full", "step", slow("sqrt")])
def test_a_loop_leaves_nothing_to_the_garbage_collector(memory):
    def run():
        w = tensor(1.0, 2.0)
        last, _ = mg.unroll(lambda w, t: (w * 0.5, None), w, steps=4, memory=memory, compile=OPTIONS)
        last.sum().backward()
        return weakref.ref(w)

    run()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_an_error_in_a_graph_leaves_no_transform_open():
    compiled = torch.compile(
        lambda x, places: torch.func.grad(lambda x: x[places].square().sum())(x),
        backend=Backend("eager"),
        fullgraph=True,
    )
    assert compiled(torch.ones(3), torch.tensor([1])).tolist() == [0, 2, 0]
    with pytest.raises(IndexError):
        compiled(torch.ones(3), torch.tensor([7]))
    assert not _torch.functorch_is_active()
    assert _torch.saved_tensors_hooks_enabled()
