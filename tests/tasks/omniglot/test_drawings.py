from __future__ import annotations

import io
import zipfile
import zlib

import numpy as np
import pytest

from metagrad.tasks.omniglot.drawings import decode_png, read_drawings
from metagrad.tasks.omniglot.splits import SPLITS, Character

BITS = np.random.default_rng(0).integers(0, 2, (7, 11))
LAYOUTS = ["write_zip", "write_tree", "write_bits"]


def write(tiny, layout: str, folder):
    return getattr(tiny, layout)(folder, *(() if layout == "write_bits" else ("images_background",)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_ink(tiny, tmp_path, layout):
    read = dict(read_drawings(write(tiny, layout, tmp_path), SPLITS["background"].characters))
    assert read.keys() == set(SPLITS["background"].characters)
    for k, character in enumerate(SPLITS["background"].characters):
        assert read[character].dtype == np.uint8
        assert np.array_equal(read[character], tiny.ink[k])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_is_wanted_is_read(tiny, tmp_path, layout):
    wanted = {Character("Aa", 2), Character("Zz", 1)}
    assert [c for c, _ in read_drawings(write(tiny, layout, tmp_path), wanted)] == [Character("Aa", 2)]


@pytest.mark.parametrize("layout", ["write_zip", "write_tree"])
def test_a_missing_drawing_is_an_error(tiny, tmp_path, layout):
    path = getattr(tiny, layout)(tmp_path, "images_background", without="character02/0001_07")
    with pytest.raises(ValueError, match=r"must have drawings 1 to 20 of Aa/character02, got \[1, .* 6, 8, "):
        list(read_drawings(path, SPLITS["background"].characters))


def test_a_drawing_of_another_size_is_an_error(tiny, tmp_path, png):
    path = tiny.write_tree(tmp_path, "images_background")
    (path / "Bb/character01/0002_03.png").write_bytes(png(np.zeros((105, 104), dtype=int)))
    with pytest.raises(ValueError, match=r"Bb/character01/0002_03\.png in .*must be 105x105, got 105x104"):
        list(read_drawings(path, SPLITS["background"].characters))


def test_a_damaged_drawing_is_named(tiny, tmp_path):
    path = tiny.write_tree(tmp_path, "images_background")
    (path / "Bb/character01/0002_03.png").write_bytes(b"\x89PNG")
    with pytest.raises(
        ValueError, match=r"0002_03\.png in .* could not be decoded: decode_png\(data\): a PNG"
    ):
        list(read_drawings(path, SPLITS["background"].characters))


def test_official_archives_and_the_array_file_hold_the_same_ink(real_small, real_bits):
    name, path = real_small
    characters = SPLITS[name].characters
    from_zip, from_bits = dict(read_drawings(path, characters)), dict(read_drawings(real_bits, characters))
    assert from_zip.keys() == from_bits.keys() == set(characters)
    assert all(np.array_equal(from_zip[c], from_bits[c]) for c in characters)


def test_black_and_white(png):
    decoded = decode_png(png(BITS))
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, BITS)


def test_pixels_split_over_chunks_are_joined(png, png_chunk):
    data = png(BITS)
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    idat = data[start + 8 : end - 4]
    split = data[:start] + png_chunk(b"IDAT", idat[:5]) + png_chunk(b"IDAT", idat[5:]) + data[end:]
    assert np.array_equal(decode_png(split), BITS)


def test_equals_pillow_on_official_drawings(real_small):
    image_module = pytest.importorskip("PIL.Image")
    with zipfile.ZipFile(real_small[1]) as archive:
        for name in [n for n in archive.namelist() if n.endswith(".png")][::97]:
            data = archive.read(name)
            with image_module.open(io.BytesIO(data)) as image:
                assert np.array_equal(decode_png(data), np.array(image))


def test_not_a_png():
    with pytest.raises(ValueError, match="a PNG must begin with its signature"):
        decode_png(b"GIF89a")


@pytest.mark.parametrize("length", [8, 30, 45, -12])
def test_a_file_cut_short(png, length):
    with pytest.raises(ValueError, match="cut short, its IEND chunk is missing"):
        decode_png(png(BITS)[:length])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"color_type": 2, "bit_depth": 8}, r"got 11x7, kind \[8, 2, 0, 0, 0\]"),
        ({"interlace": 1}, r"not interlaced, got 11x7, kind \[1, 0, 0, 0, 1\]"),
        ({"width": 0}, "must have pixels, .* got 0x7"),
        ({"height": 9}, "21 bytes are not 11x9 pixels"),
    ],
)
def test_a_png_of_another_kind(png, fields, message):
    with pytest.raises(ValueError, match=message):
        decode_png(png(BITS, **fields))


def test_a_header_of_the_wrong_length(png_chunk):
    with pytest.raises(ValueError, match=r"must have pixels, .* got 0x0"):
        decode_png(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"ab") + png_chunk(b"IEND", b""))


def replace_idat(data: bytes, idat: bytes, chunk) -> bytes:
    start = data.index(b"IDAT") - 4
    return data[:start] + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


def test_a_flipped_bit(png):
    data = bytearray(png(BITS))
    data[data.index(b"IDAT") + 8] ^= 1
    with pytest.raises(ValueError, match="the pixels could not be decompressed"):
        decode_png(bytes(data))


def test_pixels_that_are_no_zlib_stream(png, png_chunk):
    with pytest.raises(ValueError, match="the pixels could not be decompressed"):
        decode_png(replace_idat(png(BITS), b"nonsense", png_chunk))


def test_lines_with_a_filter(png, png_chunk):
    idat = zlib.compress(b"".join(b"\x01\0\0" for _ in range(7)))
    with pytest.raises(ValueError, match="lines with a filter are not supported"):
        decode_png(replace_idat(png(BITS), idat, png_chunk))
