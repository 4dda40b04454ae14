import contextlib

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.memory import MemoryTracker, Record
from metagrad.memory.phases import Phase
from metagrad.memory.report import format_bytes, inner_growth, outer_growth, summary, table


def record(*path, before=0, after=0, peak=0, graph=0, at_peak=0, device="cpu"):
    return Record(tuple(path), before, after, peak, graph, at_peak, 0.0125, device)


SIZES = {
    0: "0 B",
    1023: "1023 B",
    -8: "-8 B",
    1024: "1.00 KiB",
    1536: "1.50 KiB",
    -1536: "-1.50 KiB",
    2**20: "1.00 MiB",
    3 * 2**30: "3.00 GiB",
    5 * 2**40: "5120.00 GiB",
}


@pytest.mark.parametrize("nbytes", SIZES)
def test_format_bytes(nbytes):
    assert format_bytes(nbytes) == SIZES[nbytes]


def test_table():
    records = [
        record(("outer", 0), before=0, after=512, peak=3 * 2**20, graph=0, at_peak=8),
        record(
            ("outer", 0), ("inner", 0), before=512, after=2**20, peak=3 * 2**20, graph=2**20, at_peak=2**20
        ),
        record(("outer", 0), ("query", None), before=2**20, after=512, peak=2**20),
    ]
    assert table(records).splitlines() == [
        "phase        before     after      peak  peak delta     graph   at peak  seconds",
        "outer 0         0 B     512 B  3.00 MiB    3.00 MiB       0 B       8 B    0.013",
        "  inner 0     512 B  1.00 MiB  3.00 MiB    3.00 MiB  1.00 MiB  1.00 MiB    0.013",
        "  query    1.00 MiB     512 B  1.00 MiB         0 B       0 B       0 B    0.013",
        "cpu: bytes since the tracker was opened",
    ]


def test_a_long_table_says_what_it_leaves_out():
    records = [record(("outer", k)) for k in range(1000)]
    lines = table(records).splitlines()
    assert len(lines) == 1 + 20 + 1 + 40 + 1
    assert lines[20].startswith("outer 19 ")
    assert lines[21] == "... 940 not shown, outer 20 to outer 959; table(last=n) shows the last n"
    assert lines[22].startswith("outer 960 ")
    assert lines[61].startswith("outer 999 ")


N = 100
KIB = 1024


def outer_loop(keep_graph, outers=4, inners=3):
    """Run a second-order MAML loop on sum(w^3) / 3 that stores every meta-loss, with or without its graph."""
    w0 = torch.ones(N, dtype=torch.float64, requires_grad=True)
    history = []
    with MemoryTracker(device="cpu") as mem:
        for step in range(outers):
            with mem.outer(step):
                w = w0
                for k in range(inners):
                    with mem.inner(k):
                        (gradient,) = torch.autograd.grad((w**3).sum() / 3, w, create_graph=True)
                        w = w - 0.1 * gradient
                with mem.phase("query"):
                    loss = (w**2).sum()
                    torch.autograd.grad(loss, w0, retain_graph=keep_graph)
                history.append(loss if keep_graph else loss.item())
                del w, gradient, loss
    return mem


def test_an_outer_loop_that_keeps_graphs_leaks():
    mem = outer_loop(keep_graph=True)
    # A stored meta-loss of 8 bytes holds the graph, which is w_1 .. w_3 and 8 bytes for each inner step.
    assert "outer steps: leak of 2.38 KiB each, 2.37 KiB of it in the autograd graph\n" in mem.summary()
    assert outer_growth(mem._run.closed_phases()) == [(3 * 808 + 8, 3 * 808)] * 3


def test_the_three_lines():
    mem = outer_loop(keep_graph=False)
    query = next(record for record in mem.records() if record.name == "query")
    assert mem.summary().splitlines() == [
        "inner steps: 808 B each, 808 B of it in the autograd graph",
        "outer steps: freed",
        f"peak:        {format_bytes(mem.peak)}, mostly from outer 0 / query ({format_bytes(query.at_peak)})",
    ]


def test_an_empty_run():
    with MemoryTracker(device="cpu") as mem:
        pass
    assert mem.summary().splitlines() == [
        "inner steps: none",
        "outer steps: fewer than two, so a leak would not show",
        "peak:        0 B, mostly from outside of all phases (0 B)",
    ]


@pytest.mark.parametrize("around", [False, True])
def test_steps_that_the_backward_pass_recomputes_are_named(around):
    maml = mg.MAML(
        torch.nn.Linear(2, 1), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, memory="step"
    )
    batch = ((torch.ones(2, 3, 2), torch.ones(2, 3, 1)),) * 2
    with MemoryTracker(device="cpu") as mem, mem.outer(0) if around else contextlib.nullcontext():
        maml(batch).loss.backward()
    rows = [line.split("  ")[0 if line[0] != " " else 1] for line in mem.table().splitlines()]
    assert rows[1:] == [
        *("outer 0", "inner 0", "inner 1", "query", "inner 1 again", "inner 0 again"),
        *("cpu: bytes since the tracker was opened", "again: recomputed in the backward pass"),
    ]
    graphs = [record.graph for record in mem.records() if record.name == "inner again"]
    assert f"recomputed:  2 in backward passes. The graph of a step holds {min(graphs)} B" in mem.summary()


ROOT = Phase()


def phase(name, index, after, held=None, before=0, parent=ROOT, peak=0):
    held_before, held_after = held or (0, 0)
    return Phase(
        path=((name, index),),
        parent=parent,
        before=before,
        after=after,
        peak=peak,
        held_before=held_before,
        held_after=held_after,
    )


LINES = {
    "graph and state": (
        [phase("inner", 0, KIB, (0, 100)), phase("inner", 1, 3 * KIB, (100, 612))],
        "inner steps: 2.00 KiB each, 512 B of it in the autograd graph\nouter steps: fewer than two",
    ),
    "a single step": (
        [phase("inner", 0, 5 * KIB, (0, 4 * KIB), before=KIB)],
        "inner steps: 4.00 KiB each, 4.00 KiB of it in the autograd graph\n",
    ),
    "shrinks": (
        [phase("inner", 0, 3 * KIB, (0, 0)), phase("inner", 1, KIB, (0, 0))],
        "inner steps: -2.00 KiB each, 0 B of it",
    ),
    "two outer steps": (
        [
            phase("outer", 0, KIB, (0, 0), peak=KIB),
            phase("outer", 5, 2 * KIB, (0, KIB), before=KIB, peak=2 * KIB),
        ],
        "outer steps: leak of 1.00 KiB each, 1.00 KiB of it in the autograd graph\n",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_the_summary(name):
    phases, expected = LINES[name]
    assert expected in summary(phases, "made up", 0)


def test_inner_steps_of_different_parents_and_tasks_are_not_compared():
    other = Phase()
    phases = [
        phase("inner", 0, 1),
        phase("inner", 1, 3),
        phase("inner", 0, 1000),  # the next task
        phase("inner", 1, 1002),
        phase("inner", 0, 5000, parent=other),
        phase("inner", 1, 5002, parent=other),
    ]
    assert inner_growth(phases) == [(2, 0)] * 3
