"""The private names of torch's compiler that the library depends on, as ``_torch.py`` has those of the rest.

They are imported where they are used, so that ``import metagrad`` does not load the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
import unittest.mock
from collections.abc import Callable, Container, Generator
from typing import Any

import torch
from torch import fx

from metagrad.core import _torch


def inductor_backend(
    mode: str | None,
    dynamic: bool | None,
    kernels: Callable[[Any, int, Any], Any],
    options: Any,
    decompositions: dict[Any, Callable[..., Any]],
) -> Any:
    """Return what torch.compile makes of settings of inductor.

    Args:
        mode: Of torch.compile.
        dynamic: Likewise.
        kernels: Returns what compiles kernels in C++, from inductor's class for it, the number of its threads, and
            its class of results that are waited for.
        options: Of torch.compile.
        decompositions: Of ours, beside inductor's own.
    """
    settings = torch._TorchCompileInductorWrapper(mode, options, dynamic)  # type: ignore[attr-defined]

    def compiled(module: fx.GraphModule, examples: list[Any]) -> Any:
        from torch._inductor import async_compile, codecache
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        inductors_wait = async_compile.AsyncCompile.wait

        def wait(compiling: Any, names: dict[str, Any]) -> None:  # inductor does not, for a single thread
            results = {k: v.result() for k, v in names.items() if isinstance(v, codecache.LambdaFuture)}
            names.update(results)
            inductors_wait(compiling, names)

        @contextlib.contextmanager
        def with_kernels() -> Generator[None]:
            files = codecache.CppPythonBindingsCodeCache, async_compile.get_compile_threads()
            ours = kernels(*files, codecache.LambdaFuture)
            with (
                unittest.mock.patch.object(async_compile, "CppPythonBindingsCodeCache", ours),
                unittest.mock.patch.object(async_compile.AsyncCompile, "wait", wait),
            ):
                yield

        def compile_inner(*args: Any, **kwargs: Any) -> Any:  # may be called later, for the backward pass
            with with_kernels():
                return compile_fx_inner(*args, **kwargs)

        # As an argument, a table would keep graphs out of inductor's caches.
        with unittest.mock.patch.dict(select_decomp_table(), decompositions), with_kernels():
            return compile_fx(module, examples, inner_compile=compile_inner, config_patches=settings.config)

    return compiled


@functools.cache
def prepare_compiler() -> None:
    """Let inductor get ready to compile C++ in the background, while a call is traced.

    It finds out which instructions the compiler can use and precompiles headers, once for a cache, which takes ten
    seconds; an empty kernel needs both. Where it compiles in one thread only, there is no time to be gained.
    """
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if get_compile_threads() == 1:
        return

    def prepare() -> None:
        with contextlib.suppress(Exception):  # it is raised again where it matters
            CppPythonBindingsCodeCache.load_pybinding((), 'extern "C" void kernel() {}')

    threading.Thread(target=prepare, name="metagrad: prepare_compiler", daemon=True).start()


def other_backend(*settings: Any) -> Any:
    """Return what torch.compile makes of another backend with its mode, its options and ``dynamic``.

    Its graphs may open transforms of torch.func, which an error inside of them leaves open (torch 2.13); that closes
    them.
    """
    backend = torch._TorchCompileWrapper(*settings)  # type: ignore[attr-defined]

    def compiled(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graph = backend(module, examples)

        def call(*inputs: Any) -> Any:
            depth = _torch.functorch_depth()
            hooks_were_allowed = _torch.saved_tensors_hooks_enabled()
            try:
                return graph(*inputs)
            except BaseException:
                _torch.leave_functorch(depth)
                if hooks_were_allowed:
                    _torch.enable_saved_tensors_hooks()
                raise

        return call

    return compiled


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Run a function, and return what it computed as a graph of operations that write into nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    pure = torch.func.functionalize(function, remove="mutations")
    module = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    module.graph.eliminate_dead_code()
    return module


def graph_pass(change: Callable[[fx.Graph], None], *files: str) -> Any:
    """Return a pass of ours over the graphs that inductor makes; its cache knows the pass by the files."""
    import torch._inductor.custom_graph_pass as passes

    class GraphPass(passes.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> object:
            return passes.get_hash_for_files(files)

    return GraphPass()


def size_inputs(module: fx.GraphModule) -> dict[int, tuple[int, int]]:
    """Return which inputs of a graph of Dynamo's are sizes of others: their places, those of the others, the axes."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    try:
        sources = [node.meta["grapharg"].source for node in nodes]
        places = {source.name: place for place, source in enumerate(sources)}
        return {
            place: (places[source.base.name], source.idx)
            for place, (node, source) in enumerate(zip(nodes, sources, strict=True))
            if isinstance(node.meta["example_value"], torch.SymInt)
            and source.prop.name == "SIZE"
            and source.base.name in places
        }
    except (AttributeError, KeyError):
        return {}


def changes_objects() -> bool:
    """Say whether the function that is being compiled may also change objects of Python's, which its graph does not.

    Only Dynamo's record of side effects says so; where it is kept in another way than in torch 2.13, it may.
    """
    import torch._dynamo.symbolic_convert
    import torch._dynamo.variables.base

    try:
        effects = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.side_effects
        changed = [v for v in effects._get_modified_vars() if not _is_as_before(v)]
        kinds = [variable.mutation_type for variable in changed]
        hooks = effects.tensor_hooks
        mutations = torch._dynamo.variables.base
        changes = (mutations.AttributeMutationExisting, mutations.ValueMutationExisting)
    except AttributeError:
        return True
    return bool(hooks) or any(isinstance(kind, changes) for kind in kinds)


def _is_as_before(variable: Any) -> bool:
    """Say whether what was written leaves an object as it was found.

    That is the stack of function modes, if it is empty, and a dict whose values were put back.
    """
    kind = type(variable).__name__
    if kind == "TorchFunctionModeStackVariable":
        return not variable.symbolic_stack
    is_dict = kind == "ConstDictVariable" and len(variable.items) == len(variable.original_items)
    return is_dict and not variable.has_new_items()


def passing_code(
    code: types.CodeType, values: dict[str, object], among: Container[object] | None = None
) -> object | None:
    """Return the compiled code of a function whose guards pass for these arguments, as torch.compile finds it.

    Args:
        code: Of the function.
        values: The arguments by name.
        among: The compiled code to look at; None looks at all.

    Returns:
        The code; None where there is none, where torch.compile is told not to run it (``torch.compiler.set_stance``),
        or where its cache is kept in another way than in torch 2.13.
    """
    import torch._dynamo.eval_frame

    try:
        if torch._dynamo.eval_frame._stance.stance != "default":
            return None
        entries = (entry for entry in _entries(code) if among is None or entry.code in among)
        return next((entry.code for entry in entries if entry.guard_manager.check(values)), None)
    except AttributeError:
        return None


def failing_guard(code: types.CodeType, compiled: object, values: dict[str, object]) -> str | None:
    """Return the guard of compiled code that these arguments fail, unless it is of a setting or of a parameter.

    None where all pass, where the code is gone, or where torch.compile keeps it in another way than in torch 2.13.
    """
    try:
        guards = next((entry.guard_manager for entry in _entries(code) if entry.code is compiled), None)
        if guards is None or guards.check(values):
            return None
        parts = [part.partition("  #")[0].strip() for part in guards.check_verbose(values).verbose_code_parts]
    except AttributeError:
        return None
    return next((part for part in parts if not _OF_SETTING_OR_PARAMETER.search(part)), None)


_OF_SETTING_OR_PARAMETER = re.compile(r"^GLOBAL_STATE|^___|\._parameters\[")


def _entries(code: types.CodeType) -> list[Any]:
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)  # type: ignore[attr-defined]
