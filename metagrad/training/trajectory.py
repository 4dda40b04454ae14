"""A completed training run: its stored states, and backward sweeps through its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from metagrad.autograd.recompute.fingerprint import RELATIVE_ERROR, is_deterministic
from metagrad.autograd.unrolling.plan import Plan, Reversal
from metagrad.core.capture import AutocastState, Flags, RandomState
from metagrad.core.checks import progress
from metagrad.core.norms import every_order
from metagrad.core.reach import placed
from metagrad.core.tree import HALF, Params, dissect, tree_map_only
from metagrad.distributed.exchange import refuse_differences
from metagrad.memory.tracker import phase
from metagrad.training.reverse import (
    Cotangents,
    Leaves,
    PartGraph,
    Pullback,
    StateCotangents,
    refuse_hidden_leaves,
    with_leaves,
)
from metagrad.training.states import FolderStates, PinnedStates, States, checksum
from metagrad.training.step import Inputs, State, Step, variable

CALL = "Training(..., group)()"
MOST_DIFFERENTIABLE = 200
"""Maximum number of steps of a training whose derivative can be differentiated again."""


@dataclasses.dataclass
class Report:
    """Memory and repeated steps of a training run of :class:`metagrad.Training`.

    Attributes:
        steps: Number of steps.
        states: Maximum number of states that were stored at the same time.
        state_bytes: Bytes of one state: parameters, optimizer and buffers.
        replays: Number of steps that were repeated in reverse passes.
        is_half: True if parameters or autocast are in half precision. In half precision, scores can consist
            of rounding noise.
        growth: Norm of the cotangent of the initial parameters, relative to the cotangent of the final parameters.
            It is the maximum over metrics. None before a reverse pass. Above 1e6 in float32, scores are rounding
            errors.
    """

    steps: int
    states: int
    state_bytes: int
    replays: int = 0
    is_half: bool = False
    growth: float | None = None

    def __str__(self) -> str:
        grown = "" if self.growth is None else f", cotangents grew {self.growth:.2g} times"
        return (
            f"{self.steps} steps, at most {self.states} states of {self.state_bytes / 2**20:.2f} MiB, "
            f"{self.replays} steps repeated{grown}"
        )


class Trajectory:
    """A training run from an initial state, with the stored states for its reverse pass.

    Args:
        step: The step.
        inputs: The inputs of the training.
        leaves: The tensors that the training is a function of.
        wanted: For each tensor, True if it is differentiated.
        params: Initial parameters.
        plan: Which states are stored. None stores the graph of every step.
        offload: Storage of the states: ``"cpu"``, a folder, or None for the device of the model.

    Attributes:
        final: The state after the last step.
        losses: The loss of each step, ``[steps]``.
        report: Memory, and how many steps were repeated.
    """

    def __init__(
        self,
        step: Step,
        inputs: Inputs,
        leaves: Leaves,
        wanted: Leaves,
        params: Params,
        plan: Plan | None,
        offload: str | Path | None = None,
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.leaves = leaves
        self.wanted = wanted
        self.steps = step.stream.steps
        self.plan = plan or Plan(self.steps, max(self.steps, 1))
        self.graphs: dict[int, list[PartGraph]] = {}
        self.settings = Flags(), AutocastState()
        self.versions = [(t, t._version) for own in leaves[1:] for t in own]
        own = {name: p.detach().clone() for name, p in params.items()}
        with torch.no_grad():
            first = State(own, inputs.rule.init(own), step.model.buffers())
        refuse_differences(step.group, f"{CALL}: parameters and weights", [*own.values(), inputs.weights])
        rows = [tensor[:8].to(inputs.weights.device) for tensor in (inputs.weights, *leaves.data)]
        refuse_differences(step.group, f"{CALL}: data", rows)
        self.kept = self._kept_at(offload, first)
        self.had_graphs = plan is None
        self._run(keep_graphs=self.had_graphs)

    def _kept_at(self, offload: str | Path | None, first: State) -> States | FolderStates:
        """Return where states are kept, with the first state. A folder can already hold later states."""
        if isinstance(offload, Path) or offload not in (None, "cpu"):
            return FolderStates(Path(offload), first, self._identity(first))
        kept = States() if offload is None else PinnedStates(next(iter(first.params.values())).device)
        kept[0] = first
        return kept

    def _identity(self, first: State) -> int:
        step, inputs, stream = self.step, self.inputs, self.step.stream
        frozen = [p for p in step.model.module.parameters() if not p.requires_grad]
        tensors = first, inputs.weights, inputs.examples.tensors, frozen, [t for _, t in inputs.places]
        order = stream.seed, stream.rows(0), stream.rows(self.steps - 1), stream.order
        settings = inputs.rule, type(inputs.rule), tuple(self.plan), step.average, step.micro_batch
        return checksum((tensors, order, settings))

    def _run(self, *, keep_graphs: bool) -> None:
        first, wanted, losses = max(self.kept), set(self.plan.kept_first()), self.kept.losses
        state = self.kept[first]
        recorder = Pullback(self.step, self.inputs, self.leaves, self.wanted, 1) if keep_graphs else None
        random = RandomState()
        with self.step.model.training(), phase("forward"):
            if any(self.wanted.flat()):
                refuse_hidden_leaves(self.step, self.inputs, self.leaves, self.kept[0])
            if first:  # states of a folder, which must be of the same model, loss, transform and optimizer
                self.losses, again = torch.stack(losses), self.kept[0]
                for t in range(min(first, 2)):
                    again = self._replay(again, t)
            for t in progress(range(first, self.steps), "training"):
                if t in wanted:
                    self.kept[t] = state
                with phase("inner", t):
                    if recorder is not None:
                        self.graphs[t] = [recorder.record(state, part) for part in self.step.parts(t)]
                    gradients = None if recorder is None else [graph.gradient for graph in self.graphs[t]]
                    state, loss = self.step.take(state, t, self.inputs, gradients)
                losses.append(loss)
        random.restore()
        self.final = state
        self.losses = torch.stack(losses)
        size = sum(t.nbytes for t in dissect(state)[0])
        halves = any(p.dtype in HALF for p in state.params.values())
        is_half = halves or any(enabled for enabled, _ in self.settings[1].kinds.values())
        self.report = Report(self.steps, len(self.kept), size, is_half=is_half)

    def reverse(self, after: StateCotangents, losses: Tensor | None, wanted: Leaves, count: int) -> Leaves:
        """Return the cotangents of the leaves, ``[k, *shape]`` each, or None.

        Args:
            after: Cotangents of the final state, ``[k, *shape]`` each.
            losses: Cotangents of the losses, ``[k, steps]``, or None.
            wanted: For each leaf, True if it is differentiated.
            count: Number of cotangents, k.
        """
        self._refuse_changes()
        refuse_differences(self.step.group, f"{CALL}: metrics", [*after.params, *after.buffers, losses])
        if any(want and not had for want, had in zip(wanted.flat(), self.wanted.flat(), strict=True)):
            self.graphs.clear()  # a leaf is missing
        pull = Pullback(self.step, self.inputs, self.leaves, wanted, count)
        after = after._replace(params=[c if c is None else pull.widened(c) for c in after.params])
        last, random = _norms(after.params), RandomState()
        saved, begin = None, self.steps
        if isinstance(self.kept, FolderStates):
            saved = SavedSweep(self.kept, checksum((after, losses, wanted)))
            begin, after, pull.total = saved.load(begin, after, pull.total)
        reversal = Reversal(self.plan, self.kept, self._replay, begin)
        flags, autocast = self.settings
        with phase("reverse"), flags.restored(), autocast.restored(), self.step.model.training():
            for t, state in progress(reversal, "reverse pass", begin):
                own = None if losses is None else losses[:, t]
                after, loss = pull(state, t, after, own, self.graphs.pop(t, None))
                self._compare(loss, t)
                if saved is not None and t and t % saved.every == 0:
                    saved.save(t, after, pull.total)
            params = pull.through_init(self.kept[0].params, after)
        random.restore()
        if saved is not None:
            saved.states.reverse_path.unlink(missing_ok=True)
        self.report.replays += reversal.replays
        self.report.states = max(self.report.states, reversal.most)
        self.report.growth = _growth(_norms(params), last)
        leaves = zip(pull.collected(params), self.leaves.flat(), wanted.flat(), strict=True)
        return self.leaves.filled(c.to(t.dtype) if want and c is not None else None for c, t, want in leaves)

    def differentiable(self) -> tuple[State, Tensor, Leaves]:
        """Run all steps again in one graph, for derivatives of any order.

        Returns:
            The final state, the losses, and a view of each leaf. Leaves can depend on each other, so derivatives with
            respect to the views are partial derivatives.
        """
        if self.steps > MOST_DIFFERENTIABLE:
            raise RuntimeError(
                f"Training(...): the derivative of a training can be differentiated again (create_graph=True) for at "
                f"most {MOST_DIFFERENTIABLE} steps, got {self.steps}. Its graph would hold every step."
            )
        if self.step.group is not None:
            raise RuntimeError(f"{CALL}: create_graph=True is not supported. Leave group out.")
        views = self.leaves.filled([t.view_as(t) if t.requires_grad else t for t in self.leaves.flat()])
        inputs = with_leaves(self.inputs, self.leaves, views)
        params = dict(zip(self.kept[0].params, views.params, strict=True))
        params = {name: p if p.requires_grad else variable(p) for name, p in params.items()}
        buffers = {name: variable(b) for name, b in self.kept[0].buffers.items()}
        state = State(params, inputs.rule.init(params), buffers)
        losses, random = list[Tensor](), RandomState()
        with (
            self.settings[0].restored(),
            self.settings[1].restored(),
            self.step.model.training(),
            every_order(),
        ):
            pull = Pullback(self.step, self.inputs, self.leaves, self.wanted, 1)
            pull.record(self.kept[0], self.step.parts(0)[0])  # raises if a derivative would be lost
            with placed(inputs.places):
                for t in range(self.steps):
                    state, loss = self.step.take_with_graph(state, t, inputs)
                    losses.append(loss)
        random.restore()
        return state, torch.stack(losses), views

    def states(self) -> Iterator[tuple[int, State]]:
        """Run all steps again. After every step, yield the number of steps so far and the state."""
        state, random = self.kept[0], RandomState()
        for t in progress(range(self.steps), "training again"):
            with self.step.model.training():
                state = self._replay(state, t)
            yield t + 1, state
        random.restore()

    def _replay(self, state: State, t: int) -> State:
        state, loss = self.step.take(state, t, self.inputs)
        self._compare(loss, t)
        return state

    def _compare(self, loss: Tensor, t: int) -> None:
        """Raise ``RuntimeError`` if a repeated step has another loss than the first time."""
        # A gradient with a graph can round differently, as the gradient of a GroupNorm does.
        error = 0.0 if is_deterministic() and not self.had_graphs else RELATIVE_ERROR
        first = self.losses[t]
        if not (
            torch.equal(loss, first) or torch.allclose(loss, first, rtol=error, atol=0.0, equal_nan=True)
        ):
            raise RuntimeError(
                f"Training(...): step {t} had the loss {float(self.losses[t])} and has {float(loss)} when it is "
                "repeated. The data, the model and the loss must not change, and a folder belongs to one training. "
                "The transform and the dataset must use only the global random generators of torch, NumPy and Python."
            )

    def _refuse_changes(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"Training(...): a tensor of shape {tuple(tensor.shape)} that the training reads was modified in "
                    "place after the forward pass. Call backward before an optimizer writes it, or train again."
                )


class SavedSweep:
    """Progress of a backward pass, saved in a folder. The pass can resume after an interruption.

    Args:
        states: The folder.
        identity: Number that identifies the initial cotangents and the differentiated leaves.
    """

    every = 50
    """Number of steps between two saves."""

    def __init__(self, states: FolderStates, identity: int) -> None:
        self.states = states
        self.identity = identity

    def save(self, t: int, after: StateCotangents, total: Leaves) -> None:
        """Save the cotangents of the state before step ``t`` and of the leaves."""
        content = {"step": t, "after": list(after), "total": list(total), "sweep": self.identity}
        self.states.write(self.states.reverse_path, content)

    def load(self, begin: int, after: StateCotangents, total: Leaves) -> tuple[int, StateCotangents, Leaves]:
        """Return the saved values of the same backward pass, or the arguments."""
        if not self.states.reverse_path.exists():
            return begin, after, total
        content = self.states.read(self.states.reverse_path)
        if content["sweep"] != self.identity:
            return begin, after, total
        begin = content["step"]
        for t in [t for t in self.states if t >= begin and t]:
            del self.states[t]
        device = self.states.devices[0]
        after, total = (tree_map_only(Tensor, lambda x: x.to(device), content[k]) for k in ("after", "total"))
        return begin, StateCotangents(*after), Leaves(*total)


def _norms(cotangents: Cotangents) -> Tensor:
    """Return the norm over all parameters of each of k cotangents, ``[k]``."""
    squares = [c.double().unsqueeze(-1).flatten(1).square().sum(1) for c in cotangents if c is not None]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(1)


def _growth(first: Tensor, last: Tensor) -> float:
    """Return the maximum ratio of norms."""
    return float((first / last.clamp(min=1e-300)).max())
