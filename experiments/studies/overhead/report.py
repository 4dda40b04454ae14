"""The tables: what an order costs, what remedies buy, over sizes, over inner steps."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.overhead.methods import GRADIENT, META, PRODUCT, SECOND, WAYS
from experiments.studies.overhead.rows import MIB, Row, chosen, markdown, unique

NAMED = 1e-4  # errors above are written


def report(rows: Sequence[Row], lost: Sequence[str]) -> str:
    """Return all tables as markdown."""
    base, steps = chosen(rows, axis="base"), chosen(rows, axis="steps")
    compiled = chosen(rows, axis="compiled")
    parts = [
        ["# What an order of differentiation costs", "", *_sizes(base)],
        ["## Orders", "", ORDERS, "", *_orders(base)],
        ["## Remedies", "", REMEDIES, "", *_remedies(base)],
        ["## Compiled", "", COMPILED, "", *_remedies(compiled)] if compiled else [],
        ["## Depth, width, batch", "", SIZES, "", *_axes(rows)],
        ["## Inner steps", "", STEPS, "", *_steps(steps)] if steps else [],
        ["Not measured:", "", *lost] if lost else [],
    ]
    return "\n".join("\n".join([*part, ""]) for part in parts if part)


ORDERS = (
    "Peak, and time, in units of one gradient g of the same model; in the first row MiB and ms. The second "
    "derivative is that of g'g / 2, by create_graph=True; a Hessian product is one more of an operator that is there."
)
REMEDIES = (
    "Peak, and time, in units of the first row of each block, in which nothing is saved; the error of the result "
    f"relative to its norm, where it is above {NAMED:g}."
)
COMPILED = "Likewise, at the least depth; compilation is left out, and in the last column of overhead.csv."
SIZES = "Of a gradient MiB and ms; of the others peak, and time, in units of it."
STEPS = "MiB at the peak of a meta-gradient."


def _sizes(base: Sequence[Row]) -> list[str]:
    described = [
        f"{name} {depth} x {width} on {batch}"
        for name, depth, width, batch in unique(base, "model", "depth", "width", "batch")
    ]
    return [f"Depth x width on examples, nodes or lookups: {', '.join(described)}."]


def _orders(base: Sequence[Row]) -> list[str]:
    models = [name for (name,) in unique(base, "model")]
    body = [["gradient", *(_absolute(_one(base, name, GRADIENT, "")) for name in models)]]
    for quantity, ways in WAYS.items():
        for remedy in [way for way in ways if not way or (quantity == PRODUCT and way != "accumulated")]:
            if quantity != GRADIENT:
                label = f"{quantity}, {remedy}" if remedy else _with_steps(quantity, base)
                body.append(
                    [label, *(_relative(_one(base, n, quantity, remedy), "gradients") for n in models)]
                )
    return markdown(["", *models], body)


def _with_steps(quantity: str, base: Sequence[Row]) -> str:
    return f"{quantity}, {base[0]['steps']} inner steps" if quantity == META else quantity


def _remedies(base: Sequence[Row]) -> list[str]:
    models = [name for (name,) in unique(base, "model")]
    pairs = sorted(unique(base, "quantity", "remedy"), key=lambda pair: list(WAYS).index(pair[0]))
    body, notes = [], []
    for quantity, remedy in pairs:
        found = [_one(base, name, quantity, remedy) for name in models]
        cells = [_relative(row, "ways") + _error(row) for row in found]
        body.append([remedy or f"**{quantity}**", *cells])
        notes += [
            f"- {row['model']}, {quantity}, {remedy}: {row['note']}" for row in found if row and row["note"]
        ]
    return markdown(["", *models], body) + (["", "Refused:", "", *notes] if notes else [])


def _axes(rows: Sequence[Row]) -> list[str]:
    body = []
    for name, axis, *size in unique(rows, "model", "axis", "depth", "width", "batch"):
        if axis in ("steps", "compiled"):
            continue
        own = chosen(rows, model=name, axis=axis, **dict(zip(("depth", "width", "batch"), size, strict=True)))
        asked = [(SECOND, ""), (PRODUCT, ""), (PRODUCT, "forward over reverse"), (META, ""), (META, "step")]
        costs = [_relative(_one(own, name, *pair), "gradients") for pair in asked]
        body.append(
            [f"{name} {' x '.join(map(str, size))}", _absolute(_one(own, name, GRADIENT, "")), *costs]
        )
    header = ["depth x width x batch", GRADIENT, SECOND, PRODUCT, "forward over reverse", META, "step"]
    return markdown(header, sorted(body, key=lambda line: line[0].split()[0]))


def _steps(rows: Sequence[Row]) -> list[str]:
    counts = [count for (count,) in unique(rows, "steps")]
    body = []
    for name, remedy in unique(chosen(rows, quantity=META), "model", "remedy"):
        own = {row["steps"]: row for row in chosen(rows, model=name, quantity=META, remedy=remedy)}
        peaks = [f"{own[count]['peak'] / MIB:.3g}" if own[count]["peak"] else "refused" for count in counts]
        body.append([f"{name}, {remedy or 'full'}", *peaks])
    return markdown(["inner steps", *map(str, counts)], body)


def _one(rows: Sequence[Row], model: str, quantity: str, remedy: str) -> Row | None:
    return next(iter(chosen(rows, model=model, quantity=quantity, remedy=remedy)), None)


def _absolute(row: Row | None) -> str:
    return "" if row is None else f"{row['peak'] / MIB:.3g} MiB, {1e3 * row['seconds']:.3g} ms"


def _relative(row: Row | None, unit: str) -> str:
    if row is None:
        return ""
    if row["note"]:
        return "refused"
    return f"{row[f'peak/{unit}']:.2f}, {row[f'seconds/{unit}']:.2f}"


def _error(row: Row | None) -> str:
    is_named = row is not None and row["error"] is not None and row["error"] > NAMED
    return f", off by {row['error']:.1g}" if is_named and row is not None else ""
