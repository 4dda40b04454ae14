"""The report of ``preflight``: incorrect or missing derivatives, and the memory of a step."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.memory.report import format_bytes

Status: TypeAlias = Literal["wrong", "missing", "slower"]
_WIDTH = 118


class ModuleFinding(NamedTuple):
    """One finding of :func:`preflight`.

    Attributes:
        module: The path of the module, as in ``model.named_modules()``. It is empty for operations between modules,
            and ``"loss_fn(...)"`` for the loss.
        kind: The class of the module, or the name of the loss.
        order: The first derivative of the loss that is affected.
        status: ``"wrong"`` is silently incorrect, ``"missing"`` raises an error, and ``"slower"`` is correct but
            expensive.
        reason: A description of the problem.
        suggestion: A suggested fix.
    """

    module: str
    kind: str
    order: int
    status: Status
    reason: str
    suggestion: str

    @property
    def is_error(self) -> bool:
        """Whether a derivative is wrong or missing."""
        return self.status != "slower"

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'} ({self.kind}): {self.reason} {self.suggestion}"


class MemoryCost(NamedTuple):
    """Memory of a step in bytes, in addition to the model and the data.

    Attributes:
        stored: Bytes that the derivative needs at the end of the forward pass.
        peak: Maximum number of bytes at any time.
    """

    stored: int
    peak: int


@dataclass(frozen=True)
class Preflight:
    """The report of :func:`metagrad.preflight`. Its ``str`` is a table.

    Attributes:
        title: The model and the orders that were checked.
        order: The highest derivative that was checked.
        findings: One :class:`ModuleFinding` for each problem.
        memory: The cost of a step. The keys are values of ``memory=`` for a meta-batch, and ``"order 1"`` and so on
            for plain data.
        notes: Remarks about the check, such as parts that could not run.
    """

    title: str
    order: int
    findings: tuple[ModuleFinding, ...]
    memory: Mapping[str, MemoryCost]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no derivative is wrong or missing."""
        return not any(finding.is_error for finding in self.findings)

    def raise_for_errors(self) -> None:
        """Raise if a derivative is wrong or missing.

        Raises:
            MissingDerivative: With one line for each finding.
        """
        errors = [f"preflight: {finding}" for finding in self.findings if finding.is_error]
        if errors:
            raise MissingDerivative("\n".join(errors))

    def __str__(self) -> str:
        parts = [self.title]
        for f in self.findings:
            parts.append(f"{f.status:<8} {f.order}  {f.module or '(the model)'}  {f.kind}")
            parts.append(_wrapped(f"{f.reason} {f.suggestion}", "    "))
        if not self.findings:
            parts.append("No problems found.")
        if self.memory:
            parts.append("Memory of a step in addition to the model and the data:")
        for name, cost in self.memory.items():
            parts.append(f"  {name:<8} stored {format_bytes(cost.stored)}, peak {format_bytes(cost.peak)}")
        return "\n".join([*parts, *(_wrapped(f"Note: {note}", "  ") for note in self.notes)])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
