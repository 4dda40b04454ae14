"""The private names of torch's compiler that the library depends on, as ``_torch.py`` has those of the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.symbolic_convert
import torch._dynamo.variables.base
import torch._inductor.custom_graph_pass

_torch: Any = torch

CustomGraphPass = torch._inductor.custom_graph_pass.CustomGraphPass
hash_of_files = torch._inductor.custom_graph_pass.get_hash_for_files
"""A pass of ours over the graphs that inductor makes, and what its cache knows the pass by."""

InductorBackend = _torch._TorchCompileInductorWrapper
OtherBackend = _torch._TorchCompileWrapper
"""What torch.compile makes of the name and the options of a backend."""


def changes_objects() -> bool:
    """Say whether the function that is being compiled may also change objects of Python's, which its graph does not.

    Only Dynamo's record of side effects says so; where it is kept in another way than in torch 2.13, it may.
    """
    try:
        effects = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.side_effects
        kinds = [variable.mutation_type for variable in effects._get_modified_vars()]
        hooks = effects.tensor_hooks
        mutations = torch._dynamo.variables.base
        changes = (mutations.AttributeMutationExisting, mutations.ValueMutationExisting)
    except AttributeError:
        return True
    return bool(hooks) or any(isinstance(kind, changes) for kind in kinds)
