from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.tasks.omniglot.png import decode_png

rng = np.random.default_rng(0)
GRAY = rng.integers(0, 256, (7, 11))
BITS = rng.integers(0, 2, (7, 11))


def paeth(a: int, b: int, c: int) -> int:
    """Choose a neighbour by the branches of the specification, section 9.4."""
    p = a + b - c
    pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
    if pa <= pb and pa <= pc:
        return a
    return b if pb <= pc else c


PREDICT = {
    0: lambda a, b, c: 0,
    1: lambda a, b, c: a,
    2: lambda a, b, c: b,
    3: lambda a, b, c: (a + b) // 2,
    4: paeth,
}


def filtered_idat(lines: np.ndarray, kinds: list[int]) -> bytes:
    """Filter bytes [height, stride] line by line, as the specification defines it."""
    padded = np.pad(lines.astype(int), ((1, 0), (1, 0)))
    raw = bytearray()
    for y, kind in enumerate(kinds, start=1):
        raw.append(kind)
        for x in range(1, padded.shape[1]):
            prediction = PREDICT[kind](padded[y, x - 1], padded[y - 1, x], padded[y - 1, x - 1])
            raw.append((padded[y, x] - prediction) % 256)
    return zlib.compress(bytes(raw))


def replace_idat(data: bytes, idat: bytes, chunk) -> bytes:
    start = data.index(b"IDAT") - 4
    return data[:start] + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bit_depth", [1, 8])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_all_filters_are_undone(bit_depth, data):
    height, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 19))
    kinds = data.draw(st.lists(st.integers(0, 4), min_size=height, max_size=height))
    values = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**bit_depth, (height, width))
    lines = np.packbits(values.astype(np.uint8), axis=1) if bit_depth == 1 else values
    ihdr = struct.pack(">IIBBBBB", width, height, bit_depth, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", ihdr), (b"IDAT", filtered_idat(lines, kinds)), (b"IEND", b"")):
        png += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    assert np.array_equal(decode_png(png), values * (255 if bit_depth == 1 else 1))


@pytest.mark.parametrize(("values", "bit_depth", "scale"), [(BITS, 1, 255), (GRAY, 8, 1)])
def test_grayscale(png, values, bit_depth, scale):
    decoded = decode_png(png(values, bit_depth=bit_depth))
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, values * scale)


def test_pixels_split_over_chunks_are_joined(png, png_chunk):
    data = png(BITS)
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    idat = data[start + 8 : end - 4]
    split = data[:start] + png_chunk(b"IDAT", idat[:5]) + png_chunk(b"IDAT", idat[5:]) + data[end:]
    assert np.array_equal(decode_png(split), BITS * 255)


def test_a_palette_gives_the_luma_of_its_colors(png):
    palette = bytes([0, 0, 0, 255, 255, 255, 255, 0, 0])
    decoded = decode_png(png(np.array([[0, 1, 2]]), bit_depth=8, color_type=3, chunks=[(b"PLTE", palette)]))
    assert decoded.tolist() == [[0, 255, 76]]  # 0.299 * 255 = 76.2


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_equals_pillow(mode):
    image_module = pytest.importorskip("PIL.Image")
    levels = rng.integers(0, 256, (33, 29)).astype(np.uint8)
    image = image_module.fromarray(levels).convert("1" if mode == "1" else "L")
    if mode == "P":
        colors = image_module.fromarray(rng.integers(0, 256, (33, 29, 3)).astype(np.uint8))
        image = colors.quantize(256)
    file = io.BytesIO()
    image.save(file, "png", optimize=mode == "L")
    with image_module.open(io.BytesIO(file.getvalue())) as opened:
        assert np.array_equal(decode_png(file.getvalue()), np.array(opened.convert("L")))


def test_equals_pillow_on_official_drawings(real_small):
    image_module = pytest.importorskip("PIL.Image")
    with zipfile.ZipFile(real_small[1]) as archive:
        for name in [n for n in archive.namelist() if n.endswith(".png")][::97]:
            data = archive.read(name)
            with image_module.open(io.BytesIO(data)) as image:
                assert np.array_equal(decode_png(data), np.array(image.convert("L")))


def test_not_a_png():
    with pytest.raises(ValueError, match="a PNG must begin with its signature"):
        decode_png(b"GIF89a")


@pytest.mark.parametrize("length", [8, 30, 45, -12])
def test_a_file_cut_short(png, length):
    with pytest.raises(ValueError, match="cut short, its IEND chunk is missing"):
        decode_png(png(BITS)[:length])


def test_a_flipped_bit(png):
    data = bytearray(png(BITS))
    data[data.index(b"IDAT") + 6] ^= 1
    with pytest.raises(ValueError, match="the checksum of chunk IDAT is wrong"):
        decode_png(bytes(data))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"color_type": 2, "bit_depth": 8}, "got color type 2, bit depth 8, interlace 0"),
        ({"bit_depth": 16}, "got color type 0, bit depth 16, interlace 0"),
        ({"interlace": 1}, "not interlaced, got color type 0, bit depth 1, interlace 1"),
        ({"width": 0}, "must have pixels, got 0x7"),
        ({"height": 9}, "the pixels must take 27 bytes, got 21"),
        ({"chunks": [(b"tRNS", b"\0\0")]}, "transparency"),
        ({"color_type": 3}, "PLTE chunk must have 3 bytes for each color, got 0"),
        (
            {"color_type": 3, "chunks": [(b"PLTE", b"\0\0\0")]},
            "pixels must be below 1, the colors of the palette",
        ),
    ],
)
def test_unsupported_kinds(png, fields, message):
    with pytest.raises(ValueError, match=message):
        decode_png(png(BITS, **fields))


def test_a_header_of_the_wrong_length(png_chunk):
    with pytest.raises(ValueError, match="IHDR chunk must have 13 bytes, got 2"):
        decode_png(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"ab") + png_chunk(b"IEND", b""))


def test_pixels_that_are_no_zlib_stream(png, png_chunk):
    with pytest.raises(ValueError, match="the pixels could not be decompressed"):
        decode_png(replace_idat(png(BITS), b"nonsense", png_chunk))


def test_an_unknown_filter(png, png_chunk):
    idat = zlib.compress(b"".join(b"\x05\0\0" for _ in range(7)))
    with pytest.raises(ValueError, match="the filter of a line must be 0 to 4, got 5"):
        decode_png(replace_idat(png(BITS), idat, png_chunk))
