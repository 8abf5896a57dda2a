"""Choose Arrow types for JSON values: a type that holds all values without loss, else `JSON`.

In Arrow, a struct has the keys of all rows in each row, a list holds only one kind of number, and Slipstream's readers
treat a null inside a struct as a missing key. Values that would lose information are kept as JSON.
"""

from typing import Any

import pyarrow as pa

JSON = pa.json_()
DEPTH = 8
"""Maximum number of levels of nesting for which an Arrow type is chosen; messages with content parts have four."""
INT64 = range(-(1 << 63), 1 << 63)
SCALARS = {type(None): pa.null(), bool: pa.bool_(), float: pa.float64(), str: pa.string()}


def type_of(value: Any, depth: int = 0) -> pa.DataType:
    """Return the Arrow type that holds a JSON value without loss, or `JSON` if none does. `depth` is the nesting so
    far."""
    if isinstance(value, int) and not isinstance(value, bool):
        return pa.int64() if value in INT64 else JSON
    if not isinstance(value, (list, dict)):
        return SCALARS[type(value)]
    inner = list(value.values()) if isinstance(value, dict) else value
    if depth == DEPTH or value == {} or None in inner:
        return JSON
    types = [type_of(each, depth + 1) for each in inner]
    if JSON in types:
        return JSON
    if isinstance(value, dict):
        return pa.struct(zip(value, types, strict=True))
    element = pa.null()
    for kind in types:
        element = joined(element, kind)
    return element if element == JSON else pa.list_(element)


def joined(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that holds the values of both types without loss, or `JSON` if none does."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        element = joined(one.value_type, other.value_type)
        return element if element == JSON else pa.list_(element)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        types = [joined(mine.type, its.type) for mine, its in zip(one, other, strict=True)]
        return JSON if JSON in types else pa.struct(zip(one.names, types, strict=True))
    return JSON
