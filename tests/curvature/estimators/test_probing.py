from __future__ import annotations

from types import SimpleNamespace

import torch

from metagrad.curvature import ggn, hessian
from metagrad.curvature.estimators.probing import ProbeSampler


def probing(operator, chunk="64MiB"):
    return ProbeSampler("f(operator)", operator, "rademacher", torch.Generator().manual_seed(0), chunk)


def operator_like(**changes):
    fields = {"shape": (3, 3), "dtype": torch.float32, "device": torch.device("cpu"), "multiply": lambda v: v}
    return SimpleNamespace(**{**fields, **changes})


def test_pieces_respect_the_chunk_and_count_products():
    asked = []
    of_one = 4 * 3 * 4  # four vectors of three numbers in float32
    met = probing(operator_like(multiply=lambda v: asked.append(len(v)) or v), chunk=2 * of_one)
    sums = met.reduced(5, lambda z, products: (z * products).sum(1))
    assert asked == [2, 2, 1]
    assert met.matvecs == 5
    torch.testing.assert_close(sums, torch.full((5,), 3.0))


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
