"""The cost of orders of differentiation: all methods return the same derivative, and rows have bytes and seconds."""

import pytest
import torch

from experiments.studies.overhead import CHANGES, META, MODELS, PRODUCT, SECOND, flat, measured, ways

SIZES = {"mlp": (3, 8, 8), "convnet": (2, 4, 4), "transformer": (1, 8, 4), "table": (1, 4, 8)}


def result(model, quantity, technique):
    torch.manual_seed(0)
    task = MODELS[model](*SIZES[model])
    own = ways(3)[quantity]
    run = own[technique](task) if technique in own else own[""](CHANGES[technique](task))
    return flat(run.finish(run.hold()))


TECHNIQUES = [
    (SECOND, "mg.checkpoint"),
    (PRODUCT, "forward over reverse"),
    (PRODUCT, "four mini-batches"),
    (META, "step"),
    (META, "mg.checkpoint"),
    (META, "naive loop"),
]


@pytest.mark.parametrize("model", MODELS)
def test_techniques_give_the_same_derivative(model):
    for quantity, technique in TECHNIQUES:
        if (model, quantity, technique) == ("table", META, "mg.checkpoint"):
            continue  # a custom function reads the row-sparse table, and mg.checkpoint raises for that
        expected, found = result(model, quantity, ""), result(model, quantity, technique)
        assert (found - expected).norm() <= 1e-4 * expected.norm(), (quantity, technique)


def test_first_order_gives_another():
    expected, found = result("mlp", META, ""), result("mlp", META, "first order")
    assert (found - expected).norm() > 1e-3 * expected.norm()


def test_dense_gradients_of_a_table_take_more_memory():
    torch.manual_seed(0)
    task, own = MODELS["table"](*SIZES["table"]), ways(2)[META]
    found = [(META, "", own[""]), (META, "dense", lambda task: own[""](CHANGES["dense"](task)))]
    sparse, dense = measured(task, found, rounds=1, seed=0)
    assert dense["peak"] > 10 * sparse["peak"]
    assert len(sparse["seconds"]) == 1
