"""Every example in a docstring runs and prints the documented output."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from enum import Enum
from functools import cache
from pathlib import Path

import pytest
import torch

import metagrad
from metagrad.optim import SOAP, Lion, Muon, Shampoo, SparseAdam

ROOT = Path(metagrad.__file__).parents[1]
MODULES = [info.name for info in pkgutil.walk_packages(metagrad.__path__, "metagrad.")]


def has_examples(name):
    file = ROOT.joinpath(*name.split("."))
    return ">>>" in (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?![\w])")


def unit(number: str) -> float:
    """Return one unit of the last printed digit of a number, or 0 for an integer.

    PyTorch prints no decimals if all entries of a tensor are whole up to four decimals.
    """
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2]) or (4 if "." in digits else 0)
    return 10.0 ** (int(exponent or 0) - decimals) if "." in number or exponent else 0.0


def is_close(want: str, got: str) -> bool:
    """Return whether two numbers differ by at most one unit of the last digit or by float32 rounding."""
    rounding = 1e-6 * abs(float(want)) if unit(want) else 0.0
    return abs(float(want) - float(got)) <= 1.001 * unit(want) + rounding


class NumbersAsNumbers(doctest.OutputChecker):
    """Accepts any white space, and numbers that differ by one unit of the last printed digit."""

    def check_output(self, want, got, optionflags):
        if super().check_output(want, got, optionflags):
            return True
        wanted, found = NUMBER.findall(want), NUMBER.findall(got)
        same_text = "".join(NUMBER.sub("0", want).split()) == "".join(NUMBER.sub("0", got).split())
        return same_text and len(wanted) == len(found) and all(map(is_close, wanted, found))


@pytest.mark.parametrize(
    ("want", "got", "is_same"),
    [
        ("0.25", "0.2499999", True),
        ("0.25", "0.27", False),
        ("tensor([ 1.00, -0.00])", "tensor([1.0000, 0.0012])", True),
        ("1e-3", "2e-3", True),
        ("tensor([2.])", "tensor([2.0001])", True),
        ("tensor([2.])", "tensor([2.1])", False),
        ("1.0e-3", "2.0e-3", False),
        ("12 steps", "13 steps", False),
        ("0.5 steps", "0.5 products", False),
    ],
)
def test_numbers_are_compared_as_numbers(want, got, is_same):
    assert NumbersAsNumbers().check_output(want, got, 0) is is_same


@pytest.mark.parametrize("name", [name for name in MODULES if has_examples(name)])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(NumbersAsNumbers())
    given = {"torch": torch, "metagrad": metagrad}
    for test in doctest.DocTestFinder().find(module, extraglobs=given):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_every_module_can_be_imported():
    for name in MODULES:
        importlib.import_module(name)


ROOMS = [
    *(room for name in metagrad.__all__ if inspect.ismodule(room := getattr(metagrad, name))),
    metagrad.optim.rules,
]
PUBLIC = {
    value
    for room in ROOMS
    for value in map(vars(room).get, room.__all__)
    if callable(value) and value.__module__.startswith("metagrad.")
}
WITH_EXAMPLES = {value for value in PUBLIC if ">>>" in (value.__doc__ or "")}
NAMED = re.compile(r":(?:class|func|meth):`~?([\w.]+)`|``([\w.]+)")


def is_plain(value) -> bool:
    """Return whether a class needs no example: a protocol, a named tuple or an exception."""
    return getattr(value, "_is_protocol", False) or issubclass(value, (tuple, Exception))


def is_shown_elsewhere(value) -> bool:
    """Return whether the docstring names a public name that has an example."""
    named = {part for pair in NAMED.findall(value.__doc__ or "") for name in pair for part in name.split(".")}
    return bool(named & {value.__name__ for value in WITH_EXAMPLES})


def test_every_public_name_has_a_docstring():
    assert not [
        value for value in PUBLIC if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}(")
    ]


def test_every_public_function_has_an_example_and_every_class_or_what_makes_it():
    assert len(PUBLIC) > 120
    without = PUBLIC - WITH_EXAMPLES
    functions = {value for value in without if inspect.isroutine(value)}
    classes = {
        value for value in without - functions if not is_plain(value) and not is_shown_elsewhere(value)
    }
    assert not sorted(value.__name__ for value in functions | classes)


MADE_BY = re.compile(r":func:`[~.\w]+` (makes|returns)")
ENTRY = re.compile(r"^    \*{0,2}(\w+(?:, \*{0,2}\w+)*)(?: \(.*\))?:\s", re.MULTILINE)
OF_METHODS = re.compile(
    r"metagrad\.(curvature\.(estimators|solvers|spectrum)|hypergrad|meta\.(algorithms|maml)"
    r"|optim\.(first_order|kronecker|newton|second_order|sharpness_aware|torch_optim|transforms))\b"
)


@cache
def section(value, title: str) -> str | None:
    """Return a section of a docstring, without its title."""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)*)", inspect.cleandoc(value.__doc__ or ""), re.MULTILINE)
    return found and found[1]


def described(value) -> set[str]:
    """Return the parameters and attributes that the docstrings of a value and its bases describe."""
    texts = [
        section(v, title) for v in getattr(value, "__mro__", [value]) for title in ("Args", "Attributes")
    ]
    return {
        name.strip(" *")
        for text in texts
        if text
        for entry in ENTRY.findall(text)
        for name in entry.split(",")
    }


def parameters(value) -> set[str]:
    """Return the parameters that a user sets. Other fields of a functional optimizer are internal."""
    if inspect.isclass(value) and (
        issubclass(value, (Enum, Exception)) or getattr(value, "_is_protocol", False)
    ):
        return set()
    internal = ("unknown", "batch_ndim") if inspect.isclass(value) else ("unknown",)
    return set(inspect.signature(value).parameters).difference(internal)


def raises(value) -> bool:
    """Return whether a function, or the constructor of a class, has a ``raise`` statement."""
    names = ("__init__", "__post_init__") if inspect.isclass(value) else ("__wrapped__",)
    made = [vars(value)[name] for name in names if name in vars(value)] or [value]
    own = [
        f
        for f in made
        if inspect.isfunction(f) and f.__code__.co_filename == sys.modules[value.__module__].__file__
    ]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(f))) for f in own]
    return any(isinstance(node, ast.Raise) for tree in trees for node in ast.walk(tree))


def is_method(value) -> bool:
    """Return whether a value implements a published method. Base classes and results do not."""
    if not OF_METHODS.match(value.__module__) or inspect.isroutine(value):
        return bool(OF_METHODS.match(value.__module__))
    is_result = any(section(v, "Attributes") for v in value.__mro__) and section(value, "Args") is None
    is_named_elsewhere = re.search(rf"^Base class of|{MADE_BY.pattern}", value.__doc__)
    return not (is_plain(value) or issubclass(value, Enum) or is_result or is_named_elsewhere)


MADE_BY_THE_USER = {value for value in PUBLIC if not MADE_BY.search(value.__doc__ or "")}


def test_every_parameter_of_a_public_name_is_described_and_nothing_else():
    undescribed = {value: parameters(value) - described(value) for value in MADE_BY_THE_USER}
    assert not {value.__name__: names for value, names in undescribed.items() if names}
    unknown = {
        value: {name.strip(" *") for entry in ENTRY.findall(text) for name in entry.split(",")}
        - parameters(value)
        for value in MADE_BY_THE_USER
        if (text := section(value, "Args"))
    }
    assert not {value.__name__: names for value, names in unknown.items() if names}


def test_every_public_name_that_raises_says_what():
    assert not sorted(v.__name__ for v in MADE_BY_THE_USER if raises(v) and section(v, "Raises") is None)


def test_every_public_name_begins_with_one_sentence():
    assert not sorted(
        v.__name__ for v in PUBLIC if not re.match(r".+[.:]($|\n)", inspect.cleandoc(v.__doc__))
    )


def test_every_method_of_the_literature_names_its_source():
    methods = {value for value in PUBLIC if is_method(value)}
    assert len(methods) > 40
    assert not sorted(value.__name__ for value in methods if section(value, "References") is None)


@pytest.mark.parametrize("optimizer", [Lion, Muon, Shampoo, SOAP, SparseAdam])
def test_an_optimizer_describes_arguments_in_the_words_of_its_rule(optimizer):
    texts = (section(value, "Args").strip() for value in (optimizer, optimizer.rule))
    own, of_rule = (set(re.split(r"\n+    (?=\w+:)", text)) for text in texts)
    assert not {entry for entry in own - of_rule if entry.partition(":")[0] in parameters(optimizer.rule)}
