import importlib
import itertools
import math
from typing import NamedTuple

import pytest
import torch

import metagrad as mg
from metagrad.curvature.estimators.trace import effective_rank, trace
from tests.curvature.maps import SPECTRA, DiagonalMap, MatrixMap, covers, matrix, median_error, seeded
from tests.marks import slow


class Case(NamedTuple):
    """Properties of a method with a subspace."""

    everything: int  # products after which the subspace has all 20 dimensions
    least: int  # products that it needs
    median: float  # of relative errors, on 0.7^i with 120 products


CASES = {
    "hutch++": Case(everything=66, least=3, median=7e-8),
    "xtrace": Case(everything=40, least=2, median=8e-11),
}
SKETCHING = [*CASES]
METHODS = ["exact", "hutchinson", *CASES]
DISTRIBUTIONS = ["rademacher", "normal", "sphere"]
MEDIANS = {"hutchinson": 3e-2, **{method: case.median for method, case in CASES.items()}}


def low_rank(n=60, rank=5, dtype=torch.float64):
    rows = torch.randn(rank, n, dtype=torch.float64, generator=seeded())
    return (rows.t() @ rows).to(dtype)


# Exact answers


def test_a_budget_of_everything_is_exact():
    for method in ["exact", *SKETCHING]:
        products = CASES[method].everything if method in CASES else 1
        for spectrum in ("polynomial", "flat", "step"):
            A = matrix(spectrum, 20)
            found = trace(MatrixMap(A), method=method, probes=products, generator=seeded())
            torch.testing.assert_close(found.value, A.trace(), rtol=1e-10, atol=0)
            assert found.method == method


def test_xtrace_is_exact_where_its_basis_is_the_whole_space():
    """Leave-one-out estimates are not, and signs in few dimensions made them all equal."""
    for n in [1, 2, 3, 5]:
        A = torch.randn(n, n, dtype=torch.float64, generator=seeded())
        A = A + A.t()
        for seed, distribution in itertools.product(range(4), DISTRIBUTIONS):
            options = {"distribution": distribution, "generator": seeded(seed)}
            found = trace(MatrixMap(A), method="xtrace", probes=2 * n, **options)
            assert abs(found.value - A.trace()) <= found.stderr < 1e-13
            assert found.samples == 0


def test_low_rank_is_exact_and_known_to_be():
    for method in SKETCHING:
        for dtype in [torch.float32, torch.float64]:
            A, eps = low_rank(dtype=dtype), torch.finfo(dtype).eps
            for seed, distribution in itertools.product(range(3), DISTRIBUTIONS):
                found = trace(
                    MatrixMap(A), method=method, probes=24, distribution=distribution, generator=seeded(seed)
                )
                error = (found.value - A.double().trace()).abs()
                assert error < 100 * eps * A.trace()
                assert error <= 20 * found.stderr < 1e5 * eps * A.trace()  # both are rounding


def test_multiples_of_the_identity():
    """Zero too: no pivots, no norm, nothing to divide by."""
    for method in METHODS:
        for scale in (3.0, 1e-9, 0.0):
            found = trace(MatrixMap(scale * torch.eye(30)), method=method, probes=12, generator=seeded())
            torch.testing.assert_close(found.value, torch.tensor(30 * scale), rtol=1e-5, atol=1e-12)
            assert found.stderr <= 1e-4 * scale + 1e-12


def test_an_exact_trace_claims_the_rounding_of_a_sum_of_squares():
    """A few eps * sqrt(n) * |A|, since random errors of a sum add up so, and not eps * n * |A|, 50 times as much."""
    A = 3 * torch.eye(2500)
    found = trace(MatrixMap(A), method="xtrace", probes=12, generator=seeded())
    bound = torch.finfo(A.dtype).eps * 2500**0.5 * A.norm()
    assert 0 < found.stderr <= 16 * bound


# Statistics


@pytest.mark.parametrize(
    ("method", "distribution"),
    [*((method, "rademacher") for method in ["hutchinson", *SKETCHING]), ("xtrace", "sphere")],
)
def test_unbiased(method, distribution):
    A = matrix("polynomial", 30)
    values = torch.stack(
        [
            trace(
                MatrixMap(A), method=method, probes=12, distribution=distribution, generator=seeded(seed)
            ).value
            for seed in range(150)
        ]
    )
    error = (values.mean() - A.trace()).abs()
    assert error < 3.5 * values.std() / 150**0.5


@pytest.mark.parametrize("method", MEDIANS)
def test_medians_on_exponential_decay_are_the_published_ones(method):
    A = matrix("exponential")

    def estimate(generator):
        return trace(MatrixMap(A), method=method, probes=120, generator=generator)

    assert median_error(estimate, A.trace(), repeats=21) < 2 * MEDIANS[method]


@pytest.mark.parametrize(
    ("method", "spectrum"),
    [
        ("hutchinson", "polynomial"),
        ("hutch++", "polynomial"),
        ("xtrace", "polynomial"),
        slow("xtrace", "flat"),
        ("auto", "flat"),
        slow("auto", "step"),
    ],
)
def test_intervals_cover(method, spectrum):
    values = SPECTRA[spectrum](1000)

    def estimate(generator):
        return trace(
            DiagonalMap(values), method=method, probes=60, distribution="sphere", generator=generator
        )

    assert covers(estimate, values.sum(), repeats=100)


# rtol


def test_rtol_stops_when_the_interval_is_tight():
    for method in ["auto", "hutchinson", *SKETCHING]:
        A = matrix("step", 400)
        operator = MatrixMap(A)
        found = trace(operator, method=method, rtol=0.05, distribution="normal", generator=seeded())
        low, high = found.interval(0.95)
        assert found.converged
        assert (high - low) / 2 <= 0.05 * found.value.abs() * (1 + 1e-12)
        assert found.matvecs == operator.matvecs < 1024
        assert (found.value / A.trace() - 1).abs() < 0.1


def test_stopping_early_keeps_coverage():
    values = SPECTRA["polynomial"](1000)

    def estimate(generator):
        return trace(DiagonalMap(values), method="xtrace", rtol=0.01, generator=generator)

    assert covers(estimate, values.sum(), repeats=100)


# Choice of the method


def test_auto_is_exact_where_the_products_allow():
    found = trace(MatrixMap(matrix("polynomial", 20)), probes=20)
    assert (found.method, found.matvecs, found.samples) == ("exact", 20, 0)
    assert trace(MatrixMap(matrix("polynomial", 20)), probes=19).method == "xtrace"
    assert trace(MatrixMap(matrix("polynomial", 64)), rtol=0.5).method == "exact"
    assert trace(MatrixMap(matrix("polynomial", 65)), rtol=0.5).method != "exact"  # 16 may be enough


def test_auto_takes_hutchinson_for_few_products_and_large_operators(monkeypatch):
    A = matrix("polynomial", 100)
    assert trace(MatrixMap(A), probes=15).method == "hutchinson"
    assert trace(MatrixMap(A), probes=16).method == "xtrace"
    # The package has the function by that name.
    module = importlib.import_module("metagrad.curvature.estimators.trace")
    monkeypatch.setattr(module, "_SKETCH_BYTES", 24 * 100 * 8 - 1)
    assert trace(MatrixMap(A), probes=16).method == "hutchinson"


def test_auto_sees_from_its_first_products_whether_the_spectrum_is_flat():
    for spectrum, method in [(name, "hutchinson" if name == "flat" else "xtrace") for name in SPECTRA]:
        for seed in range(5):
            operator = MatrixMap(matrix(spectrum))
            found = trace(operator, probes=120, generator=seeded(seed))
            assert (found.method, found.matvecs, operator.matvecs) == (method, 120, 120)


def test_auto_spends_its_first_products_on_what_it_chooses():
    """So that the value is the one that this method has from these probes."""
    for spectrum in ["flat", "polynomial"]:
        A = matrix(spectrum, 300)
        auto = trace(MatrixMap(A), probes=80, generator=seeded())
        same = trace(MatrixMap(A), method=auto.method, probes=80, distribution="sphere", generator=seeded())
        torch.testing.assert_close(auto.value, same.value, rtol=1e-12, atol=0)
        torch.testing.assert_close(auto.stderr, same.stderr, rtol=1e-8, atol=0)


def test_effective_rank():
    root = torch.randn(40, 500, dtype=torch.float64, generator=seeded())
    for values in (torch.ones(500), SPECTRA["indefinite"](500), SPECTRA["exponential"](500)):
        squares = values.double().square()
        exact = squares.sum() ** 2 / squares.square().sum()
        assert effective_rank(root * values) == pytest.approx(float(exact), rel=0.5)
    assert math.isnan(effective_rank(torch.zeros(8, 5)))


def test_auto_takes_hutchinson_where_torch_does_not_factorize():
    found = trace(MatrixMap(torch.eye(100, dtype=torch.bfloat16)), probes=32)
    assert (found.method, found.value.item()) == ("hutchinson", 100)


# Reproducibility, dtypes, memory


def test_the_same_generator_gives_the_same_bits():
    for method in METHODS:
        operator = MatrixMap(matrix("polynomial", 80).float())
        first, second = (trace(operator, method=method, probes=30, generator=seeded()) for _ in range(2))
        assert first.value.dtype == first.stderr.dtype == torch.float32
        assert torch.equal(first.value, second.value)
        assert torch.equal(first.stderr, second.stderr)


def test_float32_is_as_good_as_its_digits():
    for method in METHODS:
        A = matrix("exponential", 200)
        found = trace(MatrixMap(A.float()), method=method, probes=120, generator=seeded())
        assert (found.value - A.trace()).abs() <= 4 * found.stderr
        assert found.stderr <= (0.2 if method == "hutchinson" else 5e-5)


@pytest.mark.parametrize("method", ["exact", "hutchinson"])
def test_estimates_do_not_depend_on_chunks(method):
    A = matrix("polynomial", 50)
    sizes = []

    class Watched(MatrixMap):
        def multiply(self, vectors):
            sizes.append(len(vectors))
            return super().multiply(vectors)

    def run(chunk):
        return trace(Watched(A), method=method, probes=50, generator=seeded(), chunk=chunk)

    whole = run("64MiB")
    assert sizes == [50]
    for chunk in (1, 7 * 50 * 8, "4KiB"):
        sizes.clear()
        found = run(chunk)
        assert max(sizes) <= max(1, 4096 // 400)
        torch.testing.assert_close(found.value, whole.value, rtol=1e-13, atol=0)
        torch.testing.assert_close(found.stderr, whole.stderr, rtol=1e-10, atol=0)


# Derivatives


@pytest.mark.parametrize(
    ("method", "distribution"), [*((method, "sphere") for method in METHODS), ("xtrace", "normal")]
)
def test_differentiable_as_the_products_are(method, distribution):
    root = torch.randn(12, 12, dtype=torch.float64, generator=seeded(1)).requires_grad_()

    def value(root):
        A = root @ root.t() + torch.eye(12, dtype=root.dtype)
        return trace(
            MatrixMap(A), method=method, probes=6, distribution=distribution, generator=seeded()
        ).value

    assert mg.gradcheck(value, (root,), order=2, directions=2)


def test_a_derivative_that_does_not_exist_is_an_error():
    for method in SKETCHING:
        A = low_rank().requires_grad_()
        with pytest.raises(ValueError, match=r'require grad.* dependent.*method="hutchinson" or fewer'):
            trace(MatrixMap(A), method=method, probes=30, generator=seeded())
        with torch.no_grad():
            trace(MatrixMap(A), method=method, probes=30, generator=seeded())


# Errors


def test_a_product_that_is_not_finite_is_an_error():
    for method in METHODS:
        matrix = torch.eye(9)
        matrix[4, 4] = float("nan")
        with pytest.raises(ValueError, match=r"trace\(operator, \.\.\.\): a product .* NaN or inf"):
            trace(MatrixMap(matrix), method=method, probes=6)


def test_sums_of_half_precision_overflowed_where_their_terms_did_not():
    for dtype in [torch.float16, torch.bfloat16]:
        w = torch.ones(3000, dtype=dtype, requires_grad=True)
        with mg.curvature.hessian((w.float() ** 2).sum() * 20, {"w": w}) as H:
            for trace in (mg.curvature.trace(H, probes=4), mg.curvature.trace(H, method="exact")):
                torch.testing.assert_close(
                    trace.value, torch.tensor(40.0 * 3000)
                )  # above the largest of float16
