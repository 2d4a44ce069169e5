"""A small canvas that becomes a PNG file (ISO/IEC 15948), so that a plot needs no further package."""

from __future__ import annotations

import struct
import zlib

Color = tuple[int, ...]

# Five columns and seven rows a letter, a row as five dots; letters that are missing are left blank.
GLYPHS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
    "a": "00000 00000 01110 00001 01111 10001 01111",
    "b": "10000 10000 11110 10001 10001 10001 11110",
    "c": "00000 00000 01110 10000 10000 10001 01110",
    "d": "00001 00001 01111 10001 10001 10001 01111",
    "e": "00000 00000 01110 10001 11111 10000 01110",
    "f": "00110 01001 01000 11100 01000 01000 01000",
    "g": "00000 01111 10001 10001 01111 00001 01110",
    "h": "10000 10000 10110 11001 10001 10001 10001",
    "i": "00100 00000 01100 00100 00100 00100 01110",
    "j": "00010 00000 00110 00010 00010 10010 01100",
    "k": "10000 10000 10010 10100 11000 10100 10010",
    "l": "01100 00100 00100 00100 00100 00100 01110",
    "m": "00000 00000 11010 10101 10101 10001 10001",
    "n": "00000 00000 10110 11001 10001 10001 10001",
    "o": "00000 00000 01110 10001 10001 10001 01110",
    "p": "00000 00000 11110 10001 11110 10000 10000",
    "q": "00000 00000 01101 10011 01111 00001 00001",
    "r": "00000 00000 10110 11001 10000 10000 10000",
    "s": "00000 00000 01110 10000 01110 00001 11110",
    "t": "01000 01000 11100 01000 01000 01001 00110",
    "u": "00000 00000 10001 10001 10001 10011 01101",
    "v": "00000 00000 10001 10001 10001 01010 00100",
    "w": "00000 00000 10001 10001 10101 10101 01010",
    "x": "00000 00000 10001 01010 00100 01010 10001",
    "y": "00000 00000 10001 10001 01111 00001 01110",
    "z": "00000 00000 11111 00010 00100 01000 11111",
    "-": "00000 00000 00000 11111 00000 00000 00000",
    ".": "00000 00000 00000 00000 00000 01100 01100",
    ",": "00000 00000 00000 00000 01100 00100 01000",
    ":": "00000 01100 01100 00000 01100 01100 00000",
    "/": "00000 00001 00010 00100 01000 10000 00000",
    "+": "00000 00100 00100 11111 00100 00100 00000",
    "%": "11000 11001 00010 00100 01000 10011 00011",
    "_": "00000 00000 00000 00000 00000 00000 11111",
}


class Canvas:
    """White, `width` by `height`; the origin is at the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def point(self, x: float, y: float, color: Color) -> None:
        column, row = round(x), round(y)
        if 0 <= column < self.width and 0 <= row < self.height:
            self.rows[row][3 * column : 3 * column + 3] = bytes(color)

    def line(self, x1: float, y1: float, x2: float, y2: float, color: Color) -> None:
        steps = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(steps + 1):
            self.point(x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps, color)

    def fill(self, x1: float, y1: float, x2: float, y2: float, color: Color) -> None:
        """A rectangle without its right and lower edge; as good as nothing is a line of one pixel."""
        for row in range(max(0, round(y1)), min(self.height, round(y2))):
            for column in range(max(0, round(x1)), min(self.width, max(round(x2), round(x1) + (x2 > x1)))):
                self.rows[row][3 * column : 3 * column + 3] = bytes(color)

    def dot(self, x: float, y: float, radius: int, color: Color) -> None:
        for across in range(-radius, radius + 1):
            for down in range(-radius, radius + 1):
                if across * across + down * down <= radius * radius:
                    self.point(x + across, y + down, color)

    def text(self, x: int, y: int, text: str, color: Color) -> None:
        """Lower-case letters, figures and a few signs, 6 pixels each; y is the top."""
        for index, letter in enumerate(text.lower()):
            for row, dots in enumerate(GLYPHS.get(letter, "").split()):
                for column, dot in enumerate(dots):
                    if dot == "1":
                        self.point(x + 6 * index + column, y + row, color)

    def png(self) -> bytes:
        """8-bit RGB, unfiltered rows."""
        raw = b"".join(b"\x00" + bytes(row) for row in self.rows)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw)) + _chunk(b"IEND", b"")
        )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
