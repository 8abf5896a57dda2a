"""What a bash script passes to verl, worked out from its text: nothing is run, no file is sourced.

What was chosen:

1. Variables, arrays, defaults (`${X:-1}`) and whole-number arithmetic are worked out. `$HOME` and `$PWD` become
   `${oc.env:HOME}`, which Hydra looks up where the run starts.
2. Everything else (commands, loop variables, the script's own arguments, names that are never assigned) is unknown. It
   keeps its source text and a reason, wherever it is passed on to.
3. Which branch of an `if` or `case` is taken, and whether a loop or function runs, is not decided. An assignment counts
   if it surely comes before its use; one that may come between is reported. A command in a branch counts.
"""

import itertools
import re
from dataclasses import dataclass, field

from jobs.verl.values import MARKS, Path, Values, assigns
from jobs.verl.words import Operator, Reader, ScriptError, Word

SETTING = re.compile(
    r"[+~]{0,2}(actor_rollout_ref|data|critic|algorithm|trainer|reward|reward_model|custom_reward_function)\.[\w.]+="
)
"""How a word begins that makes a command one that starts verl."""

_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_READERS = ("read", "mapfile", "readarray")
_ASSIGNED_NUMBER = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")


@dataclass(frozen=True)
class Argument:
    """A word that a command gets."""

    text: str
    """What verl sees; where that is unknown, what stands in the script."""
    line: int
    source: str
    """Name of the script."""
    unknown: tuple[str, ...] = ()
    """Why parts of it cannot be known; empty where all is."""


@dataclass(frozen=True)
class Launch:
    """A command that starts verl."""

    arguments: tuple[Argument, ...]
    line: int
    source: str
    notes: tuple[str, ...] = ()
    """Assignments that may or may not come before it."""


@dataclass
class _Block:
    kind: str
    outer: Path


@dataclass
class Script:
    """Reads scripts one after the other, as if they were one."""

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values = Values()
        self._numbers = itertools.count()

    def read(self, text: str, source: str) -> None:
        """Add what `text` assigns and starts; `source` is its name in messages.

        Raises:
            ScriptError: it cannot be read as bash.
        """
        self.source = self._values.source = source
        self._blocks: list[_Block] = []
        self._base: Path = ()
        self._values.path = ()
        self._function = False
        try:
            self._tokens = list(Reader(text.replace("\r\n", "\n").translate(MARKS)).tokens())
            self._place = 0
            while token := self._next():
                self._values.cautions = []
                if isinstance(token, Operator):
                    self._operator(token)
                elif token.plain is None or not self._keyword(token.plain, token):
                    self._command(token)
        except RecursionError as error:
            raise ScriptError(f"{source}: brackets or expansions are nested too deeply") from error
        except ScriptError as error:
            raise ScriptError(f"{source}, {error}") from error

    def _next(self) -> Word | Operator | None:
        self._place += 1
        return self._tokens[self._place - 1] if self._place <= len(self._tokens) else None

    # Structure: which commands are surely run before which others.

    def _operator(self, token: Operator) -> None:
        before = self._tokens[self._place - 2] if self._place > 1 else None
        if token.text == "&&":
            self._values.path = (*self._values.path, next(self._numbers))
        elif token.text in ("||", "|", "|&"):
            self._values.path = (*self._base, next(self._numbers))
        elif token.text == "(":
            self._open("subshell", branch=True)
        elif token.text == ")":
            self._close("subshell")
        elif token.text in (";;", ";&", ";;&"):
            self._pattern()
        elif not (token.text == "\n" and isinstance(before, Operator) and before.text in ("&&", "||", "|", "|&")):
            self._values.path = self._base

    def _open(self, kind: str, branch: bool) -> None:
        self._blocks.append(_Block(kind, self._base))
        self._function = False
        if branch:
            self._branch()

    def _branch(self) -> None:
        if self._blocks:
            self._base = self._values.path = (*self._blocks[-1].outer, next(self._numbers))

    def _close(self, kind: str) -> None:
        if any(block.kind == kind for block in self._blocks):
            while (block := self._blocks.pop()).kind != kind:
                pass
            self._base = self._values.path = block.outer

    def _keyword(self, plain: str, token: Word) -> bool:
        """Deal with a reserved word; False where `plain` is none."""
        if plain in ("if", "while", "until"):
            self._open("if" if plain == "if" else "loop", branch=False)
        elif plain in ("then", "elif", "else", "do"):
            self._branch()
        elif plain in ("fi", "done"):
            self._close("if" if plain == "fi" else "loop")
        elif plain in ("for", "select"):
            self._open("loop", branch=False)
            name = next((word.plain for word in self._rest()), None)
            if name:
                mark = self._values.unknown(f"${name}", f"is set by the loop in line {token.line}")
                self._values.bind(name, mark, token.line)
        elif plain == "case":
            self._open("case", branch=False)
            self._skip("in")
            self._pattern()
        elif plain == "esac":
            self._close("case")
        elif plain == "{":
            self._open("group", branch=self._function)
        elif plain == "}":
            self._close("group")
        elif plain == "function":
            self._rest()
            self._skip("{")
            self._open("group", branch=True)
        elif plain == "[[":
            # Its brackets and `&&` are no operators.
            self._skip("]]")
        else:
            return plain in ("!", "time")
        return True

    def _rest(self) -> list[Word]:
        """The words up to the next operator."""
        words = []
        while self._place < len(self._tokens) and isinstance(token := self._tokens[self._place], Word):
            words.append(token)
            self._place += 1
        return words

    def _skip(self, last: str) -> None:
        """Go behind the next word `last`."""
        while token := self._next():
            if isinstance(token, Word) and token.plain == last:
                return

    def _pattern(self) -> None:
        """Go behind the next pattern of a `case`."""
        while token := self._next():
            if isinstance(token, Word) and token.plain == "esac":
                self._close("case")
                return
            if isinstance(token, Operator) and token.text == ")":
                self._branch()
                return

    # Commands.

    def _command(self, first: Word) -> None:
        words = [first, *self._rest()]
        following = self._tokens[self._place] if self._place < len(self._tokens) else None
        if len(words) == 1 and first.plain and isinstance(following, Operator) and following.text == "(":
            # The head of a function, `name()`.
            self._place += 2
            self._function = True
            return
        assigned = list(itertools.takewhile(assigns, words))
        rest = words[len(assigned) :]
        name = rest[0].plain if rest else None
        if name in _DECLARATIONS:
            assigned = [word for word in rest[1:] if assigns(word)]
        if not rest or name in _DECLARATIONS:
            for word in assigned:
                self._values.assign(word)
        elif name in _READERS:
            self._hide([word.plain for word in rest[1:] if word.plain], "is read", first.line)
        elif rest[0].parts[0].kind == "arithmetic":
            self._hide(_ASSIGNED_NUMBER.findall(rest[0].parts[0].text), "is computed", first.line)
        elif name not in ("echo", "printf"):
            self._launch(rest)

    def _hide(self, names: list[str], how: str, line: int) -> None:
        for name in filter(str.isidentifier, names):
            self._values.bind(name, self._values.unknown(f"${name}", f"{how} in line {line}"), line)

    def _launch(self, words: list[Word]) -> None:
        values = self._values
        fields = [(text, word.line) for word in words for text in values.fields(word)]
        if not any(SETTING.match(text) for text, _ in fields):
            return
        if SETTING.match(fields[0][0]):
            self.notes.append(
                f"line {words[0].line} of {self.source} is a setting outside any command (a comment or a missing "
                f"backslash ends the command above), so verl does not see it: {values.shown(fields[0][0])}"
            )
            return
        arguments = (
            Argument(values.shown(text), line, self.source, tuple(dict.fromkeys(values.why(text))))
            for text, line in fields
        )
        notes = tuple(dict.fromkeys(values.cautions))
        self.launches.append(Launch(tuple(arguments), words[0].line, self.source, notes))
