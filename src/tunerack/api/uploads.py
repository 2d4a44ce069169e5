"""A multipart body whose file goes to the disk as it arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tunerack.errors import Invalid, TunerackError
from tunerack.store.disk import Incoming

MAX_FIELD_BYTES = 64 * 1024
MAX_FIELDS = 32
DRAIN_S = 20.0


class Upload:
    """The fields of a form, and its part named `file`, which may be asked for once the form has been read.

    Use as `async with`: what is not kept is removed.
    """

    def __init__(self, request: Request, folder: Path, limit_bytes: int) -> None:
        self._request = request
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._field: str | None = None
        self._to_write: list[bytes] = []
        self._values: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.incoming: Incoming | None = None

    async def __aenter__(self) -> Upload:
        pieces = self._request.stream()
        try:
            await self._read(pieces)
        except TunerackError:
            await self.__aexit__()
            # A client that is still sending would not see the answer, however slowly it sends.
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                while True:
                    await asyncio.wait_for(anext(pieces), DRAIN_S)
            raise
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self.incoming is not None:
            await asyncio.to_thread(self.incoming.discard)

    @property
    def fields(self) -> dict[str, str]:
        return {name: value.decode(errors="replace") for name, value in self._values.items()}

    async def _read(self, pieces: AsyncIterator[bytes]) -> None:
        kind, options = parse_options_header(self._request.headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise Invalid(
                "the body is not multipart/form-data", param="file", hint="curl -F purpose=fine-tune -F file=@…"
            )
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
            },
        )
        try:
            async for piece in pieces:
                parser.write(piece)
                await self._write()
            parser.finalize()
        except FormParserError as error:
            raise Invalid(f"the multipart body is broken: {error}", param="file") from None

    async def _write(self) -> None:
        pieces, self._to_write = self._to_write, []
        if pieces and self.incoming is not None:
            await asyncio.to_thread(self.incoming.write, b"".join(pieces))

    def _on_part_begin(self) -> None:
        self._disposition = self._header_name = self._header_value = b""
        self._field = None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name != "file":
            if len(self._values) >= MAX_FIELDS:
                raise Invalid(f"the form has more than {MAX_FIELDS} fields")
            self._field = name
            self._values[name] = bytearray()
            return
        if self.incoming is not None:
            raise Invalid("the form has more than one file", param="file", hint="send one file a request")
        self.filename = options.get(b"filename", b"").decode(errors="replace")
        self.incoming = Incoming(self._folder, self._limit_bytes)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._to_write.append(data[start:end])
            return
        value = self._values[self._field]
        value += data[start:end]
        if len(value) > MAX_FIELD_BYTES:
            raise Invalid(f"the field is larger than {MAX_FIELD_BYTES} bytes", param=self._field)
