import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from metagrad.memory.storages import Slot, StorageCounter, StorageMode

CPU = torch.device("cpu")
OLD = torch.arange(50, dtype=torch.float64)  # 400 bytes, allocated before any counter is open


def f64(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def resized(numel, start=10):
    return f64(start).resize_(numel)


def sparse_coo():
    index, values = torch.tensor([[0, 1, 1], [0, 0, 2]]), f64(3)
    return torch.sparse_coo_tensor(index, values, (2, 3), check_invariants=True)


class Wrapper(torch.Tensor):
    """Wrapper subclass that holds its data in another tensor, without `__tensor_flatten__`."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {})))


OLD_WRAPPER = Wrapper(OLD)
OLD_COO = torch.eye(4, dtype=torch.float64).to_sparse()


def fake():
    with FakeTensorMode():
        return torch.ones(100) * 2


def requires_grad(tensor):
    return tensor.clone().requires_grad_()


def backward():
    w = requires_grad(OLD)  # 400
    (w.exp() * 2).sum().backward()  # .grad has 400 bytes, everything else is freed
    return w


# Each case is a computation, and the bytes that stay allocated while its result is held.
CASES = {
    "factory": (lambda: f64(10), 80),
    "empty": (lambda: f64(0), 0),
    "torch.tensor": (lambda: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 24),
    "from_numpy is numpy's memory": (lambda: torch.from_numpy(np.ones(6)), 0),
    "view of old": (lambda: OLD[3:].view(-1), 0),
    "expand": (lambda: f64(1).expand(1000), 8),
    "view keeps its base": (lambda: f64(100)[0], 800),
    "detach": (lambda: OLD.detach(), 0),
    "in-place": (lambda: OLD.clone().add_(1).mul_(2), 400),
    "out=": (lambda: torch.add(OLD, 1, out=f64(50)), 400),
    "temporaries": (lambda: (OLD + 1).exp().sum(), 8),
    "grown": (lambda: resized(1000), 8000),
    "shrunk keeps its storage": (lambda: resized(2), 80),
    "set_ to an old storage": (lambda: f64(10).set_(OLD.untyped_storage()), 0),
    "data swapped": (lambda: setattr(t := f64(10), "data", f64(30)) or t, 240),
    "tuple": (lambda: torch.linalg.svd(torch.eye(3, dtype=torch.float64)), 72 + 24 + 72),
    "coo": (sparse_coo, 3 * 2 * 8 + 3 * 8),
    "coo from dense": (lambda: torch.eye(3, dtype=torch.float64).to_sparse_coo(), 3 * 2 * 8 + 3 * 8),
    "coo to dense": (lambda: OLD_COO.to_dense(), 128),
    "wrapper": (lambda: OLD_WRAPPER * 2, 400),
    "wrapper's temporaries": (lambda: (OLD_WRAPPER * 2 + 1).exp(), 400),
    "meta": (lambda: torch.empty(100, device="meta"), 0),
    "fake": (fake, 0),
    "mkldnn": (lambda: torch.ones(4, 4).to_mkldnn(), 0),
    "vmap": (lambda: torch.vmap(lambda x: x * 2)(OLD.view(5, 10)), 400),
    "func.grad": (lambda: torch.func.grad(lambda x: (x**3).sum())(OLD), 400),
    "func.jvp": (lambda: torch.func.jvp(torch.sin, (OLD,), (OLD,)), 800),
    "zero tensor": (lambda: torch._efficientzerotensor((100,)), 0),
    "inference mode": (lambda: torch.inference_mode()(lambda: OLD.reshape(5, 10) + 1)(), 400),
    "backward": (backward, 800),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_that_stay_are_exact_and_go_with_the_result(name):
    make, expected = CASES[name]
    counter = StorageCounter(CPU)
    with StorageMode(counter):
        kept = make()
        assert counter.total == expected
        del kept
        assert counter.total == 0
    assert counter.peak >= expected


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", ["csr", "bsc"])
def test_compressed_layouts_count_the_storages_of_their_three_components(layout):
    dense = torch.eye(4, dtype=torch.float64)
    block = {} if layout in ("csr", "csc") else {"blocksize": (2, 2)}
    reference = getattr(dense, f"to_sparse_{layout}")(**block)
    pointers = reference.crow_indices() if layout in ("csr", "bsr") else reference.ccol_indices()
    num_indices = 2 * reference.values().shape[0]  # `nonzero` allocates two rows, and torch uses one of them
    counter = StorageCounter(CPU)
    with StorageMode(counter):
        kept = getattr(dense, f"to_sparse_{layout}")(**block)
    assert counter.total == 8 * (pointers.numel() + num_indices + reference.values().numel())
    assert kept.layout == reference.layout


def test_storage_resized_by_hand_is_seen_when_next_returned():
    counter = StorageCounter(CPU)
    with StorageMode(counter):
        kept = f64(10)
        kept.untyped_storage().resize_(0)
        kept.detach()
        assert counter.total == 0
        del kept
        assert counter.total == 0


def test_close_freezes_the_counts():
    counter = StorageCounter(CPU)
    with StorageMode(counter):
        kept = f64(10)
    counter.close()
    del kept
    assert counter.total == 80


def test_attribution_equals_a_copy_of_all_counters_at_each_new_peak():
    chance = random.Random(0)
    counter = StorageCounter(CPU)
    slots = [Slot() for _ in range(5)]
    live = [0] * len(slots)
    expected, peak, held = list(live), 0, []
    with StorageMode(counter):
        for _ in range(500):
            if held and chance.random() < 0.5:
                slot, tensor = held.pop(chance.randrange(len(held)))
                live[slot] -= 8 * tensor.numel()
                del tensor
            else:
                slot = chance.randrange(len(slots))
                counter.slot = slots[slot]
                tensor = f64(chance.randrange(1, 50))
                live[slot] += 8 * tensor.numel()
                held.append((slot, tensor))
                del tensor
            if sum(live) > peak:
                expected, peak = list(live), sum(live)
            assert [counter.at_peak(slot) for slot in slots] == expected
            assert (counter.total, counter.peak) == (sum(live), peak)


def test_zero_tensors_below_a_mode_do_not_crash():
    # In torch 2.13 `mul.Scalar` of a zero tensor crashes the process below any TorchDispatchMode.
    counter = StorageCounter(CPU)
    with StorageMode(counter):
        zero = torch._efficientzerotensor((100,))
        assert torch.ops.aten.mul.Scalar(zero, 2.0)._is_zerotensor()
        assert counter.peak == 0
        assert not (zero + OLD[:1]).any()
