"""Errors for arguments in the wrong form: a result for a function, a class, a model for its parameters."""

import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from tests.sparse.mistakes import complaints

rules = mg.optim.rules
MODEL = nn.Linear(2, 1)
PARAMS, BATCH = dict(MODEL.named_parameters()), (torch.ones(3, 2), torch.zeros(3, 1))
W = torch.ones(3, requires_grad=True)


def squares(params, *hyper):
    return params["w"].square().sum()


def inner(params, hyper):
    return (params["w"] - hyper["l"]).square().sum()


def hypergradient(outer=squares, params=None, method=None):
    return mg.hypergradient(outer, inner, params or {"w": W}, {"l": W}, method=method)


class Short:
    """A minimal functional optimizer."""

    def init(self, params):
        return None

    def update(self, grads, state):
        return grads, state


def exponentials_of_rows():
    table = torch.ones(9, 2, requires_grad=True)
    mg.sparse.embedding(torch.tensor([7, 7, 2]), table).sum().backward()
    table.grad.exp()


def maml(inner):
    return mg.MAML(MODEL, F.mse_loss, inner=inner, steps=1)


def loss():
    return F.mse_loss(MODEL(BATCH[0]), BATCH[1])


SGD = rules.sgd(lr=0.1)
MISTAKES = {
    r"grad\(loss, params\): .* got Linear\. .*named_parameters": lambda: mg.grad(loss(), MODEL),
    r"hvp\(loss_fn, params, v\): loss_fn must be a function.*got Tensor": lambda: mg.hvp(W.sum(), W, W),
    r"checkpoint\(fn, \.\.\.\): fn must be a function, not what": lambda: mg.checkpoint(MODEL(BATCH[0])),
    r"unroll\(step, \.\.\.\): step must be a function.*got Tensor": lambda: mg.unroll(W, W, steps=2),
    r"sharpness_aware\(.*\): loss_fn must be a function": lambda: mg.optim.sharpness_aware(loss(), PARAMS),
    r"hessian\(loss, params\): expected a dict of parameters by name": lambda: mg.hessian(loss(), MODEL),
    r"ggn\(.*\): loss_fn must be a function or a module, got the class MSELoss": lambda: mg.ggn(
        MODEL, nn.MSELoss, PARAMS, BATCH
    ),
    r"ggn\(.*\): model must be a function": lambda: mg.ggn(PARAMS, F.mse_loss, PARAMS, BATCH),
    r"Reptile\(model, loss_fn, \.\.\.\): loss_fn must be a function.*got str": lambda: mg.Reptile(
        MODEL, "mse", inner=SGD, steps=1
    ),
    r"MAML.*: inner: expected a functional optimizer, such as .*sgd\(lr=0\.1\), got <class .*SGDRule": lambda: (
        maml(rules.sgd)
    ),
    r"MAML.*: inner.update must take \(grads, state, params\), but Short.update takes \(grads, state\)": lambda: (
        maml(Short())
    ),
    r"not an operation on RowSparse.*goes into mg\.optim\.SparseAdam": exponentials_of_rows,
    r"hypergradient\(.*\): outer_loss must be a function": lambda: hypergradient(outer=W.sum()),
    r"hypergradient\(.*\): all parameters must have one dtype, .*Bring them to one": lambda: hypergradient(
        params={"w": W, "v": W.double()}
    ),
    r"hypergradient\(\.\.\., method\): rule: expected a functional optimizer, .*got <class": lambda: (
        hypergradient(method=mg.hypergrad.Unroll(rules.sgd, steps=2))
    ),
    r"bilevel\(.*\): inner: expected a functional optimizer, .*got <class": lambda: mg.bilevel(
        squares, inner, {"w": W}, {"l": W}, inner=rules.sgd, outer=SGD, steps=1, inner_steps=1
    ),
    r"adam\(\.\.\.\): betas must be as many as in .* got 0\.9": lambda: rules.adam(lr=0.1, betas=0.9),  # type: ignore[arg-type]
    r"solve\(\.\.\., damping\): expected a number or a tensor, got 'str'": lambda: mg.hessian(
        loss(), PARAMS
    ).solve(torch.ones(3), damping="a"),
}


def test_what_has_another_form_is_named_with_what_to_change():
    assert complaints(MISTAKES, (TypeError, ValueError)) == {}
