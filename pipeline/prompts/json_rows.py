"""Prompt files of JSON: one object a line, or one list of objects; plain or gzip.

JSON has no footer, so the file is passed through once when it is opened, and the byte offsets of blocks of rows are
kept: they are its row groups. Rows stay bytes until one is needed. A gzip file cannot be entered in the middle; each
window of rows is read by unpacking it from its beginning, which costs time (some hundred MB a second) and no memory.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.fs

from pipeline.prompts.prompt_file import Place, PromptFile, reason

ENDINGS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
BLOCK_ROWS = 1024
BLOCK_BYTES = 4 << 20
READ_BYTES = 1 << 20
MAX_ROW_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
SEPARATORS = re.compile(r"[ \t\r\n,]*")
DECODER = json.JSONDecoder()


class Block(NamedTuple):
    """Neighbouring rows."""

    offset: int
    """Of the first byte, in the unpacked file."""
    length: int
    line: int | None
    """Number of the first line, from 1; None where rows are not lines."""


@dataclass(frozen=True)
class JsonRows(PromptFile):
    """A file of JSON objects. A batch of it has one column, the bytes of each row."""

    blocks: tuple[Block, ...]
    size: int
    """Bytes of the file as it lies there."""

    def place(self, row_group: int, row: int) -> Place:
        first = self.blocks[row_group].line
        return super().place(row_group, row)._replace(line=None if first is None else first + row)

    def row(self, batch: pa.RecordBatch, number: int, place: Place) -> dict[str, Any]:
        raw: bytes = batch.column(0)[number].as_py()
        try:
            value = json.loads(raw)
            # A lone surrogate is legal in JSON and in no text that can be stored or tokenised.
            if b"\\ud" in raw.lower():
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise NotARow(f"{place}: it is not valid JSON: {reason(error)}", raw) from error
        if not isinstance(value, dict):
            raise NotARow(
                f"{place}: it is a {type(value).__name__} where an object is needed: one JSON object a line, or a "
                "file that is one list of objects",
                raw,
            )
        return value

    def data_sources(self, batch: pa.RecordBatch) -> pa.Array:
        found = []
        for number in range(len(batch)):
            try:
                value = self.row(batch, number, Place(self.name, 0, number)).get("data_source")
            except NotARow:
                value = None
            found.append(value if isinstance(value, str) else None)
        return pa.array(found, pa.string())

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with self.filesystem.open_input_file(self.path) as handle:
            if handle.size() != self.size:
                raise OSError(f"the file now has {handle.size()} bytes; it had {self.size}")
            with _unpacked(handle, self.path) as unpacked:
                yield unpacked

    def _batches(self, reader: Any, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        block = self.blocks[row_group]
        reader.seek(block.offset)
        content = reader.read(block.length)
        rows = _elements_of(content) if block.line is None else content.rstrip(b"\n").split(b"\n")
        if len(content) != block.length or len(rows) != self.row_groups[row_group]:
            raise OSError("the file has changed")
        yield pa.record_batch({"json": pa.array(rows, pa.large_binary())})


class NotARow(ValueError):
    """A stretch of the file that is no row; `content` is what stands there."""

    def __init__(self, message: str, content: bytes) -> None:
        super().__init__(message)
        self.content = content.decode(errors="replace")


def open_json(name: str, filesystem: pyarrow.fs.FileSystem, path: str, key: str) -> JsonRows:
    """The JSON file at `path`, after one pass through it.

    Raises:
        ValueError: it cannot be read or unpacked, has no rows, or is a list that breaks off.
    """
    where = f"{key}: {name}"
    try:
        with filesystem.open_input_file(path) as handle:
            size = handle.size()
            with _unpacked(handle, path) as unpacked:
                found = list(_blocks(unpacked))
    # As in `PromptFile.read`: the exceptions depend on the filesystem package.
    except Exception as error:
        raise ValueError(
            f"{where} cannot be read as JSON: {reason(error)}. Write the file again, or leave it out."
        ) from error
    if not found:
        raise ValueError(f"{where} has no rows; write prompts into it, or leave it out")
    blocks, rows = zip(*found, strict=True)
    return JsonRows(name, key, filesystem, path, rows, blocks, size)


@contextmanager
def _unpacked(handle: Any, path: str) -> Iterator[Any]:
    if path.endswith(".gz"):
        with gzip.GzipFile(fileobj=handle, mode="rb") as unpacked:
            yield unpacked
    else:
        yield handle


def _blocks(file: IO[bytes]) -> Iterator[tuple[Block, int]]:
    """Each block of rows with their number."""
    head = file.read(READ_BYTES)
    file.seek(0)
    if head.removeprefix(BOM).lstrip(SPACE)[:1] == b"[":
        yield from _gathered((offset, length, None) for offset, length in _elements(file))
    else:
        yield from _gathered(_lines(file))


def _gathered(rows: Iterable[tuple[int, int, int | None]]) -> Iterator[tuple[Block, int]]:
    """Blocks of the rows (offset, length, line). A blank line ends a block, so that its lines follow one another."""
    block, count = None, 0
    for offset, length, line in rows:
        follows = block is not None and (line is None or line == (block.line or 0) + count)
        if block is not None and follows and count < BLOCK_ROWS and block.length < BLOCK_BYTES:
            block, count = block._replace(length=offset + length - block.offset), count + 1
            continue
        if block is not None:
            yield block, count
        block, count = Block(offset, length, line), 1
    if block is not None:
        yield block, count


def _lines(file: IO[bytes]) -> Iterator[tuple[int, int, int]]:
    """(offset, length, number) of each line that is not blank, its end included."""
    offset, rest, number = 0, b"", 0
    while True:
        read = file.read(READ_BYTES)
        lines = (rest + read).split(b"\n")
        rest = lines.pop()
        if not read and rest:
            lines, rest = [rest], b""
        for line in lines:
            number += 1
            # The last line may lack its end.
            length = len(line) + 1 if read else len(line)
            if line.strip(SPACE) not in (b"", BOM):
                yield offset, length, number
            offset += length
        if len(rest) > MAX_ROW_BYTES:
            raise ValueError(f"line {number + 1} is longer than {MAX_ROW_BYTES} bytes")
        if not read:
            return


def _elements(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """(offset, length) of each element of the list that the file is.

    Latin-1 makes one character of each byte and leaves all of JSON's own characters as they are.
    """
    text, base, row = file.read(READ_BYTES).decode("latin-1"), 0, 0
    at = text.index("[") + 1
    while True:
        at, problem = _skipped(text, at), "it breaks off"
        if at < len(text):
            if text[at] == "]":
                return
            try:
                _, end = DECODER.raw_decode(text, at)
                # A number may go on behind what was read.
                if end < len(text):
                    yield base + at, end - at
                    at, row = end, row + 1
                    continue
            except json.JSONDecodeError as error:
                problem = error.msg
        more = file.read(max(READ_BYTES, len(text) - at))
        if not more or len(text) - at > MAX_ROW_BYTES:
            raise ValueError(f"row {row}, which begins at byte {base + at}: {problem}")
        text, base, at = text[at:] + more.decode("latin-1"), base + at, 0


def _elements_of(content: bytes) -> list[bytes]:
    """The elements of a stretch of a list."""
    text, at, found = content.decode("latin-1"), 0, []
    while (at := _skipped(text, at)) < len(text):
        _, end = DECODER.raw_decode(text, at)
        found.append(content[at:end])
        at = end
    return found


def _skipped(text: str, at: int) -> int:
    match = SEPARATORS.match(text, at)
    assert match is not None
    return match.end()
