"""Where the program of a response is found."""

import pytest

from pipeline.reward.sandbox.answer import extract_code
from tests.bounds import bounded

CASES = {
    "one block": ("Text\n```python\nprint(1)\n```\nmore", "print(1)\n"),
    "the last of several": ("```python\n1\n```\n```python\n2\n```", "2\n"),
    "short names": ("```py\n1\n```\n```python3\n2\n```", "2\n"),
    "capitals and blanks": ("  ``` Python \n1\n  ```", "1\n"),
    "windows lines": ("```python\r\n1\r\n```\r\n", "1\r\n"),
    "python before others": ("```python\n1\n```\n```text\n2\n```\n```\n3\n```", "1\n"),
    "not closed": ("```python\n1\n", "1\n"),
    "not closed, then another": ("```python\n1\n```python\n2\n```", "2\n"),
    "tags": ("so <code>\nprint(1)\n</code> done", "print(1)"),
    "the last tags": ("<code>1</code><code>2</code>", "2"),
    "a block inside tags": ("<code>\n```python\n1\n```\n</code>", "1\n"),
    "tags inside a block": ("```python\nprint('<code>2</code>')\n```", "print('<code>2</code>')\n"),
    "no language": ("```\n1\n```", "1\n"),
    "backticks in a line": ("```python\nx = '```'\n```", "x = '```'\n"),
    "empty": ("```python\n```", ""),
    "another language": ("```cpp\n1\n```", None),
    "open tag alone": ("<code>1", None),
    "closing tag first": ("</code><code>1", None),
    "nothing": ("print(1)", None),
    "no text": ("", None),
}


@pytest.mark.parametrize("name", CASES)
def test_extract_code(name: str) -> None:
    response, code = CASES[name]
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "part", ["```python\n", "```", "```\n", "<code>", "</code>", "` ", "\n", "   \t", "``` ", "```\t!"]
)
def test_time_is_linear(part: str) -> None:
    with bounded():
        extract_code(part * (1_000_000 // len(part)))
        extract_code("```" + " " * 1_000_000 + "!")
