"""Every family of curves: its formula, its ranges, its noise, and the protocol."""

import math

import pytest
import torch

from metagrad.tasks import (
    Curves,
    GaussianProcess,
    Harmonic,
    Lines,
    Regression,
    Sinusoid,
    SinusoidOrLine,
    StepFunctions,
)
from metagrad.tasks.regression.gaussian_process import KERNELS
from tests.draws import seeded

FAMILIES = [Sinusoid, Lines, StepFunctions, SinusoidOrLine, Harmonic, GaussianProcess]


def sinusoid(x, amplitude, phase):
    return amplitude * math.sin(x - phase)


def sinusoid_or_line(x, amplitude, phase, slope, intercept, mode):
    return sinusoid(x, amplitude, phase) if mode else slope * x + intercept


def harmonic(x, frequency, phase1, phase2, amplitude1, amplitude2):
    return amplitude1 * math.sin(frequency * x + phase1) + amplitude2 * math.sin(2 * frequency * x + phase2)


FORMULAS = {
    Sinusoid: sinusoid,
    Lines: lambda x, slope, intercept: slope * x + intercept,
    StepFunctions: lambda x, left, right, position: right if x >= position else left,
    SinusoidOrLine: sinusoid_or_line,
    Harmonic: harmonic,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_protocol_of_task_distributions(family):
    tasks = family(shots=4, queries=3, dtype=torch.float64)
    before = torch.get_rng_state()
    first, again, other = (tasks.sample(2, generator=seeded(s)) for s in (0, 0, 1))
    assert first.support.x.shape == first.support.y.shape == (2, 4, 1)
    assert first.query.x.shape == first.query.y.shape == (2, 3, 1)
    assert first.query.y.dtype == torch.float64
    assert torch.equal(first.support.x, again.support.x)
    assert torch.equal(first.query.y, again.query.y)
    assert not torch.equal(first.query.y, other.query.y)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=rf"{family.__name__}\.sample\(num_tasks\): expected an int of 1 or"):
        tasks.sample(0)
    with pytest.raises(ValueError, match=rf"{family.__name__}\.sample: the generator is on cpu, .* on meta"):
        family(device="meta").sample(1, generator=seeded())
    with pytest.raises(TypeError, match=r"sample: expected generator=torch.Generator.*, got 0\."):
        tasks.sample(1, generator=0)
    assert repr(tasks).startswith(f"{family.__name__}(shots=4, queries=3, noise=")


@pytest.mark.parametrize("family", FORMULAS)
def test_examples_follow_the_formula(family):
    tasks = family(shots=5, queries=2, noise=0.0, dtype=torch.float64)
    functions = tasks.sample_functions(6, generator=seeded())
    for examples in tasks.sample_examples(functions, generator=seeded(1)):
        for task in range(6):
            parameters = {name: value[task].item() for name, value in functions.parameters.items()}
            expected = [FORMULAS[family](x, **parameters) for x in examples.x[task].flatten().tolist()]
            assert examples.y[task].flatten().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", FORMULAS)
def test_parameters_fill_their_ranges(family):
    tasks = family()
    drawn = tasks.sample_functions(4000, generator=seeded()).parameters
    for name, (low, high) in tasks.ranges.items():
        if name == "mode":
            continue
        width = high - low
        assert low <= drawn[name].min() < low + 0.01 * width
        assert high - 0.01 * width < drawn[name].max() <= high
        # The mean of n uniform numbers has standard error width / sqrt(12 n): 0.5 % of the width.
        assert abs(drawn[name].mean() - (low + high) / 2) < 0.025 * width


def test_noise_is_of_the_targets_alone():
    tasks = SinusoidOrLine(shots=2000, queries=2000)
    functions = tasks.sample_functions(2, generator=seeded())
    for examples in tasks.sample_examples(functions, generator=seeded(1)):
        error = examples.y - functions.evaluate(examples.x)
        assert abs(error.mean()) < 0.03  # standard error 0.005
        assert abs(error.std() - 0.3) < 0.03


def test_harmonics_have_windows():
    x = Harmonic(shots=500, queries=1, spread=0.5).sample(300, generator=seeded()).support.x
    assert abs(x.std(1).mean() - 0.5) < 0.02
    assert -4.2 < x.mean(1).min() < -3.7
    assert 3.7 < x.mean(1).max() < 4.2


@pytest.mark.parametrize("period", [None, (1.5, 1.5)], ids=["plain", "periodic"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_of_a_gaussian_process_have_its_covariance(kernel, period):
    fixed = {"lengthscale": (0.7, 0.7), "scale": (2.0, 2.0), "period": period}
    points = torch.tensor([[0.0], [0.4], [1.0], [1.5]], dtype=torch.float64)
    functions = GaussianProcess(kernel=kernel, **fixed).sample_functions(10000, generator=seeded())
    values = torch.cat([functions.evaluate(points[:2]), functions.evaluate(points[2:])], 1).squeeze(-1)
    expected = torch.tensor([[covariance(kernel, a, b, period) for a in points] for b in points])
    # The standard error of a covariance is at most sqrt(2 / 10000) of the variance 4: 0.06.
    torch.testing.assert_close(values.T @ values / 10000, expected.double(), rtol=0, atol=0.3)


def covariance(kernel, a, b, period):
    """The kernel of lengthscale 0.7 and scale 2, written out."""
    distance = abs(a.item() - b.item())
    if period is not None:
        distance = 2 * abs(math.sin(math.pi * distance / period[0]))
    r = distance / 0.7
    values = {
        "rbf": math.exp(-(r**2) / 2),
        "matern12": math.exp(-r),
        "matern32": (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r),
        "matern52": (1 + math.sqrt(5) * r + 5 * r**2 / 3) * math.exp(-math.sqrt(5) * r),
    }
    return 4 * values[kernel]


def test_evaluate_needs_points_in_the_last_dimension():
    functions = Sinusoid().sample_functions(2, generator=seeded())
    for shape in ((4,), (3, 4, 1)):
        with pytest.raises(ValueError, match=r"evaluate\(x\): .* \[points, 1\] or \[2, points, 1\], got"):
            functions.evaluate(torch.zeros(shape))


def test_one_formula_is_a_family():
    class Parabola(Regression):
        formula = staticmethod(lambda x, a: a * x**2)

        def __init__(self, shots=10):
            super().__init__(shots, ranges={"a": (1.0, 2.0)})

    batch = Parabola(shots=5).sample(3, generator=seeded())
    ratio = batch.support.y / batch.support.x.square()
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert isinstance(Parabola().sample_functions(2), Curves)
