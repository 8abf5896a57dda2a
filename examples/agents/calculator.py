"""A calculator as a tool, and a reward for products: `make demo TASK=calculator`.

    python -m jobs.train agent.tools=[examples/agents/calculator.py:calc] \
        reward.custom_reward_function.path=examples/agents/calculator.py data.train_files=...

The rows come from `python -m jobs.prepare calculator`. Any model whose chat template takes tools may use `calc`.
"""

import ast
import operator
import warnings
from fractions import Fraction

from pipeline.agent import ToolError, tool

MAX_LENGTH = 100
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool(timeout_s=2)
def calc(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: such as "(3 + 4) * 25"
    """
    if len(expression) > MAX_LENGTH or set(expression) - set("0123456789.+-*/() "):
        raise ToolError(f"digits and + - * / ( ) only, {MAX_LENGTH} at most")
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of `2 (3)`, which is refused below
            number = value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ToolError("division by zero" if isinstance(error, ZeroDivisionError) else "no expression") from error
    return str(number) if number.denominator == 1 else f"{float(number):.10g}"


def value(node: ast.AST) -> Fraction:
    """The exact value of a parsed expression. Nothing in it is executed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):  # `...` is a constant too
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value(node.operand))
    raise ToolError("no expression")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Reward of a row: 1 where the last answer is the ground truth and nothing else."""
    return float(solution_str.strip() == ground_truth)
