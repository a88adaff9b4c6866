"""The table of environment variables holds what the code reads."""

import ast
from collections.abc import Iterator

from quadriga.server.config.__main__ import READ_BY_LIBRARIES, READ_HERE
from tests.unit.source_files import nodes_of, sources


def names_read() -> set[str]:
    """Return the names of the variables that a module of the product reads from os.environ."""
    return {name for path in sources().values() for name in _names(nodes_of(path))}


def _names(nodes: list[ast.AST]) -> Iterator[str]:
    constants = {
        target.id: value.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target, value in _pairs(node)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant)
    }
    for node in nodes:
        if (key := _key(node)) is not None:
            name = constants[key.id] if isinstance(key, ast.Name) else ast.literal_eval(key)
            yield str(name)


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield from zip(target.elts, node.value.elts, strict=False)
    else:
        yield target, node.value


def _key(node: ast.AST) -> ast.expr | None:
    """Return the expression of a variable's name where a node reads os.environ."""
    match node:
        case ast.Call(func=ast.Attribute(value=where, attr="get" | "setdefault"), args=[key, *_]):
            return key if ast.unparse(where) == "os.environ" else None
        case ast.Call(func=ast.Attribute(attr="getenv"), args=[key, *_]):
            return key
        case ast.Subscript(value=where, slice=key, ctx=ast.Load()):
            return key if ast.unparse(where) == "os.environ" else None
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[where]):
            return key if ast.unparse(where) == "os.environ" else None
    return None


def test_the_variables_in_the_docs_are_those_that_the_code_reads() -> None:
    assert {variable.name for variable in READ_HERE} == names_read()


def test_a_variable_is_listed_once_and_explained() -> None:
    names = [variable.name for variable in READ_HERE + READ_BY_LIBRARIES]
    assert len(names) == len(set(names))
    assert all(variable.meaning for variable in READ_HERE + READ_BY_LIBRARIES)
