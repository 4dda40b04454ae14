"""What torch.vmap gets wrong in silence: every row of the table, and every operator of torch against a loop."""

import contextlib
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from metagrad.meta.objective.vmap import RULES, NotStackableError, vmapped
from tests.draws import draw

NUM_TASKS = 3


def one_by_one(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*stacked: Tensor) -> Tensor:
        return torch.stack([fn(*(x[i].clone() for x in stacked)) for i in range(len(stacked[0]))])

    return call


def derivatives(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], order: int) -> list[Tensor]:
    """Return the value, the gradient and the gradient of a non-linear function of the gradient."""
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    leaves = [x for x in inputs if x.requires_grad]
    found = [fn(*inputs)]
    for _ in range(order):
        total = torch.stack([(0.7 * x + 0.3).sin().sum() for x in found[-len(leaves) :]]).sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        found += [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return found


def are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def with_options(x: Tensor, w: Tensor) -> Tensor:
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        pytest.skip("this torch has no chunked linear_cross_entropy")
    return F.linear_cross_entropy(x, w, torch.tensor([0, 1, 2]), options=options(allow_retain_graph=True))


class Planted(NamedTuple):
    """A function that torch.vmap computes wrongly, and tasks that show it."""

    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


PLANTED = {
    "select_scatter": Planted(
        lambda row: torch.select_scatter(torch.ones(5, 5, dtype=torch.float64), row, 0, 1),
        (draw(NUM_TASKS, 5),),
    ),
    "Tensor.select_scatter": Planted(
        lambda x, row: x.select_scatter(row, -1, 1), (draw(NUM_TASKS, 5, 5), draw(NUM_TASKS, 5))
    ),
    "roll": Planted(lambda x: torch.roll(x, 1), (draw(NUM_TASKS),)),
    "Tensor.roll": Planted(lambda x: x.roll(1), (draw(NUM_TASKS),)),
    "index_fill": Planted(
        lambda v: torch.ones(5, dtype=torch.float64).index_fill(0, torch.tensor([1]), v), (draw(NUM_TASKS),)
    ),
    "linear_cross_entropy": Planted(with_options, (draw(NUM_TASKS, 3, 4), draw(NUM_TASKS, 5, 4))),
    "grad_fn": Planted(lambda x: x if (x * 2).grad_fn is None else -x, (draw(NUM_TASKS, 2),)),
    "is_leaf": Planted(lambda x: x if (x * 2).is_leaf else -x, (draw(NUM_TASKS, 2),)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_torch_vmap_gets_silently_wrong_is_refused(name):
    """Fails when torch has mended it: the row of the table can go then."""
    fn, inputs = PLANTED[name]
    found = derivatives(torch.vmap(fn), inputs, order=1)
    assert not are_close(found, derivatives(one_by_one(fn), inputs, order=1))
    with pytest.raises(NotStackableError, match=r"torch\.vmap"):
        vmapped(fn)(*inputs)


def test_every_rule_is_planted():
    reasons = set()
    for fn, inputs in PLANTED.values():
        with contextlib.suppress(pytest.skip.Exception):
            try:
                vmapped(fn)(*inputs)
            except NotStackableError as error:
                reasons.add(str(error))
    known = {rule.reason for rule in RULES if rule.functions}
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        known = {reason for reason in known if "linear_cross_entropy" not in reason}
    assert reasons == known


IDS = torch.tensor([[0, 1, 2, 4], [2, 2, 0, 0], [3, 4, 4, 1]])
LOOKUPS = {
    "padding_idx": lambda table, ids: F.embedding(ids, table, padding_idx=0),
    "negative padding_idx": lambda table, ids: F.embedding(ids, table, padding_idx=-1),
    "positional": lambda table, ids: F.embedding(ids, table, 2),
    "torch.embedding": lambda table, ids: torch.embedding(table, ids, 2, False, False),
    "keywords": lambda table, ids: torch.embedding(weight=table, indices=ids, padding_idx=4),
    "nn.Embedding": lambda table, ids: nn.functional.embedding(input=ids, weight=table, padding_idx=1),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_padding_has_no_gradient_under_vmap(name):
    """torch.vmap forgets the padding of all tasks but the first."""
    fn, inputs = LOOKUPS[name], (draw(NUM_TASKS, 5, 2), IDS)
    expected = derivatives(one_by_one(fn), inputs, order=2)
    assert are_close(derivatives(vmapped(fn), inputs, order=2), expected)
    assert not are_close(derivatives(torch.vmap(fn), inputs, order=2), expected)


def test_requires_grad_is_answered_as_outside_of_vmap():
    x = draw(NUM_TASKS, 2).requires_grad_()
    seen = []

    def fn(x):
        seen.extend([x.requires_grad, (x * 2).requires_grad, x.detach().requires_grad])
        return x

    vmapped(fn)(x)
    assert seen == [True, True, False]


# New memory has undefined values.
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}
# Layer normalization has an incorrect second derivative, also without vmap.
INTERNAL = {"native_layer_norm"}


@pytest.fixture
def op_db() -> Iterator[list]:
    """Yield torch's table of operators. Its module imports a package for torch's tests that is not needed here."""
    with pytest.MonkeyPatch.context() as patch:
        if "expecttest" not in sys.modules:
            stub = types.ModuleType("expecttest")
            stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            stub.assert_expected_inline = lambda *args, **kwargs: None  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "expecttest", stub)
        from torch.testing._internal.common_methods_invocations import op_db

        yield [op for op in op_db if torch.float64 in op.supported_dtypes("cpu")]


class SeesDraws(TorchDispatchMode):
    """Remember whether an operator drew random numbers, which vmap draws in another order than a loop."""

    has_drawn = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def draws(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> bool:
    with SeesDraws() as mode:
        call(*(x[0] for x in inputs))
    return mode.has_drawn


def cases_of(op) -> Iterator[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Yield functions of some of a sample's tensors, and these for several tasks."""
    if op.name in UNDEFINED | INTERNAL:
        return
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        floating = [i for i in tensors if leaves[i].is_floating_point()]
        if not all(is_usable(leaves[i]) for i in tensors):
            continue
        for chosen in {tuple(tensors), tuple(floating), *((i,) for i in floating[:3])} - {()}:

            def call(*own, leaves=leaves, spec=spec, chosen=chosen):
                filled = list(leaves)
                for place, tensor in zip(chosen, own, strict=True):
                    filled[place] = tensor
                value, args, kwargs = pytree.tree_unflatten(filled, spec)
                outputs = pytree.tree_leaves(op(value, *args, **kwargs))
                kept = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
                return torch.cat([x.flatten() for x in kept])

            yield call, tuple(for_tasks(leaves[i]) for i in chosen)


def is_usable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.isfinite().all())


def for_tasks(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.stack([tensor.detach() * (1 + 0.1 * i) for i in range(NUM_TASKS)])
    if tensor.ndim:
        return torch.stack([tensor.roll(i, 0) for i in range(NUM_TASKS)])
    return torch.stack([tensor] * NUM_TASKS)


def differs_silently(op, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> bool:
    order = 2 if op.supports_gradgrad and op.supports_autograd else 0
    try:
        torch.manual_seed(0)
        expected = derivatives(one_by_one(call), inputs, order)
        torch.manual_seed(0)
        found = derivatives(vmapped(call), inputs, order)
    except Exception:
        return False  # an error, of the loop or of vmap, is not silent
    return not are_close(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_operator_is_right_or_refused_under_vmap(op_db):
    wrong = []
    for op in op_db:
        for call, inputs in itertools.islice(cases_of(op), 12):
            if differs_silently(op, call, inputs) and not draws(call, inputs):
                wrong.append((op.name, [tuple(x.shape) for x in inputs]))
                break
    assert not wrong
