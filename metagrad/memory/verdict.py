"""The verdict: one sentence on what a run's memory does."""

from __future__ import annotations

from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from metagrad.memory.report import format_bytes

if TYPE_CHECKING:
    from metagrad.memory.phases import Phase

# Less than this share of what an outer step takes at its peak, left from one outer step to the next (a list
# of losses), is not called a leak. The bytes are stated either way.
_LEAK_SHARE = 0.01


class Growth(NamedTuple):
    """Bytes from one step to the next: all of them, and those the graph holds (`None`: not measured)."""

    total: int
    graph: int | None


def verdict(phases: list[Phase], holder: str, peak: int) -> str:
    """Return the sentence; `holder` says in words which phase the run's `peak` (bytes) is due to."""
    parts = (_on_inner(phases), _on_outer(phases), f"the peak is {format_bytes(peak)}, {holder}")
    return "; ".join(parts) + "."


def inner_growth(phases: list[Phase]) -> list[Growth]:
    """Return the growth over each pair of inner steps k, k + 1 of one parent; without pairs, each step."""
    inner = [phase for phase in phases if phase.name == "inner"]
    by_parent: dict[int, list[Phase]] = {}
    for phase in inner:
        by_parent.setdefault(id(phase.parent), []).append(phase)
    pairs = [
        (first, second)
        for siblings in by_parent.values()
        for first, second in pairwise(siblings)
        if first.index is not None and second.index == first.index + 1
    ]
    if pairs:
        return [_between(first, second) for first, second in pairs]
    return [_growth(p.after - p.before, p.held_before, p.held_after) for p in inner]


def outer_growth(phases: list[Phase]) -> list[Growth]:
    """Return the growth from the end of each outer step to the end of the next."""
    return [_between(first, second) for first, second in pairwise(p for p in phases if p.name == "outer")]


def _between(first: Phase, second: Phase) -> Growth:
    return _growth(second.after - first.after, first.held_after, second.held_after)


def _growth(total: int, held_before: int | None, held_after: int | None) -> Growth:
    if held_before is None or held_after is None:
        return Growth(total, None)
    # The graph may also take hold of what was there before: that is no growth.
    return Growth(total, min(max(held_after - held_before, 0), max(total, 0)))


def _on_inner(phases: list[Phase]) -> str:
    growths = inner_growth(phases)
    if not growths:
        return "No inner step was recorded"
    typical = _typical(growths)
    least, most = min(g.total for g in growths), max(g.total for g in growths)
    spread = "" if least == most else f" (median; {format_bytes(least)} to {format_bytes(most)})"
    if typical.total <= 0:
        return f"Inner steps do not add memory: {format_bytes(typical.total)} each{spread}"
    return f"Each inner step adds {format_bytes(typical.total)}{spread}, {_held_by(typical)}"


def _on_outer(phases: list[Phase]) -> str:
    growths = outer_growth(phases)
    if not growths:
        num_outer = sum(phase.name == "outer" for phase in phases)
        seen = "one outer step was recorded" if num_outer else "no outer step was recorded"
        return f"{seen}, so freed or leaked cannot be told"
    typical = _typical(growths)
    use = median_low(phase.peak - phase.before for phase in phases if phase.name == "outer")
    if typical.total > _LEAK_SHARE * use:
        held_by = _held_by(typical)
        return f"leaked: each outer step leaves {format_bytes(typical.total)} more than the last, {held_by}"
    return f"freed: each outer step leaves {format_bytes(max(typical.total, 0))} more than the last"


def _typical(growths: list[Growth]) -> Growth:
    """Return the growth of the median total."""
    return sorted(growths, key=lambda growth: growth.total)[(len(growths) - 1) // 2]


def _held_by(growth: Growth) -> str:
    if growth.graph is None:
        return "held by graph or state, which this method cannot tell"
    state = growth.total - growth.graph
    if not state:
        return "held by the graph"
    if not growth.graph:
        return "held by state"
    parts = {"the graph": growth.graph, "state": state}
    first, second = sorted(parts, key=lambda part: -parts[part])
    return f"held by {first} ({format_bytes(parts[first])}) and {second} ({format_bytes(parts[second])})"
