from __future__ import annotations

import os
import pickle
import stat
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.files import load, save
from metagrad.sparse.matrix.parameter import Parameter
from tests.sparse.strategies import patterns, seeds

PATTERN = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 3, 1]), (3, 4))
A = SparseTensor(PATTERN, torch.tensor([1.0, -0.5, float("nan")]))
EXECUTED = []


@pytest.fixture
def file(tmp_path):
    return tmp_path / "matrix.npz"


def arrays_of(a, file):
    save(a, file)
    with np.load(file, allow_pickle=False) as archive:
        return dict(archive)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [(), (2, 3)], ids=["numbers", "blocks"])
def test_matrices_come_back(file, dtype, block):
    values = torch.randn(3, *block, generator=torch.Generator().manual_seed(0)).to(dtype)
    save(SparseTensor(PATTERN, values).requires_grad_(), str(file))
    back = load(str(file))
    assert back.pattern.equals(PATTERN)
    assert (back.dtype, back.requires_grad, back.shape) == (dtype, False, SparseTensor(PATTERN, values).shape)
    assert torch.equal(back.values, values)
    back.values.add_(1)  # its memory is its own


@settings(max_examples=25, deadline=None)
@given(patterns(), seeds)
def test_any_pattern_comes_back(tmp_path_factory, pattern, seed):
    values = torch.randn(pattern.nnz, generator=torch.Generator().manual_seed(seed))
    file = tmp_path_factory.getbasetemp() / "any.npz"
    save(SparseTensor(pattern, values), file)
    assert load(file).pattern.equals(pattern)
    assert torch.equal(load(file).values, values)


def test_the_file_is_a_plain_npz(file):
    arrays = arrays_of(A, file)
    assert sorted(arrays) == ["col", "dtype", "format", "row", "shape", "values", "version"]
    assert (str(arrays["format"]), int(arrays["version"]), str(arrays["dtype"])) == (
        "metagrad.sparse",
        1,
        "float32",
    )
    assert arrays["shape"].tolist() == [3, 4]
    assert arrays["row"].tolist() == [0, 0, 2]
    bfloat16 = arrays_of(A.to(torch.bfloat16), file)
    assert (bfloat16["values"].dtype, str(bfloat16["dtype"])) == (np.int16, "bfloat16")


def test_a_parameter_and_values_with_strides_are_saved(file):
    save(Parameter(A), file)
    assert torch.equal(load(file).values.nan_to_num(), A.values.nan_to_num())
    save(A.with_values(torch.ones(1).expand(3)), file)
    assert load(file).values.tolist() == [1, 1, 1]


def test_what_cannot_be_saved(file):
    with pytest.raises(TypeError, match=r"save\(a, file\): a must be a SparseTensor, got Tensor"):
        save(torch.eye(2), file)
    with pytest.raises(
        TypeError, match=r"values must be one of float64, .* got torch.float8_e5m2. Use a.float\(\)"
    ):
        save(SparseTensor._of(PATTERN, A.values.to(torch.float8_e5m2)), file)
    assert not file.exists()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(file, monkeypatch):
    save(A, file)
    save(A.with_values(torch.ones(3)), file)
    assert load(file).values.tolist() == [1, 1, 1]

    def broken(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(np.lib.format, "write_array", broken)
    with pytest.raises(OSError, match="no space left"):
        save(A, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert load(file).values.tolist() == [1, 1, 1]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_file_has_the_mode_of_any_new_file(file):
    save(A, file)
    plain = file.with_name("plain")
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


# Other files


class Malicious:
    def __reduce__(self):
        return EXECUTED.append, ("once",)


def write_pickle(file):
    file.write_bytes(pickle.dumps(Malicious()))


def write_torch(file):
    torch.save({"values": Malicious()}, file)


def write_npy(file):
    with open(file, "wb") as stream:
        np.save(stream, np.array([Malicious()], dtype=object), allow_pickle=True)


def write_text(file):
    file.write_bytes(b"0 1 2.0\n")


def write_other_npz(file):
    np.savez(file, row=np.zeros(2))


def write_many(file):
    np.savez(file, *np.zeros((6, 1)))


def write_empty_zip(file):
    zipfile.ZipFile(file, "w").close()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.touch(), "it is empty"),
        (write_pickle, "it looks like a pickle, which can execute anything as it is read"),
        (write_torch, "it holds a pickle, as torch.save writes, which can execute anything as it is read"),
        (write_npy, r"it starts with b'\\x93NUM'"),
        (write_text, "it starts with b'0 1 '"),
        (write_other_npz, "it is an archive of row.npy"),
        (write_many, r"it is an archive of arr_0.npy, arr_1.npy, arr_2.npy, arr_3.npy, \.\.\."),
        (write_empty_zip, r"it starts with b'PK\\x05\\x06'"),
    ],
)
def test_other_files_are_refused_unread(file, write, message, monkeypatch):
    write(file)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kwargs: pytest.fail("it was read"))
    EXECUTED.clear()
    with pytest.raises(
        ValueError, match=rf"load\(file\): .* is not a file of metagrad.sparse.save: {message}"
    ):
        load(file)
    assert EXECUTED == []


def test_a_file_that_is_not_there(file):
    with pytest.raises(FileNotFoundError):
        load(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": np.array("other")}, "is not a file of metagrad.sparse.save: its format is 'other'"),
        ({"format": np.array(["metagrad.sparse"])}, r"its format is an array of shape \(1,\)"),
        ({"version": np.array(2)}, r"is of version 2, and this metagrad reads version 1. Update metagrad"),
        ({"version": np.array("1")}, "is of version '1', and this metagrad"),
        ({"row": np.array([0, 0, 3])}, "is damaged: Pattern.*: row must be from 0 to 2, got 3"),
        ({"row": np.array([0.0, 0.0, 2.0])}, "is damaged: Pattern.*: row must be integers"),
        ({"row": np.array([2, 0, 0])}, "is damaged: Pattern.*: entries must be in row-major order"),
        ({"shape": np.array([3, 4, 5])}, "is damaged: Pattern.*: shape must be two integers"),
        ({"values": np.ones(2, np.float32)}, r"is damaged: SparseTensor.*: .* values must have shape \[3\]"),
        ({"values": np.ones(3)}, "is damaged: its values are torch.float64 and are said to be float32"),
        (
            {"dtype": np.array("bfloat16")},
            "is damaged: its values are torch.float32 and are said to be bfloat16",
        ),
        (
            {"dtype": np.array("int16"), "values": np.ones(3, np.int16)},
            "torch.int16 and are said to be int16",
        ),
        ({"values": np.array(["a"] * 3)}, "is damaged: can't convert np.ndarray"),
    ],
)
def test_damaged_contents(file, changed, message):
    np.savez(file, **{**arrays_of(A, file), **changed})
    with pytest.raises(ValueError, match=r"load\(file\): .*" + message):
        load(file)


def test_python_objects_are_not_unpickled(file):
    arrays = arrays_of(A, file)
    EXECUTED.clear()
    np.savez(file, **{**arrays, "values": np.array([Malicious()] * 3, dtype=object)})
    with pytest.raises(ValueError, match="is damaged: values holds Python objects, which are never read"):
        load(file)
    assert EXECUTED == []


def test_compressed_and_cut_files(file):
    arrays = arrays_of(A, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="is damaged: File is not a zip file"):
        load(file)
    at = whole.index(np.float32(-0.5).tobytes())
    file.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    with pytest.raises(ValueError, match="is damaged: Bad CRC-32"):
        load(file)
    np.savez_compressed(file, **arrays)
    with pytest.raises(ValueError, match="is damaged: format is compressed"):
        load(file)


@pytest.mark.parametrize(
    ("version", "count", "message"),
    [
        ((2, 0), 3, r"col is of npy version \(2, 0\)"),
        ((1, 0), 10**15, "col should take 8000000000000128 bytes and takes 152"),
    ],
)
def test_headers_are_checked_before_memory_is_taken(file, version, count, message):
    arrays = arrays_of(A, file)
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                if name == "col":
                    header = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
                    getattr(np.lib.format, f"write_array_header_{version[0]}_0")(member, header)
                    member.write(array.tobytes())
                else:
                    np.lib.format.write_array(member, array)
    with pytest.raises(ValueError, match="is damaged: " + message):
        load(file)
