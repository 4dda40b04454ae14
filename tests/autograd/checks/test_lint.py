from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributions import Gamma
from torch.masked import as_masked_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from metagrad.autograd import Finding, lint
from metagrad.autograd.checks.lint_rules import RULES, is_piecewise_linear
from tests.draws import draw

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning"),
]

IDS = torch.tensor([0, 2, 2, 1])
OFFSETS = torch.tensor([0, 2])
ENTRIES = torch.tensor([[0, 1, 1], [0, 0, 1]])
CROW, COL = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
PATTERN = torch.tensor([[True, False], [True, True]])
TARGET = torch.tensor([0, 2, 1, 3])


def positive(*shape: int) -> Tensor:
    return draw(*shape).abs() + 0.5


def placed(v: Tensor) -> Tensor:
    """Put values at ENTRIES by an operation that is correct at every order."""
    return v.new_zeros(2, 2).index_put(tuple(ENTRIES), v)


def coo(v: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(ENTRIES, v, (2, 2))


def csr(v: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(CROW, COL, v, (2, 2))


def constant(layout: Callable[[Tensor], Tensor]) -> Tensor:
    return layout(torch.ones(3, dtype=torch.float64))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


def normalised(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * (variance + 1e-5).rsqrt()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def ctc(x: Tensor) -> Tensor:
    return F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]), reduction="sum"
    )


def ctc_by_paths(x: Tensor) -> Tensor:
    """Sum over the five alignments of the labels 1, 2 with four frames, blanks 0 included."""
    paths = [p for p in torch.cartesian_prod(*[torch.arange(3)] * 4).tolist() if collapse(p) == [1, 2]]
    scores = x.log_softmax(-1)[torch.arange(4), 0, torch.tensor(paths)].sum(1)
    return -scores.logsumexp(0)


def collapse(path: list[int]) -> list[int]:
    return [label for i, label in enumerate(path) if label and (i == 0 or path[i - 1] != label)]


def seeded(sample: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sample(x)

    return call


def compiled(x: Tensor) -> Tensor:
    return torch.compile(torch.sin, backend="aot_eager")(x)


def chunked_cross_entropy(x: Tensor, w: Tensor) -> Tensor:
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        pytest.skip("this torch has no chunked linear_cross_entropy")
    return F.linear_cross_entropy(x, w, TARGET, options=options(allow_retain_graph=True))


class Planted(NamedTuple):
    """A function with a defect, a correct function with the same values, and the expected finding.

    If there is no correct function, the derivative raises.
    """

    bad: Callable[..., Tensor]
    right: Callable[..., Tensor] | None
    inputs: tuple[Tensor, ...]
    expected: tuple[str, str, int] | None  # None if the installed torch is correct


def product(bad: Callable[..., Tensor], node: str, order: int, right: Callable = torch.mm) -> Planted:
    """Return the case of a product of two matrices that raises."""
    return Planted(bad, right, (draw(2, 2), draw(2, 2, seed=1)), (node, "error", order))


def in_rows(bad: Callable[..., Tensor], right: Callable[..., Tensor], node: str) -> Planted:
    """Return the case of an operation on the rows of a sparse matrix that raises."""
    expected = (node, "error", 2)
    return Planted(lambda a: bad(a.to_sparse(), 1).to_dense(), lambda a: right(a, 1), (draw(2, 2),), expected)


def margin(bad: Callable[..., Tensor], node: str) -> Planted:
    """Return the case of a loss of the first class of three that raises."""
    hinge = lambda x: (1 - x[0, 0] + x[0, 1:]).clamp_min(0).sum() / 3  # noqa: E731
    return Planted(bad, hinge, (draw(1, 3),), (node, "error", 2))


CASES = {
    "sparse_coo_tensor": Planted(
        lambda v, d: coo(v).to_dense() * d,
        lambda v, d: placed(v) * d,
        (draw(3), draw(2, 2)),
        ("SparseCooTensorWithDimsAndTensorsBackward0", "cut", 2),
    ),
    "sparse_csr_tensor": Planted(
        lambda v, d: csr(v).to_dense() * d,
        lambda v, d: placed(v) * d,
        (draw(3), draw(2, 2)),
        ("SparseCompressedTensorBackward0", "error", 2),
    ),
    "values of CSR": Planted(
        lambda a: a.to_sparse_csr().values(),
        lambda a: a.flatten(),
        (draw(2, 2),),
        ("ValuesBackward0", "cut", 2),
    ),
    "values of COO": Planted(
        lambda a: a.to_sparse().coalesce().values(),
        lambda a: a.flatten(),
        (draw(2, 2),),
        ("ValuesBackward0", "cut", 3),
    ),
    "to_dense": Planted(
        lambda a: (a.to_sparse() * 2).to_dense() ** 2,
        lambda a: (a * 2) ** 2,
        (draw(2, 2),),
        ("ToDenseBackward0", "error", 3),
    ),
    "sparse_mask": Planted(
        lambda a: a.sparse_mask(constant(coo).coalesce()).to_dense(),
        lambda a: a * PATTERN,
        (draw(2, 2),),
        ("SparseMaskBackward0", "error", 2),
    ),
    "sparse.mm of CSR": product(
        lambda a, b: torch.sparse.mm(a.to_sparse_csr(), b), "SparseAddmmBackward0", 1
    ),
    "sparse.mm of COO": product(lambda a, b: torch.sparse.mm(a.to_sparse(), b), "SparseAddmmBackward0", 3),
    "sparse @ sparse": product(
        lambda a, b: torch.sparse.mm(a.to_sparse(), b.to_sparse()).to_dense(),
        "SparseSparseMatmulBackward0",
        2,
    ),
    "sampled_addmm": product(
        lambda a, b: torch.sparse.sampled_addmm(constant(csr), a, b).to_dense(),
        "SparseSampledAddmmBackward0",
        2,
        right=lambda a, b: (1 + a @ b) * PATTERN,
    ),
    "sparse.mm with reduce": product(
        lambda a, b: torch.sparse.mm(a.to_sparse_csr(), b, "mean"),
        "SparseMmReduceImplBackward0",
        2,
        right=lambda a, b: a @ b / 2,
    ),
    "sparse.softmax": in_rows(torch.sparse.softmax, torch.softmax, "SparseSoftmaxBackward0"),
    "sparse.log_softmax": in_rows(torch.sparse.log_softmax, torch.log_softmax, "SparseLogSoftmaxBackward0"),
    "sparse.sum": in_rows(torch.sparse.sum, torch.sum, "SparseSumBackward0"),
    "embedding, sparse": Planted(
        lambda t: F.embedding(IDS, t, sparse=True),
        lambda t: t[IDS],
        (draw(3, 2),),
        ("EmbeddingBackward0", "cut", 3),
    ),
    "embedding, scaled by frequency": Planted(
        lambda t: F.embedding(IDS, t, scale_grad_by_freq=True),
        lambda t: (
            (rows := t[IDS]) / IDS.bincount()[IDS, None] + (rows - rows / IDS.bincount()[IDS, None]).detach()
        ),
        (draw(3, 2),),
        ("EmbeddingBackward0", "wrong", 2),
    ),
    "gather, sparse": Planted(
        lambda t: torch.gather(t, 0, IDS[:3, None], sparse_grad=True),
        lambda t: t[IDS[:3], :1],
        (draw(3, 2),),
        ("GatherBackward0", "cut", 3),
    ),
    "embedding_bag": Planted(
        lambda t: F.embedding_bag(IDS, t, OFFSETS, mode="sum"),
        lambda t: t[IDS].view(2, 2, -1).sum(1),
        (draw(3, 2),),
        ("EmbeddingBagBackward0", "error", 2),
    ),
    "segment_reduce": Planted(
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 2])),
        lambda x: torch.stack([x[0], x[1:].sum()]),
        (draw(3),),
        ("SegmentReduceBackward0", "error", 2),
    ),
    "cdist": Planted(
        torch.cdist,
        lambda a, b: (a[:, None] - b).norm(dim=-1),
        (draw(3, 2), draw(4, 2, seed=1)),
        ("CdistBackward0", "error", 2) if torch.__version__ < "2.14" else None,
    ),
    "pdist": Planted(
        F.pdist,
        lambda a: (a[[0, 0, 1]] - a[[1, 2, 2]]).norm(dim=-1),
        (draw(3, 2),),
        ("PdistBackward0", "error", 2) if torch.__version__ < "2.14" else ("PdistBackward0", "wrong", 3),
    ),
    "ctc_loss": Planted(ctc, ctc_by_paths, (draw(4, 1, 3),), ("CtcLossBackward0", "error", 2)),
    "multi_margin_loss": margin(lambda x: F.multi_margin_loss(x, TARGET[:1]), "MultiMarginLossBackward0"),
    "multilabel_margin_loss": margin(
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, -1, -1]])), "MultilabelMarginLossBackward0"
    ),
    "linear_cross_entropy in chunks": Planted(
        chunked_cross_entropy,
        lambda x, w: F.cross_entropy(x @ w.T, TARGET),
        (draw(4, 3), draw(4, 3, seed=1)),
        ("GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward", "cut", 2),
    ),
    "hardsigmoid": Planted(
        F.hardsigmoid, lambda x: F.relu6(x + 3) / 6, (draw(4),), ("HardsigmoidBackward0", "error", 2)
    ),
    "logcumsumexp": Planted(
        lambda x: x.logcumsumexp(0),
        lambda x: (x - x.max()).exp().cumsum(0).log() + x.max(),
        (draw(4),),
        ("LogcumsumexpBackward0", "wrong", 3),
    ),
    "_masked_softmax": Planted(
        lambda x: torch._masked_softmax(x, ~PATTERN, 1, 0),
        lambda x: torch.where(PATTERN, x, -torch.inf).softmax(1),
        (draw(2, 2),),
        ("MaskedSoftmaxBackward0", "error", 2),
    ),
    "Gamma.rsample": Planted(
        seeded(lambda a: Gamma(a, 1.0).rsample()),
        None,
        (positive(3),),
        ("StandardGammaBackward0", "error", 2),
    ),
    "fake quantisation": Planted(
        lambda x, s: torch._fake_quantize_learnable_per_tensor_affine(
            x.float(), s.float(), torch.zeros(1), 0, 255, 1.0
        ).double(),
        None,
        (draw(3), positive(1)),
        ("FakeQuantizeLearnablePerTensorAffineBackward0", "error", 2),
    ),
    "layer_norm": Planted(
        lambda x: F.layer_norm(x, (5,)),
        lambda x: normalised(x, 1),
        (draw(3, 5),),
        ("NativeLayerNormBackward0", "wrong", 3),
    ),
    "batch_norm": Planted(
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: normalised(x, 0),
        (draw(4, 3),),
        ("NativeBatchNormBackward0", "wrong", 3),
    ),
    "weight_norm": Planted(
        lambda v, g: torch._weight_norm(v, g, 0),
        lambda v, g: g * v / v.norm(dim=1, keepdim=True),
        (draw(3, 4), positive(3, 1)),
        ("WeightNormInterfaceBackward0", "wrong", 2),
    ),
    "conv_transpose with output_padding": Planted(
        lambda x, w: F.conv_transpose1d(x, w, stride=2, output_padding=1),
        lambda x, w: F.pad(F.conv_transpose1d(x, w, stride=2), (0, 1)),
        (draw(1, 2, 3), draw(2, 2, 3, seed=1)),
        ("ConvolutionBackward0", "error", 3),
    ),
    "scaled_dot_product_attention": Planted(
        F.scaled_dot_product_attention,
        attention,
        (draw(1, 1, 3, 4), draw(1, 1, 3, 4, seed=1), draw(1, 1, 3, 4, seed=2)),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "error", 2),
    ),
    "once_differentiable": Planted(Once.apply, lambda x: x**3, (draw(3),), ("OnceBackward", "cut", 2)),
    "MaskedTensor": Planted(
        lambda x: as_masked_tensor(x, PATTERN).to_tensor(0.0),
        lambda x: x * PATTERN,
        (draw(2, 2),),
        ("GetDataBackward", "cut", 2),
    ),
    "checkpoint, reentrant": Planted(
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True),
        torch.sin,
        (draw(3),),
        ("CheckpointFunctionBackward", "error", 1),
    ),
    "torch.compile": Planted(compiled, torch.sin, (draw(3),), ("CompiledFunctionBackward", "error", 2)),
}

ON_CUDA_ONLY = {
    "*AttentionForwardBackward?",
    "CudnnRnnBackward?",
    "CudnnRnnBackwardBackward?",
    "CudnnBatchNormBackward?",
    "CudnnBatchNormBackwardBackward?",
    "CudnnCtcLossBackward?",
}


def leaves(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in inputs]


def strided(g: Tensor) -> Tensor:
    if g.layout != torch.strided:
        return g.to_dense()
    return g.to_tensor(0.0) if hasattr(g, "to_tensor") else g


def contracted(fn: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    y = fn(*inputs)
    return (y**3 + y**2).sum()


def derivatives(fn, inputs):
    """Yield the gradients of nonlinear contractions of all lower derivatives, order by order."""
    inputs = leaves(inputs)
    loss = contracted(fn, inputs)
    while True:
        gradients = [strided(g) for g in torch.autograd.grad(loss, inputs, create_graph=True)]
        yield gradients
        loss = loss + sum((g**3 + g**2).sum() for g in gradients)


def first_bad_order(case: Planted) -> int | None:
    """Return the order of the first derivative that raises or differs from the correct function."""
    got = derivatives(case.bad, case.inputs)
    expected = derivatives(case.right, case.inputs) if case.right else None
    for order in (1, 2, 3):
        try:
            gradients = next(got)
        except (RuntimeError, ValueError):
            return order
        if expected and not all(
            torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(gradients, next(expected), strict=True)
        ):
            return order
    return None


def found(loss: Tensor, order: int) -> set[tuple[str, str, int]]:
    return {(f.node, f.kind, f.order) for f in lint(loss, order=order)}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_defect_is_found_at_the_order_at_which_torch_fails(name):
    case = CASES[name]
    torch._dynamo.reset()
    loss = contracted(case.bad, leaves(case.inputs))
    if case.expected is None:
        assert first_bad_order(case) is None
        assert found(loss, 3) == set()
        return
    order = case.expected[2]
    assert first_bad_order(case) == order
    assert case.expected in found(loss, 3)
    earlier = {f for f in found(loss, 3) if f[1] != "dense" and f[2] < order}
    assert earlier == set()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.right])
def test_the_right_function_beside_it_raises_no_alarm(name):
    assert found(contracted(CASES[name].right, leaves(CASES[name].inputs)), 3) == set()


IN_THE_GRADIENT = {
    "embedding, sparse": ("SparseCooTensorWithDimsAndTensorsBackward0", "cut", 2),
    "to_dense": ("SparseMaskBackward0", "error", 2),
    "embedding_bag": ("EmbeddingBagBackwardBackward0", "error", 1),
    "Gamma.rsample": ("StandardGammaGradBackward0", "error", 1),
    "layer_norm": ("NativeLayerNormBackwardBackward0", "wrong", 2),
    "batch_norm": ("NativeBatchNormBackwardBackward0", "wrong", 2),
    "conv_transpose with output_padding": ("ConvolutionBackwardBackward0", "error", 2),
    "torch.compile": ("CompiledFunctionBackwardBackward", "error", 1),
    "hardsigmoid": ("torch::autograd::NotImplemented", "error", 1),
    "once_differentiable": ("torch::autograd::Error", "error", 1),
}
if torch.__version__ < "2.14":
    IN_THE_GRADIENT |= {
        "cdist": ("CdistBackwardBackward0", "error", 1),
        "pdist": ("PdistBackwardBackward0", "error", 1),
    }


@pytest.mark.parametrize("name", IN_THE_GRADIENT)
def test_in_the_graph_of_the_gradient_the_defect_is_an_order_nearer(name):
    case = CASES[name]
    torch._dynamo.reset()
    inputs = leaves(case.inputs)
    gradient = torch.autograd.grad(contracted(case.bad, inputs), inputs, create_graph=True)[0]
    assert IN_THE_GRADIENT[name] in found((strided(gradient) ** 3).sum(), 3)


@pytest.mark.parametrize(
    ("product", "node"),
    [
        (torch.sparse.mm, "SparseAddmmBackward0"),
        (torch.mm, "MmBackward0"),
        (lambda a, b: torch.addmm(torch.zeros(50, 1), a, b), "AddmmBackward0"),
    ],
)
def test_a_gradient_that_is_computed_densely_is_found_and_not_refused(product, node):
    a = torch.sparse_coo_tensor(ENTRIES, torch.ones(3), (50, 50)).requires_grad_()
    b = torch.ones(50, 1, requires_grad=True)
    loss = product(a, b).square().sum()
    assert (node, "dense", 1) in found(loss, 1)
    mg.grad(loss, a, create_graph=True)
    assert found(product(a.detach(), b).square().sum(), 3) == set()


def test_every_rule_that_runs_on_a_cpu_is_planted():
    planted = {case.expected for case in CASES.values() if case.expected} | set(IN_THE_GRADIENT.values())
    planted |= {(f"{n}Backward0", "dense", 1) for n in ("SparseAddmm", "Mm", "Addmm")}

    def matches(rule):
        return any(fnmatchcase(n, rule.node) and (k, o) == (rule.kind, rule.order) for n, k, o in planted)

    assert {rule.node for rule in RULES if not matches(rule)} == ON_CUDA_ONLY


def test_once_differentiable_is_seen_under_other_decorators():
    class Wrapped(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        @once_differentiable
        def backward(ctx, g):
            return g * 2

    assert found(Wrapped.apply(draw(3).requires_grad_()), 2) == {("WrappedBackward", "cut", 2)}


def mlp(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 2)).double()


class MathAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.attention(x, x, x, need_weights=False)[0]


class Recomputed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state, _ = mg.unroll(
            lambda s, t: (s.sin(), None), mg.checkpoint(torch.tanh, x), steps=2, memory="step"
        )
        return state


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return mg.checkpoint(lambda x: mg.checkpoint(self.model, x), x)


LAYER_NORM = {("NativeLayerNormBackward0", "wrong", 3)}
GOOD = {
    "MLP": (mlp(nn.Tanh()), ()),
    "GELU, SiLU, softmax": (mlp(nn.GELU(), nn.SiLU(), nn.Softmax(-1)), ()),
    "group_norm": (mlp(nn.Tanh(), nn.GroupNorm(2, 6)), ()),
    "rms_norm": (mlp(nn.Tanh(), nn.RMSNorm(6)), ()),
    "batch_norm in evaluation": (mlp(nn.Tanh(), nn.BatchNorm1d(6)).eval(), ()),
    "attention by SDPBackend.MATH": (MathAttention().double(), ()),
    "checkpoint and unroll": (Recomputed(), ()),
    "layer_norm in a checkpoint in a checkpoint": (Checkpointed(mlp(nn.Tanh(), nn.LayerNorm(6))), LAYER_NORM),
    "layer_norm": (mlp(nn.Tanh(), nn.LayerNorm(6)), LAYER_NORM),
    "batch_norm in training": (mlp(nn.BatchNorm1d(6)), {("NativeBatchNormBackward0", "wrong", 3)}),
    "transformer": (
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0).double(),
        LAYER_NORM | {("ScaledDotProductFlashAttentionForCpuBackward0", "error", 2)},
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_models_raise_the_expected_alarms_and_no_others(name):
    model, expected = GOOD[name]
    x = draw(3, 4).requires_grad_()
    loss = model(x).exp().mean()
    assert found(loss, 3) == set(expected)
    assert found(loss, 2) == {f for f in expected if f[2] <= 2}


@pytest.mark.parametrize("name", [name for name, (_, expected) in GOOD.items() if not expected])
def test_models_without_alarms_are_right_to_order_three(name):
    assert mg.gradcheck(GOOD[name][0], draw(3, 4).requires_grad_(), order=3, directions=1)


def test_a_finding_is_a_sentence_and_the_nearest_comes_first():
    x = draw(3, 5).requires_grad_()
    loss = F.layer_norm(F.layer_norm(F.hardsigmoid(x), (5,)), (5,)).sum()
    assert "derivatives of order 2 silently lose terms" in str(lint(Once.apply(x).sum())[0])
    first, second = lint(loss, order=3)
    assert isinstance(first, Finding)
    assert str(first) == (
        "HardsigmoidBackward0, from F.hardsigmoid, raises an error in derivatives of order 2. "
        "Write it as F.relu6(x + 3) / 6."
    )
    assert (
        "NativeLayerNormBackward0, from F.layer_norm, returns derivatives of order 3 that are silently wrong"
        in str(second)
    )


PIECEWISE_LINEAR = {
    "relu": F.relu,
    "leaky relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=torch.float64)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "abs": torch.abs,
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "hardtanh": F.hardtanh,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
}


@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_what_is_piecewise_linear_has_a_gradient_and_no_second_derivative(name):
    x = torch.linspace(-2, 2, 8, dtype=torch.float64).requires_grad_()
    y = PIECEWISE_LINEAR[name](x)
    assert is_piecewise_linear(y.grad_fn.name())
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert gradient.any()
    if gradient.requires_grad:
        assert not torch.autograd.grad(gradient.sum(), x, materialize_grads=True)[0].any()
