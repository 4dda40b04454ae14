"""The next call uses a changed model, argument or batch."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import rules


class Layer(nn.Module):
    """An affine map that reads attributes of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(2, 2, dtype=torch.float64), nn.Tanh()
        self.scale, self.name, self.parts, self.extra = 1.0, "plain", [1.0], {"shift": 0.0}
        self.register_buffer("offset", torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        y = self.inner(self.linear(x)) * self.scale * self.parts[0] + self.extra["shift"] + self.offset
        y = 2 * y if self.training else y
        return 3 * y if self.name == "thrice" else y


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2, dtype=torch.float64), Layer(), nn.Linear(2, 1, dtype=torch.float64))


def maml_of(model: nn.Module, **arguments) -> mg.MAML:
    given = {"inner": rules.sgd(lr=nn.Parameter(torch.tensor(0.1, dtype=torch.float64))), "steps": 2}
    return mg.MAML(model, F.mse_loss, **given | arguments)  # type: ignore[arg-type]


def batch_of(tasks: int = 3, shots: int = 4, dtype: torch.dtype = torch.float64) -> mg.tasks.Batch:
    generator = torch.Generator().manual_seed(tasks)
    batch = mg.tasks.Sinusoid(shots=shots, queries=3).sample(tasks, generator=generator)
    return batch.to(dtype=dtype)


def results_of(maml: mg.MAML, batch=None) -> list[Any]:
    out = maml(batch or batch_of())
    learned = [p for p in maml.parameters() if p.requires_grad]
    return [out.loss.detach(), *torch.autograd.grad(out.loss, learned, allow_unused=True)]


def hooked(module, *args):
    return 3 * args[-1]


def set_attribute(path: str, value: object) -> Callable[[Any], None]:
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, value)


def entered(model: Any) -> None:
    model[1].extra["shift"] = 1.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "a training flag": lambda model: model.eval(),
    "a number": set_attribute("1.scale", 2.0),
    "an item of a dict": entered,
    "a forward hook": lambda model: model[1].register_forward_hook(hooked),
    "a layer": set_attribute("2", nn.Linear(2, 1, dtype=torch.float64)),
    "a parameter": set_attribute("2.weight", nn.Parameter(torch.ones(1, 2, dtype=torch.float64))),
    "what is learned": lambda model: model[0].requires_grad_(False),
    "a buffer": set_attribute("1.offset", torch.ones(2, dtype=torch.float64)),
}


@pytest.mark.filterwarnings("ignore:MAML")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_seen(name):
    model = model_of()
    maml = maml_of(model)
    first, again = results_of(maml), results_of(maml)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    CHANGES[name](model)
    found = results_of(maml)
    torch.testing.assert_close(found, results_of(maml_of(model)), rtol=1e-12, atol=1e-14)
    assert len(found) != len(first) or not torch.allclose(found[0], first[0])


ATTRIBUTES: dict[str, Callable[[Any], object]] = {
    "steps": lambda maml: setattr(maml, "steps", 3),
    "truncate": lambda maml: setattr(maml, "truncate", 1),
    "tolerance": lambda maml: setattr(maml, "tolerance", 1e9),
    "order": lambda maml: setattr(maml, "order", 1),
    "memory": lambda maml: setattr(maml, "memory", "step"),
    "task_chunk": lambda maml: setattr(maml, "task_chunk", 1),
    "an item of adapted": lambda maml: maml.adapted.append("2.weight"),
    "loss_fn": lambda maml: setattr(maml, "loss_fn", F.l1_loss),
    "the rule": lambda maml: setattr(maml, "inner", rules.sgd(lr=0.5)),
    "the model": lambda maml: setattr(maml, "model", nn.Linear(1, 1, dtype=torch.float64)),
}


def arguments_of(maml: mg.MAML) -> dict:
    names = ("steps", "order", "memory", "truncate", "tolerance", "task_chunk")
    return {name: getattr(maml, name) for name in names} | {"adapt": maml.adapted, "inner": maml.inner}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_change_of_an_attribute_is_seen(name):
    maml = maml_of(model_of(), adapt=["0.*"] if name == "an item of adapted" else None)
    first, _ = results_of(maml), results_of(maml)
    ATTRIBUTES[name](maml)
    found = results_of(maml)
    fresh = mg.MAML(maml.model, maml.loss_fn, **arguments_of(maml))
    expected = results_of(fresh)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sums_of(found), sums_of(expected), rtol=1e-10, atol=1e-12)
    if name not in ("memory", "task_chunk"):
        assert not torch.allclose(sums_of(found), sums_of(first))


def sums_of(results: list[Any]) -> torch.Tensor:
    """Return the sum of squares, which does not depend on the order of parameters."""
    return torch.stack([t.square().sum() for t in results if t is not None]).sum()


def test_another_form_of_batch_is_seen():
    maml = maml_of(model_of())
    forms = [batch_of(), batch_of(tasks=2), batch_of(shots=5), batch_of(tasks=1), batch_of()]
    found = [results_of(maml, batch) for batch in forms]
    for batch, results in zip(forms, found, strict=True):
        torch.testing.assert_close(results, results_of(maml_of(maml.model), batch), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(maml(batch_of()).loss, found[0][0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(maml(batch_of(), steps=0).loss, maml_of(maml.model, steps=0)(batch_of()).loss)
    single = maml.float()
    assert single(batch_of(dtype=torch.float32)).loss.dtype == torch.float32


def test_copies_have_their_own():
    maml = maml_of(model_of())
    first = results_of(maml)
    for other in (copy.deepcopy(maml), pickle.loads(pickle.dumps(maml)), copy.copy(maml)):
        other.steps = 1
        torch.testing.assert_close(
            results_of(other), results_of(maml_of(other.model, steps=1)), rtol=1e-12, atol=0
        )
    other: Any = copy.deepcopy(maml)
    results_of(other)
    other.model[1].scale = 3.0
    assert not torch.allclose(results_of(other)[0], first[0])
    torch.testing.assert_close(results_of(maml), first, rtol=0, atol=0)


COMPILED = ("a training flag", "a number", "an item of a dict", "a buffer", "a forward hook")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MAML")
def test_changes_of_the_model_are_seen_compiled():
    model = model_of()
    maml = maml_of(model, compile={"backend": "aot_eager"})
    for change in (lambda model: None, *(CHANGES[name] for name in COMPILED)):
        change(model)
        for _ in range(2):
            torch.testing.assert_close(results_of(maml), results_of(maml_of(model)), rtol=1e-9, atol=1e-12)
