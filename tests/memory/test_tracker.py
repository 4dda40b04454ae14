from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from metagrad.memory import MemoryTracker, current

N = 100
BYTES = 8 * N


def f64(numel):
    return torch.zeros(numel, dtype=torch.float64)


def cubic_step(w, create_graph=True):
    """Run one SGD step on sum(w^3) / 3, written so that every saved tensor is known."""
    (gradient,) = torch.autograd.grad((w**3).sum() / 3, w, create_graph=create_graph)
    return w - 0.1 * gradient


def unrolled(mem, steps=5, create_graph=True):
    w = torch.ones(N, dtype=torch.float64, requires_grad=True)
    for k in range(steps):
        with mem.inner(k):
            w = cubic_step(w, create_graph)
    return w


def active():
    """Return the hooks and modes of torch that a tracker may change."""
    return (
        _get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def sizes(record):
    return record.before, record.after, record.peak


def test_unrolled_sgd_grows_by_the_same_bytes_each_step():
    # Step k leaves w_{k+1}, which is N doubles. The double backward of w^3 needs the incoming gradient 1/3, which is
    # one expanded double. The powers save w_k, a leaf at k = 0. So the graph holds w_1 .. w_k and 8 bytes a step.
    with MemoryTracker(device="cpu") as mem, mem.outer(0):
        kept = unrolled(mem)
    inner = [record for record in mem.records() if record.name == "inner"]
    growth = [second.after - first.after for first, second in pairwise(inner)]
    assert growth == [BYTES + 8] * 4
    assert [record.graph for record in inner] == [8, *[BYTES + 8] * 4]
    assert kept.requires_grad


def test_phases_nest_and_fold():
    with MemoryTracker(device="cpu") as mem:
        base = f64(N)
        with mem.outer(7):
            with mem.inner(0):
                first = f64(N) + 1  # two storages at once, one of them stays
            with mem.phase("query", index=2):
                with mem.phase("deep"):
                    f64(5 * N)
                del first
        del base
    outer, inner, query, deep = mem.records()
    assert sizes(outer) == (BYTES, BYTES, 7 * BYTES)
    assert sizes(inner) == (BYTES, 2 * BYTES, 3 * BYTES)
    assert sizes(query) == (2 * BYTES, BYTES, 7 * BYTES)
    assert sizes(deep) == (2 * BYTES, 2 * BYTES, 7 * BYTES)
    assert [record.peak_delta for record in mem.records()] == [6 * BYTES, 2 * BYTES, 5 * BYTES, 5 * BYTES]
    assert deep.path == (("outer", 7), ("query", 2), ("deep", None))
    assert (deep.name, deep.index, deep.depth, deep.outer) == ("deep", None, 2, 7)
    assert (inner.name, inner.index, inner.depth, inner.outer) == ("inner", 0, 1, 7)
    assert mem.peak == 7 * BYTES


def test_the_peak_is_attributed_to_the_phases_that_made_it():
    with MemoryTracker(device="cpu") as mem:
        outside = f64(1)
        with mem.outer(0):
            with mem.inner(0):
                x, y = f64(100), f64(50)
                del y
            with mem.inner(1):
                z = f64(200)  # x and z have 2400 + 8 bytes, a first peak
                del x
            with mem.inner(2):
                u = f64(150)  # z and u have 2800 + 8 bytes, a higher peak
                v = u[:10].clone()  # 2880 + 8 bytes, the peak
                del u
            with mem.inner(3):
                z = f64(100)  # 1600 + 80 + 800 bytes, below the peak
    at_peak = [record.at_peak for record in mem.records()]
    assert at_peak == [0, 0, 1600, 1280, 0]
    assert mem.peak == 2888 == sum(at_peak) + 8 * outside.numel()
    assert "peak:        2.82 KiB, mostly from outer 0 / inner 1 (1.56 KiB)" in mem.summary()
    assert v.numel() + z.numel() == 110


def test_nothing_changes_after_closing():
    with MemoryTracker(device="cpu") as mem, mem.inner(0):
        kept = f64(N)
    before = mem.records(), mem.peak, mem.table(), mem.summary()
    del kept
    f64(10 * N)
    assert (mem.records(), mem.peak, mem.table(), mem.summary()) == before


def allocate_and_raise(mem):
    with mem, mem.outer(0), mem.inner(0):
        f64(N).sum()
        raise KeyError("mine")


def test_closed_after_an_exception_too():
    before, mem = active(), MemoryTracker(device="cpu")
    with pytest.raises(KeyError, match="mine"):
        allocate_and_raise(mem)
    assert active() == before
    assert current() is None
    assert [record.peak for record in mem.records()] == [BYTES + 8] * 2


def test_two_open_at_once():
    with (
        MemoryTracker(device="cpu"),
        pytest.raises(RuntimeError, match="expected no open tracker, but another one is; close it or use"),
    ):
        MemoryTracker(device="cpu").__enter__()


def test_a_tracker_measures_one_run():
    with MemoryTracker(device="cpu") as mem:
        pass
    assert repr(mem).startswith("MemoryTracker(cpu, 0 phases)")
    with pytest.raises(RuntimeError, match="this one has measured its run; make a new one"):
        mem.__enter__()
    assert current() is None


@pytest.mark.parametrize("open_first", [False, True])
def test_phases_of_a_closed_tracker(open_first):
    mem = MemoryTracker(device="cpu")
    if open_first:
        with mem:
            pass
    message = (
        r"MemoryTracker.phase\('inner'\): expected an open tracker, but it is closed; enter phases inside"
    )
    with pytest.raises(RuntimeError, match=message), mem.inner(0):
        pass


def suspended_in(mem):
    """Return a generator that is suspended inside an inner step."""

    def steps():
        with mem.inner(0):
            yield

    generator = steps()
    next(generator)
    return generator


def leave_before_inner(phase, mem, suspended, error=None):
    with phase:
        suspended.append(suspended_in(mem))
        if error is not None:
            raise error


def test_a_phase_closed_out_of_order():
    message = (
        "expected outer 0 / inner 0 to be closed before outer 0, which is around it; close phases in the"
    )
    suspended = []
    with MemoryTracker(device="cpu") as mem:
        with pytest.raises(RuntimeError, match=message):
            leave_before_inner(mem.outer(0), mem, suspended)
        suspended.pop().close()
        with mem.outer(1):
            pass
    assert [record.path[-1] for record in mem.records()] == [("outer", 0), ("inner", 0), ("outer", 1)]


BAD_ARGUMENTS = {
    "meta": (lambda: MemoryTracker(device="meta"), ValueError, r"\(device\): expected one of 'cpu', 'cuda'"),
    "name": (lambda: MemoryTracker().phase(3), TypeError, r"phase\(name\): expected str, got int"),
    "index": (lambda: MemoryTracker().inner("0"), ValueError, r"inner', index=...\): expected None or an"),
    "last": (lambda: MemoryTracker().table(last=0), ValueError, r"table\(last\): expected None or an int of"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    call, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        call()
