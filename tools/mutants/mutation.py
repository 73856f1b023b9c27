"""Mutations of a source file: where they are, and the file with one of them made."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_OPERATORS = {
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
_LONGEST_TEXT = 70


@dataclass(frozen=True)
class Mutation:
    """One change of one place.

    Attributes:
        function: Qualified name of the function within its module; "" at the level of the module.
        kind: "comparison", "condition", "constant", "operator", "sign" or "statement".
        change: Old and new text of the place; with a number where the function has several that are alike.
        path: File of today.
        span: First and last byte of the place in that file.
        text: New text of the place.
    """

    function: str
    kind: str
    change: str
    path: Path
    span: tuple[int, int]
    text: str

    @property
    def name(self) -> tuple[str, str, str]:
        """Identity that outlives a move to another file."""
        return self.function, self.kind, self.change

    def source(self) -> bytes:
        """Text of the file with this mutation."""
        source = self.path.read_bytes()
        start, end = self.span
        return source[:start] + self.text.encode() + source[end:]


def mutations_of(path: Path) -> list[Mutation]:
    """All mutations of a file."""
    visitor = _Visitor(path)
    visitor.visit(ast.parse(path.read_bytes()))
    return visitor.mutations


class _Visitor(ast.NodeVisitor):
    """Collects mutations; the text of a place is replaced, so that the lines around it stay as they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mutations: list[Mutation] = []
        self._source = path.read_bytes()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._in_function = False
        self._alike: dict[tuple[str, str, str], int] = defaultdict(int)

    # ------------------------------------------------------------------ scopes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._visit_body(node)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._in_function
        self._in_function = True
        self._scope.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._visit_body(node)
        self._scope.pop()
        self._in_function = outer

    def _visit_body(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # ------------------------------------------------------------------ places that are left alone

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out texts: their parts have no places of their own before Python 3.12."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Leave out annotations."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove the refusal; what its message computes is left alone."""
        self._add(node, "statement", "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out assertions: they tell types to mypy."""

    # ------------------------------------------------------------------ places that are changed

    def visit_Compare(self, node: ast.Compare) -> None:
        swapped = _COMPARISONS[type(node.ops[0])]()
        changed = ast.Compare(node.left, [swapped, *node.ops[1:]], node.comparators)
        self._add(node, "comparison", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        for kind, swaps in (("sign", _SIGNS), ("operator", _OPERATORS)):
            if type(node.op) in swaps:
                changed = ast.BinOp(node.left, swaps[type(node.op)](), node.right)
                self._add(node, kind, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement", "pass")
        self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self._add(node, "sign", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.Not):
            self._add(node, "condition", f"bool({ast.unparse(node.operand)})")
        else:
            self.generic_visit(node)
            return
        if not isinstance(node.operand, ast.Constant):
            self.visit(node.operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "condition", f"({ast.unparse(ast.BoolOp(swapped, node.values))})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, "constant", repr(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self._in_function:
            self._add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # A local name that is gone is noticed by each test.
        if self._in_function and not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            self._add(node, "statement", "pass")
        self.visit(node.value)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Compare | ast.UnaryOp) and not isinstance(getattr(test, "op", None), ast.USub):
            return  # their own mutations do that
        self._add(test, "condition", f"(not {ast.unparse(test)})" if _binds(test) else f"(not ({ast.unparse(test)}))")

    def _add(self, node: ast.stmt | ast.expr, kind: str, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        function = ".".join(self._scope)
        change = f"{_shortened(ast.unparse(node))} → {_shortened(text)}"
        self._alike[function, kind, change] += 1
        count = self._alike[function, kind, change]
        if count > 1:
            change += f" ({count})"
        self.mutations.append(Mutation(function, kind, change, self.path, (start, end), text))


def _binds(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONGEST_TEXT:
        return line
    return f"{line[: _LONGEST_TEXT - 1]}…"
