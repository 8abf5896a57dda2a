"""Names of the forms of Python that assertions must not use, and the error that refuses them."""

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
    """Error for Python code with assertions that cannot be judged without running it."""

    def __init__(self, form: str, node: ast.AST | None = None, detail: str = "") -> None:
        """Store the reason.

        Args:
            form: the form of Python that cannot be judged, in a few words. Rows are counted by it.
            node: the code in this form, for the message.
            detail: further text for the message.
        """
        where = f" in `{shown(node)}`" if node is not None else ""
        super().__init__(form + where + detail)
        self.form = form


def shown(node: ast.AST) -> str:
    """Return the code of a node as one line of at most 100 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def form_of(node: ast.AST) -> str:
    """Return the form of Python that `node` has, in a few words: `a lambda`, `an f-string`."""
    match node:
        case ast.Expr(ast.Call(ast.Name(name))):
            return f"the statement `{name}(...)`"
        case ast.FunctionDef():
            return f"the function `{node.name}`"
        case ast.BinOp(op=sign) | ast.UnaryOp(op=sign):
            return f"`{SIGNS[type(sign)]}`"
    return NAMES.get(type(node), f"`{type(node).__name__}`")
