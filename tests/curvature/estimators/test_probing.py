import torch

from metagrad.curvature import ggn, hessian
from metagrad.curvature.estimators.probing import ProbeSampler


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
