"""Compiled code that is called by its graph once its guards have passed, and what the guards must see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from metagrad.autograd.compile.compiled import Compiled, pass_gate
from metagrad.core import _torch_compiler
from tests.marks import slow

OPTIONS = {"backend": "aot_eager"}
FACTOR = 2.0


class Scale(nn.Module):
    """Reads a number, a class attribute, an entry of a dict and a buffer."""

    power = 1

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.settings = 1.0, {"shift": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return x**self.power * self.factor + self.settings["shift"]


class Offset(nn.Module):
    """Reads a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def by_global(x: Tensor) -> Tensor:
    return FACTOR * x


def called(function, tensors: list[Tensor], others: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    pass_gate()
    return [function(tensor) for tensor in tensors], others["y"].sum()


def made(monkeypatch) -> tuple[Compiled, list]:
    """Return compiled code, and a list of its calls by way of torch.compile."""
    by_compiler: list = []
    run = Compiled._called
    monkeypatch.setattr(
        Compiled, "_called", lambda self, check, args: by_compiler.append(args) or run(self, check, args)
    )
    return Compiled(called, OPTIONS), by_compiler


def call(compiled: Compiled, function, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    return compiled(lambda: None, function, list(tensors), {"y": torch.ones(3)})


def check(compiled: Compiled, function, *tensors: Tensor) -> None:
    found, total = call(compiled, function, *tensors)
    torch.testing.assert_close(found, [function(tensor) for tensor in tensors], rtol=0, atol=0)
    assert total.item() == 3.0


def test_the_second_call_calls_the_graph(monkeypatch):
    compiled, by_compiler = made(monkeypatch)
    for _ in range(3):
        check(compiled, Scale(), torch.randn(2), torch.randn(2))
    assert len(by_compiler) == 1


CHANGES = {
    "a number": lambda scale: setattr(scale, "factor", 3.0),
    "an entry of a dict": lambda scale: scale.settings.update(shift=1.0),
    "an attribute of the class": lambda scale: setattr(Scale, "power", 2),
    "a flag": lambda scale: scale.eval(),
    "a method": lambda scale: setattr(scale, "forward", lambda x: -x),
}


@pytest.mark.parametrize("name", ["a number", *map(slow, list(CHANGES)[1:])])
def test_what_a_function_reads_is_seen(name, monkeypatch):
    monkeypatch.setattr(Scale, "power", 1)
    (compiled, _), scale = made(monkeypatch), Scale()
    for _ in range(2):
        check(compiled, scale, torch.randn(2))
    CHANGES[name](scale)
    for _ in range(2):
        check(compiled, scale, torch.randn(2))


def test_a_global_is_seen(monkeypatch):
    compiled, by_compiler = made(monkeypatch)
    for value in (2.0, 2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        check(compiled, by_global, torch.randn(2))
    assert 2 <= len(by_compiler) <= 3


@pytest.mark.slow
def test_other_tensors_are_seen(monkeypatch):
    (compiled, _), scale = made(monkeypatch), Scale()
    x = torch.randn(2)
    others = [
        (x,),
        (torch.randn(3),),
        (torch.randn(2, dtype=torch.float64),),
        (x, x),
        (x, torch.randn(2)),
        (x, x),
    ]
    for tensors in (*others, (torch.randn(2, requires_grad=True),), (torch.randn(2, 2).t(),)):
        for _ in range(2):
            check(compiled, scale, *tensors)
    (found,), _ = call(compiled, scale, y := torch.randn(2, requires_grad=True))
    assert torch.autograd.grad(found.sum(), y)[0].tolist() == [1.0, 1.0]
    with torch.no_grad():
        assert not call(compiled, scale, y)[0][0].requires_grad


def test_a_tensor_that_is_no_argument_is_read_again(monkeypatch):
    (compiled, by_compiler), offset = made(monkeypatch), Offset()
    for value in (1.0, 2.0, 3.0):
        offset.offset = torch.full((2,), value)
        check(compiled, offset, torch.randn(2))
    assert len(by_compiler) == 3


class Writing(nn.Module):
    """Writes into a dict what it reads from there, and may put the former value back."""

    def __init__(self, *, restores: bool) -> None:
        super().__init__()
        self.settings, self.restores = {"shift": torch.zeros(2)}, restores

    def forward(self, x: Tensor) -> Tensor:
        before = self.settings["shift"]
        self.settings["shift"] = x + 1
        y = x * self.settings["shift"]
        if self.restores:
            self.settings["shift"] = before
        return y


@pytest.mark.parametrize("restores", [True, slow(False)])
def test_a_dict_that_is_written_into_is_left_to_torch_compile_unless_its_values_are_put_back(
    restores, monkeypatch
):
    (compiled, by_compiler), writing = made(monkeypatch), Writing(restores=restores)
    shift = writing.settings["shift"]
    for _ in range(3):
        x = torch.randn(2)
        (y,), _ = call(compiled, writing, x)
        torch.testing.assert_close(y, x * (x + 1), rtol=0, atol=0)
        torch.testing.assert_close(writing.settings["shift"], shift if restores else x + 1, rtol=0, atol=0)
    assert len(by_compiler) == (1 if restores else 3)


@pytest.mark.slow
def test_a_stance_of_the_compiler_is_heeded(monkeypatch):
    (compiled, by_compiler), scale = made(monkeypatch), Scale()
    for _ in range(2):
        check(compiled, scale, torch.randn(2))
    with torch.compiler.set_stance("force_eager"):
        check(compiled, scale, torch.randn(2))
    assert len(by_compiler) == 2


@pytest.mark.slow
def test_everything_goes_by_torch_compile_where_its_cache_cannot_be_read(monkeypatch):
    (compiled, by_compiler), scale = made(monkeypatch), Scale()
    monkeypatch.setattr(_torch_compiler, "passing_code", lambda *args: None)
    for _ in range(3):
        check(compiled, scale, torch.randn(2))
    assert len(by_compiler) == 3
