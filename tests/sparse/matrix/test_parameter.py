import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.parameter import Parameter

PATTERN = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 3, 1]), (3, 4))
OTHER = Pattern(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 1]), (3, 4))
WIDER = Pattern(PATTERN.row, PATTERN.col, (3, 5))
X = torch.arange(8.0).reshape(4, 2)


def matrix(pattern=PATTERN, values=(1.0, 2.0, 3.0)):
    return SparseTensor(pattern, torch.tensor(values))


class Linear(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.weight = Parameter(a)
        self.bias = nn.Parameter(torch.zeros(a.shape[0]))

    def forward(self, x):
        return (self.weight @ x.mT).mT + self.bias


def test_the_values_are_an_ordinary_parameter():
    a = matrix()
    layer = Linear(a)
    named = dict(layer.named_parameters())
    assert list(named) == ["bias", "weight.values"]
    assert type(named["weight.values"]) is nn.Parameter
    assert named["weight.values"].data_ptr() == a.values.data_ptr()
    assert dict(layer.named_buffers()) == {}
    assert not Parameter(a, requires_grad=False).values.requires_grad
    assert repr(layer.weight) == "Parameter(shape=(3, 4), nnz=3, dtype=torch.float32)"


def test_derivatives_reach_the_values():
    weight = Parameter(matrix().double())
    loss = ((weight @ X.double()) ** 3).sum() + (weight * weight).sum()
    grads = mg.grad(loss, dict(weight.named_parameters()), create_graph=True)
    leaf = weight.values.detach().requires_grad_()
    dense = SparseTensor(PATTERN, leaf).to_dense()
    loss = ((dense @ X.double()) ** 3).sum() + (dense**2).sum()
    (expected,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert torch.allclose(grads["values"], expected, rtol=1e-14)
    (second,) = torch.autograd.grad((grads["values"] ** 3).sum(), weight.values)
    (expected,) = torch.autograd.grad((expected**3).sum(), leaf)
    assert torch.allclose(second, expected, rtol=1e-13)
    sparse = mg.grad((weight.tensor.values**2).sum(), {"w": weight.tensor})["w"]
    assert sparse.pattern is PATTERN


def test_the_state_comes_back():
    layer, fresh = Linear(matrix()), Linear(matrix(values=(0.0, 0.0, 0.0)))
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert sorted(state) == ["bias", "weight._extra_state", "weight.values"]
    assert state["weight._extra_state"].tolist() == [[3, 0, 0, 2], [4, 0, 3, 1]]
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    assert fresh.weight.values.tolist() == [1, 2, 3]
    assert fresh.load_state_dict(state, assign=True).missing_keys == []
    assert fresh.weight.values.data_ptr() == state["weight.values"].data_ptr()


def test_another_pattern_raises_before_values_are_loaded():
    for saved, strict in itertools.product((OTHER, WIDER), (True, False)):
        layer = Linear(matrix())
        state = Linear(SparseTensor(saved, torch.full((saved.nnz,), 7.0))).state_dict()
        with pytest.raises(RuntimeError, match=r"weight._extra_state is another pattern .* Make the param"):
            layer.load_state_dict(state, strict=strict)
        assert layer.weight.values.tolist() == [1, 2, 3]


def test_moving_converting_and_copying():
    layer = Linear(matrix()).double()
    assert layer.weight.values.dtype == torch.float64
    assert layer.weight.pattern is PATTERN
    twin = copy.deepcopy(layer)
    assert twin.weight.pattern is PATTERN
    assert twin.weight.values.data_ptr() != layer.weight.values.data_ptr()
    elsewhere = copy.deepcopy(layer).to("meta")
    assert elsewhere.weight.pattern.device == elsewhere.weight.values.device == torch.device("meta")
    assert layer.weight.pattern.device == torch.device("cpu")
    assert torch.equal(layer.to("cpu")(X.mT.double()), twin(X.mT.double()))


def test_functional_call():
    layer = Linear(matrix())
    params = {"weight.values": torch.tensor([2.0, 4.0, 6.0]), "bias": torch.ones(3)}
    assert torch.equal(functional_call(layer, params, X.mT), 2 * layer(X.mT) + 1)
    per_sample = torch.vmap(lambda v: functional_call(layer, {"weight.values": v}, X.mT))
    stacked = torch.stack([layer.weight.values, params["weight.values"]])
    assert torch.equal(per_sample(stacked)[1], 2 * layer(X.mT))


class Dense(nn.Module):
    """The oracle: the same values, put into a dense weight by plain torch."""

    def __init__(self, a):
        super().__init__()
        self.values, self.bias = nn.Parameter(a.values.clone()), nn.Parameter(torch.zeros(a.shape[0]))
        self.place = a.pattern.row * a.shape[1] + a.pattern.col

    def forward(self, x):
        weight = self.values.new_zeros(12).index_put((self.place,), self.values).reshape(3, 4)
        return x @ weight.mT + self.bias


@pytest.mark.parametrize("memory", ["full", "step"])
def test_maml_adapts_it(memory):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 5, width, generator=generator).double() for width in (4, 3))
    batch = mg.tasks.Batch(mg.tasks.Examples(x, y), mg.tasks.Examples(x + 1, y))
    results = []
    for model in (Linear(matrix()).double(), Dense(matrix()).double()):
        inner = mg.optim.rules.sgd(lr=0.05, momentum=0.5)
        out = mg.MAML(model, nn.functional.mse_loss, inner=inner, steps=3, memory=memory)(batch)
        out.loss.backward()
        values = dict(model.named_parameters())[next(n for n, _ in model.named_parameters() if "values" in n)]
        results.append((out.loss.detach(), values.grad, model.bias.grad))
    for sparse, dense in zip(*results, strict=True):
        assert torch.allclose(sparse, dense, rtol=1e-12)
