"""Values as anyone may write them, into calls of tools, requests, frames and replies."""

import json
from typing import Any

from hypothesis import strategies as st

LITERALS = [
    *("9" * 309, "-" + "9" * 309, "9" * 4300, "9" * 5000, "1" + "0" * 400),
    *("1e308", "1e309", "-1e999", "1e-999", "-0", "-0.0", "NaN", "Infinity", "-Infinity", "1e5", "3.0", "1.7e308"),
    *(
        "[" * 60 + "]" * 60,
        "[" * 200 + "]" * 200,
        "[" * 3000 + "]" * 3000,
        "[" * 100_000,
        '{"a":' * 300 + "1" + "}" * 300,
    ),
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\uFFFF"', '"' + "x" * 50_000 + '"', '"\\', '"\x01"', '""'),
    *('{"a": 1, "a": 2}', '{"__class__": {"__init__": 1}}', '{"self": 1, "name": 2, "request": 3}', '{"": {}}'),
    *("[]", "{}", "null", "true", "nul", "01", "+1", "1_000", "0x10", "[1,]", "{'a': 1}", "{a: 1}", "--1", ".5"),
    *("[" + "1," * 20_000 + "1]", "[" + "{}," * 10_000 + "{}]", '{"$ref": "#"}', "9" * 200 + "." + "9" * 200),
]
"""JSON, and what is nearly JSON."""
NAMES = ["self", "__class__", "", "\x00", "é", "a" * 5000, "name", "expression\n", "<|im_end|>", "{{ x }}", "🙂", "0"]
"""Names of arguments and of members."""
NUMBERS = [
    10**308,
    10**309,
    -(10**400),
    10**5000,
    0,
    -1,
    True,
    1e308,
    1.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    -0.0,
]

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(NUMBERS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner),
    max_leaves=8,
)
"""Values as a parser may give them."""

KINDS = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans()
    | st.just({})
    | st.fixed_dictionaries({"type": KINDS | st.lists(KINDS, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, max_size=3)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            "additionalProperties": inner,
            "required": st.lists(st.sampled_from(NAMES), max_size=2),
            "nullable": st.booleans(),
        },
    ),
    max_leaves=6,
)
"""Schemas of arguments, as servers may give them."""


def call(literal: str, name: str = "expression") -> str:
    """A call in the most common form, with a literal as an argument."""
    return f'<tool_call>\n{{"name": "calc", "arguments": {{{json.dumps(name)}: {literal}}}}}\n</tool_call>'
