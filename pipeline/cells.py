"""Cells of Arrow columns as Python values.

1. A struct has every field in every row, null in rows that lack it. Within a column null fields are left out, at any
   depth: Arrow cannot tell them from nulls that were written. The fields of a column that is itself a struct, such as
   `extra_info`, stay with None, since functions of users index them.
2. A map is a dict. Its nulls were written, and stay.
3. A cell of the type `arrow.json`, single or within others, is the value of its JSON text. Its nulls, its whole
   numbers and the order of its keys stay.
4. Text is text. `parsed` reads the cells of columns that must hold a list or an object.
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
    """Yield the rows, each with all of its columns.

    Args:
        rows: from a file.
        places: beginning of the error for each row.

    Raises:
        ValueError: a cell cannot be read; the sentence names its column.
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
    """Refuse a file in which two columns have one name.

    Raises:
        ValueError: the sentence begins with `place`.
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
    """Return a function that turns Arrow's cell of this type into its value."""
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
    """Return whether cells of a type are lists."""
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    return isinstance(kind, lists)


def is_text(kind: pa.DataType | None) -> bool:
    """Return whether cells of a type are text."""
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def may_be_object(kind: pa.DataType | None) -> bool:
    """Return whether cells of a type may hold any object: JSON, text that is JSON, or a map."""
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
    """Return the list or object in a cell that must hold one; text is read as JSON, and blank text is None.

    Raises:
        ValueError: it is a text that is neither; the sentence begins with `place`.
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
    """Return `value` with lists instead of NumPy's arrays, which pandas makes, and instead of tuples, at any depth."""
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def without_nulls(value: Any) -> Any:
    """Return `value` without the fields of its objects that are None, at any depth."""
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
