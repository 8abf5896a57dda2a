"""The score, the parts and the error of a row, made from a reward function's result or exception."""

import json
import math
from numbers import Real
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38
MAX_ERROR = 500  # characters of a row's error
MAX_PARTS = 100_000  # characters of a row's parts as JSON

Answer = tuple[float, str, str | None]
"""The score, the parts as a JSON mapping, and the reason if the reward failed, else None."""


def failed(reason: str) -> Answer:
    """Return the answer for a row whose reward failed. Its score is 0, which is not used because of the error."""
    return 0.0, "{}", reason[:MAX_ERROR]


def sent_answer(sent: Any) -> Answer:
    """Check an answer that a worker has sent as JSON.

    Raises:
        ValueError, TypeError: it is not an answer.
    """
    score, parts, error = sent
    if not isinstance(parts, str) or not isinstance(json.loads(parts), dict) or not isinstance(error, str | None):
        raise ValueError("no answer")
    return _score({"score": score}), parts, error


def answer_from(result: Any, place: str = "") -> Answer:
    """Make an answer from a function's result, or from the exception that it raised.

    Args:
        result: a number, a dict with the key `score`, or an exception.
        place: place of the exception, appended to its message.
    """
    if isinstance(result, BaseException):
        return failed(_message(result)[: MAX_ERROR - len(place)] + place)
    # The result may fail to convert in any way, which is an error of only its row.
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
    """Take the score out of `parts`."""
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
    """Convert a part of a reward to plain JSON values, from NumPy and torch values too."""
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
