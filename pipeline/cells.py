"""Convert cells of Arrow columns to Python values.

1. In Arrow, a struct has all fields in every row; missing ones are null, like nulls that were written. So null fields
   inside a column are left out, at any depth. Only the fields of a column that is itself a struct, such as
   `extra_info`, are kept as None, since functions of users index them.
2. A map becomes a dict. Nulls in it are kept.
3. A cell of the type `arrow.json`, also inside others, becomes the value of its JSON text, with its nulls, its whole
   numbers and the order of its keys.
4. Text stays text. `parsed` parses the text of columns that must hold a list or an object.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Read = Callable[[Any], Any]


def values(rows: pa.Table | pa.RecordBatch, places: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict of column names to Python values.

    Args:
        rows: rows as read from a file.
        places: beginning of the error text for each row; empty for none.

    Raises:
        ValueError: a cell cannot be converted; the text names its column.
    """
    readers = {field.name: _column(field.type) for field in rows.schema}
    for number in range(len(rows)):
        row, place = {}, f"{places[number]}, " if places else ""
        for name, read in readers.items():
            try:
                row[name] = read(rows[name][number].as_py())
            # Dates and times have more values in Arrow than in Python.
            except (ValueError, OverflowError, NotImplementedError) as error:
                raise ValueError(f"{place}column {name!r} cannot be read: {error}") from error
        yield row


def check_names(names: Sequence[str], place: str) -> None:
    """Check that the names of a file's columns are distinct.

    Raises:
        ValueError: two columns have the same name; the text begins with `place`.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(
                f"{place} has several columns named {name!r}, and none is to be preferred; rename or remove all of "
                "them but one"
            )


def _column(kind: pa.DataType) -> Read:
    if not isinstance(kind, pa.StructType):
        return reader(kind)
    fields = {field.name: reader(field.type) for field in kind}
    return lambda value: value and {name: read(value[name]) for name, read in fields.items()}


def reader(kind: pa.DataType) -> Read:
    """Return a function that converts a cell of the type `kind` (the result of `as_py`) to its Python value."""
    if isinstance(kind, pa.JsonType):
        return from_json
    if isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        return reader(kind.value_type)
    if isinstance(kind, pa.MapType):
        return functools.partial(_map, reader(kind.key_type), reader(kind.item_type))
    if isinstance(kind, pa.StructType):
        return functools.partial(_struct, {field.name: reader(field.type) for field in kind})
    if is_list(kind):
        inner = reader(kind.value_type)
        return _same if inner is _same else functools.partial(_list, inner)
    return _same


def is_list(kind: pa.DataType) -> bool:
    """Return True if cells of the type are lists."""
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    return isinstance(kind, lists)


def is_text(kind: pa.DataType | None) -> bool:
    """Return True if cells of the type are text."""
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def may_be_object(kind: pa.DataType | None) -> bool:
    """Return True if cells of the type may hold an object: JSON, text (which may be JSON), or a map."""
    return is_text(kind) or isinstance(kind, pa.JsonType | pa.MapType)


def from_json(text: str | None) -> Any:
    """Return the value of a JSON text; None for None. Raises ValueError if it is not JSON."""
    if text is None:
        return None
    try:
        value = json.loads(text)
        if "\\u" in text:
            # Half of a surrogate pair can be written in JSON, and is not text.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {text:.200}") from error


def parsed(value: Any, place: str) -> Any:
    """Parse a cell that must hold a list or an object. Text is parsed as JSON; empty text becomes None. Other values
    are returned unchanged.

    Raises:
        ValueError: the text is not JSON of a list or an object; the text of the error begins with `place`.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        found = from_json(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; a list or an object is needed, or its JSON") from error
    if found is not None and not isinstance(found, list | dict):
        raise ValueError(f"{place}: {value:.200} is not a list or an object")
    return found


def plain(value: Any) -> Any:
    """Return `value` with lists in place of NumPy arrays (from pandas) and tuples, at any depth."""
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def without_nulls(value: Any) -> Any:
    """Return `value` without the None values in dicts, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _same(value: Any) -> Any:
    return value


def _list(read: Read, value: list[Any] | None) -> list[Any] | None:
    return None if value is None else [read(entry) for entry in value]


def _struct(readers: dict[str, Read], value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: readers[name](field) for name, field in value.items() if field is not None}


def _map(key: Read, item: Read, value: list[tuple[Any, Any]] | None) -> dict[Any, Any] | None:
    if value is None:
        return None
    pairs = [(key(name), item(field)) for name, field in value]
    for name, _ in pairs:
        if not isinstance(name, str | int | float):
            raise ValueError(f"a map has the key {name!r:.80}, which is neither text nor a number")
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a map has one key twice")
    return found
