"""A trace file, whatever its format: the format is known by its first line."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path

from tunerack.errors import Invalid
from tunerack.schedule.traces import columns, gavel, pollux, throughputs
from tunerack.schedule.traces.trace import Trace

MAX_BYTES = 1 << 30
# Where the peers keep their tables; taken when they lie beside a trace that needs them.
BESIDE = ("throughput_tables.tar.gz", "simulation_throughputs.json.gz", "simulation_throughputs.json")
BESIDE_POLLUX = "throughput_and_goodput_tables.tar.gz"


def read_trace(path: str, tables: Path | None = None) -> Trace:
    """`FILE`, or `ARCHIVE.tar.gz:MEMBER`; .gz is unpacked. `tables`: speeds that the trace needs, or that make its jobs
    elastic; the peers' own names are found beside the trace.

    Raises Invalid: no such file, no known format, broken rows (all of them, with their lines).
    """
    archive, _, member = path.partition(".tar.gz:")
    file = Path(f"{archive}.tar.gz" if member else path)
    text = _member(file, member) if member else _text(file)
    name = Path(member).name if member else file.name
    lines = text.splitlines()
    if not lines or not lines[0].strip():
        raise Invalid("the file is empty", where=name)
    header = [column.strip() for column in lines[0].split(",")]
    if columns.recognised(header):
        beside = tables or _beside(file, BESIDE[:1])
        return columns.read(name, lines, _elasticflow(beside) if beside and "batch_size" in header else None)
    if pollux.recognised(header):
        beside = tables or _beside(file, (BESIDE_POLLUX,))
        return pollux.read(name, lines, _files(beside) if beside else None)
    if gavel.recognised(lines[0]):
        beside = tables or _beside(file, BESIDE[1:])
        return gavel.read(name, lines, throughputs.gavel(beside.name, _text(beside)) if beside else None)
    raise columns.refuse(name, header)


def _beside(file: Path, names: tuple[str, ...]) -> Path | None:
    return next((found for name in names if (found := file.parent / name).is_file()), None)


def _text(file: Path) -> str:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Invalid("there is no such file", where=str(file)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise Invalid(f"it can't be read: {error}", where=str(file)) from error
    if len(raw) > MAX_BYTES:
        raise Invalid(f"it is larger than {MAX_BYTES >> 30} GiB", where=str(file))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Invalid(f"it is not text: {error}", where=str(file)) from error


def _files(archive: Path) -> list[tuple[str, str]]:
    """(path, text) of every CSV file of an archive; nothing is written to disk."""
    try:
        with tarfile.open(archive) as tar:
            found = [m for m in tar.getmembers() if m.isfile() and m.name.endswith(".csv") and m.size < MAX_BYTES]
            return [(m.name, tar.extractfile(m).read().decode()) for m in found]  # type: ignore[union-attr]
    except (OSError, tarfile.TarError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Invalid(f"this archive can't be read: {error}", where=str(archive)) from error


def _member(archive: Path, member: str) -> str:
    found = dict(_files(archive))
    matching = [name for name in found if name == member or name.endswith(f"/{member}")]
    if not matching:
        raise Invalid(f"there is no {member!r} in it", where=str(archive), hint=f"it has {', '.join(list(found)[:12])}")
    return found[min(matching, key=len)]


def _elasticflow(path: Path) -> throughputs.Tables:
    return throughputs.elasticflow(path.name, _files(path))
