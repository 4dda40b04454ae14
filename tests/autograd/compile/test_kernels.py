"""Kernels in C++ that share files: each is still what it was."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_inductor_cache

from metagrad.autograd.compile import kernels
from metagrad.autograd.compile.backend import Backend
from metagrad.autograd.compile.kernels import divided, one_file, sharing_files


@pytest.mark.parametrize(
    ("count", "most", "files"), [(1, 8, 1), (7, 8, 1), (9, 8, 2), (36, 2, 2), (36, 64, 9)]
)
def test_every_source_is_in_one_file(count, most, files):
    sources = [f"source {k}" for k in range(count)]
    groups = divided(sources, most)
    assert len(groups) == files
    assert sorted(source for group in groups for source in group) == sorted(sources)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_headers_come_before_the_modules_and_once():
    module = '#include <a.h>\nextern "C" void kernel() {}\n    #include <b.h>\nPyInit_kernel'
    lines = one_file([module, module.replace("b.h", "c.h")]).splitlines()
    assert [line.strip() for line in lines[:3]] == ["#include <a.h>", "#include <b.h>", "#include <c.h>"]
    assert not any("#include" in line for line in lines[3:])


def test_modules_of_two_files_have_two_names(monkeypatch):
    """Python makes one module of all that are loaded again by one name: a graph got the kernels of another file."""

    class Cache:
        @classmethod
        def load_async(cls, source, *args, **settings):
            spec = SimpleNamespace(name=f"key{hash(source)}.kernel")
            return lambda: SimpleNamespace(__spec__=spec, __file__="file")

    imported = []
    monkeypatch.setattr(kernels, "_extension", lambda name, file: imported.append(name))
    sharing = sharing_files(Cache, 2, lambda load: load)
    modules = [sharing.load_async(f"source {k}") for k in range(8)]
    modules[0]()
    assert len(imported) == len(set(imported)) == 6
    assert {name.rpartition(".")[2] for name in imported} == {"kernel_1", "kernel_2", "kernel_3"}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_of_both_passes_share_files(threads):
    generator = torch.Generator().manual_seed(0)
    x, *weights = torch.randn(13, 6, 6, generator=generator, dtype=torch.float64)
    weights = [weight.requires_grad_() for weight in weights]

    def slopes(function):
        return torch.autograd.grad(function(x), weights)

    def loss(x):
        for place, weight in enumerate(weights):  # a kernel of its own for each
            x = (x @ weight).sub(place).tanh()
        return x.sum()

    with (
        fresh_inductor_cache(),
        torch._inductor.config.patch(compile_threads=threads),
        mock.patch.object(
            CppPythonBindingsCodeCache, "load_async", wraps=CppPythonBindingsCodeCache.load_async
        ) as load,
    ):
        found = slopes(torch.compile(loss, backend=Backend()))
        torch._dynamo.reset()
        again = slopes(torch.compile(loss, backend=Backend()))  # the same files, from the cache
    torch.testing.assert_close(found, slopes(loss), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    counts = [call.args[0].count('extern "C"') for call in load.call_args_list]
    assert sum(counts) > 12
    assert len({call.args[0] for call in load.call_args_list}) <= 1 + 2 * threads  # an empty one; each pass
