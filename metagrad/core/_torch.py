"""The private names of torch that the library depends on, under names of their own, each with its reason.

And, at the end, what torch leaves without types, under the types that it has.

No other module under ``metagrad/`` uses a private name of torch. ``tests/test_torch_names.py`` holds them to that,
bounds the number of names, and says which of them an installed torch lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch._functorch.utils
import torch._subclasses.fake_tensor
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor, nn
from torch.autograd import forward_ad

_C: Any = torch._C
_torch: Any = torch

# Trees

pytree = torch.utils._pytree
"""Nested dicts, lists, tuples and named tuples, as torch.func takes them. Torch has no public module for them."""

# torch.func

functorch_is_active = _C._are_functorch_transforms_active
"""Whether a transform of torch.func is active, inside which nothing can be recomputed."""

is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is the wrapper of a transform, valid only while that is active."""

is_batched = _C._functorch.is_batchedtensor
is_legacy_batched = _C._functorch.is_legacy_batchedtensor
"""Whether vmap, or ``is_grads_batched``, added a dimension to a tensor."""

get_unwrapped = functools.partial(torch.func.debug_unwrap, recurse=False)
"""The tensor that a wrapper wraps: the same one transform further out."""

unwrap_dead_wrappers = torch._functorch.utils.unwrap_dead_wrappers
"""Arguments without the wrappers of transforms that have ended; a Function is applied to nothing else."""

get_interpreter_stack = _C._functorch.get_interpreter_stack
TransformType = _C._functorch.TransformType
"""The active transforms, the outermost first, and their kinds: whether one of them differentiates."""

functorch_level = _C._functorch.maybe_current_level
functorch_level_of = _C._functorch.maybe_get_level
"""The number of the innermost transform, and of the one that a tensor belongs to."""

# Modes

without_torch_function = _C.DisableTorchFunction
"""A context in which neither function modes nor subclasses see the torch functions that are called."""

without_torch_function_of_subclasses = _C.DisableTorchFunctionSubclass
"""A context in which subclasses do not see them, and function modes do."""

with_torch_function = _C._EnableTorchFunction
has_torch_function_of_subclasses = _C._is_torch_function_enabled
"""A context in which subclasses see the torch functions that are called, and whether they do."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A mode that sees every operation below autograd."""


is_wrapper_subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor wraps other tensors, which have the storages."""

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""A tensor without memory, as torch.compile makes them while it traces."""

included_dispatch_keys = _C._dispatch_tls_local_include_set
excluded_dispatch_keys = _C._dispatch_tls_local_exclude_set
force_dispatch_keys = _C._ForceDispatchKeyGuard
DispatchKey = _C.DispatchKey
"""The dispatch keys, set so that an operation on zero tensors finds the same kernel below a mode as without one."""

# The autograd graph

saved_tensors_hooks_enabled = _C._autograd._saved_tensors_hooks_is_enabled
innermost_saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
"""The state of the saved-tensor hooks, which decide what a graph keeps."""

forward_mode = forward_ad._set_fwd_grad_enabled
"""A context that switches forward mode on in the ``jvp`` of a Function."""


def forward_level() -> int:
    """Return the level of forward mode that is open, -1 if there is none."""
    return forward_ad._current_level


current_graph_task = _C._current_graph_task_id
"""The number of the backward pass that is running, -1 outside of all: whether a module runs in one."""


# Kinds


def averaging_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """Return the wrapper whose forward runs, if it will average the gradients of the next backward pass."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    return wrapper if wrapper is not None and wrapper.require_backward_grad_sync else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own, so that it is not only its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
"""The base classes of norms of every number of dimensions, also of those that users derive from them."""

# Types

if TYPE_CHECKING:
    import numpy as np

    class Function(torch.autograd.Function):
        """A Function whose rules take what each is written for."""

        forward: ClassVar[Callable[..., Any]]
        setup_context: ClassVar[Callable[..., Any]]
        backward: ClassVar[Callable[..., Any]]
        jvp: ClassVar[Callable[..., Any]]
        vmap: ClassVar[Callable[..., Any]]
        apply: ClassVar[Callable[..., Any]]

    class Module(nn.Module):
        """A module that overrides how it is moved and loaded."""

        _apply: Callable[..., Any]
        _load_from_state_dict: Callable[..., Any]

    class TensorSubclass(Tensor):
        """A tensor that overrides methods of torch."""

        __eq__: ClassVar[Any]
        __ne__: ClassVar[Any]
        __hash__: ClassVar[Any]
        __torch_function__: Any
        coalesce: Any
        to_dense: Any
        values: Any

else:
    Function = torch.autograd.Function
    Module = nn.Module
    TensorSubclass = Tensor


class Context(Protocol):
    """What the rules of a Function share; a rule names in a subclass what it puts there itself."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    save_for_backward: Callable[..., None]
    save_for_forward: Callable[..., None]
    mark_non_differentiable: Callable[..., None]
    set_materialize_grads: Callable[[bool], None]


class VmapInfo(Protocol):
    """What torch tells the ``vmap`` of a Function."""

    batch_size: int


linalg: Any = torch.linalg
from_numpy: Callable[[np.ndarray[Any, Any]], Tensor] = _torch.from_numpy
at_least_1d: Callable[[Tensor], Tensor] = _torch.atleast_1d
at_least_2d: Callable[[Tensor], Tensor] = _torch.atleast_2d
broadcast_shapes: Callable[..., torch.Size] = _torch.broadcast_shapes
sparse_coo_tensor: Callable[..., Tensor] = _torch.sparse_coo_tensor
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
has_torch_function: Callable[[Tensor], bool] = torch.overrides.has_torch_function_unary
add_safe_globals: Callable[[list[Any]], None] = _torch.serialization.add_safe_globals
gradients_or_none: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.grad
"""``torch.autograd.grad`` with ``allow_unused=True``: None for what the outputs do not depend on."""


def distinct_and_places(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values, ascending, and where among them each is."""
    return _torch.unique(values, return_inverse=True)


def backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Call ``tensor.backward``, which optimizers redirect."""
    tensor.backward(gradient, retain_graph, create_graph, inputs=inputs)


def to_list(tensor: Tensor) -> list[Any]:
    """Return a tensor of one dimension as a list of numbers, of more as nested lists."""
    return tensor.tolist()


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model and their paths, itself first, under the empty one."""
    return model.named_modules()
