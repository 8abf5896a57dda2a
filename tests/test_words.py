"""The word lint counts turns in docstrings and comments, and not in code, quoted or not."""

import json
from collections import Counter
from pathlib import Path

from tests.words import TURNS, Text, found, pages, paragraphs, without_code


def counts(text: str) -> dict[str, int]:
    return dict(+Counter(found(Text("a.py", 1, without_code(text)))))


def test_turns_are_counted_in_any_case() -> None:
    assert counts("Where there is no file, those of the run.") == {"where": 1, "is no": 1, "of which": 1}
    assert counts("The file of the run.") == {}


def test_beginnings_are_those_of_docstrings() -> None:
    assert counts("Whether it runs.") == {"begins with what": 1}
    assert counts("# Whether it runs.") == counts("True if it runs, whether or not.") == {}


def test_code_is_no_prose() -> None:
    assert counts("Calls `torch.where` and ``beside``.") == {}


def test_a_page_has_paragraphs_items_and_lines_of_tables_but_no_code() -> None:
    page = """# Where it runs

Behind
[that](beside.md).

```bash
echo beside
```
- alone
  there
    x where y
| a | b |

<!-- table: made -->
| anew |
<!-- end of the table -->
"""
    assert list(paragraphs(page)) == [(3, "Behind\n[that]."), (9, "alone\n  there"), (12, "a | b |")]


def test_the_pages_are_counted_without_the_generated_one() -> None:
    paths = {text.path for text in pages()}
    assert {"README.md", "docs/algorithms.md"} <= paths and "docs/configuration.md" not in paths
    assert set(json.loads((Path(__file__).parent / "words.json").read_text())["pages"]) == set(TURNS)
