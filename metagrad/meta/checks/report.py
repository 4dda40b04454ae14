"""What is said of a model before it is trained: findings, costs, and the remedies that can be applied."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, TypeAlias

from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.memory.report import format_bytes
from metagrad.meta.checks.fixes import Remedy

Verdict: TypeAlias = Literal["wrong", "missing", "slower", "right"]
VERDICTS: tuple[Verdict, ...] = ("wrong", "missing", "slower", "right")
_WIDTH = 118
_MOST_NAMES = 3  # of modules of which the same is said


@dataclass(frozen=True)
class ModuleFinding:
    """What :func:`preflight` knows of the derivatives of a module.

    Attributes:
        module: Its path, as ``model.named_modules()`` has it: empty for what the model computes between its
            modules, ``"loss_fn(...)"`` for the loss.
        kind: The class of the module, or the operation.
        order: The first derivative of the loss that is affected.
        verdict: ``"wrong"`` (silently), ``"missing"`` (an error), ``"slower"`` (right at another cost) or ``"right"``
            (for information).
        reason: What happens, in a sentence.
        remedy: What to do, in a sentence.
        fixable: Whether ``fix=True`` does it.
    """

    module: str
    kind: str
    order: int
    verdict: Verdict
    reason: str
    remedy: str
    fixable: bool = False

    @property
    def is_error(self) -> bool:
        """Whether a derivative is wrong or missing."""
        return self.verdict in ("wrong", "missing")

    def __str__(self) -> str:
        where = f"{self.module or 'the model itself'} ({self.kind})"
        return f"{where}: {self.reason} {self.remedy}"


@dataclass(frozen=True)
class MemoryCost:
    """Bytes of a step beside those of model and data, as :func:`preflight` counts them.

    Attributes:
        held: When the forward pass is over: what is kept for the derivative.
        peak: The most at any time.
        extrapolated: Whether it was computed from fewer inner steps.
    """

    held: int
    peak: int
    extrapolated: bool = False


class Preflight:
    """The report of :func:`metagrad.preflight`; its ``str`` is a table.

    Attributes:
        title: What was looked at; the first line of the table.
        order: The highest derivative that was looked at.
        findings: One :class:`ModuleFinding` for each thing to be known, the worst first.
        memory: What a step costs: by ``memory=`` mode for a meta-batch, by ``"order 1"`` and so on for plain data.
        notes: What could not be found out, in sentences.
        remedies: What mends findings; those that ``fix=True`` applies change no numbers.
        fixed: The findings that the remedies have done away with, if they were applied by ``fix=True``.
    """

    def __init__(
        self,
        title: str,
        order: int,
        findings: Sequence[ModuleFinding],
        memory: Mapping[str, MemoryCost],
        notes: Sequence[str],
        remedies: Sequence[Remedy] = (),
        fixed: Sequence[ModuleFinding] = (),
    ) -> None:
        self.title = title
        self.order = order
        self.findings: tuple[ModuleFinding, ...] = tuple(
            sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict))
        )
        self.memory: dict[str, MemoryCost] = dict(memory)
        self.notes: tuple[str, ...] = tuple(notes)
        self.remedies: tuple[Remedy, ...] = tuple(remedies)
        self.fixed: tuple[ModuleFinding, ...] = tuple(fixed)

    @property
    def ok(self) -> bool:
        """Whether no derivative is known to be wrong or missing."""
        return not any(finding.is_error for finding in self.findings)

    def raise_for_errors(self) -> None:
        """Raise if a derivative is wrong or missing.

        Raises:
            MissingDerivative: With a line for each.
        """
        errors = [f"preflight: {finding}" for finding in self.findings if finding.is_error]
        if errors:
            raise MissingDerivative("\n".join(errors))

    def apply(self) -> Preflight:
        """Apply the remedies that are safe, until :meth:`undo` or the end of a ``with`` block.

        The forward of a module that needs it runs within a context, by a pair of hooks; layers with running
        statistics get rid of them. Nothing else changes, and :attr:`remedies` says what does.
        """
        for remedy in self.remedies:
            remedy.apply()
        return self

    def undo(self) -> None:
        """Leave the model as it was before the remedies were applied."""
        for remedy in reversed(self.remedies):
            remedy.undo()

    def __enter__(self) -> Preflight:
        """Return the report."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the remedies."""
        self.undo()

    def __str__(self) -> str:
        parts = [self.title, *_findings_text(self.findings)]
        applied = [remedy for remedy in self.remedies if remedy.is_applied]
        if applied:
            parts += ["Applied, until undo():", *(f"  {remedy}" for remedy in applied)]
        elif self.remedies:
            parts += ["fix=True, or apply(), would change:", *(f"  {remedy}" for remedy in self.remedies)]
        if self.memory:
            parts += ["Memory of a step beside the model and the data:", *_memory_text(self.memory)]
        return "\n".join([*parts, *(_wrapped(f"Note: {note}", "  ") for note in self.notes)])


def _findings_text(findings: Sequence[ModuleFinding]) -> list[str]:
    if not findings:
        return ["No finding."]
    alike: dict[ModuleFinding, list[str]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, module=""), []).append(finding.module or "(the model)")
    rows = [("verdict", "from order", "module", "kind")]
    rows += [(f.verdict, str(f.order), _listed(modules), f.kind) for f, modules in alike.items()]
    texts = [_wrapped(f"{f.reason} {f.remedy}{' [fix=True]' if f.fixable else ''}", "    ") for f in alike]
    head, *lines = _aligned(rows)
    return [head, *(line for pair in zip(lines, texts, strict=True) for line in pair)]


def _listed(modules: list[str]) -> str:
    shown = ", ".join(modules[:_MOST_NAMES])
    return shown if len(modules) <= _MOST_NAMES else f"{shown} and {len(modules) - _MOST_NAMES} more"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _memory_text(memory: Mapping[str, MemoryCost]) -> list[str]:
    rows = [("", "held", "peak", "")]
    for name, cost in memory.items():
        how = "from fewer steps" if cost.extrapolated else "measured"
        rows.append((name, format_bytes(cost.held), format_bytes(cost.peak), how))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"  {name.ljust(widths[0])}  {held.rjust(widths[1])}  {peak.rjust(widths[2])}  {how}".rstrip()
        for name, held, peak, how in rows
    ]


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
