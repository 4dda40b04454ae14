"""Results of two and four processes of gloo equal the results of one process with all data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.distributed import average_gradients
from tests.distributed.processes import in_processes
from tests.marks import slow

pytestmark = pytest.mark.usefixtures("doubles")

R = mg.optim.rules
PAGE = Path(__file__).parents[2] / "docs/scale.md"


def share_of(group, count):
    """Return the places of this rank, or all places without a group."""
    places = torch.arange(count)
    return places if group is None else places.tensor_split(group.size())[group.rank()]


def gradients(module):
    return {name: p.grad.to_dense() for name, p in module.named_parameters()}


def sinusoids(group):
    batch = mg.tasks.Sinusoid().sample(8, generator=torch.Generator().manual_seed(0))
    batch = batch.to(dtype=torch.float64)
    return batch if group is None else batch.shard(group)


def learner(lr=0.01):
    rule = R.sgd(lr=lr)
    return mg.MAML(mg.models.MLP([1, 8, 1]), F.mse_loss, inner=rule, steps=2)


def wrapped_maml(group):
    """Two outer steps, because the wrapper rebuilds its buckets after the first step."""
    maml, share = learner(nn.Parameter(torch.tensor(0.01))), sinusoids(group)
    wrapped = maml if group is None else nn.parallel.DistributedDataParallel(maml)
    outer, found = torch.optim.SGD(maml.parameters(), lr=1e-3), []
    for _ in range(2):
        outer.zero_grad()
        wrapped(share).loss.backward()
        found.append({name: g.clone() for name, g in gradients(maml).items()})
        outer.step()
    return found


class MetaLoss(nn.Module):
    """A user's module that computes a meta-loss. Its parameters are the initialization."""

    def __init__(self):
        super().__init__()
        self.model = mg.models.MLP([1, 8, 1])

    def forward(self, batch):
        def loss(params, x, y):
            return F.mse_loss(torch.func.functional_call(self.model, params, x), y)

        losses = []
        for task in range(batch.num_tasks):
            params = dict(self.model.named_parameters())
            found = mg.grad(
                loss(params, batch.support.x[task], batch.support.y[task]), params, create_graph=True
            )
            params = {name: p - 0.01 * found[name] for name, p in params.items()}
            losses.append(loss(params, batch.query.x[task], batch.query.y[task]))
        return torch.stack(losses).mean()


def wrapped_module(group):
    module = MetaLoss()
    wrapped = module if group is None else nn.parallel.DistributedDataParallel(module)
    wrapped(sinusoids(group)).backward()
    return gradients(module)


def rows_of_tables(group):
    """Each rank looks up other rows, and has another number of examples."""
    model = nn.Sequential(nn.EmbeddingBag(30, 3, sparse=True), nn.Linear(3, 1))
    ids, y = torch.arange(28).reshape(7, 4), torch.randn(7, 1)
    own = share_of(group, 7)
    F.mse_loss(model(ids[own]), y[own]).backward()
    average_gradients(model, weight=len(own))
    return gradients(model)


def products(group):
    model = mg.models.MLP([3, 5, 4])
    x, y, own = torch.randn(8, 3), torch.randint(0, 4, (8,)), share_of(group, 8)
    params = dict(model.named_parameters())
    operators = (
        mg.hessian(F.cross_entropy(model(x[own]), y[own]), params),
        mg.ggn(model, F.cross_entropy, params, (x[own], y[own])),
    )
    return [mg.curvature.Averaged(operator).to_dense() for operator in operators]


def factors(group):
    """Unequal shares, means and sums, and EK-FAC, with all kinds of layers. A rank may have no label or no data."""
    tokens, linear = nn.Sequential(nn.Embedding(6, 4), nn.Flatten()), nn.Linear(8, 5)
    model = nn.Sequential(tokens, linear, nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3))
    x, y, own = torch.randint(0, 6, (11, 2)), torch.randint(0, 3, (11,)), share_of(group, 11)
    late, one = y.where(torch.arange(11) >= 6, -100), share_of(group, 1)

    def total(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    return [
        mg.kfac(
            model,
            loss_fn,
            dict(model.named_parameters()),
            data,
            correct=correct,
            fisher="exact",
            group=group,
        ).to_dense()
        for loss_fn, data in (
            (F.cross_entropy, (x[own], y[own])),
            (total, (x[own], y[own])),
            (F.cross_entropy, (x[own], late[own])),
            (total, (x[one], y[one])),
            (total, [(x[one], y[one])][: len(one)]),
        )
        for correct in (False, True)
    ]


def training(group, model=None, **options):
    """A training whose last mini-batch of an epoch is a single example, so that other ranks have none."""
    torch.manual_seed(0)
    x, y, scale = torch.randn(15, 4), torch.randint(0, 3, (15,)), torch.tensor(1.3, requires_grad=True)

    def loss_fn(output, y):
        return scale * F.cross_entropy(output, y, reduction="none")

    model = model or nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    options = {"optimizer": R.sgd(lr=0.1, momentum=0.9), "batch_size": 7, "epochs": 2, **options}
    return mg.Training(model, loss_fn, (x, y), group=group, **options), scale


def metrics(trained):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    return F.cross_entropy(trained(x), y, reduction="none")


def leaves_of_trainings(group):
    found = {}
    for average, memory in (("batch", "full"), ("weights", "sqrt"), ("weights", "full")):
        for options in ({}, {"micro_batch": 2}, {"optimizer": R.adam(lr=0.01, eps_root=1e-8)}):
            own, scale = training(group, average=average, **options)
            x, y = own.examples.tensors
            x = x.clone().requires_grad_()
            weights = torch.linspace(0.5, 1.5, 15).requires_grad_()
            rates = torch.linspace(0.05, 0.1, own.steps, requires_grad=True)
            given = {} if "optimizer" in options else {"optimizer": R.sgd(lr=rates, momentum=0.9)}
            trained = own(weights, data=(x, y), memory=memory, **given)
            leaves = [weights, x, scale, *own.model.params().values(), *([rates] if given else [])]
            outcome = metrics(trained).mean() + trained.losses[-2]
            found[f"{average} {memory} {list(options)}"] = outcome, *torch.autograd.grad(outcome, leaves)
    return found


def attribution(group):
    own, _ = training(group)
    methods = mg.attribution.Replay(), mg.attribution.TracIn(checkpoints=2)
    rows = torch.stack([torch.ones(15), torch.linspace(0, 2, 15)])
    scores = [mg.attribute(own(), metrics, method).values for method in methods]
    return [*scores, mg.attribution.retrain(own, rows, metrics).metrics]


def dropout(group):
    """Return a derivative, and the central difference. The masks of each rank repeat with the steps."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 3))
    own, _ = training(group, model)
    weights, direction = torch.ones(15, requires_grad=True), torch.linspace(-1, 1, 15)
    (found,) = torch.autograd.grad(metrics(own(weights, memory="sqrt")).sum(), weights)
    ends = [metrics(own(weights.detach() + h * direction)).sum() for h in (1e-6, -1e-6)]
    return found @ direction, (ends[0] - ends[1]) / 2e-6


def message(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def errors(group):
    own, _ = training(group)
    norm = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    rank = group.rank()
    weights = torch.ones(15, requires_grad=True)
    return [
        message(lambda: own(torch.full((15,), 1.0 + rank))),
        message(lambda: own(data=(own.examples.tensors[0] + rank, own.examples.tensors[1]))),
        message(lambda: own().trajectory and mg.attribute(own(), lambda m: metrics(m)[rank :: group.size()])),
        message(lambda: mg.attribution.retrain(own, torch.full((2, 15), 1.0 + rank), metrics)),
        message(lambda: own(memory="auto")),
        message(lambda: own(offload="folder")),
        message(lambda: torch.autograd.grad(own(weights).losses.sum(), weights, create_graph=True)),
        message(lambda: training(group, norm, batch_size=15)[0]()),
    ]


ERRORS = [
    "parameters and weights: expected the same values on all ranks",
    "data: expected the same values on all ranks",
    "metrics: expected the same values on all ranks",
    r"retrain\(weights\): expected the same values on all ranks",
    'another mode than "auto"',
    "no folder",
    "create_graph=True is not supported",
    r"Training\(micro_batch, group\): the model writes its buffer '1.running_mean'",
]


def page(group):
    """The programs of the page, with the values that several ranks share."""
    names: dict[str, object] = {}
    torch.set_default_dtype(torch.float32)
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(program, names)
    gradient = [p.grad for p in names["maml"].parameters()]
    return [*gradient, *(names[name] for name in ("scores", "outcomes", "curvature", "factored"))]


def sharded_learners(group):
    """Two outer steps of learners whose parameters are DTensors between the steps, then predictions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found, batch, share = [], sinusoids(None), sinusoids(group)
    meta_sgd = mg.MetaSGD(mg.models.MLP([1, 8, 1]), F.mse_loss, lr=0.01, steps=2)
    for own in (learner(), meta_sgd):
        if group is not None:
            fully_shard(own, mesh=init_device_mesh("cpu", (group.size(),)))
        outer = torch.optim.Adam(own.parameters(), lr=1e-3)
        for _ in range(2):
            outer.zero_grad()
            own(share).loss.backward()
            grads = [p.grad for p in own.parameters()]
            found.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads])
            outer.step()
        if group is not None:
            own.unshard()
        found.append(own.adapt(batch.support)(batch.query.x).detach())
    return found


def sharded_layers(group):
    """Return the message for a model whose layers are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    own = learner()
    for layer in (own.model, own):
        fully_shard(layer, mesh=init_device_mesh("cpu", (group.size(),)))
    return message(lambda: own(sinusoids(group)))


CASES = {
    case.__name__: case
    for case in (
        wrapped_maml,
        wrapped_module,
        rows_of_tables,
        products,
        factors,
        leaves_of_trainings,
        attribution,
    )
}


@pytest.fixture(scope="module", params=[2, slow(4)])
def found(request, tmp_path_factory):
    cases = CASES | {"dropout": dropout, "errors": errors, "page": page}
    return in_processes(request.param, cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(found, name):
    torch.manual_seed(0)
    expected = CASES[name](None)
    for own in found:
        assert not isinstance(own[name], str), own[name]
        torch.testing.assert_close(own[name], expected, rtol=1e-11, atol=1e-12)


def test_a_training_with_dropout_has_the_derivative_of_its_masks(found):
    """The error of the difference is of order STEP**2 + eps / STEP, about 1e-9."""
    for own in found:
        assert not isinstance(own["dropout"], str), own["dropout"]
        assert torch.equal(own["dropout"][0], found[0]["dropout"][0])
        torch.testing.assert_close(*own["dropout"], rtol=1e-6, atol=1e-8)


def test_the_programs_of_the_page_have_the_same_results_on_ranks(found):
    """They compute in float32. The sums of several ranks have another order."""
    torch.manual_seed(0)
    expected = page(None)
    for own in found:
        assert not isinstance(own["page"], str), own["page"]
        torch.testing.assert_close(own["page"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("number", "expected"), list(enumerate(ERRORS)))
def test_errors_are_raised_on_all_ranks(found, number, expected):
    for own in found:
        assert re.search(expected, own["errors"][number]), own["errors"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.filterwarnings("default")  # of the imports of fully_shard
def test_sharded_learners_equal_one_process(size, tmp_path):
    """Only the learner can be sharded. A model with sharded layers raises."""
    cases = {case.__name__: case for case in (sharded_learners, sharded_layers)}
    torch.manual_seed(0)
    expected = sharded_learners(None)
    for own in in_processes(size, cases, tmp_path):
        assert not isinstance(own["sharded_learners"], str), own["sharded_learners"]
        torch.testing.assert_close(own["sharded_learners"], expected, rtol=1e-9, atol=1e-12)
        assert "is a DTensor, as fully_shard makes them" in own["sharded_layers"]
