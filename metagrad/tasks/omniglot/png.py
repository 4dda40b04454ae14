"""Decoding of the few kinds of PNG that drawings are stored in, with zlib and NumPy alone."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAYSCALE, PALETTE = 0, 3
LUMA = np.array([19595, 38470, 7471])  # ITU-R 601-2 in 16-bit fixed point, as Pillow converts to "L"


class Header(NamedTuple):
    """Hold the fields of the IHDR chunk, in its order."""

    width: int
    height: int
    bit_depth: int
    color_type: int
    compression: int
    filtering: int
    interlace: int


def decode_png(data: bytes) -> np.ndarray:
    """Decode a grayscale or palette PNG of one or eight bits a pixel to gray levels.

    Args:
        data: The file's bytes.

    Returns:
        Gray levels 0 (black) to 255 (white), [height, width], uint8; a palette's colours by their luma.

    Raises:
        ValueError: When the file is damaged, or has another color type, bit depth, transparency or
            interlacing.

    References:
        Portable Network Graphics (PNG) Specification, second edition, W3C 2003.
    """
    chunks = _read_chunks(data)
    header = _read_header(chunks.get(b"IHDR", b""))
    if b"tRNS" in chunks:
        raise ValueError("decode_png(data): transparency (tRNS) is not supported.")
    stride = (header.width * header.bit_depth + 7) // 8
    lines = _unfilter(_inflate(chunks.get(b"IDAT", b""), header.height * (stride + 1)), header.height)
    pixels = (np.unpackbits(lines, axis=1) if header.bit_depth == 1 else lines)[:, : header.width]
    levels = _gray_levels(header, chunks.get(b"PLTE", b""))
    if pixels.max() >= len(levels):
        raise ValueError(f"decode_png(data): pixels must be below {len(levels)}, the colors of the palette.")
    return levels[pixels]


def _read_chunks(data: bytes) -> dict[bytes, bytes]:
    if not data.startswith(SIGNATURE):
        raise ValueError("decode_png(data): a PNG must begin with its signature.")
    chunks: dict[bytes, bytes] = {}
    for name, body in _iter_chunks(data):
        chunks[name] = chunks.get(name, b"") + body
        if name == b"IEND":
            return chunks
    raise ValueError("decode_png(data): the file is cut short, its IEND chunk is missing.")


def _iter_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = len(SIGNATURE)
    while start + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, start)
        end = start + 8 + length
        if end + 4 > len(data):
            return
        body = data[start + 8 : end]
        if zlib.crc32(body, zlib.crc32(name)) != int.from_bytes(data[end : end + 4], "big"):
            raise ValueError(f"decode_png(data): the checksum of chunk {name.decode('latin-1')} is wrong.")
        yield name, body
        start = end + 4


def _read_header(body: bytes) -> Header:
    if len(body) != 13:
        raise ValueError(f"decode_png(data): the IHDR chunk must have 13 bytes, got {len(body)}.")
    header = Header(*struct.unpack(">IIBBBBB", body))
    supported = header.color_type in (GRAYSCALE, PALETTE) and header.bit_depth in (1, 8)
    if not supported or header.compression or header.filtering or header.interlace:
        raise ValueError(
            "decode_png(data): the image must be grayscale (0) or palette (3), of bit depth 1 or 8, "
            f"not interlaced, got color type {header.color_type}, bit depth {header.bit_depth}, "
            f"interlace {header.interlace}."
        )
    if not (header.width and header.height):
        raise ValueError(f"decode_png(data): the image must have pixels, got {header.width}x{header.height}.")
    return header


def _inflate(body: bytes, size: int) -> bytes:
    try:
        raw = zlib.decompress(body)
    except zlib.error as error:
        raise ValueError(f"decode_png(data): the pixels could not be decompressed ({error}).") from error
    if len(raw) != size:
        raise ValueError(f"decode_png(data): the pixels must take {size} bytes, got {len(raw)}.")
    return raw


def _gray_levels(header: Header, palette: bytes) -> np.ndarray:
    """Return the gray level of each value of a pixel."""
    if header.color_type == GRAYSCALE:
        return np.linspace(0, 255, 2**header.bit_depth).astype(np.uint8)
    if not palette or len(palette) % 3:
        raise ValueError(
            f"decode_png(data): the PLTE chunk must have 3 bytes for each color, got {len(palette)}."
        )
    colors = np.frombuffer(palette, dtype=np.uint8).reshape(-1, 3)
    return ((colors @ LUMA + 0x8000) >> 16).astype(np.uint8)


def _unfilter(raw: bytes, height: int) -> np.ndarray:
    """Undo the filter of each line; a pixel is one byte or less, so its left neighbour is the byte before."""
    lines = np.frombuffer(raw, dtype=np.uint8).reshape(height, -1)
    kinds, lines = lines[:, 0], lines[:, 1:]
    if not kinds.any():
        return lines
    above, restored = np.zeros(lines.shape[1], dtype=np.uint8), np.empty_like(lines)
    for row, (kind, line) in enumerate(zip(kinds.tolist(), lines, strict=True)):
        restored[row] = above = _unfilter_line(kind, line, above)
    return restored


def _unfilter_line(kind: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, dtype=np.uint8)
    if kind == 2:
        return line + above
    if kind not in (3, 4):
        raise ValueError(f"decode_png(data): the filter of a line must be 0 to 4, got {kind}.")
    predict = _average if kind == 3 else _paeth
    restored, left, above_left = np.empty_like(line), 0, 0
    for k, (value, up) in enumerate(zip(line.tolist(), above.tolist(), strict=True)):
        left = (value + predict(left, up, above_left)) % 256
        restored[k], above_left = left, up
    return restored


def _average(left: int, above: int, above_left: int) -> int:
    return (left + above) // 2


def _paeth(left: int, above: int, above_left: int) -> int:
    estimate = left + above - above_left
    return min((left, above, above_left), key=lambda neighbour: abs(estimate - neighbour))
