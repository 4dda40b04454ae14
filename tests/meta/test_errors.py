"""Wrong arguments and data: every error is raised by metagrad, names the call, and describes the value."""

import functools
import re
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad import hypergrad
from tests.meta.textbook import Graph, Scaled

rules = mg.optim.rules
SGD = rules.sgd(lr=0.1)
LEARNED = rules.sgd(lr=nn.Parameter(torch.tensor(0.1)))
ROWS = {"0.weight": torch.ones(5, 1), "1.weight": 0.1, "1.bias": 0.1}
FOREIGN = re.compile(r"aten::|torch/|\.cpp|\.cc\b|site-packages|forward\(\)|__init__\(\)")


def complaint(call, message):
    """Return the problem with the error of a call, or None."""
    try:
        call()
    except Exception as error:
        text, name = str(error), re.match(r"\w+", str(error))
        if not isinstance(error, (ValueError, TypeError, RuntimeError)):
            return f"is a {type(error).__name__}"
        if "metagrad" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            return f"is raised outside of metagrad: {text}"
        if name is None or name[0] not in {"rule", *mg.meta.__all__, *rules.__all__} or FOREIGN.search(text):
            return f"does not name the call: {text}"
        return None if re.search(message, text) else f"does not match: {text}"
    return "is not raised"


def assert_named(calls):
    """Check the errors of calls, whose keys are the messages."""
    found = {message: complaint(call, message) for message, call in calls.items()}
    assert {message: wrong for message, wrong in found.items() if wrong} == {}


def net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def with_norm(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(2, 4), norm(4), nn.Linear(4, 3))


def untracked(channels):
    return nn.BatchNorm1d(channels, track_running_stats=False)


def table():
    return nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 3))


def scripted():
    return torch.jit.script(net())


class Unreachable(nn.BatchNorm1d):
    def forward(self, x):
        return (x - self.running_mean) * self.weight + self.bias


def of(algorithm, model=None, loss=F.mse_loss, **options):
    """Return a function that constructs an algorithm."""
    model = net() if model is None else model
    if issubclass(algorithm, mg.meta.HeadAlgorithm):
        return functools.partial(algorithm, model, **options)
    if algorithm not in (mg.MetaSGD, mg.MAMLPlusPlus):
        options = {"inner": SGD, "steps": 2, **options}
    elif algorithm is mg.MetaSGD:
        options = {"lr": 0.1, **options}
    return functools.partial(algorithm, model, loss, **options)


def maml(model=None, loss=F.mse_loss, **options):
    return of(mg.MAML, model, loss, **options)


def test_arguments_of_maml():
    frozen = net().requires_grad_(False)
    assert_named(
        {
            r"^MAML\(model, ...\): model must be a torch.nn.Module, got builtin": maml(torch.sin),
            "no parameter of the model requires grad": maml(frozen),
            "TorchScript keeps the parameters": maml(nn.Sequential(scripted())),
            "LazyLinear is not initialized.*Call the model once": maml(nn.LazyLinear(3)),
            r"MAML.* must be .* got the class MSELoss\. Make one of it: MSELoss\(\)": maml(None, nn.MSELoss),
            "loss_fn must be a function, not what it returns, got Tensor": maml(None, torch.ones(())),
            r"steps\): expected an int of 0 or more, got -1": maml(steps=-1),
            "expected a functional optimizer, .*, got 'SGD'": maml(inner=torch.optim.SGD([torch.ones(1)])),
            r"order\): expected one of 1, 2, got 3": maml(order=3),
            "memory must be .*\"step\".*got 'half'": maml(memory="half"),
            "task_chunk.*got 0": maml(task_chunk=0),
            r"nonfinite\): expected one of 'raise', 'skip', got 'ignore'": maml(nonfinite="ignore"),
            "compile must be a bool, or a dict of the arguments": maml(compile="whole"),
            r"MAML\(..., truncate\): expected None .* got 0": maml(truncate=0),
            r"MAML\(..., tolerance\): .* 0 or more, got -1.0": maml(tolerance=-1.0),
            "'first_order'. Did you mean order=1": maml(first_order=True),
            r"'lr'. Did you mean inner=metagrad.optim.rules.sgd\(lr=": maml(lr=0.1),
            "'chunks'. The options are sparse, task_chunk": maml(chunks=1),
        }
    )


def test_names_of_parameters():
    half = net()
    half[0].requires_grad_(False)
    named = functools.partial(maml, half)
    frozen = table()
    frozen[0].requires_grad_(False)
    assert_named(
        {
            r"'haed\.\*' matches no parameter.*'2\.weight'": named(adapt="haed.*"),
            "does not require grad": named(adapt="0.*"),
            "chooses none of the parameters": named(adapt="!*"),
            "the module Linear matches no parameter": named(adapt=nn.Linear(4, 3)),
            "expected None, a name.*a list": named(adapt=[3]),
            r"predicate.*got \[Parameter con\.\.\..{0,20}\]\.$": named(
                adapt=[nn.Parameter(torch.ones(9, 9))]
            ),
            "expected a list of parameter names, .* got True": maml(table(), sparse=True),
            r"expected a list of .* got '0.weight'": maml(table(), sparse="0.weight"),
            r"sparse\): 'item' is not a parameter": maml(table(), sparse=["item"]),
            r"sparse\): '1.bias': expected an embedding table \[V, D\]": maml(table(), sparse=["1.bias"]),
            "'0.weight' does not require grad, so it is not learned": maml(frozen, sparse=["0.weight"]),
            r"sparse=True.*Pass sparse=\['0.weight'\]": maml(nn.Sequential(nn.Embedding(4, 2, sparse=True))),
            r"max_norm=1\.0, which writes": maml(nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=1.0))),
            "value for each row of '0.weight'": maml(table(), inner=rules.sgd(lr=ROWS), sparse=["0.weight"]),
            r"each row of '0.weight', its shape is \(5, 2\)": of(mg.MetaSGD, table(), sparse=["0.weight"]),
        }
    )


def test_policies_for_norms():
    running, per_step = maml(with_norm(Unreachable), norm="running")(), maml(with_norm(), norm="per_step")()
    assert_named(
        {
            "expected one of 'transductive', 'support', .* got 'batch'": maml(with_norm(), norm="batch"),
            "no module of the model normalizes by statistics": maml(norm="running"),
            r"BatchNorm1d \(1\) keeps no running statistics": maml(with_norm(untracked), norm="running"),
            "track_running_stats=True": maml(with_norm(untracked), norm="per_step"),
            "for each inner step, but steps is 0": maml(with_norm(), norm="per_step", steps=0),
            "only weights and biases of normalizations": maml(with_norm(), norm="per_step", adapt="1"),
            r"^MAMLPlusPlus.* no module of the model .* Pass norm=None": of(mg.MAMLPlusPlus),
            "^ProtoNet.*'running'.: no module": of(mg.ProtoNet, norm="running"),
            "^ProtoNet.* each inner step, but steps is 0": of(mg.ProtoNet, with_norm(), norm="per_step"),
            r"Unreachable \(1\) has a forward of its own": lambda: running(regression()),
            "statistics for 2 inner steps, but this is step 2": lambda: per_step(regression(), steps=3),
        }
    )


def weighted(weights):
    return of(mg.MAMLPlusPlus, norm=None, steps=2, query_weights=weights)


def test_arguments_of_other_algorithms():
    decayed = rules.chain(rules.clip_by_norm(1.0), rules.adamw(lr=0.1))
    assert_named(
        {
            r"ANIL\(model, ..., head\): expected a module .* got 'head'.* \['0', '2'\]": of(mg.ANIL),
            "got a module Linear": of(mg.ANIL, head=nn.Linear(4, 3)),
            r"ANIL\(..., adapt\): only the head is adapted": of(mg.ANIL, adapt="0"),
            r"BOIL\(..., adapt\): all but the head is adapted": of(mg.BOIL, adapt="0"),
            r"FOMAML\(..., order\): it is 1": of(mg.FOMAML, order=2),
            r"CAVIA\(..., adapt\): only the context": of(mg.CAVIA, adapt="0"),
            "'context' matches no parameter of the model": of(mg.CAVIA),
            r"MetaSGD\(..., per\): .* 'entry', 'tensor', 'step', got 'row'": of(mg.MetaSGD, per="row"),
            r"MetaSGD\(..., inner\): it is SGD with learned rates": of(mg.MetaSGD, inner=SGD),
            r"sgd\(...\): lr must be at least 0, got -1": of(mg.MetaSGD, lr=-1.0),
            r"MAMLPlusPlus\(..., inner\): it is SGD": of(mg.MAMLPlusPlus, inner=SGD),
            r"multi_step_updates\): .* 0 or more, got -1": of(mg.MAMLPlusPlus, multi_step_updates=-1),
            r"first_order_updates\): .* 0 or more, got 0.5": of(mg.MAMLPlusPlus, first_order_updates=0.5),
            "a weight for each of 2 steps": weighted([1.0]),
            "weights must be finite and at least 0": weighted([1.0, -1.0]),
            "all weights are 0": weighted([0, 0.0]),
            r"Reptile\(..., order\): .* Use FOMAML or MAML": of(mg.Reptile, order=2),
            r"Reptile\(..., adapt\): all parameters are adapted": of(mg.Reptile, adapt="0.*"),
            r"Reptile\(..., truncate\)": of(mg.Reptile, truncate=None),
            "lr of inner would be learned, but the steps are not": of(mg.Reptile, inner=LEARNED),
            "the loss would be learned": of(mg.Reptile, None, Scaled()),
            "expected one of 'all', 'support', got 'query'": of(mg.Reptile, examples="query"),
            'norm="per_step" would be learned': of(mg.Reptile, with_norm(), norm="per_step"),
            "lr would be learned, and does not influence a minimum": of(mg.iMAML, inner=LEARNED),
            "weight_decay .* Put the penalty into the loss": of(mg.iMAML, inner=decayed),
            r"iMAML\(..., truncate\): it differentiates through no step": of(mg.iMAML, truncate=2),
            r"iMAML\(..., matrix\): expected one of 'hessian', 'ggn'": of(mg.iMAML, matrix="fisher"),
            r"iMAML\(..., tolerance\)": of(mg.iMAML, tolerance=0.1),
            r"iMAML\(..., order\)": of(mg.iMAML, order=1),
            "a minimum has no statistics of each step": of(mg.iMAML, with_norm(), norm="per_step"),
            "it keeps none of the steps": of(mg.iMAML, memory="step"),
            "expected an implicit method, CG": of(mg.iMAML, hypergradient=hypergrad.Unroll(SGD, 1)),
            "treats the minimum as a constant": of(mg.iMAML, hypergradient=hypergrad.FirstOrder()),
            r"proximal\): expected a number above 0, got -1.0": of(mg.iMAML, proximal=-1.0),
            r"proximal\): expected a scalar, got shape \(2,\)": of(mg.iMAML, proximal=torch.ones(2)),
            r"'head' is no module .* \['0', '2'\]": of(mg.ProtoMAML),
            "'1' is a Tanh": of(mg.ProtoMAML, head="1"),
            "'0' is a Linear": of(mg.ProtoMAML, nn.Sequential(nn.Linear(2, 3, bias=False)), head="0"),
            r"ProtoNet\(model, ...\): model must be a torch.nn.Module": of(mg.ProtoNet, torch.sin),
            "expected one of 'euclidean', 'cosine', got 'l1'": of(mg.ProtoNet, distance="l1"),
            r"ProtoNet\(model, ...\): TorchScript keeps": of(mg.ProtoNet, nn.Sequential(scripted())),
            r"ProtoNet\(...\): unexpected keyword argument 'inner'": of(mg.ProtoNet, inner=SGD),
            r"R2D2\(..., penalty\): expected a number above 0": of(mg.R2D2, penalty=0.0),
        }
    )


def batch(x, y, query_x=None, query_y=None):
    support = SimpleNamespace(x=x, y=y)
    query = SimpleNamespace(x=x if query_x is None else query_x, y=y if query_y is None else query_y)
    return SimpleNamespace(support=support, query=query)


X, Y, LABELS = torch.randn(4, 6, 2), torch.randn(4, 6, 3), torch.arange(6).repeat(4, 1) % 3


def regression():
    return batch(X, Y)


class Opaque:
    __slots__ = ("hidden",)


def test_batches():
    call = maml()()
    row = maml(nn.Linear(6, 6))()
    cases = {
        r"support.x is empty, its shape is \(0, 6, 2\)": batch(X[:0], Y[:0]),
        r"query.x is empty, its shape is \(4, 0, 2\)": batch(X, Y, X[:, :0], Y[:, :0]),
        r"same number of tasks in front.* a single task, use x.unsqueeze\(0\)": batch(X[:2], Y[:2], X, Y),
        "support.x and support.y must have the same number of examples": batch(X, Y[:, :3], X, Y),
        "query.x and query.y must have the same number of examples": batch(X, Y, X, Y[:, :3]),
        r"must be \[tasks, examples, ...\], got shape \(6,\)": batch(X[0, :, 0], Y),
        r"must be a pair \(support, query\), .* got a tuple of 1. Stack single tasks": ((X, Y),),
        r"support.x holds a NumPy array. Use torch.from_numpy": batch(X.numpy(), Y),
        "support.x must be .* got a list without tensors": batch(X.tolist(), Y),
        r"got a dict with the keys \['train', 'test'\]": {"train": 1, "test": 2},
        r"query must be a pair \(x, y\), .* got a Tensor": ((X, Y), Y),
        r"query.x must be a tensor, or a nesting": ((X, Y), ({}, Y)),
        r"query.x\['ids'\] must be \[tasks, .* without axes": ((X, Y), ({"ids": torch.ones(())}, Y)),
        r"query.x holds a Opaque at \[0\]": ((X, Y), ([Opaque()], Y)),
        r"returns \(6, 3\).*targets are \(6, 1\).*broadcast": batch(X, Y[..., :1]),
    }
    calls = {message: functools.partial(call, given) for message, given in cases.items()}
    calls |= {
        r"got a whole batch. Pass batch.support": lambda: call.adapt(mg.tasks.Batch((X, Y), (X, Y))),
        r"adapted to 4 tasks, so x must be \[4, n, ...\], got \(2, 6, 2\)": lambda: call.adapt((X, Y))(X[:2]),
        "expected an int of 0 or more, got -2": lambda: call(regression(), steps=-2),
        "one value for each of 2 steps": lambda: of(mg.MetaSGD, steps=2, per="step")()(regression(), steps=3),
        r"support.x is \(4, 6\), .* 6 features .* x.unsqueeze\(0\)": lambda: row(batch(*[X[..., 0]] * 2)),
    }
    assert_named(calls)


class Outside(nn.Module):
    """A model that reads a parameter by a list, where substitution does not reach it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.held = [self.linear.weight]

    def forward(self, x):
        return self.linear(x) + x @ self.held[0].T


class Tuple(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Constant(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach() + torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_losses_and_models(task_chunk):
    own = net()

    def penalty(prediction, target):
        return F.mse_loss(prediction, target) + sum(p.square().sum() for p in own.parameters())

    def run(model=None, loss=F.mse_loss, given=None, **options):
        call = maml(model, loss, task_chunk=task_chunk, **options)
        return lambda: call()(regression() if given is None else given)

    elementwise = functools.partial(F.mse_loss, reduction="none")
    reptile = of(mg.Reptile, Graph(6, 2, 3), task_chunk=task_chunk)
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert_named(
        {
            "the loss of a task reads the parameter '0.weight'.* weight_decay": run(own, penalty),
            "reads the parameter 'linear.weight'": run(Outside()),
            r"the model returns a tuple.* F.mse_loss\(out\[0\], y\)": run(Tuple(2, 3)),
            "depends on none of the parameters": run(Constant(2, 3)),
            "depends on none of the parameters.* detach": run(None, lambda p, y: p.detach().mean()),
            "a real loss in floating point, got torch.complex64": run(None, lambda p, y: p.mean() * 1j),
            "expected a tensor from loss_fn, got 'NoneType'": run(None, lambda p, y: None),
            r"scalar for each task, got shape \(6, 3\)": run(None, elementwise),
            "at the first inner step: WeightNorm": run(normed),
            "Expected support.x in torch.float32, .* got torch.float64": run(given=batch(X.double(), Y)),
            r"Reptile.*together \(.*shapes.* Pass examples='support'": lambda: reptile()(regression()),
            "Use torch.no_grad": torch.inference_mode()(run()),
        }
    )
    loss = run(own, memory="full")().loss
    torch.nn.init.zeros_(own[2].weight)
    assert_named({"parameter '2.weight' was modified in place between the forward and": loss.backward})
    shared = maml(own, lambda p, y: F.mse_loss(p, y) + own[0].weight.square().sum(), adapt="2")()
    assert shared(regression()).loss.isfinite()


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_labels(task_chunk):
    def run(labels, loss=F.cross_entropy):
        call = maml(None, loss, task_chunk=task_chunk)
        return lambda: call()(batch(X, labels))

    hot = F.one_hot(LABELS, 3)
    losses = [F.cross_entropy, nn.CrossEntropyLoss(), functools.partial(F.cross_entropy, label_smoothing=0.1)]
    for loss in losses:
        assert_named(
            {
                "labels must lie in 0..2.*from 1 to 3": run(LABELS + 1, loss),
                "labels must lie in 0..2.*from -1 to 1": run(LABELS - 1, loss),
                "labels must be int64, got torch.int32. Pass y.long()": run(LABELS.int(), loss),
                r"shape of the predictions, \(6, 3\), as one-hot vectors.* y.argmax\(-1\)": run(hot, loss),
                r"one class per example, \(6,\) per task, got \(6, 1\)": run(LABELS.unsqueeze(-1), loss),
            }
        )
    binary = F.binary_cross_entropy_with_logits
    assert_named(
        {
            r"targets in floating point, as y.float\(\), got torch.int64": run(hot, binary),
            "targets in floating point, .*got torch.bool": run(hot.bool(), nn.HuberLoss()),
        }
    )
    for labels in (LABELS, LABELS.byte(), hot.float(), LABELS.masked_fill(LABELS == 2, -100)):
        assert run(labels)().loss.isfinite()


def test_data_of_heads():
    call, embedded = of(mg.R2D2, nn.Linear(2, 4))(), torch.where(LABELS == 1, 2, LABELS)
    cases = {
        r"R2D2\(batch\): classes must be 0 or more, .* has -1": batch(X, LABELS - 1),
        "task 0 has no support example that is no padding": batch(X, LABELS * 0 - 100),
        r"must be the classes .*, got float32 \[4, 6\]": batch(X, LABELS.float()),
        "must be the classes .*, got dict": batch(X, {"a": LABELS}),
        r"^R2D2\(batch\): .* task 0 has none of class 1 ": batch(X, embedded),
        "query example 0 of task 0 is of class 3, of which": batch(X, LABELS, None, LABELS + 3),
    }

    def returning(change):
        model = nn.Linear(2, 3)
        model.register_forward_hook(lambda module, args, result: change(result))
        return lambda: mg.ProtoNet(model, task_chunk=1)(batch(X, LABELS))

    proto = of(mg.ProtoMAML, nn.Sequential(nn.Linear(2, 3)), F.cross_entropy, head="0")()
    assert_named(
        {message: functools.partial(call, given) for message, given in cases.items()}
        | {
            r"^R2D2.adapt\(support\): .* task 0 has none of class 1": lambda: call.adapt((X, embedded)),
            "the head is fitted in closed form": lambda: call(batch(X, LABELS), steps=1),
            r"got dict": returning(lambda y: {"logits": y}),
            r"must return a floating tensor .*, got int64": returning(lambda y: y.long()),
            r"must return a floating tensor .*, got float32": returning(lambda y: y[:, 0]),
            "one embedding for each example, got 5 for 6 labels": returning(lambda y: y[:-1]),
            "^ProtoMAML.* task 0 has none of class 1": lambda: proto(batch(X, embedded)),
            r"'0' has 3 outputs, .* of the classes 0\.\.2": lambda: proto.adapt((X, LABELS.clamp(max=1))),
            "^ProtoMAML.* must be the classes": lambda: proto.adapt((X, LABELS.float())),
        }
    )


def test_assigned_attributes_are_checked_by_the_next_call():
    call, named = of(mg.iMAML)(), maml()()
    call.truncate, named.adapted = 2, "none"
    calls = {r"truncate\)": call, "no parameter of the model": named}
    assert_named({message: functools.partial(c, regression()) for message, c in calls.items()})
    for attribute, value in (("truncate", 1), ("adapted", "0.*"), ("order", 2)):
        reptile = of(mg.Reptile)()
        reptile(regression())
        setattr(reptile, attribute, value)
        message = r"Reptile\(...\): expected order 1, adapted None and truncate None"
        assert_named({message: functools.partial(reptile, regression())})
