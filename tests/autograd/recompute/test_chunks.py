"""Cross entropy and attention in chunks against the dense computations of torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.autograd import attention, linear_cross_entropy
from metagrad.memory.storages import StorageCounter, StorageMode
from tests.autograd.recompute.test_checkpoint import assert_same_derivatives

F64 = torch.float64


def draw(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("chunk", [1, 7, 40, 2**21])
@pytest.mark.parametrize(
    ("options", "has_bias"),
    [
        ({}, True),
        ({"reduction": "sum", "ignore_index": 2}, False),
        ({"reduction": "none", "label_smoothing": 0.3}, True),
        ({"label_smoothing": 0.1, "ignore_index": 0}, False),
    ],
)
def test_cross_entropy_has_the_derivatives_of_torch_up_to_order_3(chunk, options, has_bias):
    torch.manual_seed(0)
    labels = torch.tensor([[3, 2, 0], [10, 2, 5]])
    inputs = [draw(2, 3, 4), draw(11, 4), *[draw(11)] * has_bias]

    def chunked(hidden, weight, bias=None):
        return linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk, **options)

    def dense(hidden, weight, bias=None):
        losses = F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten(), **options)
        return losses.view(labels.shape) if losses.ndim else losses

    torch.testing.assert_close(chunked(*inputs), dense(*inputs))
    assert_same_derivatives(chunked, dense, inputs)


MASKS = {
    "none": None,
    "keys": torch.tensor([True, False, True, True, True, False]),
    "no key for query 1": torch.ones(5, 6, dtype=torch.bool).index_fill(0, torch.tensor([1]), False),
    "added": torch.linspace(-1, 1, 2 * 5 * 6, dtype=F64).view(2, 1, 5, 6),
}


@pytest.mark.parametrize(("mask", "is_causal"), list(itertools.product(MASKS, [False, True])))
@pytest.mark.parametrize("chunk", [1, 40, 2**21])
def test_attention_has_the_derivatives_of_torch_up_to_order_3(chunk, mask, is_causal):
    torch.manual_seed(0)
    inputs = [draw(2, 3, 5, 4), draw(2, 3, 6, 4), draw(2, 3, 6, 2)]
    causal = torch.ones(5, 6, dtype=torch.bool).tril() if is_causal else torch.ones(5, 6, dtype=torch.bool)

    def chunked(query, key, value):
        return attention(query, key, value, MASKS[mask], is_causal=is_causal, scale=0.7, chunk=chunk)

    def dense(query, key, value):
        scores, allowed = 0.7 * query @ key.mT, causal
        if mask == "added":
            scores = scores + MASKS[mask]
        elif mask != "none":
            allowed = causal & MASKS[mask]
        weights = scores.exp() * allowed
        return weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-300)

    torch.testing.assert_close(chunked(*inputs), dense(*inputs))
    assert_same_derivatives(chunked, dense, inputs)


def test_float32_is_as_exact_as_the_dense_loss():
    """A logit has the error of a sum of n products, and the exponentials of a sum have the error of their logits."""
    torch.manual_seed(0)
    labels, exact = torch.randint(300, (20,)), (draw(20, 16), draw(300, 16))
    single = [x.detach().float().requires_grad_() for x in exact]
    results = [
        torch.autograd.grad(linear_cross_entropy(*inputs, labels, chunk=640), inputs)
        for inputs in (single, exact)
    ]
    largest = (exact[0] @ exact[1].T).detach().abs().max()
    for got, expected in zip(*results, strict=True):
        bound = 2 * 16 * torch.finfo(torch.float32).eps * float(largest)
        assert float((got - expected).norm() / expected.norm()) <= bound


def test_dtypes_differ_only_under_autocast():
    hidden, weight, labels = torch.randn(3, 4), torch.randn(5, 4).bfloat16(), torch.arange(3)
    with pytest.raises(ValueError, match=r"weight: expected torch.float32 as hidden, or torch.autocast"):
        linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_cross_entropy(hidden, weight, labels).isfinite()


def test_products_need_no_memory_for_all_logits():
    torch.manual_seed(0)
    hidden, weight, labels = draw(512, 4), draw(4096, 4), torch.randint(4096, (512,))
    peaks, products = [], []
    for loss in (
        lambda: F.cross_entropy(hidden @ weight.T, labels),
        lambda: linear_cross_entropy(hidden, weight, labels, chunk=2**16),
    ):
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            value = loss()
            with mg.autograd.linearize(value, {"weight": weight}) as linear:
                products.append(linear.hvp({"weight": torch.ones_like(weight)})["weight"])
        peaks.append(counter.peak)
    torch.testing.assert_close(*products)
    assert peaks[1] < peaks[0] / 8


def test_losses_without_labels_are_torchs():
    weight = draw(5, 3)
    assert linear_cross_entropy(draw(2, 3), weight, torch.full((2,), -100)).isnan()
    assert linear_cross_entropy(draw(0, 3), weight, torch.zeros(0, dtype=torch.long), reduction="sum") == 0
    got = linear_cross_entropy(draw(2, 3, dtype=torch.bfloat16), weight.bfloat16(), torch.tensor([0, 1]))
    assert got.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*inside a torch.func transform")
def test_tasks_run_in_turn():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 6).double()
    x, y = torch.randn(2, 5, 3, dtype=F64), torch.randint(6, (2, 5))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x):
            return self.body(x).tanh(), self.head.weight

    def chunked(out, y):
        return linear_cross_entropy(*out, y, chunk=6)

    def dense(out, y):
        return F.cross_entropy(out[0] @ out[1].T, y)

    results = []
    for loss, chunk in ((dense, None), (chunked, 1), (chunked, None)):
        maml = mg.MAML(Net(), loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, task_chunk=chunk)
        out = maml(mg.tasks.Batch((x, y), (x, y)))
        results.append(torch.autograd.grad(out.loss, [body.weight, head.weight]))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(F64).min])
@pytest.mark.parametrize("chunk", [1, 2**21])
def test_a_mask_of_scores_never_opens_a_later_key(lowest, chunk):
    query, key, value = draw(3, 4), draw(3, 4), draw(3, 2)
    mask = torch.tensor([lowest, 0.0, 0.0], dtype=F64)
    out = attention(query, key, value, mask, is_causal=True, chunk=chunk)
    torch.testing.assert_close(out[0], 0 * value[0] if lowest == -torch.inf else value[0])
    grads = torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(sum(g.square().sum() for g in grads), value))


@pytest.mark.parametrize(
    ("mask", "error"), [(torch.ones(3, dtype=torch.int64), TypeError), (torch.ones(2, 3) > 0, ValueError)]
)
def test_a_mask_that_does_not_fit_is_named(mask, error):
    with pytest.raises(error, match=r"attention\(query, key, value, ...\): .*mask"):
        attention(draw(1, 4), draw(3, 4), draw(3, 2), mask)


def test_nan_in_a_mask_of_scores_is_no_excluded_key():
    mask = torch.tensor([[0.0, torch.nan], [0.0, 0.0]])
    outputs = attention(torch.eye(2), torch.eye(2), torch.eye(2), mask)
    assert outputs.isfinite().all(1).tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:.*inside a torch.func transform")
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_that_are_no_classes_raise_under_vmap(label):
    hidden, weight, labels = torch.ones(2, 4, 2), torch.ones(3, 2), torch.zeros(2, 4, dtype=torch.long)
    loss = torch.vmap(lambda h, y: linear_cross_entropy(h, weight, y, ignore_index=-100))
    assert loss(hidden, labels.index_fill(1, torch.tensor(2), -100)).isfinite().all()
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss(hidden, labels.index_fill(1, torch.tensor(2), label))


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_bias_may_exclude_classes(chunk):
    hidden, weight, bias = draw(5, 4), draw(7, 4), torch.tensor([-torch.inf] * 3 + [0.0] * 4, dtype=F64)
    labels = torch.tensor([3, 4, 5, 6, 3])
    got = linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk)
    expected = F.cross_entropy(hidden @ weight.T + bias, labels)
    for _ in range(3):
        got, expected = (torch.autograd.grad(x, weight, create_graph=True)[0] for x in (got, expected))
        torch.testing.assert_close(got, expected)
        got, expected = got.square().sum(), expected.square().sum()


def test_neither_bytes_nor_half_precision_wrap():
    hidden, labels = torch.ones(1, 16).half(), torch.tensor([156], dtype=torch.uint8)
    weight = torch.full((70_000, 16), 0.1).half()
    got = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1)
    torch.testing.assert_close(got, torch.tensor(70_000.0).log())
