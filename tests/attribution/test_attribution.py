"""Scores and evaluations against closed forms."""

import math
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.attribution import (
    EKFAC,
    TRAK,
    Influence,
    Outcomes,
    Replay,
    Scores,
    TracIn,
    auc,
    lds,
    loo,
    metasmoothness,
    retrain,
    subsets,
)

pytestmark = pytest.mark.usefixtures("doubles")

R = mg.optim.rules


def classifier(model=None, rule=None, n=20, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)) if model is None else model()
    x, y = torch.randn(n, 4), torch.randint(0, 3, (n,))
    rule = R.sgd(lr=0.1, momentum=0.9) if rule is None else rule
    return mg.Training(
        net, F.cross_entropy, (x, y), optimizer=rule, **{"batch_size": 5, "epochs": 2, **options}
    )


def test_losses(net):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return F.cross_entropy(net(x), y, reduction="none")


test_losses.__test__ = False


def test_scores_predict_linearly_and_rank_examples():
    training = classifier()
    scores = mg.attribute(training(), test_losses)
    assert scores.values.shape == (6, 20)
    torch.testing.assert_close(scores.metrics, test_losses(training()).detach())
    mask = torch.ones(20)
    mask[3] = 0
    torch.testing.assert_close(scores.predict(mask), scores.metrics - scores.values[:, 3])
    torch.testing.assert_close(scores.predict(torch.stack([mask, mask]))[1], scores.predict(mask))
    best, worst = scores.helpful(2)[0], scores.harmful(2)[0]
    assert scores.values[0, best[0]] == scores.values[0].min()
    assert scores.values[0, worst[0]] == scores.values[0].max()
    assert "Scores of 20 examples for 6 metrics by Replay" in repr(scores)


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.3), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3)
    ),
}
RULES = {
    "sgd": lambda: R.sgd(lr=0.1, momentum=0.9),
    "clip and adamw": lambda: R.chain(R.clip_by_norm(0.5), R.adamw(lr=0.01)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [{}, {"average": "weights"}, {"micro_batch": 2}])
def test_retraining_together_is_training_one_by_one(model, rule, options):
    training = classifier(MODELS[model], RULES[rule](), **options)
    weights = torch.rand(3, 20)
    if model == "batch norm" and "micro_batch" in options:
        with pytest.raises(ValueError, match="writes its buffer"):
            retrain(classifier(MODELS[model], batch_size=4, **options), weights, test_losses)
        return
    random = torch.get_rng_state()
    outcomes = retrain(training, weights, test_losses, chunk=1, keep=True)  # one model at a time
    together = retrain(training, weights, test_losses, keep=True)
    assert torch.equal(torch.get_rng_state(), random)
    for i, row in enumerate(weights):
        trained = training(row)
        for found in (outcomes, together):
            torch.testing.assert_close(
                found.metrics[i], test_losses(trained).detach(), rtol=1e-11, atol=1e-12
            )
            for name, p in trained.params.items():
                torch.testing.assert_close(found.params[name][i], p.detach(), rtol=1e-11, atol=1e-12)


class Branching(nn.Module):
    """A model that vmap does not support."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        output = self.linear(x)
        return output if float(output.detach().sum()) > 0 else 2 * output


class TransposedDropout(nn.Module):
    """A model whose dropout draws other numbers under vmap."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3), nn.Dropout(0.4)

    def forward(self, x):
        return self.dropout(self.linear(x).T).T


@pytest.mark.parametrize("model", [Branching, TransposedDropout])
def test_a_model_that_vmap_does_not_support_is_trained_in_turn(model):
    training = classifier(model)
    weights = torch.rand(2, 20)
    with pytest.warns(UserWarning, match="vmap does not support the model"):
        outcomes = retrain(training, weights, test_losses)
    torch.testing.assert_close(outcomes.metrics[1], test_losses(training(weights[1])).detach())


def ridge(n=40, steps=300):
    """Linear regression by full batches to convergence: with weights that average, it depends on them smoothly."""
    torch.manual_seed(0)
    x = torch.randn(n, 3)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.1 * torch.randn(n, 1)
    model, rule = nn.Linear(3, 1, bias=False), R.sgd(lr=0.1, weight_decay=0.1)
    return mg.Training(model, F.mse_loss, (x, y), optimizer=rule, batch_size=n, steps=steps)


def predictions(net):
    return net(torch.eye(3))[:, 0]


def test_scores_of_a_converged_ridge_regression_are_its_influence_function():
    training = ridge()
    scores = mg.attribute(training(), predictions).values
    (x, y), n = training.examples.tensors, training.num_examples
    hessian = 2 * x.T @ x / n + 0.1 * torch.eye(3)
    minimum = torch.linalg.solve(hessian, 2 * x.T @ y / n)
    gradients = 2 * (x @ minimum - y) * x / n
    torch.testing.assert_close(scores, -torch.linalg.solve(hessian, gradients.T), rtol=1e-8, atol=1e-10)


def test_evaluations_of_a_smooth_training_are_nearly_one():
    training = ridge()
    scores = mg.attribute(training(), predictions)
    # The influence function of ridge regression is exact to second order in the share of dropped weights.
    found = lds(training, scores, predictions, drop=0.025, subsets=40)
    assert found.value > 0.98
    assert found.interval[0] > 0.95
    assert repr(found).startswith(f"lds = {found.value:.3f} [")
    assert loo(training, scores, predictions, torch.arange(20)).value > 0.98
    smooth = metasmoothness(training, predictions, scores, h=1e-4)
    assert smooth.value > 0.999
    assert smooth.slope_error < 1e-2
    again = lds(training, scores, predictions, outcomes=found.outcomes)
    assert again.value == found.value


@pytest.mark.parametrize("correlation", [0.0, 0.8, 0.99])
@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_a_rank_correlation_covers_the_truth(seed, correlation):
    generator = torch.Generator().manual_seed(seed)
    scores = Scores(torch.randn(20, 40, generator=generator), torch.ones(40), torch.zeros(20), Replay())
    weights = 1 + 0.1 * torch.randn(100, 40, generator=generator)
    predicted = scores.predict(weights) / (0.1 * scores.values.norm(dim=1))  # normal, of variance 1
    noise = torch.randn(100, 20, generator=generator)
    outcomes = Outcomes(weights, correlation * predicted + math.sqrt(1 - correlation**2) * noise)
    found = lds(ridge(steps=2), scores, predictions, outcomes=outcomes)
    assert found.interval[0] < 6 / math.pi * math.asin(correlation / 2) < found.interval[1]
    assert found.interval[0] < found.value < found.interval[1]


def test_lds_warns_if_the_scores_are_far_from_the_subsets():
    training = ridge(steps=20)
    scores = mg.attribute(training(), predictions)
    with pytest.warns(UserWarning, match="from the weights of the scores"):
        lds(training, scores, predictions, drop=0.5, subsets=4)
    half = mg.attribute(training(torch.full((40,), 0.5)), predictions)
    lds(training, half, predictions, drop=0.5, subsets=4)


def test_auc_counts_pairs_and_halves_ties():
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0])
    wrong = torch.tensor([True, False, True, False, False])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[wrong] for b in scores[~wrong]]
    found = auc(scores, wrong)
    assert found.value == pytest.approx(sum(map(float, pairs)) / 6)
    assert found.interval[0] < found.value <= found.interval[1]
    perfect = auc(torch.arange(10.0), torch.arange(10) > 6)
    assert (perfect.value, perfect.interval[1]) == pytest.approx((1, 1), abs=1e-3)
    assert 0.4 < perfect.interval[0] < 0.8  # of three wrong examples


@pytest.mark.parametrize("shift", [-3.5, 0.0, 3.5])
def test_the_interval_of_the_auc_covers_the_truth(shift):
    wrong, truth, covered = torch.arange(100) < 10, (1 + math.erf(shift / 2)) / 2, 0
    for seed in range(100):
        scores = torch.randn(100, generator=torch.Generator().manual_seed(seed)) + shift * wrong
        low, high = auc(scores, wrong).interval
        covered += low <= truth <= high
    assert covered >= 88  # at 95 %: fewer have a probability of 2e-3


def test_tracin_is_its_formula():
    training = classifier(n=8, batch_size=8, epochs=4, rule=R.sgd(lr=[0.1, 0.2, 0.3, 0.4]))
    trained = training()
    scores = mg.attribute(trained, test_losses, TracIn(checkpoints=2)).values
    x, y = training.examples.tensors
    params, expected = {k: p.detach() for k, p in training.model.params().items()}, 0.0
    for t, rate in enumerate([0.1, 0.2, 0.3, 0.4]):

        def losses(params, x=x, y=y):
            return F.cross_entropy(
                torch.func.functional_call(training.model.module, params, (x,)), y, reduction="none"
            )

        grads = torch.func.grad(lambda p: losses(p).mean())(params)
        params = {k: p - rate * grads[k] for k, p in params.items()}
        if t in (1, 3):
            metric = torch.func.jacrev(
                lambda p: test_losses(lambda x: torch.func.functional_call(training.model.module, p, (x,)))
            )
            rows, own = (
                torch.cat([j.flatten(1) for j in f.values()], 1)
                for f in (metric(params), torch.func.jacrev(losses)(params))
            )
            expected = expected - rate * 4 / (2 * 8) * rows @ own.T
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)


def test_trak_without_projection_is_the_influence_of_the_linearized_model():
    training = classifier(model=lambda: nn.Linear(4, 3, bias=False), n=30)
    trained = training()
    x, y = training.examples.tensors
    weight = trained.params["weight"].detach()

    def losses(w, x, y):
        return F.cross_entropy(x @ w.T, y, reduction="none")

    own = torch.func.jacrev(losses)(weight, x, y).flatten(1)
    scale = 1 - torch.exp(-losses(weight, x, y))
    metric = torch.func.jacrev(lambda w: test_losses(lambda x: x @ w.T))(weight).flatten(1)
    features = own / scale[:, None]
    # A projection to as many dimensions as there are parameters does not change the scores.
    expected = -metric @ torch.linalg.pinv(features.T @ features) @ own.T
    found = mg.attribute(trained, test_losses, TRAK(dim=12, damping=1e-14)).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def scored(metrics, *method):
    return mg.attribute(classifier()(), metrics, *method)


WRONG = {
    "no training": (lambda: mg.attribute(nn.Linear(4, 3), test_losses), TypeError, "attribute(trained)"),
    "a scalar": (lambda: scored(lambda net: test_losses(net).mean()), ValueError, "1-d tensor"),
    "metrics in a list": (lambda: scored(lambda net: [1.0]), TypeError, "got list"),
    "values": (lambda: scored(torch.ones(3)), TypeError, "not what it returns"),
    "not trained": (lambda: mg.attribute(classifier(), test_losses), TypeError, "training()"),
    "trained": (lambda: retrain(classifier()(), torch.ones(1, 20), test_losses), TypeError, "got Trained"),
    "lds of trained": (lambda: lds(classifier()(), None, test_losses), TypeError, "lds(training)"),
    "smoothness of trained": (lambda: metasmoothness(classifier()(), test_losses), TypeError, "got Trained"),
    "weights": (lambda: retrain(classifier(), torch.ones(20), test_losses), ValueError, "[m, 20]"),
    "drop": (lambda: subsets(10, 0.01, 3), ValueError, "some but not all of 10"),
    "drop of all": (lambda: subsets(10, 0.95, 3), ValueError, "some but not all of 10"),
    "no rows": (lambda: retrain(classifier(), torch.ones(0, 20), test_losses), ValueError, "m > 0"),
    "integers": (lambda: auc(torch.rand(3), torch.tensor([0, 1, 1])), ValueError, "bool [n]"),
    "nan": (
        lambda: auc(torch.tensor([torch.nan, 1.0]), torch.tensor([True, False])),
        ValueError,
        "NaN has no rank, got nan",
    ),
    "no length": (lambda: metasmoothness(classifier(), test_losses, h=0), ValueError, "above 0"),
    "no graph": (lambda: scored(lambda net: test_losses(net).detach()), ValueError, "depend on the model"),
    "no metric": (lambda: scored(lambda net: test_losses(net)[:0]), ValueError, "attribute(metrics)"),
    "unequal weights": (
        lambda: mg.attribute(classifier()(torch.rand(20)), test_losses, Influence()),
        ValueError,
        "one weight above 0",
    ),
    "a mask": (
        lambda: loo(classifier(), scored(test_losses), test_losses, torch.ones(3) > 0),
        ValueError,
        "int64",
    ),
    "no example": (
        lambda: loo(classifier(), scored(test_losses), test_losses, torch.arange(18, 21)),
        ValueError,
        "indices of 20 examples",
    ),
    "no wrong": (lambda: auc(torch.ones(3), torch.zeros(3) > 0), ValueError, "auc(scores, wrong)"),
    "a class": (lambda: scored(test_losses, TRAK), TypeError, "attribute(method)"),
    "a list": (lambda: loo(classifier(), None, test_losses, [0, 1, 2]), TypeError, "loo(examples)"),
    "no method": (lambda: scored(test_losses, "tracin"), TypeError, "attribute(method)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_an_error_that_names_the_argument(name):
    call, error, message = WRONG[name]
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_weights_of_tokens_are_refused_except_by_replay():
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    training = mg.Training(
        nn.Linear(4, 2),
        lambda output, y: F.mse_loss(output, y, reduction="none"),
        (x, y),
        optimizer=R.sgd(lr=0.1),
        batch_size=3,
        epochs=1,
    )

    def metrics(net):
        return net(x[:2])[:, 0]

    trained = training(torch.ones(6, 2))
    scores = mg.attribute(trained, metrics)
    for call in (
        lambda: mg.attribute(trained, metrics, TracIn(1)),
        lambda: mg.attribute(trained, metrics, TRAK(2)),
        lambda: mg.attribute(trained, metrics, Influence(fisher="empirical")),
        lambda: scores.predict(torch.ones(6)),
        lambda: lds(training, scores, metrics, subsets=3, drop=0.2),
        lambda: loo(training, scores, metrics, torch.arange(3)),
        lambda: metasmoothness(training, metrics, scores),
    ):
        with pytest.raises(ValueError, match=r"expected (weights|scores of examples|.6, 2. or rows)"):
            call()


@pytest.mark.parametrize("method", [Influence(0.3, 50, "exact"), Influence(0.3, method="exact")])
def test_influence_takes_equal_weights_into_account(method):
    torch.manual_seed(0)
    x, y, test_x = torch.randn(12, 3), torch.randn(12, 2), torch.randn(4, 3)
    rule = R.sgd(lr=0.4, weight_decay=0.3)
    training = mg.Training(nn.Linear(3, 2), F.mse_loss, (x, y), optimizer=rule, batch_size=12, steps=200)
    trained = training(torch.full((12,), 0.5))
    found = [mg.attribute(trained, lambda net: net(test_x)[:, 0], own).values for own in (method, None)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_trak_takes_weights_into_account():
    """An example of weight zero changes no other score."""
    torch.manual_seed(0)
    x, y, weights = torch.randn(8, 4), torch.arange(8) % 3, torch.ones(8)
    weights[-1] = 0

    def scores(count):
        training = mg.Training(
            nn.Linear(4, 3),
            F.cross_entropy,
            (x[:count], y[:count]),
            optimizer=R.sgd(lr=0.0),
            batch_size=8,
            steps=1,
        )
        torch.nn.init.eye_(training.model.module.weight)
        torch.nn.init.zeros_(training.model.module.bias)
        return mg.attribute(training(weights[:count]), lambda net: net(x[:2])[:, 0], TRAK(6, 1e-9)).values

    torch.testing.assert_close(scores(8)[:, :7], scores(7), rtol=1e-6, atol=1e-9)


def test_after_convergence_influence_is_the_derivative_through_training():
    """For one linear layer and squared errors, the Kronecker product is exact as well."""
    torch.manual_seed(0)
    x, y, test_x = torch.randn(12, 3), torch.randn(12, 2), torch.randn(4, 3)
    training = mg.Training(
        nn.Linear(3, 2), F.mse_loss, (x, y), optimizer=R.sgd(lr=0.5), batch_size=12, steps=300
    )
    trained = training()

    def metrics(net):
        return net(test_x).square().sum(1)

    expected = mg.attribute(trained, metrics).values
    for method in (Influence(damping=1e-9, max_steps=20), EKFAC(damping=1e-9, fisher="exact")):
        torch.testing.assert_close(
            mg.attribute(trained, metrics, method).values, expected, rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize("options", [{"weight": torch.tensor([0.5, 1.0, 4.0]).double()}, {"ignore_index": 0}])
def test_class_weights_and_ignored_targets_scale_the_gradients_of_examples(options):
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 3), (torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))

    def loss_fn(output, y):
        return F.cross_entropy(output, y, **options)

    trained = mg.Training(model, loss_fn, batch, optimizer=R.sgd(lr=1e-8), batch_size=4, steps=1)()
    exact, close, trak = (
        mg.attribute(trained, lambda model: model(torch.ones(1, 3)).square().sum(1), method).values
        for method in (None, TracIn(1), TRAK(dim=8, damping=1e-2))
    )
    torch.testing.assert_close(exact / exact.norm(), close / close.norm(), rtol=1e-5, atol=1e-5)
    assert trak.isfinite().all()


class Product(nn.Sequential):
    def forward(self, a, b):
        return super().forward(a * b)


@pytest.mark.parametrize("method", [Influence(), EKFAC(), TracIn(2), TRAK(dim=16)])
def test_every_method_takes_the_inputs_that_training_takes(method):
    layer, x, ones, y = nn.Linear(4, 3), torch.randn(12, 4), torch.ones(12, 4), torch.randint(3, (12,))

    def scores(net, inputs, *args):
        torch.manual_seed(0)
        rule = R.sgd(lr=0.1)
        training = mg.Training(net, F.cross_entropy, (inputs, y), optimizer=rule, batch_size=4, steps=3)
        losses = lambda net: F.cross_entropy(net(*args), y, reduction="none")[:2]  # noqa: E731
        return mg.attribute(training(), losses, method).values

    expected = scores(nn.Sequential(layer), x, x)
    for inputs in ({"a": x, "b": ones}, UserDict(a=x, b=ones), (x, ones)):
        torch.testing.assert_close(scores(Product(layer), inputs, x, ones), expected)
