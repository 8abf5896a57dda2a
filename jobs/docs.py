"""Read the documentation: `python -m jobs.docs [NAME]`."""

import difflib
import pydoc
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.command import called, exit_code, new_parser
from jobs.entry import command

HERE = Path(__file__).resolve().parent
EPILOG = """\
examples:
  python -m jobs.docs rewards
  python -m jobs.docs --search sandbox memory
  python -m jobs.docs kuberay/cpu_demo.yaml > cpu_demo.yaml
"""


def files() -> dict[str, Path]:
    """Return the paths of pages, examples and manifests by name, such as `rewards` and `examples/rl_loop.py`."""
    # Links in a checkout, folders in a wheel.
    pages, examples = (HERE / "pages").resolve(), (HERE / "examples").resolve()
    found = {path.stem: path for path in sorted(pages.glob("*.md"))}
    found |= {path.relative_to(examples.parent).as_posix(): path for path in sorted(examples.rglob("*.py"))}
    return found | {path.relative_to(HERE).as_posix(): path for path in sorted((HERE / "kuberay").glob("*.yaml"))}


def title(path: Path) -> str:
    """Return the first line of a file, without `#`, quotes and spaces around it."""
    return path.read_text(encoding="utf-8").partition("\n")[0].strip('#" ')


def sections(text: str) -> Iterator[str]:
    """Yield the sections of a page, each from its heading to the next one; comments in code blocks are not headings."""
    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if not in_code and lines and re.match("#+ ", line):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def search(words: Sequence[str]) -> list[str]:
    """Return a line for each section of a page with all `words`, in any case: the page, the heading, its first line
    with one of them.

    Sections whose heading has all words come first, and among them sections of pages whose title has them; then pages
    go by how often they have the words.
    """
    wanted = [word.casefold() for word in words]

    def hits(text: str) -> int:
        return min(text.casefold().count(word) for word in wanted)

    found: list[tuple[bool, bool, int, str]] = []
    for name, path in files().items():
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            of_page = (not hits(title(path)), -hits(text))
            for section in filter(hits, sections(text)):
                heading, *lines = section.splitlines()
                first = next((line for line in lines if any(word in line.casefold() for word in wanted)), "")
                line = f"{name}: {heading.strip('# ')}: {first.strip()}".rstrip(": ")
                found.append((not hits(heading), *of_page, line))
    # Equal ones stay in the order of the page.
    return [line for *_, line in sorted(found, key=lambda entry: entry[:3])]


def show(name: str) -> None:
    """Print the file with the name `name`; on a terminal with a pager.

    Raises:
        ValueError: the name is unknown.
    """
    known = files()
    # A page may be named by its file, an example by the last part of its name.
    name = name.removeprefix("docs/").removesuffix(".md")
    path = known.get(name) or next((path for path in known.values() if path.name == name), None)
    if path is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"{' '.join(called('docs'))} lists them"
        raise ValueError(f"the page {name!r} does not exist; {hint}")
    text = path.read_text(encoding="utf-8")
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        sys.stdout.write(text)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 nothing found, 2 no such page."""
    parser = new_parser("docs", "Read the documentation; without NAME, list it.", EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a page, an example or a manifest")
    parser.add_argument("--search", nargs="+", metavar="WORD", help="list the sections that have all words")
    options = parser.parse_args(arguments)

    def run() -> int:
        if options.search:
            found = search(options.search)
            print("\n".join(found) or f"no page has {' '.join(options.search)}")
            return 0 if found else 1
        if options.name:
            show(options.name)
        else:
            for name, path in files().items():
                print(f"{name:<40}{title(path)}")
        return 0

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
