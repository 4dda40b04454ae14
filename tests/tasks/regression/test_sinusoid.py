from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.tasks import Sinusoid
from metagrad.tasks.regression.curves import _sinusoid
from metagrad.tasks.regression.family import Curves

counts = st.integers(1, 7)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(num_tasks=counts, shots=counts, queries=counts)
@settings(max_examples=20, deadline=None)
def test_shapes(num_tasks, shots, queries):
    batch = Sinusoid(shots, queries, dtype=torch.float64).sample(num_tasks, generator=seeded())
    assert batch.num_tasks == num_tasks
    assert batch.support.x.shape == batch.support.y.shape == (num_tasks, shots, 1)
    assert batch.query.x.shape == batch.query.y.shape == (num_tasks, queries, 1)
    assert batch.query.y.dtype == torch.float64


def test_examples_lie_on_the_curve_of_their_task():
    tasks = Sinusoid(shots=6, queries=3, dtype=torch.float64)
    functions = tasks.sample_functions(4, generator=seeded())
    batch = tasks.sample_examples(functions, generator=seeded(1))
    for examples in batch:
        for task in range(4):
            curve = functions.parameters["amplitude"][task] * torch.sin(
                examples.x[task] - functions.parameters["phase"][task]
            )
            torch.testing.assert_close(examples.y[task], curve, rtol=0, atol=1e-15)


def test_support_and_query_are_drawn_apart():
    batch = Sinusoid(shots=5, queries=5).sample(3, generator=seeded())
    assert not torch.isin(batch.support.x, batch.query.x).any()


def test_sample_is_its_two_halves_in_turn():
    tasks, generator = Sinusoid(), seeded()
    parts = tasks.sample_examples(tasks.sample_functions(3, generator=generator), generator=generator)
    whole = tasks.sample(3, generator=seeded())
    assert torch.equal(parts.query.y, whole.query.y)


def test_ranges_are_kept_and_filled():
    tasks = Sinusoid(shots=2000, queries=1)
    functions = tasks.sample_functions(2000, generator=seeded())
    x = tasks.sample(1, generator=seeded()).support.x
    for drawn, low, high in (
        (functions.parameters["amplitude"], 0.1, 5.0),
        (functions.parameters["phase"], 0.0, math.pi),
        (x, -5.0, 5.0),
    ):
        width = high - low
        assert low <= drawn.min() < low + 0.01 * width
        assert high - 0.01 * width < drawn.max() <= high
        # The mean of n uniform numbers has standard error width / sqrt(12 n): 0.65 % of the width.
        assert abs(drawn.mean() - (low + high) / 2) < 0.03 * width


def test_a_range_of_one_point_is_a_constant():
    functions = Sinusoid(amplitude=(2.0, 2.0)).sample_functions(3, generator=seeded())
    assert torch.equal(functions.parameters["amplitude"], torch.full((3,), 2.0))


def test_the_generator_decides_alone():
    tasks = Sinusoid()
    before = torch.get_rng_state()
    first, again, other = (tasks.sample(2, generator=seeded(s)) for s in (0, 0, 1))
    assert torch.equal(first.support.x, again.support.x)
    assert torch.equal(first.query.y, again.query.y)
    assert not torch.equal(first.support.x, other.support.x)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_one_is_used():
    torch.manual_seed(3)
    first = Sinusoid().sample(2)
    torch.manual_seed(3)
    assert torch.equal(first.support.x, Sinusoid().sample(2).support.x)


def test_evaluate_takes_points_common_to_all_tasks():
    functions = Curves(
        _sinusoid, {"amplitude": torch.tensor([2.0, 3.0]), "phase": torch.tensor([0.0, math.pi / 2])}
    )
    y = functions.evaluate(torch.tensor([[0.0], [math.pi / 2]]))
    torch.testing.assert_close(y.squeeze(-1), torch.tensor([[0.0, 2.0], [-3.0, 0.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (3, 4, 1), (2, 2, 4, 1)])
def test_evaluate_refuses_other_shapes(shape):
    functions = Sinusoid().sample_functions(2, generator=seeded())
    with pytest.raises(ValueError, match=r"evaluate\(x\): x must be \[points, 1\] or \[2, points, 1\], got"):
        functions.evaluate(torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shots": 0}, ValueError, "Sinusoid: shots must be at least 1, got 0"),
        ({"queries": -1}, ValueError, "Sinusoid: queries must be at least 1, got -1"),
        ({"shots": 2.5}, TypeError, r"Sinusoid: shots must be an int, got 2.5 \(float\)"),
        ({"shots": True}, TypeError, r"Sinusoid: shots must be an int, got True \(bool\)"),
        ({"amplitude": (5.0, 0.1)}, ValueError, r"amplitude must be \(lowest, highest\).*got \(5.0, 0.1\)"),
        ({"phase": (0.0, math.inf)}, ValueError, "phase must be .* finite and ascending"),
        ({"x": (math.nan, 1.0)}, ValueError, "x must be .* finite and ascending"),
        ({"dtype": torch.int64}, ValueError, "dtype must be a floating-point type .* got torch.int64"),
    ],
)
def test_construction_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        Sinusoid(**arguments)


def test_num_tasks_below_one():
    with pytest.raises(ValueError, match=r"Sinusoid.sample: num_tasks must be at least 1, got 0"):
        Sinusoid().sample(0)


def test_generator_on_another_device():
    tasks = Sinusoid(device="meta")
    with pytest.raises(ValueError, match=r"Sinusoid.sample: the generator is on cpu, the tasks are on meta"):
        tasks.sample(1, generator=seeded())
