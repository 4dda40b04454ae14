import itertools

import pytest
import torch

from metagrad.curvature import ggn, hessian
from metagrad.curvature.estimators.probes import ProbeSampler, sample_probes
from tests.curvature.maps import MatrixMap, seeded

DISTRIBUTIONS = ["rademacher", "normal", "sphere"]


def test_shape_dtype_and_the_same_bits_again():
    for distribution in DISTRIBUTIONS:
        dtype = torch.bfloat16
        first, second = (
            sample_probes(5, 7, distribution=distribution, dtype=dtype, generator=seeded()) for _ in range(2)
        )
        assert first.shape == (5, 7)
        assert first.dtype == dtype
        assert torch.equal(first, second)
        assert not torch.equal(
            first, sample_probes(5, 7, distribution=distribution, dtype=dtype, generator=seeded(1))
        )


def test_pieces_have_the_bits_of_the_whole():
    for distribution in DISTRIBUTIONS:
        # torch fills long and short tensors by different code
        for n, rows in itertools.product([1, 15, 16, 33], [1, 3, 10, 64]):
            whole = sample_probes(10, n, distribution=distribution, generator=seeded())
            operator, bytes_of_rows = MatrixMap(torch.eye(n)), 4 * n * rows
            sampler = ProbeSampler("f()", operator, distribution, seeded(), bytes_of_rows, stored=1)
            assert torch.equal(torch.cat(list(sampler.drawn(10))), whole)


def test_the_second_moment_is_the_identity():
    for distribution in DISTRIBUTIONS:
        z = sample_probes(20_000, 4, distribution=distribution, dtype=torch.float64, generator=seeded())
        torch.testing.assert_close(z.t() @ z / len(z), torch.eye(4, dtype=z.dtype), rtol=0, atol=0.05)
        torch.testing.assert_close(z.mean(0), torch.zeros(4, dtype=z.dtype), rtol=0, atol=0.05)


def test_what_each_distribution_is():
    signs = sample_probes(50, 9, distribution="rademacher", generator=seeded())
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    on_sphere = sample_probes(50, 9, distribution="sphere", dtype=torch.float64, generator=seeded())
    torch.testing.assert_close(on_sphere.norm(dim=1), torch.full((50,), 3.0, dtype=torch.float64))
    normal = sample_probes(5000, 9, distribution="normal", dtype=torch.float64, generator=seeded())
    assert (normal**4).mean() == pytest.approx(3, rel=0.1)  # 1 for signs, 27 / 11 on this sphere


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_on_the_cpu_draws_for_other_devices():
    found = sample_probes(3, 20, distribution="normal", device="cuda", generator=seeded())
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), sample_probes(3, 20, distribution="normal", generator=seeded()))
    own = sample_probes(3, 20, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert own.device.type == "cuda"


def test_rows_in_a_chunk():
    def sampler(chunk, n, dtype):
        return ProbeSampler("f()", MatrixMap(torch.eye(n, dtype=dtype)), "normal", None, chunk, stored=1)

    assert sampler("64KiB", 1024, torch.float32).rows == 16
    assert sampler(80, 10, torch.float64).rows == 1
    assert sampler(1, 10, torch.float64).rows == 1
    assert [len(rows) for rows in sampler(160, 10, torch.float32).drawn(10)] == [4, 4, 2]


def probing(operator, chunk="64MiB"):
    return ProbeSampler("f(operator)", operator, "rademacher", torch.Generator().manual_seed(0), chunk)


def test_no_more_probes_are_held_than_the_operator_multiplies_together():
    for kind in [hessian, ggn]:
        for chunk, pieces in [("1MiB", [2, 8]), (1, [2] + [1] * 8)]:
            model, batch = torch.nn.Linear(2, 2), (torch.ones(3, 2), torch.tensor([0, 1, 1]))
            loss = torch.nn.functional.cross_entropy
            if kind is ggn:
                operator = ggn(model, loss, dict(model.named_parameters()), batch, chunk=chunk)
            else:
                operator = hessian(
                    loss(model(batch[0]), batch[1]), dict(model.named_parameters()), chunk=chunk
                )
            with operator:
                assert [len(probes) for probes, _ in probing(operator).pieces(10)] == pieces
