"""Forms of Python that no assertion may have, by their names."""

import ast

NAMES: dict[type[ast.AST], str] = {
    ast.Lambda: "a lambda",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.JoinedStr: "an f-string",
    ast.IfExp: "`if` in an expression",
    ast.NamedExpr: "`:=`",
    ast.Starred: "`*`",
    ast.For: "a `for` loop",
    ast.While: "a `while` loop",
    ast.If: "`if`",
    ast.With: "`with`",
    ast.Try: "`try`",
    ast.Assign: "an assignment",
    ast.AugAssign: "an assignment",
    ast.AnnAssign: "an assignment",
    ast.FunctionDef: "a function",
    ast.ClassDef: "a class",
    ast.Expr: "a statement that asserts nothing",
}
SIGNS: dict[type[ast.AST], str] = {
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.MatMult: "@",
    ast.Invert: "~",
}


class Refused(ValueError):
    """A piece of Python whose assertions cannot be judged."""

    def __init__(self, form: str, node: ast.AST | None = None, detail: str = "") -> None:
        """Store the reason.

        Args:
            form: the form that cannot be judged, in a few words, by which rows are counted.
            node: its place.
            detail: further text on it.
        """
        where = f" in `{shown(node)}`" if node is not None else ""
        super().__init__(form + where + detail)
        self.form = form


def shown(node: ast.AST) -> str:
    """Format a node as a line of bounded length."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def form_of(node: ast.AST) -> str:
    """Return the name of a node's form, in a few words."""
    match node:
        case ast.Expr(ast.Call(ast.Name(name))):
            return f"the statement `{name}(...)`"
        case ast.FunctionDef():
            return f"the function `{node.name}`"
        case ast.BinOp(op=sign) | ast.UnaryOp(op=sign):
            return f"`{SIGNS[type(sign)]}`"
    return NAMES.get(type(node), f"`{type(node).__name__}`")
