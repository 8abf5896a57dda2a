"""The turns of phrase that make a second reading necessary, counted in docstrings and comments, and in the pages.

    python -m tests.words            # fails if a turn stands more often than its ceiling allows (part of `make lint`)
    python -m tests.words --lower    # writes today's counts as the new ceilings, if none of them rises
    python -m tests.words --show beside

Ceilings are in `words.json`, for the code and for the pages (README.md and `docs/`). They only fall: a sentence that is
mended lowers one for good.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_suffix(".json")
FOLDERS = ("pipeline", "jobs", "benchmarks")
GENERATED = ("configuration.md",)
"""Pages that are written from docstrings, whose words are counted there."""
TURNS = {
    "of which": r"(?i)\b(?:of which|those of|that of|those that|those which)\b",
    "is no": r"(?i)\b(?:is|are|was|were) no\b",
    "where": r"(?i)\bwhere\b",
    "beside": r"(?i)\bbeside\b",
    "behind": r"(?i)\bbehind\b",
    "alone": r"(?i)\balone\b",
    "anew": r"(?i)\banew\b",
    "whoever": r"(?i)\b(?:whoever|whatever|nobody)\b",
    "person": r"(?i)\b(?:asks|asked|tells|told|plays|played|says|said|hears|heard|obeys|mourns)\b",
    "begins with what": r"\A(?:What|Whether|Why|Of|As|Its|Those)\b",
}
"""Each turn by its name, as a regular expression. The last one looks at the beginnings of docstrings and of a page's
paragraphs: a comment begins with its sign."""


@dataclass(frozen=True)
class Text:
    """A docstring, a comment, or a paragraph of a page.

    Attributes:
        path: of its file, below the root.
        line: number of its first line.
        words: the text, without code in backticks.
    """

    path: str
    line: int
    words: str


def texts(folders: Sequence[str] = FOLDERS) -> Iterator[Text]:
    """All docstrings and comments of the Python files below `folders`."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(source)):
            # A string that stands for itself documents a module, a class, a function or the field above it.
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield Text(name, node.lineno, without_code(node.value.value))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield Text(name, token.start[0], without_code(token.string))


def pages() -> Iterator[Text]:
    """All paragraphs, items of lists and lines of tables of the pages, without headings, code and generated tables."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if path.name not in GENERATED:
            for line, paragraph in paragraphs(path.read_text()):
                yield Text(str(path.relative_to(ROOT)), line, without_code(paragraph))


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Each paragraph, item and line of a table of a Markdown page, with the number of its first line."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]+", "", match[0])

    # Code, generated tables and headings become empty lines, so that the numbers of lines stay.
    for pattern in (r"^```.*?^```", r"^<!-- table:.*?^<!-- end.*?$", r"^#+ .*?$", r"^ {4,}(?![-*]|\d+\.).*?$"):
        page = re.sub(pattern, blank, page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"\]\([^)\s]+\)", "]", page)
    begun, number = "", 0
    for line, text in enumerate([*page.splitlines(), ""], start=1):
        if not text.strip() or re.match(r"\s*(?:[-*|]|\d+\.)\s", text):
            if begun:
                yield number, begun
            begun, number = re.sub(r"^\s*(?:[-*|]|\d+\.)\s+", "", text), line
        else:
            begun, number = (f"{begun}\n{text}", number) if begun else (text, line)


def without_code(text: str) -> str:
    """`text` without what stands in backticks, and without indented blocks of commands and code."""
    prose = re.sub(r"``?[^`]+``?", "`", text)
    return re.sub(r"\n\n {4,}\S[^\n]* {2,}[^\n]*", "", prose)


def found(text: Text) -> Counter[str]:
    """How often each turn stands in `text`."""
    return Counter({turn: len(re.findall(pattern, text.words)) for turn, pattern in TURNS.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the counts with their ceilings; returns the exit code."""
    parser = argparse.ArgumentParser(description="Count turns of phrase in docstrings, comments and pages.")
    parser.add_argument("--lower", action="store_true", help="write today's counts as the new ceilings")
    parser.add_argument("--show", choices=TURNS, help="print the lines with this turn")
    parser.add_argument("--rooms", action="store_true", help="print the counts of each room, per 1,000 words")
    options = parser.parse_args(arguments)
    code, prose = list(texts()), list(pages())
    every = [*code, *prose]
    if options.show:
        for text in every:
            if found(text)[options.show]:
                print(f"{text.path}:{text.line}: {' '.join(text.words.split())[:160]}")
        return 0
    if options.rooms:
        return by_room(every)
    ceilings = json.loads(CEILINGS.read_text()) if CEILINGS.is_file() else {}
    now = total(code) | {"pages": total(prose)}
    high = [*too_many(code, ceilings, "docstrings and comments"), *too_many(prose, ceilings.get("pages", {}), "pages")]
    for sentence in high:
        print(sentence, file=sys.stderr)
    if high:
        return 1
    if options.lower:
        CEILINGS.write_text(json.dumps(now, indent=1) + "\n")
    return 0


def total(every: Sequence[Text]) -> dict[str, Any]:
    """How often each turn stands in all texts together."""
    counts: Counter[str] = sum((found(text) for text in every), Counter())
    return {turn: counts[turn] for turn in TURNS}


def too_many(every: Sequence[Text], ceilings: dict[str, int], place: str) -> Iterator[str]:
    """A sentence for each turn that stands more often than its ceiling allows."""
    for turn, count in total(every).items():
        if count > ceilings.get(turn, count):
            yield (
                f"{turn!r} stands {count} times in {place}, and {ceilings[turn]} are allowed; say it in other words "
                f"(python -m tests.words --show {turn!r} lists the places)"
            )


def by_room(every: Sequence[Text]) -> int:
    """Print each turn's count per 1,000 words of each room, and of all."""
    rooms: dict[str, list[Text]] = {"all": list(every)}
    for text in every:
        rooms.setdefault("/".join(text.path.split("/")[:2]).removesuffix(".py"), []).append(text)
    print("room", "words", *TURNS, sep=" | ")
    for room, inside in rooms.items():
        words = sum(len(text.words.split()) for text in inside)
        counts: Counter[str] = sum((found(text) for text in inside), Counter())
        print(room, words, *(f"{1000 * counts[turn] / max(words, 1):.1f}" for turn in TURNS), sep=" | ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
