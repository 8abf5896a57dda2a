"""Checks of what the user's code returns. This module needs Python 3.9 and nothing but the standard library.

The process of an episode checks each value before it sends it, and the run checks it once more.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field
from typing import Any

from pipeline.agent.inside.frames import MAX_MESSAGES, MAX_TEXT, cut, encode
from pipeline.agent.inside.interface import Observation, ToolResult

# The bounds of `pipeline/reward/result.py`, which these processes do not have.
FLOAT32_MAX = 3.4028234663852886e38
MAX_PARTS = 100_000  # bytes of one observation's parts as JSON
MAX_ROLE = 40  # characters
MAX_IMAGES = 3 << 20  # bytes of one observation's images in base64


@dataclass
class ProgramResult:
    """The result of a program or a command at the end of its episode."""

    reward: float | None = None
    """Score of the whole episode; None if there is none."""
    rewards: list[float] | None = None
    """Reward of each turn, in the order in which the turns were requested; None if there are none."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Further values for metrics, by name."""


def returned(result: Any, name: str) -> ProgramResult:
    """Convert the result of a program: a number, a dict that may have a `reward` and `rewards`, or None.

    Args:
        name: name of the program for errors.

    Raises:
        ValueError: the result is something else.
    """
    parts = dict(result) if isinstance(result, dict) else {"reward": result}
    return checked_result(ProgramResult(parts.pop("reward", None), parts.pop("rewards", None), parts), name)


def checked_result(result: ProgramResult, name: str) -> ProgramResult:
    """Check the result of a program, and convert its rewards to floats.

    Raises:
        ValueError: a field has a wrong type, or a reward is not a finite float32.
    """
    rewards: Any = result.rewards
    if rewards is not None:
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        if not isinstance(rewards, (list, tuple)) or any(value is None for value in rewards):
            raise ValueError(f"{name} returned rewards of {shown(rewards)}; expected a list of numbers")
        rewards = [_reward(value, name, f" (rewards[{place}])") for place, value in enumerate(rewards)]
    return ProgramResult(_reward(result.reward, name), rewards, _parts(result.parts, name))


def checked(observation: Observation, name: str) -> dict[str, Any]:
    """Check an observation, and return its fields as a dict.

    Args:
        name: name, for errors, of the method that returned the observation.

    Raises:
        ValueError: a field has a wrong type, or the reward is not a finite float32.
    """
    reward, done = _reward(observation.reward, name), observation.done
    if done not in (True, False):
        raise ValueError(f"{name} returned done={shown(done)}; expected True or False")
    parts, content = _parts(observation.parts, name), checked_content(observation.content, name)
    images = checked_images(observation.images, name)
    return {"content": content, "done": bool(done), "reward": reward, "parts": parts, "images": images}


def checked_tool(result: ToolResult, name: str) -> dict[str, Any]:
    """Check the result of a tool with images, and return its fields as a dict.

    Args:
        name: name of the tool, for errors.

    Raises:
        ValueError: a field has a wrong type, or the images are too large.
    """
    if not isinstance(result.text, str):
        raise ValueError(f"{name} returned a ToolResult with {shown(result.text)}; expected a text")
    return {"text": cut(result.text, MAX_TEXT), "images": checked_images(result.images, name)}


def checked_images(images: Any, name: str) -> list[str]:
    """Check the encoded images of an observation, and return them as text in base64.

    Args:
        name: name, for errors, of the method that returned the images.

    Raises:
        ValueError: they are something else than a list of bytes, or larger together than `MAX_IMAGES`.
    """
    if not isinstance(images, (list, tuple)) or not all(isinstance(image, (bytes, str)) for image in images):
        raise ValueError(f"{name} returned images of {shown(images)}; expected a list of bytes, such as a PNG file's")
    texts = [image if isinstance(image, str) else base64.b64encode(image).decode() for image in images]
    if (size := sum(map(len, texts))) > MAX_IMAGES:
        raise ValueError(f"{name} returned images of {size:,} bytes in base64; at most {MAX_IMAGES:,} fit")
    return texts


def _reward(reward: Any, name: str, place: str = "") -> float | None:
    if reward is None:
        return None
    try:
        if isinstance(reward, (str, bytes)):
            raise TypeError
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} returned a reward of {shown(reward)}{place}; expected a number or None") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} returned a reward of {number}{place}; expected a finite number")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"{name} returned a reward of {number}{place}; expected a float32, at most {FLOAT32_MAX:.4g}")
    return number


def _parts(parts: Any, name: str) -> dict[str, Any]:
    if not isinstance(parts, dict) or not all(isinstance(key, str) for key in parts):
        raise ValueError(f"{name} returned parts of {shown(parts)}; expected a dict of numbers by name")
    for key, value in parts.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        if key == "acc" and not isinstance(value, (int, float, type(None))):
            raise ValueError(
                f"{name} returned parts with acc={shown(value)}; expected a number, which validation counts"
            )
        if isinstance(value, int) and abs(value) > FLOAT32_MAX:
            raise ValueError(f"{name} returned parts with {key}={shown(value)}; expected a number of float32")
    try:
        size = len(encode(parts))
    except ValueError as error:
        raise ValueError(f"{name} returned {error}") from None
    if size > MAX_PARTS:
        raise ValueError(f"{name} returned parts of {size:,} bytes as JSON; at most {MAX_PARTS:,} fit")
    return parts


def checked_content(content: Any, name: str) -> Any:
    """Check content for the model: a text, messages, or None. Texts longer than an engine reads are cut.

    Args:
        name: name, for errors, of the method that returned the content.

    Raises:
        ValueError: the content is something else, or has too many messages.
    """
    if content is None:
        return content
    if isinstance(content, str):
        return cut(content, MAX_TEXT)
    wanted = "expected a text, a list of messages {role, content} with texts, or None"
    if not isinstance(content, list):
        raise ValueError(f"{name} returned a content of {shown(content)}; {wanted}")
    if len(content) > MAX_MESSAGES:
        raise ValueError(f"{name} returned {len(content):,} messages; at most {MAX_MESSAGES:,} are read")
    for message in content:
        fits = isinstance(message, dict) and set(message) == {"role", "content"}
        if not fits or not all(isinstance(value, str) for value in message.values()) or len(message["role"]) > MAX_ROLE:
            raise ValueError(f"{name} returned the message {shown(message)}; {wanted}")
    most = max(1000, MAX_TEXT // max(1, len(content)))
    return [message | {"content": cut(message["content"], most)} for message in content]


def shown(value: Any) -> str:
    """Return the `repr` of a value for an error message, cut to 200 characters."""
    try:
        text = repr(value)
    # The user's class may have a `__repr__` that fails.
    except Exception:  # noqa: BLE001
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:197] + "..."
