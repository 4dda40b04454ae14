"""The same meta-gradient by JAX: the models in its numpy, steps by `lax.scan`, tasks by `vmap`, all under `jit`.

Convolutional tasks run sequentially through a program with unrolled steps. On a CPU, XLA takes three to ten times as
long for a convolution that is vmapped over weights or inside of a `scan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.benchmarks.maml.workloads import Workload

Arrays = dict[str, Any]
"""JAX arrays by the names of the torch parameters."""


def compiled(work: Workload, *, checkpoint: bool) -> tuple[Callable[[], list[Any]], int]:
    """Compile the meta-gradient, and return it with its bytes at run time, as the compiler reports them.

    Args:
        work: The weights and the batch are handed over as NumPy arrays.
        checkpoint: Recompute each step in the reverse sweep.
    """
    import jax  # type: ignore[reportMissingImports]

    weights = {name: p.detach().cpu().numpy() for name, p in work.params.items()}
    jax.config.update("jax_enable_x64", next(iter(weights.values())).dtype == "float64")
    params = {name: jax.numpy.asarray(value) for name, value in weights.items()}
    batch = tuple(jax.numpy.asarray(tensor.cpu().numpy()) for part in work.batch for tensor in part)
    parts = _one_by_one(batch) if _is_convolutional(work) else [batch]
    objective = jax.grad(_objective(work, checkpoint=checkpoint))
    program = jax.jit(objective).lower(params, parts[0]).compile()
    memory = program.memory_analysis()

    def run() -> list[Any]:
        grads = [program(params, part) for part in parts]
        return jax.block_until_ready([sum(g[name] for g in grads) / len(parts) for name in weights])

    return run, memory.temp_size_in_bytes + len(parts) * memory.output_size_in_bytes


def _is_convolutional(work: Workload) -> bool:
    return isinstance(work.model, mg.models.Conv4)


def _one_by_one(batch: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [tuple(array[i : i + 1] for array in batch) for i in range(len(batch[0]))]


def _objective(work: Workload, *, checkpoint: bool) -> Callable[[Arrays, tuple], Any]:
    import jax  # type: ignore[reportMissingImports]

    forward, loss_fn = _forward(work.model), _losses()[work.loss_fn]

    def loss_of(params: Arrays, x: Any, y: Any) -> Any:
        return loss_fn(forward(params, x), y)

    def step(params: Arrays, x: Any, y: Any) -> Arrays:
        grads = jax.grad(loss_of)(params, x, y)
        return {name: p - work.lr * grads[name] for name, p in params.items()}

    taken = jax.checkpoint(step) if checkpoint else step

    def task(params: Arrays, x: Any, y: Any, query_x: Any, query_y: Any) -> Any:
        unroll = work.steps if _is_convolutional(work) else 1
        fast, _ = jax.lax.scan(lambda p, _: (taken(p, x, y), None), params, length=work.steps, unroll=unroll)
        return loss_of(fast, query_x, query_y)

    if _is_convolutional(work):
        return lambda params, batch: task(params, *(array[0] for array in batch))
    return lambda params, batch: jax.vmap(task, (None, 0, 0, 0, 0))(params, *batch).mean()


def _losses() -> dict[Callable, Callable]:
    import jax  # type: ignore[reportMissingImports]
    import jax.numpy as jnp  # type: ignore[reportMissingImports]

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    return {F.mse_loss: lambda found, wanted: ((found - wanted) ** 2).mean(), F.cross_entropy: cross_entropy}


def _forward(model: torch.nn.Module) -> Callable[[Arrays, Any], Any]:
    return _conv4 if isinstance(model, mg.models.Conv4) else _mlp


def _linear(params: Arrays, name: str, x: Any) -> Any:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _mlp(params: Arrays, x: Any) -> Any:
    import jax  # type: ignore[reportMissingImports]

    first, *rest = [name.removesuffix(".weight") for name in params if name.endswith(".weight")]
    x = _linear(params, first, x)
    for name in rest:
        x = _linear(params, name, jax.nn.relu(x))
    return x


def _conv4(params: Arrays, x: Any) -> Any:
    import jax  # type: ignore[reportMissingImports]

    for block in range(4):
        convolution, norm = f"blocks.{block}.0", f"blocks.{block}.1"
        x = jax.lax.conv_general_dilated(x, params[f"{convolution}.weight"], (1, 1), "SAME")
        x = x + params[f"{convolution}.bias"][:, None, None]
        centered = x - x.mean((0, 2, 3), keepdims=True)
        x = centered / jax.numpy.sqrt((centered**2).mean((0, 2, 3), keepdims=True) + 1e-5)
        x = x * params[f"{norm}.weight"][:, None, None] + params[f"{norm}.bias"][:, None, None]
        windows = (1, 1, 2, 2)
        x = jax.lax.reduce_window(jax.nn.relu(x), -math.inf, jax.lax.max, windows, windows, "VALID")
    return _linear(params, "head", x.reshape(len(x), -1))
