"""Check of the arguments that a model wrote in a tool call against the tool's JSON schema, in the run's process.

The check is made by `jsonschema`. A model may write anything, and a server may give any schema, so a check never
raises, ends in time, and fetches nothing. Keywords whose check could take long are left to the tool, and so are
references that do not resolve to a schema. Keywords that negate others are left out too, so leaving keywords out can
only make the check accept more.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import attrs
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from referencing import Registry

from pipeline.agent.inside.frames import cut

CHECK_S = 2.0
"""Maximum CPU time of one check, in seconds."""
MAX_ERROR = 300
"""Maximum length of one error, in characters."""
MAX_FORMS = 16
"""Maximum number of subschemas of one `anyOf` whose errors are kept, to choose the most relevant error."""
LEFT_TO_THE_TOOL = (
    # Regular expressions can take exponential time, and hold the interpreter's lock meanwhile.
    *("pattern", "patternProperties"),
    # These take quadratic time.
    *("uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    # These negate other keywords, which may be left out.
    *("not", "if", "contains"),
)
_ELSEWHERE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties"}
"""Keywords of a schema that may allow arguments that its `properties` do not name."""
_until: ContextVar[float] = ContextVar("_until")
Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError]]


class _Late(Exception):
    """A check has taken longer than `CHECK_S`."""


def check_schema(schema: dict[str, Any]) -> None:
    """Check that the `parameters` of a tool are a valid JSON schema of an object.

    Args:
        schema: description of the tool in OpenAI's form.

    Raises:
        ValueError: the parameters are not such a schema; the message names the tool.
    """
    function = schema["function"]
    parameters = function.get("parameters") or {}
    found = _error(Draft202012Validator.META_SCHEMA, parameters)
    if found or not isinstance(parameters, dict):
        text = found[1] if found else "it is not an object"
        raise ValueError(f"the tool {function['name']} has no valid JSON schema: {text}")


def mistake(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """Find the first mistake in the arguments of a call. Returns a sentence for the model, or None if there is none.

    An argument that the schema does not name is a mistake unless the schema allows further ones. All numbers must be
    finite, and integers small enough for a float, so that no tool fails because it computes with them.

    Args:
        schema: description of the tool in OpenAI's form, which `check_schema` has accepted.
        arguments: the arguments by name.
    """
    function = schema["function"]
    tool, parameters = function["name"], function.get("parameters") or {}
    known = parameters.get("properties") or {}
    if not parameters.get("additionalProperties") and _ELSEWHERE.isdisjoint(parameters):
        for name in arguments:
            if name not in known:
                names = ", ".join(known) or "none"
                return f"{tool} has no argument {name!r:.80}; its arguments are: {cut(names, MAX_ERROR)}"
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"the argument {name} of {tool} is missing"
    for name, value in arguments.items():
        if not _is_finite(value):
            most = sys.float_info.max_10_exp
            return f"the argument {name:.80} of {tool} must have finite numbers of at most {most} digits"
    found = _error(parameters, arguments)
    if not found:
        return None
    path, text = found
    if not path:
        return f"the arguments of {tool}: {text}"
    place = ", at " + cut("".join(f"[{step!r}]" for step in path[1:]), MAX_ERROR) if path[1:] else ""
    return f"the argument {path[0]:.80} of {tool}{place}: {text}"


def whole(schema: Any, value: Any) -> Any:
    """Return `value` with floats replaced by integers at the positions of `"type": "integer"` in the schema.

    A model may write 3.0, which is an integer in JSON.

    Args:
        schema: JSON schema of the value.
        value: a value that fits the schema.
    """
    if not isinstance(schema, dict):
        return value
    if isinstance(value, float) and schema.get("type") == "integer" and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(schema.get("items"), item) for item in value]
    if isinstance(value, dict):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        return {name: whole(known.get(name, others), item) for name, item in value.items()}
    return value


def _is_finite(value: Any) -> bool:
    """Return False if a value holds, at any depth, a number that is not finite or an integer too large for a float."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, int) and abs(one) > sys.float_info.max or isinstance(one, float) and not math.isfinite(one):
            return False
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return True


def _error(schema: Any, value: Any) -> tuple[list[Any], str] | None:
    """Find the first error of a value against a schema. Returns (path to the part with the error, message), or None."""
    _until.set(time.thread_time() + CHECK_S)
    try:
        errors = _Validator(schema, registry=Registry()).iter_errors(value)
        error = best_match(itertools.islice(errors, 1))
    except RecursionError:
        return [], "nested too deeply"
    except _Late:
        return [], f"too many parts, which take more than {CHECK_S:g} s to check"
    return None if error is None else (list(error.absolute_path), cut(error.message, MAX_ERROR))


def _bounded(check: Keyword) -> Keyword:
    """Wrap the check of a schema keyword: it ends within `CHECK_S`, never raises, and yields short errors.

    The wrapped check also accepts None if the schema has OpenAPI's `nullable`, which chat templates expect.
    """

    def keyword(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        _in_time()
        if instance is None and schema.get("nullable") is True:
            return
        try:
            for error in check(validator, value, instance, schema) or ():
                error.message = cut(error.message, MAX_ERROR)
                yield error
        except (_Late, RecursionError):
            raise
        # A reference may lead to anything, such as to a number in place of a schema.
        except Exception:  # noqa: BLE001
            return

    return keyword


def _in_time() -> None:
    if time.thread_time() > _until.get():
        raise _Late


def _any_of(validator: Any, forms: list[Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `anyOf` and `oneOf`, and keep few errors.

    `oneOf` is checked as `anyOf`, since its forms may differ only in keywords that are left to the tool.
    """
    errors: list[ValidationError] = []
    for index, form in enumerate(forms):
        _in_time()
        error = next(validator.descend(instance, form, schema_path=index), None)
        if error is None:
            return
        errors = errors if len(errors) == MAX_FORMS else [*errors, error]
    yield ValidationError(f"{instance!r} fits none of the forms in the schema", context=errors)


def _additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if "patternProperties" not in schema:
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, value, instance, schema)


def _left(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


_own = {
    "anyOf": _any_of,
    "oneOf": _any_of,
    "additionalProperties": _additional,
    **dict.fromkeys(LEFT_TO_THE_TOOL, _left),
}
_Validator = extend(
    Draft202012Validator,
    {name: _bounded(check) for name, check in {**Draft202012Validator.VALIDATORS, **_own}.items()},
)
# jsonschema's `evolve` takes another class for a part that has `$schema`.
_Validator.evolve = attrs.evolve
