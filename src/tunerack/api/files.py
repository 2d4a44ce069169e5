"""/v1/files: data to train on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tunerack.api.requests import identity_of, listing, query_limit, query_newest_first, whole_number
from tunerack.api.services import services_of
from tunerack.api.uploads import Upload
from tunerack.errors import Invalid, Problem
from tunerack.store.files import File, new_file_id

PURPOSES = ("fine-tune", "assistants", "batch", "vision", "user_data")
EXPIRES_AFTER_S = range(3600, 2592000 + 1)


def file_object(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": file.sha256,
    }


async def create(request: Request) -> Response:
    """The bytes are on the disk under the file's id before the row is, so an id that was told is a whole file."""
    services, now = services_of(request), time.time()
    settings = services.settings
    async with Upload(request, settings.files, settings.max_upload_bytes) as upload:
        life_s = _check(upload.filename, upload.fields)
        incoming = upload.incoming
        if incoming is None or upload.filename is None:
            raise Invalid("the form has no file", param="file", hint="curl -F purpose=fine-tune -F file=@train.jsonl")
        asked = [upload.filename, upload.fields["purpose"], life_s, incoming.sha256]
        file = File(
            id=new_file_id(),
            filename=upload.filename,
            purpose=upload.fields["purpose"],
            size_bytes=incoming.size_bytes,
            sha256=incoming.sha256,
            created_at=now,
            expires_at=None if life_s is None else now + life_s,
        )
        path = settings.files / file.id
        stored = file
        try:
            await asyncio.to_thread(incoming.keep, path)
            stored = await asyncio.to_thread(services.store.files.add, file, identity_of(request, "files", asked), now)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if stored.id != file.id:
            path.unlink(missing_ok=True)
    return JSONResponse(file_object(stored))


def _check(filename: str | None, fields: Mapping[str, str]) -> int | None:
    """Seconds that the file is to live, or None; raises Invalid with everything that is wrong with the form."""
    found = []
    if filename is not None and (problem := _filename_problem(filename)):
        found.append(Problem(problem, "file", "send the bare name of the file"))
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        found.append(Problem(f"{purpose!r} is not a purpose", "purpose", 'write "fine-tune"'))
    life_s = None
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]")
    if seconds is not None or anchor is not None:
        if anchor != "created_at":
            found.append(Problem(f"{anchor!r} is not an anchor", "expires_after[anchor]", 'write "created_at"'))
        life_s = whole_number(seconds or "")
        if life_s not in EXPIRES_AFTER_S:
            bounds = f"from {EXPIRES_AFTER_S.start} to {EXPIRES_AFTER_S.stop - 1}"
            found.append(Problem(f"{seconds!r} is not a number of seconds {bounds}", "expires_after[seconds]"))
    if found:
        raise Invalid(found, param=found[0].where)
    return life_s


def _filename_problem(filename: str) -> str | None:
    if not filename or filename in (".", "..") or len(filename.encode()) > 255:
        return f"{filename[:80]!r} can't be the name of a file"
    if any(letter in "/\\" or ord(letter) < 32 or ord(letter) == 127 for letter in filename):
        return f"{filename[:80]!r} is a path or has control characters"
    return None


async def page(request: Request) -> Response:
    found = await asyncio.to_thread(
        services_of(request).store.files.page,
        purpose=request.query_params.get("purpose"),
        after=request.query_params.get("after"),
        limit=query_limit(request, 10_000, 10_000),
        newest_first=query_newest_first(request),
    )
    return JSONResponse(listing([file_object(file) for file in found.rows], found.has_more))


async def retrieve(request: Request) -> Response:
    return JSONResponse(file_object(services_of(request).store.files.get(request.path_params["file_id"])))


async def content(request: Request) -> Response:
    services = services_of(request)
    file = services.store.files.get(request.path_params["file_id"])
    path = services.settings.files / file.id
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete(request: Request) -> Response:
    services, file_id = services_of(request), request.path_params["file_id"]
    await asyncio.to_thread(services.store.files.delete, file_id)
    (services.settings.files / file_id).unlink(missing_ok=True)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


ROUTES = (
    Route("/v1/files", create, methods=["POST"]),
    Route("/v1/files", page, methods=["GET"]),
    Route("/v1/files/{file_id}", retrieve, methods=["GET"]),
    Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", content, methods=["GET"]),
)
