"""Sparse matrices in files: plain arrays, checked before they are read, from which nothing can be executed."""

from __future__ import annotations

import math
import os
import secrets
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch

from metagrad.core._torch import from_numpy
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.entries import as_sparse
from metagrad.sparse.pattern import Pattern

FORMAT = "metagrad.sparse"
VERSION = 1
ARRAYS = ("format", "version", "shape", "row", "col", "values", "dtype")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

_ZIP_START, _PICKLE_START = b"PK\x03\x04", b"\x80"
_NPY_VERSION = (1, 0)


def save(a: SparseTensor | Parameter, file: str | os.PathLike[str]) -> None:
    """Write a matrix to a file, which is there as a whole or not at all.

    The file is NumPy's npz, whatever its name: the ``shape`` of the pattern, ``row``, ``col`` and ``values``, with
    the name of the format and its version. bfloat16, which NumPy lacks, is stored as int16. The tape is not kept.

    Args:
        a: The matrix, on any device.
        file: Its path; a file that is there is replaced.

    Raises:
        TypeError: ``a`` is not a SparseTensor, or neither float64, float32, float16 nor bfloat16.
        OSError: The file cannot be written.

    Example:
        >>> import os, tempfile
        >>> a = metagrad.sparse.SparseTensor.from_dense(torch.eye(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     metagrad.sparse.save(a, os.path.join(folder, "a.npz"))
        ...     metagrad.sparse.load(os.path.join(folder, "a.npz"))
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([1., 1.]))
    """
    arrays = _as_arrays(as_sparse("save(a, file)", "a", a))
    with _replacing(Path(file)) as stream, zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, version=_NPY_VERSION, allow_pickle=False)


def load(file: str | os.PathLike[str]) -> SparseTensor:
    """Read a matrix that :func:`save` wrote, to the CPU.

    Any other file is refused by its first bytes, by the names in it and by its format, before its contents are read.
    Nothing is unpickled or unpacked, and indices are checked as those of every :class:`Pattern`.

    Args:
        file: Its path.

    Returns:
        The matrix; its values do not require grad.

    Raises:
        ValueError: The file is not one of :func:`save`, is of another version, or is damaged.
        OSError: The file cannot be read.

    Example:
        >>> import os, tempfile
        >>> a = metagrad.sparse.SparseTensor.from_dense(torch.eye(2, dtype=torch.bfloat16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     metagrad.sparse.save(a, os.path.join(folder, "a.npz"))
        ...     metagrad.sparse.load(os.path.join(folder, "a.npz")).dtype
        torch.bfloat16
    """
    path = Path(file)
    _check_start(path)
    with _damage_of(path):
        archive = zipfile.ZipFile(path)
    with archive:
        _check_names(path, archive)
        _check_format(path, archive)
        arrays = {name: _read(path, archive, name) for name in ARRAYS}
    with _damage_of(path):
        return _as_matrix(arrays)


def _as_arrays(a: SparseTensor) -> dict[str, np.ndarray]:
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(
            f"save(a, file): values must be one of {', '.join(DTYPES)}, got {a.dtype}. Use a.float()."
        )
    values = a.values.detach().cpu()
    numbers = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    return {
        "format": np.array(FORMAT),
        "version": np.array(VERSION),
        "shape": np.array(a.pattern.shape, dtype=np.int64),
        "row": a.pattern.row.cpu().numpy(),
        "col": a.pattern.col.cpu().numpy(),
        "values": numbers.numpy(),
        "dtype": np.array(dtype),
    }


def _as_matrix(arrays: dict[str, np.ndarray]) -> SparseTensor:
    dtype = DTYPES.get(str(arrays["dtype"]))
    values = from_numpy(arrays["values"])
    if values.dtype != (torch.int16 if dtype == torch.bfloat16 else dtype):
        raise ValueError(f"its values are {values.dtype} and are said to be {arrays['dtype']}.")
    pattern = Pattern(from_numpy(arrays["row"]), from_numpy(arrays["col"]), arrays["shape"].tolist())
    return SparseTensor(pattern, values.view(torch.bfloat16) if dtype == torch.bfloat16 else values)


def _check_start(path: Path) -> None:
    with open(path, "rb") as stream:
        start = stream.read(len(_ZIP_START))
    if start != _ZIP_START:
        if not start:
            what = "it is empty"
        elif start.startswith(_PICKLE_START):
            what = "it looks like a pickle, which can execute anything as it is read"
        else:
            what = f"it starts with {start!r}"
        raise _foreign(path, what)


def _check_names(path: Path, archive: zipfile.ZipFile) -> None:
    names = sorted(archive.namelist())
    if any(name.endswith("data.pkl") for name in names):
        raise _foreign(
            path, "it holds a pickle, as torch.save writes, which can execute anything as it is read"
        )
    if names != sorted(f"{name}.npy" for name in ARRAYS):
        more = ", ..." if len(names) > 4 else ""
        raise _foreign(path, f"it is an archive of {', '.join(names[:4])}{more}")


def _check_format(path: Path, archive: zipfile.ZipFile) -> None:
    name, version = _read(path, archive, "format"), _read(path, archive, "version")
    if name.shape or str(name) != FORMAT:
        raise _foreign(path, f"its format is {_word(name)}")
    if version.shape or version.dtype.kind != "i" or int(version) != VERSION:
        raise ValueError(
            f"load(file): {path} is of version {_word(version)}, and this metagrad reads version {VERSION}. "
            "Update metagrad, or write the file again."
        )


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array whose header has been found to describe as many bytes as the archive stores for it."""
    info = archive.getinfo(f"{name}.npy")
    with _damage_of(path):
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed.")
        with archive.open(info) as member:
            _check_header(name, member, info.file_size)
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)


def _check_header(name: str, member: IO[bytes], num_bytes: int) -> None:
    version = np.lib.format.read_magic(member)
    if version != _NPY_VERSION:
        raise ValueError(f"{name} is of npy version {version}.")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never read.")
    expected = member.tell() + math.prod(shape) * dtype.itemsize
    if expected != num_bytes:
        raise ValueError(f"{name} should take {expected} bytes and takes {num_bytes}.")


def _foreign(path: Path, what: str) -> ValueError:
    return ValueError(f"load(file): {path} is not a file of metagrad.sparse.save: {what}.")


def _word(array: np.ndarray) -> str:
    return repr(array.item()) if not array.shape else f"an array of shape {array.shape}"


@contextmanager
def _damage_of(path: Path) -> Generator[None]:
    """Name the file in whatever its reading or checking raises."""
    try:
        yield
    except (zipfile.BadZipFile, EOFError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"load(file): {path} is damaged: {error}") from error


@contextmanager
def _replacing(path: Path) -> Generator[IO[bytes]]:
    """Write beside a file and put the result in its place, complete, or leave no trace."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
