"""The commands that a bash script would start, worked out from its text. Nothing is run, and no file is sourced.

What was chosen:

1. Assignments, arrays, defaults, arithmetic, tests, `if`, `case`, `for` and functions are followed as bash does, in an
   environment that holds HOME, PWD and the variables that the caller names. Other variables count as not set.
2. The output of a command and the files of the machine are unknown. A branch that depends on them is in doubt: each
   variable that is assigned there is unknown from then on, and a command there that trains is refused later.
3. Slipstream runs on NVIDIA GPUs and CPUs, so `python3 -c 'import torch_npu'` fails.
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jobs.verl.conditions import Status, all_of, any_of, fits, holds, opposite
from jobs.verl.expand import Expander, Value
from jobs.verl.tokens import ScriptError, Token, tokens

MAX_COMMANDS = 20_000
"""Commands after which a script counts as one that never ends."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_READERS = ("read", "mapfile", "readarray", "getopts", "let")
_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}", "select", "coproc")
_IGNORED = ("set", "shopt", "ulimit", "wait", "sleep", "trap", "mkdir", ":", "true")


@dataclass(frozen=True)
class Command:
    """A program that the script starts."""

    arguments: list[str]
    line: int
    doubt: int | None = None
    """Line of the branch that decides whether the command is reached, where the text does not settle it."""


class Script(Expander):
    """Follows scripts one after the other, as if they were one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """
        Args:
            variables: the environment.
        """
        super().__init__(variables)
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self._functions: dict[str, tuple[list[Token], int]] = {}
        self._tokens: list[Token] = []
        self._place = 0
        self._dead_code = False
        self._ended = ""
        self._output: list[str] = []
        self._count = 0
        self._outside: list[dict[str, Value | None]] = []
        """Per function that is followed: what the variables hold outside that it declares for itself."""

    def read(self, text: str, path: str = "run.sh") -> None:
        """Follow a script, whose file is `path`.

        Raises:
            ScriptError: it is not bash, or it does something that is not followed here.
        """
        self.variables |= {"0": path, "BASH_SOURCE": path}
        try:
            self._inside(tokens(text.replace("\ue000", "").replace("\ue001", "")))
        except RecursionError as error:
            raise ScriptError("brackets, functions or expansions are nested too deeply") from error

    def output(self, text: str, line: int) -> str | None:
        outer = self._output, dict(self.variables), self._ended, len(self.commands)
        self._output = []
        self._inside(tokens(text, line))
        result = "\n".join(self._output).rstrip("\n")
        self._output, self.variables, self._ended, commands = outer
        return result if len(self.commands) == commands else None

    # The structure of the script.

    def _inside(self, inner: list[Token], place: int = 0, only_one: bool = False) -> Status:
        """Follow other tokens: all of them, or the one command at `place`."""
        outer = self._tokens, self._place
        self._tokens, self._place = inner, place
        status = self._command() if only_one else self._list()
        if not only_one and self._place < len(inner):
            raise ScriptError(f"line {self._peek().line}: nothing is open that this {self._peek().text!r} could end")
        self._tokens, self._place = outer
        return status

    @property
    def _live(self) -> bool:
        return not self._dead_code and not self._ended

    def _peek(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        end = Token("", self._tokens[-1].line if self._tokens else 1, operator=True)
        return self._tokens[place] if place < len(self._tokens) else end

    def _take(self, expected: str | None = None) -> Token:
        token = self._peek()
        self._place += 1
        if expected is not None and token.text != expected:
            raise ScriptError(f"line {token.line}: {expected!r} is missing before {token.text or 'the end'!r}")
        return token

    def _skip(self, *texts: str) -> None:
        while self._peek().operator and self._peek().text in texts:
            self._place += 1

    def _now(self, token: Token) -> str:
        """What a word expands to, unless it stands in a part that is not run."""
        return self.text(token.text, token.line) if self._live and not token.operator else token.text

    def _follow(self, status: Status, line: int, part: Callable[[], Status]) -> Status:
        """Follow a part of the script that is run where `status` holds."""
        outer = self._dead_code, self.doubt, self._ended
        self._dead_code = self._dead_code or status is False
        self.doubt = self.doubt or (line if status is None and self._live else None)
        result = part()
        # A way in doubt that ends the script is not the one on which verl is started.
        ended = outer[2] if status is None else self._ended
        self._dead_code, self.doubt, self._ended = outer[0], outer[1], ended
        return result if status else None

    def _list(self, *stops: str) -> Status:
        """Follow commands up to one of the words `stops`, a closing bracket, or the end."""
        status: Status = True
        while (token := self._peek()).text and token.text not in (*stops, ")", ";;", ";&", ";;&"):
            if token.operator and token.text in ("\n", ";", "&"):
                self._place += 1
            else:
                status = self._and_or()
        return status

    def _and_or(self) -> Status:
        status = self._pipeline()
        while (operator := self._peek()).text in ("&&", "||"):
            self._place += 1
            self._skip("\n")
            goes_on = status if operator.text == "&&" else opposite(status)
            following = self._follow(goes_on, operator.line, self._pipeline)
            status = following if goes_on else status
        return status

    def _pipeline(self) -> Status:
        negated = self._peek().text == "!"
        self._place += negated
        status = self._command()
        while self._peek().text in ("|", "|&"):
            self._place += 1
            self._skip("\n")
            status = self._command()
        return opposite(status) if negated else status

    def _command(self) -> Status:
        token, following = self._peek(), self._peek(1)
        if token.operator and token.text != "(":
            raise ScriptError(f"line {token.line}: no command stands before {token.text!r}")
        if token.text in _RESERVED:
            raise ScriptError(f"line {token.line}: {token.text!r} is not followed here")
        compound = {"if": self._if, "case": self._case, "for": self._for, "[[": self._double}
        compound |= {"while": self._while, "until": self._while, "{": self._group, "(": self._group}
        if token.text in compound:
            self._place += 1
            return compound[token.text](token)
        if token.text == "function" or (following.text == "(" and following.operator):
            return self._define()
        return self._simple()

    def _define(self) -> Status:
        self._place += self._peek().text == "function"
        name = self._take().text
        self._skip("(", ")", "\n")
        if self._live and self.doubt:
            raise ScriptError(f"line {self._peek().line}: it depends on line {self.doubt} whether {name} is defined")
        if self._live:
            self._functions[name] = self._tokens, self._place
        self._follow(False, 0, self._command)
        return True

    def _if(self, start: Token) -> Status:
        reached: Status = True
        word = start
        while word.text != "fi":
            status: Status = True
            if word.text != "else":
                status = self._follow(reached, start.line, lambda: self._list("then"))
                self._take("then")
            self._follow(all_of([reached, status]), start.line, lambda: self._list("elif", "else", "fi"))
            reached = all_of([reached, opposite(status)])
            word = self._take()
            if word.text not in ("elif", "else", "fi"):
                raise ScriptError(f"line {start.line}: no `fi` ends this `if`")
        return None

    def _case(self, start: Token) -> Status:
        value = self._now(self._take())
        going: Status = self._live
        self._skip("\n")
        self._take("in")
        self._skip("\n")
        while (word := self._take()).text != "esac":
            matches: list[Status] = []
            while word.text not in (")", ""):
                matches += [] if word.operator else [fits(value, self._now(word), self.why)]
                word = self._take()
            self._follow(all_of([going, any_of(matches)]), start.line, lambda: self._list("esac"))
            going = all_of([going, opposite(any_of(matches))])
            if self._peek().text != "esac":
                self._take(";;")
            self._skip("\n")
        return None

    def _for(self, start: Token) -> Status:
        name = self._take()
        words = list(self.arguments)
        if name.text.startswith("(("):
            words = [self.unknown(name.text, f"in line {name.line} is a loop's number")]
        self._skip("\n")
        if self._peek().text == "in":
            self._place += 1
            words = []
            while not self._peek().operator:
                word = self._take()
                words += self.fields(word) if self._live else []
        self._skip("\n", ";")
        self._take("do")
        body = self._place
        self._follow(False, 0, lambda: self._list("done"))
        for value in words if self._live else ():
            self._place = body
            self.bind(name.text if name.text.isidentifier() else "_", value, name.line)
            self._follow(None if self.why(value) else True, start.line, lambda: self._list("done"))
        self._take("done")
        return None

    def _while(self, start: Token) -> Status:
        status = self._list("do")
        self._take("do")
        # One round in doubt: what the rounds change is unknown behind the loop.
        self._follow(False if status is (start.text == "until") else None, start.line, lambda: self._list("done"))
        self._take("done")
        return None

    def _group(self, start: Token) -> Status:
        variables, ended = dict(self.variables), self._ended
        status = self._list("}" if start.text == "{" else ")")
        self._take("}" if start.text == "{" else ")")
        if start.text == "(":
            self.variables, self._ended = variables, ended
        return status

    def _double(self, start: Token) -> Status:
        """`[[ ... ]]`, in which `&&` and `||` belong to the test."""
        ways: list[list[list[str]]] = [[[]]]
        while (token := self._take()).text not in ("]]", ""):
            if token.text == "||":
                ways.append([[]])
            elif token.text == "&&":
                ways[-1].append([])
            elif token.text != "\n":
                ways[-1][-1].append(self._now(token))
        return any_of([all_of([self._holds(test) for test in way]) for way in ways])

    # Simple commands.

    def _simple(self) -> Status:
        words: list[Token] = []
        while not self._peek().operator:
            words.append(self._take())
        if not self._live:
            return None
        self._count += 1
        if self._count > MAX_COMMANDS:
            raise ScriptError(f"line {words[0].line}: the script starts more than {MAX_COMMANDS} commands")
        assigned = 0
        while assigned < len(words) and _ASSIGNMENT.fullmatch(words[assigned].text):
            assigned += 1
        if assigned == len(words) or words[0].text in _DECLARATIONS:
            if words[0].text in ("local", "declare", "typeset"):
                self._localise(words[1:])
            for word in words:
                if match := _ASSIGNMENT.fullmatch(word.text):
                    self.assign(match[1], match[2] or "", bool(match[3]), match[4], word.line)
                elif "$" in word.text:
                    self.notes.append(f"line {word.line}: the variables that `{word.text}` sets are not known")
            return None if any(sign in word.text for word in words for sign in ("$(", "`")) else True
        if words[assigned].text.startswith("(("):
            return self._hide(re.findall(r"[A-Za-z_]\w*", words[assigned].text), words[0].line)
        arguments = [field for word in words[assigned:] for field in self.fields(word)]
        return self._start(arguments, words[0].line) if arguments else True

    def _localise(self, words: list[Token]) -> None:
        """Keep what variables hold outside of the function that declares them."""
        for word in words if self._outside else ():
            name = word.text.partition("=")[0].removesuffix("+")
            self._outside[-1].setdefault(name, self.variables.get(name))
            self.variables.pop(name, None)

    def _hide(self, names: list[str], line: int) -> Status:
        for name in filter(str.isidentifier, names):
            self.bind(name, self.unknown(f"${name}", f"is set by the shell in line {line}"), line)
        return None

    def _start(self, arguments: list[str], line: int) -> Status:
        """Follow a command whose words are expanded."""
        name = arguments[0]
        if name in self._functions:
            return self._call(*self._functions[name], arguments[1:])
        if name in ("exit", "return") and not (name == "return" and self.doubt):
            self._ended = name
        elif name in ("return", "break", "continue"):
            raise ScriptError(f"line {line}: a `{name}` is not followed here")
        elif name == "eval":
            return self._inside(tokens(" ".join(arguments[1:]), line))
        elif name in ("bash", "sh") and arguments[1:2] in (["-c"], ["-lc"]) and len(arguments) > 2:
            return self._inside(tokens(arguments[2], line))
        elif name in ("source", "."):
            source = self.shown(" ".join(arguments))
            self.notes.append(f"line {line}: the file of `{source}` is not read; give it in front of this script")
        elif name in ("echo", "pwd", "dirname", "basename"):
            said = self._said(name, arguments[1:], line)
            self._output.append(self.unknown(said, f"depends on line {self.doubt}") if self.doubt else said)
        elif name in ("[", "test"):
            return self._holds(arguments[1:-1] if name == "[" else arguments[1:])
        elif name == "unset":
            for variable in arguments[1:] if not self.doubt else ():
                self.variables.pop(variable, None)
            return self._hide(arguments[1:], line) if self.doubt else True
        elif name == "shift" or (name == "set" and "--" in arguments):
            if self.doubt:
                raise ScriptError(f"line {line}: it depends on line {self.doubt} whether the arguments change")
            self.arguments = self.arguments[1:] if name == "shift" else arguments[arguments.index("--") + 1 :]
        elif name == "cd" and len(arguments) > 1:
            self.bind("PWD", posixpath.normpath(posixpath.join(self.text("$PWD", line), arguments[-1])), line)
        elif name == "getopts" and not self.arguments:
            return False
        elif name in _READERS or (name == "printf" and "-v" in arguments):
            return self._hide(re.findall(r"[A-Za-z_]\w*", " ".join(arguments[1:])), line)
        elif name == "false" or (name.startswith("python") and arguments[1:] == ["-c", "import torch_npu"]):
            return False
        elif name not in _IGNORED:
            self.commands.append(Command(arguments, line, self.doubt))
            # What stands behind `exec PROGRAM` is not reached.
            self._ended = "exit" if name == "exec" and len(arguments) > 1 and not self.doubt else self._ended
            return None
        return True

    def _holds(self, words: list[str]) -> Status:
        return holds(words, self.why)

    def _said(self, name: str, words: list[str], line: int) -> str:
        """What a command that only prints puts out."""
        if name in ("echo", "pwd"):
            return self.text("$PWD", line) if name == "pwd" else " ".join(w for w in words if w not in ("-n", "-e"))
        if not 1 <= len(words) <= 1 + (name == "basename") or self.why(words[0]):
            return self.unknown(f"$({name} {' '.join(words)})", f"in line {line} is a command")
        path = words[0].rstrip("/")
        if name == "dirname":
            return posixpath.dirname(path) or "."
        return posixpath.basename(path).removesuffix(words[1] if len(words) > 1 else "")

    def _call(self, body: list[Token], place: int, arguments: list[str]) -> Status:
        outer, self.arguments = self.arguments, arguments
        self._outside.append({})
        status = self._inside(body, place, only_one=True)
        self.arguments = outer
        for variable, value in self._outside.pop().items():
            self.variables.pop(variable, None)
            self.variables |= {} if value is None else {variable: value}
        self._ended = "" if self._ended == "return" else self._ended
        return status
