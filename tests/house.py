"""Count what a reader of this repository has to find their way through, at one commit or at two.

    python -m tests.house                        the working tree
    python -m tests.house --before 563779a6      that commit, and the working tree beside it
    python -m tests.house --pairs                which folders import each other, and where

Files are only parsed, never imported, so any commit can be counted. The one exception is the number
of flags, for which `launcher.py --help-all` of the counted tree runs in this environment. What each
row counts is in the docstring of its function.
"""

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "quadriga", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc",
    "cluster_proc", "simulator", "bench",
)  # fmt: skip
STARTER = "running_server"
TEST_IMPORT = re.compile(r"^\s*(?:from|import)\b[^\n(]*(?:\([^)]*)?\btest_", re.M)
PUBLIC_UNDERSCORES = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Documented names of the standard library: those of named tuples, and `os._exit`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, and the name that is imported or used there."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two folders that import each other, with one import each way."""

    folders: tuple[str, str]
    there: Place
    back: Place

    @property
    def is_nested(self) -> bool:
        """Return whether one folder lies in the other."""
        first, second = self.folders
        return second.startswith(f"{first}.")


class Source:
    """One Python file.

    Args:
        path: the file.
        root: the tree that it is part of.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._text = path.read_text()
        self.path = path.relative_to(root)
        self.is_package = path.name == "__init__.py"
        self.is_module = path.name not in ("__init__.py", "__main__.py")
        self.is_test = path.name.startswith("test_")
        self.name = ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")
        self.folder = self.name if self.is_package else self.name.rpartition(".")[0]
        self.num_lines = self._text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self._text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imported_names(self) -> list[tuple[int, str, str, str]]:
        """Return (line, module, name, local name) of each imported name; `import a.b` has no name.

        Imports inside functions and for type checking only are among them.
        """
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.append((node.lineno, alias.name, "", alias.asname or alias.name))
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                for alias in node.names:
                    found.append((node.lineno, module, alias.name, alias.asname or alias.name))
        return found

    @property
    def may_import_tests(self) -> bool:
        """Return whether an import statement may name a file test_*.py; says so without parsing."""
        return TEST_IMPORT.search(self._text) is not None

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.folder.split(".")
        parents = parents[: len(parents) - node.level + 1]
        return ".".join([*parents, *filter(None, [node.module])])


class House:
    """The Python files of one tree.

    Args:
        root: folder of the tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        found = [Source(path, root) for part in PRODUCT for path in _python_files(root / part)]
        self.product = {source.name: source for source in found}
        self.modules = [source for source in found if source.is_module]
        self.tests = [Source(path, root) for path in _python_files(root / "tests")]

    # --- files and lines --------------------------------------------------------------------------

    def num_modules(self) -> int:
        """Count the product's Python files without `__init__.py` and `__main__.py`."""
        return len(self.modules)

    def num_folders(self) -> int:
        """Count the product's folders that hold at least one Python file, `__init__.py` or other.

        Each of them has a row in docs/architecture.md.
        """
        return len({source.path.parent for source in self.product.values()})

    def num_lines(self) -> int:
        """Count the lines of the product's modules."""
        return sum(source.num_lines for source in self.modules)

    def num_package_lines(self) -> int:
        """Count the lines of the files `__init__.py` and `__main__.py` of the product."""
        return sum(source.num_lines for source in self.product.values()) - self.num_lines()

    def num_imports(self) -> int:
        """Count the import statements at the top level of all Python files of the product.

        A statement that goes over several lines counts once, as the formatter decides about that.
        """
        kinds = (ast.Import, ast.ImportFrom)
        files = self.product.values()
        return sum(isinstance(node, kinds) for source in files for node in source.tree.body)

    # --- who imports whom -------------------------------------------------------------------------

    def _imports(self) -> Iterator[tuple[Source, Source, int]]:
        """Yield (importer, imported file, line) for the product's imports of itself.

        A name that a package's `__init__.py` passes on is an import of the module that has it. What
        that `__init__.py` imports only to pass it on is none.
        """
        for source in self.product.values():
            used = set()
            if source.is_package:
                used = {node.id for node in source.nodes if isinstance(node, ast.Name)}
            for line, module, name, local in source.imported_names:
                if source.is_package and local.partition(".")[0] not in used:
                    continue
                imported = self._find(module, name)
                if imported is not None and imported is not source:
                    yield source, imported, line

    def _find(self, module: str, name: str, passed: frozenset[str] = frozenset()) -> Source | None:
        """Return the file that an imported name comes from, or None outside of the product."""
        full = f"{module}.{name}"
        if full in self.product:
            return self.product[full]
        package = self.product.get(module)
        if package is None or not package.is_package or full in passed:
            return package
        for _, origin, original, local in package.imported_names:
            if local == name and (found := self._find(origin, original, passed | {full})):
                return found
        return package

    def modules_of_one_importer(self) -> list[tuple[Source, Source]]:
        """Return (module, importer): modules that one file imports, a file of the module's folder.

        The files of the product count, launcher.py and tests do not. A module that an `__init__.py`
        passes on is imported by the files that import it from there. Not among them are modules
        whose one importer is the `__init__.py` of their folder.
        """
        importers = defaultdict(set)
        for importer, imported, _ in self._imports():
            importers[imported.name].add(importer.name)
        found = []
        for module in self.modules:
            names = importers[module.name]
            only = self.product[next(iter(names))] if len(names) == 1 else None
            if only and not only.is_package and only.folder == module.folder:
                found.append((module, only))
        return found

    def pairs(self) -> list[Pair]:
        """Return the folders of which each has a file that imports a file of the other.

        A folder and one that lies in it are two folders. A `__main__.py` starts a program and
        counts for no folder.
        """
        places: dict[tuple[str, str], Place] = {}
        for importer, imported, line in self._imports():
            if importer.path.name == "__main__.py":
                continue
            way = importer.folder, imported.folder
            if way[0] != way[1]:
                places.setdefault(way, Place(importer.path, line, imported.name))
        return [
            Pair((one, other), there, places[other, one])
            for (one, other), there in sorted(places.items(), key=lambda item: item[0])
            if one < other and (other, one) in places
        ]

    def num_pairs_side_by_side(self) -> int:
        """Count the pairs of folders that import each other and do not lie in each other."""
        return sum(not pair.is_nested for pair in self.pairs())

    def num_nested_pairs(self) -> int:
        """Count the pairs of folders that import each other and of which one lies in the other."""
        return sum(pair.is_nested for pair in self.pairs())

    # --- flags ------------------------------------------------------------------------------------

    def num_flags(self) -> int:
        """Count the flags in the groups of `launcher.py --help-all`; an alias is no further flag.

        The parser's own options, such as --help and --config, belong to no group.
        """
        command = [sys.executable, str(self.root / "launcher.py"), "--help-all"]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "NO_COLOR": "1"}
        environment["COLUMNS"] = "100"
        text = subprocess.run(
            command, cwd=self.root, env=environment, check=True, capture_output=True, text=True
        ).stdout
        groups = [group.strip("\n").split("\n") for group in text.split("\n\n")]
        options = ("options:", "optional arguments:")
        flags = [
            line
            for title, *lines in groups
            if title.endswith(":") and title not in options
            for line in lines
            if line.startswith("  --")
        ]
        assert flags, f"{self.root}/launcher.py --help-all shows no group of flags"
        return len(flags)

    # --- tests ------------------------------------------------------------------------------------

    def num_test_lines(self) -> int:
        """Count the lines of the Python files below tests/, helpers too."""
        return sum(source.num_lines for source in self.tests)

    def num_test_modules(self) -> int:
        """Count the files test_*.py below tests/."""
        return sum(source.is_test for source in self.tests)

    def imports_between_tests(self) -> list[Place]:
        """Return the import statements below tests/ that import from a file test_*.py."""
        names = {source.name for source in self.tests if source.is_test}
        found = {
            (source.path, line): Place(source.path, line, imported)
            for source in self.tests
            if source.may_import_tests
            for line, module, name, _ in source.imported_names
            for imported in (module, f"{module}.{name}")
            if imported in names
        }
        return list(found.values())

    def num_server_starts(self) -> int:
        """Count the functions of files test_*.py and conftest.py that call `running_server`.

        They are tests and fixtures; a fixture counts once, however often it runs.
        """
        return sum(
            _calls(node, STARTER)
            for source in self.tests
            if source.is_test or source.path.name == "conftest.py"
            for node in source.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        )

    def private_uses(self) -> list[Place]:
        """Return the private attributes of foreign objects that files test_*.py use.

        Such an attribute begins with one underscore. Those of `self` and `cls` do not count, and
        those that have a name which the same file defines: they are the test's own.
        """
        return [
            Place(source.path, node.lineno, ast.unparse(node))
            for source in self.tests
            if source.is_test
            for own in [_defined_names(source)]
            for node in source.nodes
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ]


def _python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _calls(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(function)
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_UNDERSCORES


def _defined_names(source: Source) -> set[str]:
    """Return the names of functions, and of attributes that are assigned to `self`."""
    names = set()
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


# --- the table --------------------------------------------------------------------------------

ROWS: dict[str, Callable[[House], int]] = {
    "product modules": House.num_modules,
    "product folders": House.num_folders,
    "product lines": House.num_lines,
    "lines of __init__ and __main__": House.num_package_lines,
    "modules with one importer, in its folder": lambda house: len(house.modules_of_one_importer()),
    "pairs of folders that import each other": House.num_pairs_side_by_side,
    "pairs of a folder and one in it": House.num_nested_pairs,
    "import statements": House.num_imports,
    "flags": House.num_flags,
    "test lines": House.num_test_lines,
    "test modules": House.num_test_modules,
    "imports from one test module in another": lambda house: len(house.imports_between_tests()),
    "tests and fixtures that start a server": House.num_server_starts,
    "uses of private attributes in tests": lambda house: len(house.private_uses()),
}
Row = tuple[str, list[float]]


def counts(houses: Sequence[House]) -> list[Row]:
    """Return the rows of the table, with a number for each tree."""
    return [(label, [count(house) for house in houses]) for label, count in ROWS.items()]


def table(header: Sequence[str], rows: Sequence[Row], *, is_markdown: bool) -> str:
    """Return a table with a change in its last column if there are two numbers in each row."""
    cells = [list(header), *([label, *_numbers(values)] for label, values in rows)]
    if is_markdown:
        ruler = ["---", *("---:" for _ in header[1:])]
        return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ruler, *cells[1:]])
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    )


def _numbers(values: list[float]) -> list[str]:
    shown = [f"{value:,.10g}" for value in values]
    return [*shown, f"{values[1] - values[0]:+,.10g}"] if len(values) == 2 else shown


def pairs_text(house: House) -> str:
    """Return the pairs of folders that import each other, with one import each way."""
    return "\n".join(
        f"{' <-> '.join(pair.folders)}\n    {pair.there}\n    {pair.back}" for pair in house.pairs()
    )


@contextmanager
def tree_of(revision: str, repository: Path = ROOT) -> Iterator[Path]:
    """Yield a temporary folder with the files of a commit."""
    archive = ["git", "-C", str(repository), "archive", revision]
    packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m tests.house", description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="REV", help="count this commit, too")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.add_argument("--pairs", action="store_true", help="print the pairs of folders, too")
    suite = {
        "cpu": "CPU seconds of `make test`",
        "wall": "wall seconds of `make test`",
        "ci": "wall seconds of `.ci/run`",
    }
    for name, text in suite.items():
        parser.add_argument(
            f"--{name}-seconds",
            nargs="+",
            type=float,
            metavar="SECONDS",
            help=f"{text}, as measured: one number for each tree, that of --before first",
        )
    arguments = parser.parse_args()
    header = ["", "before", "after", "change"] if arguments.before else ["", "count"]
    rows: list[Row] = []
    for name, text in suite.items():
        if (seconds := getattr(arguments, f"{name}_seconds")) is not None:
            if len(seconds) != 1 + bool(arguments.before):
                parser.error(f"--{name}-seconds needs one number for each tree")
            rows.append((text.replace("`", ""), seconds))
    now = House(ROOT)
    if arguments.before:
        with tree_of(arguments.before) as folder:
            rows = [*counts([House(folder), now]), *rows]
    else:
        rows = [*counts([now]), *rows]
    print(table(header, rows, is_markdown=arguments.markdown))
    if arguments.pairs:
        print(f"\n{pairs_text(now)}")


if __name__ == "__main__":
    main()
