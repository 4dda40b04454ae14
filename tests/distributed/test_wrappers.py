"""Wrapped models raise an error. A wrapped learner averages the outer gradients of equal shares."""

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from tests.distributed.threads import in_threads


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel without a process group."""

    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module


def sharded():
    model = torch.nn.Linear(1, 1)
    model.bias.device_mesh = "as a DTensor has"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wrapped(torch.nn.Linear(1, 1)), "model is a Wrapped, which averages what reaches .grad"),
        (sharded, r"the parameter '(Linear\.)?bias' is a DTensor, as fully_shard makes them"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=1),
        lambda model: mg.ProtoNet(model),
        lambda model: mg.ggn(
            model, F.mse_loss, dict(model.named_parameters()), (torch.ones(1, 1), torch.ones(1, 1))
        ),
    ],
    ids=["MAML", "ProtoNet", "ggn"],
)
def test_wrapped_models_are_refused(make, message, use):
    with pytest.raises(ValueError, match=message):
        use(make())


def test_tables_by_rows_are_refused_in_a_wrapper_that_averages_gradients():
    """The buckets of the wrapper are dense. Without the check, a product raises a TypeError about its argument."""
    (group,) = in_threads(1, lambda group: group)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 1))
    rule = mg.optim.rules.sgd(lr=0.1)
    maml = mg.MAML(model, F.mse_loss, inner=rule, steps=1, sparse=["0.weight"])
    batch = [(torch.tensor([[0, 1]]), torch.zeros(1, 2, 1))] * 2
    with pytest.raises(ValueError, match=r"MAML\(..., sparse\): DistributedDataParallel averages dense"):
        torch.nn.parallel.DistributedDataParallel(maml, process_group=group)(batch)
    maml(batch).loss.backward()
    assert isinstance(model[0].weight.grad, mg.sparse.RowSparse)


def freed():
    """Return a loss of a parameter whose memory is freed in a backward pass, as fully_shard does."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (w**3).sum()

    def free(_):
        w.untyped_storage().resize_(0)

    w.register_hook(free)
    return loss, {"w": w}


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("hessian", mg.hessian),
        ("linearize", mg.linearize),
        ("hessian", lambda loss, params: mg.hessian(lambda p: loss, params)),
        ("grad", lambda loss, params: mg.grad(loss, params, create_graph=True)),
    ],
    ids=["hessian", "linearize", "hessian of a function", "grad"],
)
def test_parameters_that_a_backward_pass_frees_are_refused(call, use):
    """Parameters in fully_shard are whole after a call. Without the check, torch raises an error about storages."""
    with pytest.raises(
        ValueError, match=rf"^{call}\(.*: the memory of the parameter .*w.* is freed, as fully_shard"
    ):
        use(*freed())


def test_products_with_sharded_parameters_are_refused():
    """Modules in fully_shard use other parameters. Without the check, the gradient and the product are zero."""
    w = torch.ones(2)
    w.device_mesh = "as a DTensor has"
    with pytest.raises(ValueError, match=r"hvp\(loss_fn, params, v\): the parameter \"params\['w'\]\" is a"):
        mg.hvp(lambda p: p["w"].sum(), {"w": w}, {"w": w})
