"""The derivatives of a training, against central differences of trainings that run again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg

pytestmark = pytest.mark.usefixtures("doubles")

R = mg.optim.rules
STEP = 1e-6  # of the central differences: their error is of order STEP**2 + eps / STEP


class Block(nn.Module):
    """A transformer block with dropout, on sequences of three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = x.unflatten(1, (3, 4))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3))


def conv(norm):
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 2, bias=False),
        norm,
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


MODELS = {
    "mlp": mlp,
    "group norm": lambda: conv(nn.GroupNorm(2, 4)),
    "batch norm": lambda: conv(nn.BatchNorm2d(4)),
    "frozen batch norm": lambda: conv(nn.BatchNorm2d(4).eval()),
    "attention and dropout": Block,
}
MATRICES = {"0.weight", "5.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"}
RULES = {
    "sgd": lambda: R.sgd(lr=0.1),
    "momentum": lambda: R.sgd(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw and clip": lambda: R.chain(R.clip_by_norm(0.5), R.adamw(lr=0.01)),
    "adam": lambda: R.adam(lr=0.01, eps_root=1e-8),
    "rmsprop": lambda: R.rmsprop(lr=0.01, momentum=0.9, eps_root=1e-6),
    "muon": lambda: R.mask(R.muon(lr=0.02), lambda name: name in MATRICES, other=R.sgd(lr=0.1)),
    "shampoo": lambda: R.shampoo(lr=0.02),
    # With the default shift, the eigenvectors amplify the rounding errors of the differences.
    "soap": lambda: R.soap(lr=0.01, eps=1e-2, shift=1e-2, basis_every=3),
    "schedule": lambda: R.sgd(lr=[0.1, 0.2, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1]),
}


def problem(model="mlp", rule="momentum", **options):
    torch.manual_seed(0)
    net = MODELS[model]() if isinstance(model, str) else model
    x, y = torch.randn(14, 12), torch.randint(0, 3, (14,))
    given = {
        "optimizer": RULES[rule]() if isinstance(rule, str) else rule,
        "batch_size": 4,
        "epochs": 2,
        **options,
    }
    return mg.Training(net, F.cross_entropy, (x, y), **given)


def metric_data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 12, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def metric(trained):
    x, y = metric_data()
    return F.cross_entropy(trained(x), y) + trained.losses[-1]


def difference(function, at, direction, step=STEP):
    return (function(at + step * direction) - function(at - step * direction)) / (2 * step)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_derivatives_agree_with_trainings_that_run_again(model, rule):
    training = problem(model, rule)
    leaves = {
        "weights": torch.ones(14),
        "x": training.examples.tensors[0],
        **training.model.params(),
    }
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}

    def trained(leaves):
        params = {name: leaf for name, leaf in leaves.items() if name not in ("weights", "x")}
        data = leaves["x"], training.examples.tensors[1]
        return training(leaves["weights"], data=data, params=params, memory="sqrt")

    found = dict(
        zip(leaves, torch.autograd.grad(metric(trained(leaves)), list(leaves.values())), strict=True)
    )
    for name, gradient in found.items():  # a rule can have a kink within the longer step
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2))

        def at(value, name=name):
            with torch.no_grad():
                return float(metric(trained({**leaves, name: value})))

        slope, bound = (
            float((gradient * direction).sum()),
            1e-6 * max(float(gradient.norm() * direction.norm()), 1e-3),
        )
        differences = (difference(at, leaves[name].detach(), direction, step) for step in (STEP, STEP / 10))
        assert any(abs(slope - other) < bound for other in differences), name


def by_hand(training, weights, lr, momentum):
    """Train a model without buffers by a plain loop with one graph of all steps."""
    params = {name: p.detach().clone().requires_grad_() for name, p in training.model.params().items()}
    first, velocity = params, {name: torch.zeros_like(p) for name, p in params.items()}
    x, y = training.examples.tensors
    losses = []
    for t in range(training.steps):
        rows = training.step.stream.rows(t)
        output = torch.func.functional_call(training.model.module, params, (x[rows],))
        losses.append((weights[rows] * F.cross_entropy(output, y[rows], reduction="none")).mean())
        grads = torch.autograd.grad(losses[-1], list(params.values()), create_graph=True)
        velocity = {name: momentum * v + g for (name, v), g in zip(velocity.items(), grads, strict=True)}
        params = {name: p - lr[t] * velocity[name] for name, p in params.items()}
    x, y = metric_data()
    loss = F.cross_entropy(torch.func.functional_call(training.model.module, params, (x,)), y) + losses[-1]
    return loss, first


@pytest.mark.parametrize("memory", ["full", "step", "sqrt", "log", 3, "4KiB"])
def test_the_gradient_is_the_same_bits_for_every_memory(memory):
    training = problem(rule=R.sgd(lr=0.1, momentum=0.9), epochs=3)
    rates = torch.linspace(0.1, 0.2, training.steps, requires_grad=True)
    momentum = torch.tensor(0.8, requires_grad=True)
    weights = torch.linspace(0.5, 1.5, 14).requires_grad_()
    rule = R.sgd(lr=rates, momentum=momentum)
    given = {"states": memory} if isinstance(memory, int) else {"memory": memory}
    own = list(training.model.params().values())

    def gradients(**given):
        trained = training(weights, optimizer=rule, **given)
        return trained, torch.autograd.grad(metric(trained), [weights, rates, momentum, *own])

    trained, found = gradients(**given)
    assert all(map(torch.equal, found, gradients(memory="step")[1]))
    loss, first = by_hand(training, weights, rates, momentum)
    expected = torch.autograd.grad(loss, [weights, rates, momentum, *first.values()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    # The state before the last step is kept in addition.
    assert trained.report.states <= training.plan(**given).states + 1
    assert trained.report.replays == training.plan(**given).forward_steps - training.steps


@pytest.mark.parametrize("memory", ["full", "log"])
@pytest.mark.parametrize("seed", range(4))
def test_a_second_sweep_trains_again(seed, memory):
    """With a graph, gradients of a group norm round differently."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 5), nn.GroupNorm(1, 5), nn.Tanh(), nn.Linear(5, 3))
    weights = torch.rand(14, requires_grad=True)
    value = metric(problem(net, rule="sgd")(weights, memory=memory))
    first, second = (torch.autograd.grad(value, weights, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-9 if memory == "full" else 0, atol=1e-12)


@pytest.mark.parametrize("memory", ["full", "log"])
@pytest.mark.parametrize("average", ["batch", "weights"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_add_up(micro_batch, average, memory):
    weights = torch.linspace(0.5, 1.5, 14).requires_grad_()

    def gradient(micro_batch):
        trained = problem(micro_batch=micro_batch, average=average)(weights, memory=memory)
        return torch.autograd.grad(metric(trained), weights)[0]

    torch.testing.assert_close(gradient(micro_batch), gradient(None), rtol=1e-12, atol=1e-14)


def test_weights_that_average_do_not_depend_on_their_scale():
    def losses(scale):
        return problem(average="weights")(torch.full((14,), scale)).losses

    torch.testing.assert_close(losses(2.0), losses(1.0), rtol=1e-12, atol=1e-14)
    weights = torch.ones(14, requires_grad=True)
    found = torch.autograd.grad(metric(problem(average="weights")(weights)), weights)[0]
    assert abs(float(found.sum())) < 1e-12  # by Euler's theorem


@pytest.mark.parametrize("model", ["batch norm", "attention and dropout"])
def test_all_metrics_of_one_sweep_are_single_gradients(model):
    training = problem(model)
    weights = torch.ones(14, requires_grad=True)
    x, y = metric_data()

    def metrics(net):
        return F.cross_entropy(net(x), y, reduction="none")

    trained = training(weights, memory="sqrt")
    values, (rows,) = trained.jacobian(metrics)
    parts = training(memory="sqrt").jacobian(metrics, chunk=4)[1][0]
    single = metrics(trained)
    torch.testing.assert_close(values, single.detach(), rtol=1e-12, atol=0)
    for row, part, value in zip(rows, parts, single, strict=True):
        expected = torch.autograd.grad(value, weights, retain_graph=True)[0]
        torch.testing.assert_close(row, expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(part, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("wrt", ["params", "data", "weights"])
def test_metrics_that_read_inputs_of_the_training_are_refused(wrt):
    training = problem()
    x, first = training.examples.tensors[0].requires_grad_(), training.model.module[0].weight
    trained = training()
    own = {"params": first, "data": x, "weights": trained.losses}[wrt]
    with pytest.raises(ValueError, match=r"jacobian\(metrics\): the metrics depend on inputs"):
        trained.jacobian(lambda model: model(metric_data()[0])[:, 0] + own.sum(), wrt)


def test_a_derivative_can_be_differentiated_again():
    training = problem("batch norm", steps=3, epochs=None)
    direction = torch.linspace(-1, 1, 14)

    def slope(weights, create_graph=False):
        (found,) = torch.autograd.grad(metric(training(weights)), weights, create_graph=create_graph)
        return found @ direction

    weights = torch.ones(14, requires_grad=True)
    found = torch.autograd.grad(slope(weights, create_graph=True), weights)[0] @ direction
    expected = difference(lambda w: slope(w.requires_grad_()).detach(), torch.ones(14), direction)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    long = problem(steps=201, epochs=None, model="mlp")(weights)
    with pytest.raises(RuntimeError, match="at most 200 steps, got 201"):
        torch.autograd.grad(metric(long), weights, create_graph=True)


@pytest.mark.parametrize("kind", ["a module", "a closure", "no leaf"])
def test_what_the_loss_reads_is_differentiated(kind):
    scale = torch.tensor([0.5, 1.0, 1.5], requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(scale.detach().clone())

        def forward(self, output, y):
            return F.cross_entropy(output * self.scale, y)

    module = Scaled()
    twice = 2 * scale
    loss_fn, leaf = {
        "a module": (module, module.scale),
        "a closure": (lambda output, y: F.cross_entropy(output * scale, y), scale),
        "no leaf": (lambda output, y: F.cross_entropy(output * twice / 2, y), scale),
    }[kind]
    torch.manual_seed(0)
    net, x, y = mlp(), torch.randn(14, 12), torch.randint(0, 3, (14,))

    def value(scale):
        training = mg.Training(
            net,
            lambda o, y: F.cross_entropy(o * scale, y),
            (x, y),
            optimizer=R.sgd(lr=0.5),
            batch_size=4,
            steps=5,
        )
        return float(metric(training()).detach())

    training = mg.Training(net, loss_fn, (x, y), optimizer=R.sgd(lr=0.5), batch_size=4, steps=5)
    found = torch.autograd.grad(metric(training()), leaf)[0]
    direction = torch.tensor([1.0, -2.0, 0.5])
    expected = difference(value, scale.detach(), direction)
    assert float(found @ direction) == pytest.approx(expected, rel=1e-6)


class Penalized:
    """A loss that holds a tensor and a function of it."""

    def __init__(self, z):
        self.z, self.square = z, z**2

    def __call__(self, output, y):
        return (output - y).square().mean(1) * self.square


def linked(z, name):
    """Train with two inputs that are functions of ``z``."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 3), torch.randn(14, 3), torch.randn(14, 3)
    net.register_parameter("scale", nn.Parameter(torch.ones(())))
    net.register_forward_hook(lambda module, args, output: output * module.scale)
    loss_fn = Penalized(z) if name == "loss" else F.mse_loss
    training = mg.Training(net, loss_fn, (x, y), optimizer=R.sgd(lr=0.1), batch_size=4, steps=4)
    weights, moved = z.repeat(14), x * z
    options = {
        "weights and rate": lambda: {"weights": weights, "optimizer": R.sgd(lr=weights.mean() / 9)},
        "inputs are targets": lambda: {"data": (moved, moved)},
        "weights and inputs": lambda: {"weights": weights, "data": (x * weights[:, None], y)},
        "parameters": lambda: {
            "params": {"weight": (w := net.weight.detach() * z), "bias": w.sum(1), "scale": torch.ones(())}
        },
        "loss": dict,
    }[name]()
    return training(**options)(x).square().mean()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "name", ["weights and rate", "inputs are targets", "weights and inputs", "parameters", "loss"]
)
def test_inputs_that_depend_on_each_other_count_once(name, create_graph):
    z = torch.tensor(0.9, requires_grad=True)
    (found,) = torch.autograd.grad(linked(z, name), z, create_graph=create_graph)
    expected = difference(lambda z: linked(z, name).detach(), torch.tensor(0.9), torch.tensor(1.0))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_parameter_that_a_rule_leaves_out_is_still_a_variable(create_graph):
    rule = R.chain(R.clip_by_norm(0.3), R.mask(R.sgd(lr=0.5), "0.*"))
    training, weights = problem(rule=rule), torch.ones(14, requires_grad=True)
    (found,) = torch.autograd.grad(metric(training(weights)), weights, create_graph=create_graph)
    direction = torch.linspace(-1, 1, 14)
    expected = difference(lambda w: metric(training(w)).detach(), torch.ones(14), direction)
    torch.testing.assert_close(found.detach() @ direction, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_a_tensor_that_cannot_be_found_is_an_error(memory):
    class Holder:
        __slots__ = ("scale",)

    holder = Holder()
    holder.scale = torch.tensor(2.0, requires_grad=True)
    net = nn.Sequential(nn.Linear(12, 3))
    net.register_forward_hook(lambda module, args, output: output * holder.scale)
    training = problem(net, steps=3, epochs=None)
    with pytest.raises(ValueError, match=r"a tensor of shape \(\) that requires grad"):
        training(memory=memory)
    with torch.no_grad():
        assert len(training(memory=memory).losses) == 3


def test_a_dataset_of_tensors_that_require_grad_is_an_error():
    x, y = torch.randn(14, 12, requires_grad=True), torch.randint(0, 3, (14,))
    data = torch.utils.data.TensorDataset(x, y)
    training = mg.Training(mlp(), F.cross_entropy, data, optimizer=R.sgd(lr=0.1), batch_size=4, steps=2)
    with pytest.raises(ValueError, match=r"a tensor of shape \(14, 12\) that requires grad"):
        training()


def test_weights_of_tokens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    x, y = torch.randint(0, 5, (2, 8, 3))

    def loss_fn(output, y):
        return F.cross_entropy(output.movedim(-1, 1), y, reduction="none")

    training = mg.Training(net, loss_fn, (x, y), optimizer=R.sgd(lr=0.5), batch_size=4, epochs=2)
    weights = torch.ones(8, 3, requires_grad=True)
    tokens = torch.autograd.grad(training(weights)(x).square().mean(), weights)[0]
    examples = torch.ones(8, requires_grad=True)
    rows = torch.autograd.grad(training(examples)(x).square().mean(), examples)[0]
    torch.testing.assert_close(tokens.sum(1), rows, rtol=1e-12, atol=1e-14)


def test_a_training_leaves_everything_as_it_was():
    training = problem("batch norm")
    net = training.model.module
    before = {name: t.clone() for name, t in net.state_dict().items()}
    random, weights = torch.get_rng_state(), torch.ones(14, requires_grad=True)
    trained = training(weights)
    loss = trained(torch.ones(2, 12)).sum()
    net.eval()  # of no influence
    loss.backward()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert not net.training
    assert not trained.module().training
    # The module has torch's batch norm, which rounds differently on some CPUs.
    torch.testing.assert_close(trained.module()(torch.ones(2, 12)).sum(), loss)


@pytest.mark.parametrize("average", ["batch", "weights"])
def test_half_precision_counts_more_terms_than_its_largest_number(average):
    """The largest float16 number is 65,504."""
    ids = torch.arange(2**17).reshape(2, -1) % 5

    def gradient(dtype):
        torch.manual_seed(0)
        training = mg.Training(
            nn.Embedding(5, 5).to(dtype),
            lambda output, y: F.cross_entropy(output.transpose(1, 2), y, reduction="none"),
            (ids, ids.roll(1, 1)),
            optimizer=R.sgd(lr=1.0),
            batch_size=2,
            steps=1,
            average=average,
        )
        weights = torch.ones(2, 2**16, dtype=dtype, requires_grad=True)
        trained = training(weights)
        (slope,) = torch.autograd.grad(trained(ids[:1, :5]).square().sum() * 1e4, weights)
        return trained.losses.detach(), trained.params["weight"].detach(), slope

    for found, expected in zip(gradient(torch.float16), gradient(torch.float64), strict=True):
        largest = float(expected.abs().max())  # sums of many float16 numbers are inexact
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=0.3 * largest)


@pytest.mark.parametrize("memory", ["full", "step", "log"])
def test_statistics_of_micro_batches_are_refused(memory):
    weights = torch.ones(14, requires_grad=True)
    with pytest.raises(ValueError, match=r"micro_batch, group\): .* '2.running_mean'.* Use GroupNorm"):
        problem("batch norm", micro_batch=2)(weights, memory=memory)


def test_labels_have_no_derivative():
    _, (x, labels) = problem()(memory="step").jacobian(lambda net: net(metric_data()[0])[0], "data")
    assert x.any()
    assert not labels.any()


def test_a_memory_tracker_has_a_phase_for_each_pass_and_step():
    training = problem(epochs=1)
    with mg.MemoryTracker(device="cpu") as tracker:
        training().jacobian(lambda net: net(metric_data()[0])[0])
    *steps, forward, reverse = sorted(tracker.records(), key=lambda record: -record.depth)
    paths = [(("forward", None), ("inner", t)) for t in range(training.steps)]
    assert [record.path for record in steps] == paths
    assert (forward.name, reverse.name) == ("forward", "reverse")
    assert (
        steps[-1].after - steps[-1].before == sum(2 * p.nbytes for p in training.model.params().values()) + 8
    )
    assert reverse.peak > forward.peak


def test_it_takes_the_steps_of_torch():
    training = problem("batch norm", R.sgd(lr=0.1, momentum=0.9))
    net = problem("batch norm").model.module
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = training.examples.tensors
    for t in range(training.steps):
        rows = training.step.stream.rows(t)
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    trained = training().module()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("muon", "shampoo", "soap")])
def test_single_precision_is_close_to_double(rule):
    def gradient(dtype):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        net, x, y = mlp().to(dtype), torch.randn(14, 12).to(dtype), torch.randint(0, 3, (14,))
        training = mg.Training(net, F.cross_entropy, (x, y), optimizer=RULES[rule](), batch_size=4, epochs=2)
        weights = torch.ones(14, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(training(weights)(x).square().mean(), weights)[0].double()

    single, double = gradient(torch.float32), gradient(torch.float64)
    # Each of 8 steps adds some rounding errors of the size of the scores.
    assert (single - double).norm() < 1e3 * torch.finfo(torch.float32).eps * double.norm()


class Checkpointed(nn.Module):
    """A model whose blocks run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.blocks, x, use_reentrant=False)


def test_blocks_that_run_again_see_the_weights_of_their_step():
    weights = torch.ones(14, requires_grad=True)
    torch.manual_seed(0)
    plain, wrapped = mlp(), Checkpointed()
    wrapped.blocks.load_state_dict(plain.state_dict())
    found = [torch.autograd.grad(metric(problem(net)(weights)), weights)[0] for net in (plain, wrapped)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_blocks_whose_gradient_is_hidden_raise_an_error():
    class Hidden(Checkpointed):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=True) @ self.last

    model = Hidden()
    model.last = nn.Parameter(torch.ones(model.blocks[0].out_features, 3))
    with pytest.raises(ValueError, match=r"Training\(model\): an autograd.Function.*Linear \(blocks.0\)"):
        problem(model)()


class Noisy(torch.utils.data.Dataset):
    """A dataset that draws random numbers, from the global generator or from its own."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.randn(12, generator=self.generator) + i, i % 3


def test_a_dataset_draws_the_same_examples_again():
    training = mg.Training(mlp(), F.cross_entropy, Noisy(), optimizer=R.sgd(lr=0.1), batch_size=4, epochs=2)
    weights = torch.ones(6, requires_grad=True)
    found = [torch.autograd.grad(metric(training(weights, memory=m)), weights)[0] for m in ("full", "log")]
    assert torch.equal(*found)
    own = Noisy(torch.Generator().manual_seed(0))
    training = mg.Training(mlp(), F.cross_entropy, own, optimizer=R.sgd(lr=0.1), batch_size=4, epochs=2)
    with pytest.raises(RuntimeError, match="step 3 had the loss"):
        metric(training(weights, memory="step")).backward()


def test_data_that_changes_between_the_passes_is_an_error():
    training = problem()
    weights = torch.ones(14, requires_grad=True)
    loss = metric(training(weights))
    training.examples.tensors[0].add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(14, 12\) .* was modified in place"):
        loss.backward()


class Average(nn.Module):
    """A model that subtracts a running average of its outputs, which it writes in one of several ways."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(12, 3), kind
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        output = self.linear(x)
        if self.training:
            new = 0.9 * self.average + 0.1 * output.mean(0)
            if self.kind == "in place":
                self.average.copy_(new)
            elif self.kind == "replaced":
                self.average = new
            else:
                self.average = new.detach()
        return output - self.average


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_buffers_that_a_model_writes_are_part_of_the_state(kind):
    training = problem(Average(kind))
    weights, direction = torch.ones(14, requires_grad=True), torch.linspace(-1, 1, 14)
    found = torch.autograd.grad(metric(training(weights)), weights)[0] @ direction
    expected = difference(lambda w: float(metric(training(w)).detach()), torch.ones(14), direction)
    assert float(found) == pytest.approx(expected, rel=1e-6)


LOST = {
    "a buffer": (lambda: Average("detached"), "the model writes its buffer 'average' without a graph"),
    "a parameter": (
        lambda: nn.Sequential(nn.Embedding(3, 4, max_norm=0.1), nn.Flatten(), nn.Linear(48, 3)),
        "the model writes its parameter '0.weight' in place",
    ),
    "rows": (
        lambda: nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Flatten(), nn.Linear(48, 3)),
        "the gradient of '0.weight' is sparse",
    ),
    "a wrong derivative": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 3))),
        "WeightNormInterfaceBackward0",
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", LOST)
def test_a_derivative_that_would_be_lost_is_an_error(name, create_graph):
    model, message = LOST[name]
    torch.manual_seed(0)
    x = torch.randint(0, 3, (14, 12)) if name in ("a parameter", "rows") else torch.randn(14, 12)
    data = x, torch.randint(0, 3, (14,))
    training = mg.Training(model(), F.cross_entropy, data, optimizer=R.sgd(lr=0.1), batch_size=4, steps=3)
    with pytest.raises(ValueError, match=message):
        training(torch.ones(14, requires_grad=True))(x).sum().backward(create_graph=create_graph)


WRONG = {
    "an iterator": ({"data": iter([])}, TypeError, "a loader cannot be used"),
    "a dict": ({"data": [{"x": torch.zeros(12), "y": 0}]}, TypeError, "pairs (x, y), got 'dict items'"),
    "three parts": ({"data": [(torch.zeros(12), 0, 1)]}, TypeError, "pairs (x, y)"),
    "an array": ({"data": (torch.zeros(3, 12).numpy(), torch.zeros(3))}, TypeError, "torch.from_numpy"),
    "another dtype": (
        {"data": (torch.zeros(3, 12, dtype=torch.float32), torch.zeros(3, dtype=torch.int64))},
        ValueError,
        "x.to(torch.float64)",
    ),
    "compiled": ({"model": lambda: torch.compile(mlp())}, ValueError, "as it was before torch.compile"),
    "frozen": ({"model": lambda: mlp().requires_grad_(False)}, ValueError, "a parameter that requires grad"),
    "lengths": ({"data": (torch.zeros(3, 12), torch.zeros(2))}, ValueError, "same number of examples"),
    "a sum": (
        {"loss_fn": lambda o, y: F.cross_entropy(o, y, reduction="sum")},
        ValueError,
        "one loss for each of 4",
    ),
    "a penalty": (
        {"loss_fn": lambda o, y: F.cross_entropy(o, y) + 1},
        ValueError,
        "A penalty on the parameters",
    ),
    "both": ({"epochs": 1, "steps": 2}, ValueError, "one of both"),
    "no rule": ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, TypeError, "functional optimizer"),
    "evaluation": ({"model": lambda: mlp().eval()}, ValueError, "evaluation mode"),
    "class weights": (
        {"loss_fn": lambda o, y: F.cross_entropy(o, y, weight=torch.ones(3)), "micro_batch": 2},
        ValueError,
        "class weights or ignored targets",
    ),
    "order": ({"order": torch.full((2, 2), 99), "epochs": None}, ValueError, "indices from 0 to 13"),
    "shape": ({"weights": torch.ones(3)}, ValueError, "14"),
    "device": ({"weights": torch.ones(14, device="meta")}, ValueError, "] on cpu"),
    "params": ({"params": {}}, ValueError, "trained parameters"),
    "a budget": ({"memory": 10}, ValueError, "less than one state"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_an_error_that_names_the_argument(name):
    changes, error, message = WRONG[name]
    torch.manual_seed(0)
    given = {
        "model": mlp,
        "loss_fn": F.cross_entropy,
        "data": (torch.randn(14, 12), torch.randint(0, 3, (14,))),
        "optimizer": R.sgd(lr=0.1),
        "batch_size": 4,
        "epochs": 1,
    }
    calls = {key: changes[key] for key in ("weights", "params", "memory") if key in changes}
    given.update({key: value for key, value in changes.items() if key not in calls})
    with pytest.raises(error, match=r"Training\(") as raised:
        mg.Training(given.pop("model")(), **given)(**calls)
    assert message in str(raised.value)


class Odd(nn.Linear):
    """A module without a truth value, as ``torch.compile`` returns."""

    def __len__(self):
        raise TypeError("no len()")


def test_trainings_and_trained_models_print_model_steps_and_loss():
    training = mg.Training(
        Odd(2, 1),
        F.mse_loss,
        (torch.zeros(3, 2), torch.zeros(3, 1)),
        optimizer=R.sgd(lr=0.0),
        batch_size=3,
        steps=2,
    )
    trained = training()
    assert repr(training).startswith("Training(Odd, 3 examples, 2 steps, SGDRule(lr=0.0")
    assert repr(trained).endswith(f"loss {trained.losses[-1].item():.4g} at the last step")
