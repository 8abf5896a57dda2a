"""Read assertions (Python code with `assert`) without running them.

Assertions may call functions of the program under test with literals, and compare or compute with the results. Reading
them gives the calls to make, in order, and claims about their results. The program makes only the calls; claims are
decided outside of its process, on plain data (`operations.py`), so the program never sees an expected value. All other
forms of Python are refused by name.

`and`, `or` and chained comparisons stop as in Python. The calls after the stop are made nevertheless, so that the
program cannot find out from the next call whether a result was right; their results and errors do not count.
"""

import ast
import builtins
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.reward.sandbox.answers import Answers, NoValue
from pipeline.reward.sandbox.forms import Refused, form_of, shown
from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.operations import BINARY, COMPARISONS, CONSTANTS, ERRORS, FUNCTIONS, UNARY
from pipeline.reward.sandbox.outcome import MAX_REASON

MATH = "math"
PROGRAM = "solution"  # the module that the program is
SOLUTION = "Solution"  # the class of LeetCode's programs, whose methods are functions

# A class of the program, whose objects have methods of their own.
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
_PLAIN = (str, bytes, list, tuple, set, dict, int, float, complex)

Target = str | list[Any]
"""Function to call: its name, or [number of an earlier call, method of the result] (see `inside/driver.py`)."""


@dataclass(frozen=True)
class Part:
    """An expression of an assertion. `of` computes its value from the results of the program's calls."""

    of: Callable[[Answers], Any]
    constant: bool = False
    """True if the value does not depend on the program."""


@dataclass(frozen=True)
class Assertions:
    """The content of Python code with assertions."""

    calls: tuple[str, ...]
    """Calls of the program's functions, in order, each as a line of JSON for `inside/driver.py`."""
    claims: tuple[tuple[Part, str], ...]
    """Conditions that must be true, each with the message of its assertion."""

    def failure(self, answers: Answers) -> str:
        """Return the reason why the program fails, in a few words; "" if all claims hold."""
        for claim, message in self.claims:
            try:
                if not claim.of(answers):
                    return f"assertion failed {message}".strip()[:MAX_REASON]
            except NoValue as error:
                return str(error)
            except ERRORS as error:
                return f"{type(error).__name__}: {error}"[:MAX_REASON]
        return ""


def read(source: str) -> Assertions:
    """Read Python code with assertions.

    Raises:
        Refused: the code has a form that cannot be judged, or no assertion that calls the program.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused("text that is not Python", detail=f" ({error})") from error
    reader = _Reader(tree)
    try:
        for statement in tree.body:
            reader.statement(statement)
    except RecursionError as error:
        raise Refused("an expression that is nested too deep") from error
    if unused := [name for name in reader.functions if name not in reader.entered]:
        raise Refused(f"the function `{unused[0]}` that is not called", detail=f"; write {unused[0]}(NAME) below it")
    if not reader.claims:
        raise Refused("text without an assert")
    if not reader.calls:
        raise Refused("an assert that calls nothing of the program")
    return Assertions(tuple(reader.calls), tuple(reader.claims))


class _Reader:
    """Reads statements in order, and collects calls and claims."""

    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[str] = []
        self.claims: list[tuple[Part, str]] = []
        self.functions: dict[str, ast.FunctionDef] = {}
        self.entered: set[str] = set()
        self.imported: dict[str, str] = {MATH: MATH, "isclose": f"{MATH}.isclose"}
        """Names that imports define, to their full dotted names."""
        self.bound: dict[str, Target] = {}
        """Parameters of the function that is being read, to the functions of the program that they stand for."""
        nodes = list(ast.walk(tree))
        self.loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        called -= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
        called -= {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {MATH, "isclose"}
        defined = {node.arg for node in nodes if isinstance(node, ast.arg)}
        # A task may require a function with the name of a built-in function.
        self.theirs = called if len(called) == 1 and not called & defined else set()

    # Statements

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assert():
                message = node.msg.value if isinstance(node.msg, ast.Constant) else ""
                self.claims.append((self.truth(node.test), str(message)))
            case ast.Import():
                self.imported |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            case ast.ImportFrom(module) if module == PROGRAM and all(alias.asname is None for alias in node.names):
                pass  # its functions are called by their own names
            case ast.ImportFrom():
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            case ast.FunctionDef(args=ast.arguments([], [_], None, [], [], None, []), decorator_list=[]):
                self.functions[node.name] = node
            case ast.Expr(ast.Call(ast.Name(name), [argument], [])) if name in self.functions:
                self.enter(name, argument)
            case ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case ast.Assign([ast.Name(name)]) if name not in self.loaded and not _has(node.value, ast.Call):
                pass  # a note, such as HumanEval's METADATA
            case _:
                raise Refused(form_of(node), node)

    def enter(self, name: str, argument: ast.expr) -> None:
        """Read the body of the function `name` (such as HumanEval's `check`), which is called with a function of the
        program."""
        function, before = self.functions[name], self.bound
        match argument:
            case ast.Name(given) if given not in self.imported:
                target: Any = given
            case ast.Attribute(ast.Call()):
                target = self.target(argument)
            case _:
                raise Refused(f"`{name}` of something other than a function of the program", argument)
        self.entered.add(name)
        self.bound = {function.args.args[0].arg: target}
        for statement in function.body:
            self.statement(statement)
        self.bound = before

    # Expressions

    def truth(self, node: ast.expr) -> Part:
        """Read an expression that is used as a condition."""
        value = self.value(node)
        match node:
            case ast.Tuple([_, *_]) | ast.List([_, *_]) | ast.Set() | ast.Dict([_, *_]):
                raise Refused("a list or tuple as a condition, which is always true", node)
            case ast.Call(function, given, named) if self.is_call(node):
                given = [*given, *(keyword.value for keyword in named)]
                asked = isinstance(function, ast.Attribute) and _name(function.value) != SOLUTION and given
                if asked or any(self.is_call(inner) for argument in given for inner in ast.walk(argument)):
                    raise Refused("a function of the program that decides on results of the program", node)
        return value

    def value(self, node: ast.expr) -> Part:
        if (literal := _literal(node)) is not None:
            return Part(lambda _: literal, True)
        match node:
            case ast.Constant(value) if value is not Ellipsis:
                return Part(lambda _: value, True)
            case ast.List(items):
                return self.made(node, lambda *parts: list(parts), *map(self.value, items))
            case ast.Tuple(items):
                return self.made(node, lambda *parts: parts, *map(self.value, items))
            case ast.Set(items):
                return self.made(node, lambda *parts: set(parts), *map(self.value, items))
            case ast.Dict(keys, items) if None not in keys:
                parts = [self.value(part) for pair in zip(keys, items, strict=True) for part in pair if part]
                return self.made(node, lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)), *parts)
            case ast.UnaryOp(ast.Not(), operand):
                return self.made(node, UNARY[ast.Not], self.truth(operand))
            case ast.UnaryOp(sign, operand) if type(sign) in UNARY:
                return self.made(node, UNARY[type(sign)], self.value(operand))
            case ast.BinOp(left, sign, right) if type(sign) in BINARY:
                return self.made(node, BINARY[type(sign)], self.value(left), self.value(right))
            case ast.BoolOp(sign, operands):
                return self.joined(isinstance(sign, ast.And), operands)
            case ast.Compare():
                return self.compared(node)
            case ast.Subscript(of, ast.Slice(lower, upper, step)):
                parts = [self.value(part or ast.Constant(None)) for part in (lower, upper, step)]
                return self.made(node, lambda of, *parts: of[slice(*parts)], self.value(of), *parts)
            case ast.Subscript(of, index):
                return self.made(node, lambda of, index: of[index], self.value(of), self.value(index))
            case ast.Name() | ast.Attribute():
                return self.named(node)
            case ast.Call():
                return self.called(node)
        raise Refused(form_of(node), node)

    def made(self, node: ast.expr, function: Callable[..., Any], *parts: Part) -> Part:
        """Return `function` applied to the parts. It is computed at once if all of them are constants."""
        if not all(part.constant for part in parts):
            return Part(lambda answers: function(*(part.of(answers) for part in parts)))
        try:
            constant = function(*(part.of(_NO_ANSWERS) for part in parts))
        except ERRORS as error:
            raise Refused(f"`{shown(node)}`, which raises {type(error).__name__}: {error}") from error
        return Part(lambda _: constant, True)

    def joined(self, every: bool, operands: list[ast.expr]) -> Part:
        """Return the operands joined by `and` if `every` is True, else by `or`."""
        parts = [self.truth(operand) for operand in operands]

        def join(answers: Answers) -> Any:
            for part in parts:
                found = part.of(answers)
                if bool(found) is not every:
                    break
            return found

        return Part(join, all(part.constant for part in parts))

    def compared(self, node: ast.Compare) -> Part:
        operands = [node.left, *node.comparators]
        truths = any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in operands)
        for sign, sides in zip(node.ops, zip(operands, operands[1:], strict=False), strict=True):
            single = (isinstance(side, ast.Constant) and isinstance(side.value, bool | None) for side in sides)
            if isinstance(sign, ast.Is | ast.IsNot) and not any(single):
                raise Refused("`is` with something other than None, True and False", node)
        parts = [(self.truth if truths else self.value)(operand) for operand in operands]
        compare = [COMPARISONS[type(sign)] for sign in node.ops]

        def chain(answers: Answers) -> Any:
            left = parts[0].of(answers)
            for comparison, part in zip(compare, parts[1:], strict=True):
                right = part.of(answers)
                if not comparison(left, right):
                    return False
                left = right
            return True

        return Part(chain, all(part.constant for part in parts))

    def named(self, node: ast.Name | ast.Attribute) -> Part:
        """Return a constant of `math`."""
        name = self.imported_name(node)
        module, _, constant = name.rpartition(".")
        if module != MATH or constant not in CONSTANTS:
            raise Refused(f"the name `{shown(node)}`")
        return Part(lambda _: CONSTANTS[constant], True)

    def called(self, node: ast.Call) -> Part:
        target = self.target(node.func)
        if not isinstance(target, tuple):
            number = self.call(target, node)
            return Part(lambda answers: answers[number])
        name, function, keywords = target
        named = {}
        for keyword in node.keywords:
            if keyword.arg not in keywords:
                raise Refused(f"`{keyword.arg or '**'}` of {name}()", node)
            named[keyword.arg] = self.value(keyword.value)
        given, count = [self.value(argument) for argument in node.args], len(node.args)
        return self.made(
            node,
            lambda *parts: function(*parts[:count], **dict(zip(named, parts[count:], strict=True))),
            *given,
            *named.values(),
        )

    # Calls of the program

    def call(self, target: Target, node: ast.Call) -> int:
        """Add a call of the program's function `target`. Returns the number of the call."""
        given: list[Any] = ["l"]
        for argument in node.args:
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.List | ast.Tuple):
                given += map(self.argument, argument.value.elts)
            else:
                given.append(self.argument(argument))
        if any(keyword.arg is None for keyword in node.keywords):
            raise Refused("`**`", node)
        named = [[keyword.arg, self.argument(keyword.value)] for keyword in node.keywords]
        self.calls.append(json.dumps([target, given, ["d", *named]]))
        return len(self.calls) - 1

    def argument(self, node: ast.expr) -> Any:
        """Convert an argument of a call to JSON data. If it is a call of the program itself, the data refers to the
        result of that call, which does not leave the program's process."""
        if isinstance(node, ast.Call) and self.is_call(node):
            target = self.target(node.func)
            assert not isinstance(target, tuple)
            return ["r", self.call(target, node)]
        literal = _literal(node)
        if literal is None and isinstance(node, ast.List | ast.Tuple):
            return ["l" if isinstance(node, ast.List) else "t", *map(self.argument, node.elts)]
        if literal is None:
            if any(self.is_call(inner) for inner in ast.walk(node)):
                raise Refused("an argument that is calculated from a result of the program", node)
            literal = self.value(node).of(_NO_ANSWERS)
        try:
            return values.pack(literal)
        except values.NotPlain as error:
            raise Refused(f"an argument with {error}", node) from error

    def is_call(self, node: ast.AST) -> bool:
        """Return True if the node is a call of a function of the program."""
        match node:
            case ast.Call(ast.Name(name)):
                return name in self.bound or not isinstance(self.target(node.func), tuple)
            case ast.Call(ast.Attribute(ast.Call())):
                return True
        return False

    def target(self, node: ast.expr) -> Target | tuple[str, Callable[..., Any], tuple[str, ...]]:
        """Return the function that a call calls: a `Target` if the program defines it; else (name, function, keywords)
        of one of `FUNCTIONS`."""
        match node:
            case ast.Name(name) if name in self.bound:
                return self.bound[name]
            case ast.Name(name) if name in self.theirs:
                return name
            case ast.Name(name) if name not in self.imported:
                if name in FUNCTIONS:
                    return (name, *FUNCTIONS[name])
                if hasattr(builtins, name) or name in self.functions:
                    raise Refused(f"`{name}`")
                return name
            case ast.Attribute(ast.Call(ast.Name(kind)) as made, method):
                own = _CLASS.fullmatch(kind) and (kind == SOLUTION or not any(hasattr(t, method) for t in _PLAIN))
                if not own or not self.is_call(made) or method.startswith("_"):
                    raise Refused(f"a method of a result (`.{method}`)", node)
                return [self.call(self.target(made.func), made), method]  # type: ignore[arg-type]
            case ast.Attribute(ast.Call(), method):
                raise Refused(f"a method of a result (`.{method}`)", node)
            case ast.Name() | ast.Attribute():
                name = self.imported_name(node)
                if name == f"{MATH}.isclose":
                    return (name, *FUNCTIONS["isclose"])
                raise Refused(f"`{shown(node)}`")
        raise Refused("a call of something other than a name", node)

    def imported_name(self, node: ast.expr) -> str:
        """Return the dotted name of an imported name or attribute; "" for others."""
        match node:
            case ast.Name(name):
                return self.imported.get(name, "")
            case ast.Attribute(ast.Name(module), name):
                return f"{self.imported[module]}.{name}" if module in self.imported else ""
        return ""


class _NoAnswers(Answers):
    """Stands for the results of calls when constants are computed, which use none."""

    def __init__(self) -> None:
        pass


_NO_ANSWERS = _NoAnswers()


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal list, tuple or dict, which may be long; None for other expressions."""
    # `literal_eval` takes the empty set for a literal as well, but its call may be the program's.
    if not isinstance(node, ast.List | ast.Tuple | ast.Dict):
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _name(node: ast.expr) -> str:
    """Return the name of the function that a call calls; "" if it is not a plain name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(inner, kind) for inner in ast.walk(node))
