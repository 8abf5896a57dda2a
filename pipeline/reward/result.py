"""Convert the return value or the exception of a reward function to a row's result: score, parts and error."""

import json
import math
from numbers import Real
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38
MAX_ERROR = 500  # characters of a row's error
MAX_PARTS = 100_000  # characters of a row's parts as JSON

Answer = tuple[float, str, str | None]
"""Result for one row: (score, parts of the reward as a JSON object, reason if the reward failed, else None)."""


def failed(reason: str) -> Answer:
    """Return the result of a row with an error of the reward. The score in it is 0, but is not used."""
    return 0.0, "{}", reason[:MAX_ERROR]


def sent_answer(sent: Any) -> Answer:
    """Check a row's result that a worker has sent as JSON, and return it.

    Raises:
        ValueError, TypeError: `sent` is not (score, parts, error).
    """
    score, parts, error = sent
    if not isinstance(parts, str) or not isinstance(json.loads(parts), dict) or not isinstance(error, str | None):
        raise ValueError("no answer")
    return _score({"score": score}), parts, error


def answer_from(result: Any, place: str = "") -> Answer:
    """Convert what a reward function returned or raised to a row's result.

    Args:
        result: a number, a dict with the key `score`, or an exception.
        place: file and line of the exception as text, appended to its message.
    """
    if isinstance(result, BaseException):
        return failed(_message(result)[: MAX_ERROR - len(place)] + place)
    # Conversion may raise any exception, which is then the error of this row only.
    try:
        parts = dict(result) if isinstance(result, dict) else {"score": result}
        score = _score(parts)
        made = _part(parts)
        if not isinstance(made.get("acc"), int | float | None):
            raise ValueError(f"acc, which validation counts, must be a number, not a {type(made['acc']).__name__}")
        text = json.dumps(made)
        if len(text) > MAX_PARTS:
            raise ValueError(f"the parts of the reward are {len(text):,} characters as JSON; at most {MAX_PARTS:,} fit")
        return score, text, None
    except Exception as error:  # noqa: BLE001
        return failed(_message(error))


def _message(error: BaseException) -> str:
    try:
        return _text(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001
        return f"{type(error).__name__}, whose message cannot be read"


def _text(text: str) -> str:
    # Arrow strings are UTF-8: a lone surrogate would fail the whole table.
    return text.encode(errors="replace").decode()


def _score(parts: dict[Any, Any]) -> float:
    """Remove the key `score` from `parts` and return it as a float. Raises ValueError if it is not a finite float32."""
    if "score" not in parts:
        keys = sorted(map(str, parts))
        raise ValueError(f"the reward function returned a dict without the key 'score' (keys: {keys})")
    score = parts.pop("score")
    score = score.tolist() if hasattr(score, "tolist") else score
    if not isinstance(score, Real):
        raise ValueError(f"the score must be a number, not a {type(score).__name__}")
    value = float(score)
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise ValueError(f"the score is {value}, not a finite float32")
    return value


def _part(value: Any) -> Any:
    """Convert a part of a reward to JSON values; NumPy and torch values are accepted. Raises ValueError for others."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        if not math.isfinite(float(value)):
            raise ValueError(f"a part of the reward is {float(value)}, which JSON cannot hold")
        return value
    if isinstance(value, dict):
        return {_text(str(name)): _part(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_part(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _part(value.tolist())
    raise ValueError(f"a part of the reward is a {type(value).__name__}, which JSON cannot hold")
