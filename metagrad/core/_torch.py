"""The private names of torch that the library depends on, each with its purpose.

The end of the file gives types to public functions that torch leaves untyped.

No other module under ``metagrad/`` uses a private name of torch. ``tests/test_torch_names.py`` checks this, bounds
the number of names, and lists the names that the installed torch lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
"""The pytree module that torch.func uses. Torch has no public pytree module."""

# torch.func

functorch_is_active = _C._are_functorch_transforms_active
"""Return whether a torch.func transform is active. Recomputation is not possible inside a transform."""

is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is the wrapper of a transform. A wrapper is valid only while its transform is active."""

is_batched = _C._functorch.is_batchedtensor
is_legacy_batched = _C._functorch.is_legacy_batchedtensor
"""Return whether ``vmap`` or ``is_grads_batched`` added a dimension to a tensor."""

get_unwrapped = functools.partial(torch.func.debug_unwrap, recurse=False)
"""Return the tensor inside a wrapper, which belongs to the next outer transform."""

unwrap_dead_wrappers = torch._functorch.utils.unwrap_dead_wrappers
"""Remove the wrappers of finished transforms from arguments. A Function needs arguments without such wrappers."""

get_interpreter_stack = _C._functorch.get_interpreter_stack
TransformType = _C._functorch.TransformType
"""The active transforms, outermost first, and the enum of their kinds."""

functorch_level_of = _C._functorch.maybe_get_level
"""Return the level of the transform that a tensor belongs to."""

# Modes

without_torch_function = _C.DisableTorchFunction
"""Context manager in which neither function modes nor subclasses handle torch functions."""

without_torch_function_of_subclasses = _C.DisableTorchFunctionSubclass
"""Context manager in which function modes handle torch functions, but subclasses do not."""

with_torch_function = _C._EnableTorchFunction
has_torch_function_of_subclasses = _C._is_torch_function_enabled
"""Context manager in which subclasses handle torch functions, and a function that returns whether they do."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Base class of modes that see every operation below autograd."""

has_dispatch_mode = torch.utils._python_dispatch.is_in_torch_dispatch_mode
"""Return whether such a mode is active. Torch then computes some derivatives by other operations."""

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""The class of tensors without memory, which torch.compile uses during tracing."""

included_dispatch_keys = _C._dispatch_tls_local_include_set
excluded_dispatch_keys = _C._dispatch_tls_local_exclude_set
force_dispatch_keys = _C._ForceDispatchKeyGuard
DispatchKey = _C.DispatchKey
"""The dispatch keys. Setting them selects the same kernel for zero tensors with and without a mode."""

# The autograd graph

saved_tensors_hooks_enabled = _C._autograd._saved_tensors_hooks_is_enabled
innermost_saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
"""The state of the saved-tensor hooks, which choose the tensors that a graph stores."""

forward_mode = forward_ad._set_fwd_grad_enabled
"""Context manager that enables forward mode in the ``jvp`` of a Function."""


def forward_level() -> int:
    """Return the active level of forward mode, or -1 if there is none."""
    return forward_ad._current_level


current_graph_task = _C._current_graph_task_id
"""Return the number of the running backward pass, or -1 outside of backward passes."""


# Kinds


def averaging_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """Return the running DDP wrapper if it will average the next gradients, or None."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    return wrapper if wrapper is not None and wrapper.require_backward_grad_sync else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that run in addition to its ``forward``."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
"""The base classes of batch and instance norms for every number of dimensions."""

# Types

Function: Any = torch.autograd.Function
"""The base class of Functions, whose static methods may have any signature."""

if TYPE_CHECKING:
    import numpy as np

    class Module(nn.Module):
        """A module that overrides the methods for moving and loading parameters."""

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
    Module = nn.Module
    TensorSubclass = Tensor


class Context(Protocol):
    """The ``ctx`` argument of the static methods of a Function. Subclasses add the attributes of a Function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    save_for_backward: Callable[..., None]
    save_for_forward: Callable[..., None]
    mark_non_differentiable: Callable[..., None]
    set_materialize_grads: Callable[[bool], None]


class VmapInfo(Protocol):
    """The ``info`` argument of the ``vmap`` method of a Function."""

    batch_size: int


linalg: Any = torch.linalg
from_numpy: Callable[[np.ndarray[Any, Any]], Tensor] = _torch.from_numpy
at_least_2d: Callable[[Tensor], Tensor] = _torch.atleast_2d
broadcast_shapes: Callable[..., torch.Size] = _torch.broadcast_shapes
split: Callable[..., tuple[Tensor, ...]] = _torch.split
sparse_coo_tensor: Callable[..., Tensor] = _torch.sparse_coo_tensor
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
has_torch_function: Callable[[Tensor], bool] = torch.overrides.has_torch_function_unary
add_safe_globals: Callable[[list[Any]], None] = _torch.serialization.add_safe_globals
gradients_or_none: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.grad
"""``torch.autograd.grad`` with ``allow_unused=True``. It returns None for unused inputs."""


def distinct_and_places(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values in ascending order, and the index of each value among them."""
    return _torch.unique(values, return_inverse=True)


def backward(tensor: Tensor, *args: Any, **options: Any) -> None:
    """Call ``tensor.backward``, which optimizers may override."""
    tensor.backward(*args, **options)


def to_list(tensor: Tensor) -> list[Any]:
    """Return a 1-D tensor as a list of numbers, or an N-D tensor as nested lists."""
    return tensor.tolist()


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of each module in a model. The model is first and has an empty path."""
    return model.named_modules()
