"""The derivative of a recorded call whose signature was seen before, without running the call again.

The first such derivative is computed by autograd, and its operations are noted; later ones are these operations on
other tensors. That the derivative is the one of this call is known from the signature, of which the call itself gave
each part when it ran. That its operands are as they were is known from one result, which is computed along with the
derivative, and from the fingerprints of the operands that it does not depend on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.recompute.captured_tensors import unobserved
from metagrad.autograd.recompute.fingerprint import Fingerprint
from metagrad.autograd.recompute.program import Program, Programs, Tracer
from metagrad.autograd.recompute.replay import Call
from metagrad.autograd.recompute.signature import kinds
from metagrad.core import _torch
from metagrad.core.capture import restored
from metagrad.core.tree import fresh_leaf


def pulled(
    call: Call,
    programs: Programs,
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    present: Sequence[int],
    cotangents: Sequence[Tensor],
) -> list[Tensor | None] | None:
    """Compute the vector-Jacobian product of a recorded call by a program; None if there is none.

    Args:
        call: The call.
        programs: Those of its signature; one is added where it is missing.
        tensors: The operands of the call.
        wanted: Which of these to differentiate with respect to.
        present: Which results the cotangents belong to.
        cotangents: Of these results.
    """
    if _torch.functorch_is_active() or torch.is_anomaly_enabled():
        return None
    constants = call.reads.constants_again(call.name)
    inputs = [*tensors, *constants, *cotangents]
    what = kinds(inputs)
    if what is None:
        return None
    key = (*wanted, -1, *present), what
    if key not in programs.known:
        grads, program = _traced(call, tensors, constants, wanted, present, cotangents)
        programs.add(key, program)
        return grads
    program = programs.known[key]
    operands = [*tensors, *constants]
    if program is None or not all(i in call.watched for i in program.unseen if i < len(operands)):
        return None
    with unobserved(), restored(call.flags, call.autocast):
        call.verify_operands(operands)
        grads, results = program.run(*inputs)
        call.verify_results(results, exact=False)  # some are computed by other operations than before
    return grads


def _traced(
    call: Call,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
    wanted: Sequence[int],
    present: Sequence[int],
    cotangents: Sequence[Tensor],
) -> tuple[list[Tensor | None], Program | None]:
    """Compute a vector-Jacobian product by autograd, and note the program."""
    with unobserved():  # distinct tensors, also where one is handed over twice
        entered, given = list(map(fresh_leaf, tensors)), [c.detach() for c in cotangents]
    with Tracer([*entered, *constants, *given]) as tracer:
        with torch.enable_grad():
            outputs = call.run(entered)
        sources, targets = [outputs[i] for i in present], [entered[i] for i in wanted]
        grads = graph_vjp(sources, targets, given)
    with unobserved():
        call.verify(entered, outputs)
        program = tracer.program(grads, [outputs[i] for i in call.compared])
        del entered, outputs, targets, sources
        again = None if program is None else _repeated(program, [*tensors, *constants, *given], grads)
        return (grads, None) if again is None else (again, program)


def _repeated(
    program: Program, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None] | None:
    """Return what a program returns, in the memory order of its own; None unless autograd returned the same.

    Some operations cannot be called from Python with the arguments that C++ gave them.
    """
    with torch.no_grad():
        try:
            again = program.run(*inputs)[0]
        except (RuntimeError, TypeError):
            return None
    return again if Fingerprint(grads).difference(again, exact=False) is None else None
