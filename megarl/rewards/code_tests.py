"""Parses the tests of a program.

Each assertion is split into the part that the program computes and the part that judges it.

In `assert math.isclose(f(1), 0.3)` the program computes only `f(1)`. The rest, including the expected value,
is evaluated in a process that never runs the program.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megarl.machine.strict_json import refuse_unencodable
from megarl.rewards.code_values import decode, encode, holds_nan, same_as_json

# The judge calls the program by this name: REMOTE(number of the source, {bound name: value}).
REMOTE = "__call_program__"
# Names that an assertion may use without importing them, as in test suites such as MBPP.
_MODULES = (
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "itertools",
    "math",
    "operator",
    "re",
    "statistics",
    "string",
)
_MEMBERS = {
    **{name: f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "Decimal": "decimal.Decimal",
    "Fraction": "fractions.Fraction",
}
# Built-in functions that assertions apply to results of the program. They are not the tested function if
# another function is called.
_WRAPPERS = {
    "abs",
    "all",
    "any",
    "bool",
    "dict",
    "float",
    "frozenset",
    "int",
    "isinstance",
    "len",
    "list",
    "range",
    "repr",
}
_WRAPPERS |= {"reversed", "round", "set", "sorted", "str", "tuple", "type", "zip"}


class CallTest(NamedTuple):
    """A test of the value of an expression of the program.

    Attributes:
        is_json: Whether `returns` may have been decoded from JSON, so that it is compared with
            `same_as_json` and a tolerance instead of `==`.
        imports: See AssertTest.
    """

    call: str
    returns: Any
    is_json: bool
    imports: Mapping[str, str] = {}


class StreamTest(NamedTuple):
    """A test of the output of the whole program for an input."""

    stdin: str
    stdout: str


class AssertTest(NamedTuple):
    """A test whose assertion needs the judge.

    Attributes:
        judged: The condition, an expression in which REMOTE represents the program.
        sources: The expressions that the program evaluates.
        imports: Name in the test -> module, or member of a module, available in both processes.
    """

    judged: str
    sources: tuple[str, ...]
    imports: Mapping[str, str]


CodeTest = CallTest | StreamTest | AssertTest


@contextmanager
def long_integers() -> Generator[None]:
    """Allow integers of any number of digits in texts.

    Python's limit of 4,300 digits protects from untrusted texts. Tests are trusted; programs convert their
    own integers, within the sandbox's limit of CPU time.
    """
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@long_integers()
def read_tests(ground_truth: Any) -> list[CodeTest]:
    """Parse a list of tests, or such a list as JSON.

    Raises:
        ValueError: The ground truth is not a list of tests, or a test cannot be run or passed.
    """
    what = "the ground truth"
    if isinstance(ground_truth, str):
        try:
            # JSON that is nested too deeply causes a RecursionError.
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{what} {ground_truth[:60]!r} is not a list of tests as JSON: {error}"
            ) from None

    if not isinstance(ground_truth, Sequence) or isinstance(ground_truth, str | bytes) or not ground_truth:
        shown = str(ground_truth)[:60]
        raise ValueError(
            f"{what} {shown!r} is not a list of tests with at least one; see the page on rewards"
        )

    return [_test(test) for test in ground_truth]


def _test(test: Any) -> CodeTest:
    refuse_unencodable(test, "the text in a test")
    match test:
        case str():
            try:
                return _of_assert(test)
            except RecursionError:
                raise ValueError(f"the test {test[:100]!r} is nested too deeply") from None
        case {"call": str(call), "returns": value, **others} if not others:
            _expression(call)
            if not _is_carried(value):
                raise ValueError(
                    f"the value {str(value)[:60]!r} that a test expects is of a type that cannot leave the "
                    f"sandbox"
                )
            return CallTest(call, value, is_json=True)
        case {"stdin": str(stdin), "stdout": str(stdout), **others} if not others:
            return StreamTest(stdin, stdout)

    raise ValueError(
        f"the test {str(test)[:100]!r} must be {{call, returns}}, {{stdin, stdout}} or an assert statement"
    )


def _expression(text: str) -> None:
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the call {text[:100]!r} of a test is not a Python expression: {error}") from None


def _is_carried(value: Any) -> bool:
    try:
        return same_as_json(decode(json.loads(json.dumps(encode(value)))), value)
    except (ValueError, TypeError, RecursionError):
        return False


# ---- assertions


def _of_assert(text: str) -> CodeTest:
    imports, conditions = _statements(text)
    split = _Split(_names_of_program(text, conditions, imports), imports)
    judged = [split.visit(condition) for condition in conditions]
    if not split.sources:
        raise ValueError(f"the test {text[:100]!r} does not call the program")

    if len(judged) == 1 and (simple := _equality(judged[0], split.sources, split.used)) is not None:
        if holds_nan(simple.returns):
            raise ValueError(f"the test {text[:100]!r} can never pass: NaN equals nothing; use math.isnan")
        return simple

    # All assertions of a test must hold.
    condition = judged[0] if len(judged) == 1 else ast.BoolOp(ast.And(), judged)
    return AssertTest(ast.unparse(ast.fix_missing_locations(condition)), tuple(split.sources), split.used)


def _statements(text: str) -> tuple[dict[str, str], list[ast.expr]]:
    """Return the imports of a test, and the conditions of its assertions."""
    what = f"the test {text[:100]!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text.strip())
            # ast.parse accepts some programs that compile refuses.
            compile(tree, "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} is not a Python assert statement: {error}") from None

    imports: dict[str, str] = {}
    conditions: list[ast.expr] = []

    for statement in tree.body:
        match statement:
            case ast.Import(names=names):
                imports |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                imports |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
            case ast.Assert(test=ast.Tuple(elts=[_, *_])):
                raise ValueError(f"{what} asserts a tuple, which is always true; leave out the parentheses")
            case ast.Assert(test=condition):
                conditions.append(condition)
            case _:
                raise ValueError(f"{what} has a statement that is neither an assert nor an import")

    absent = {path.split(".")[0] for path in imports.values()} - sys.stdlib_module_names
    if absent:
        raise ValueError(
            f"{what} imports {', '.join(sorted(absent))}, but the sandbox has only the standard library"
        )

    if not conditions:
        raise ValueError(f"{what} has no assert statement")
    return imports, conditions


def _equality(condition: ast.expr, sources: Sequence[str], imports: Mapping[str, str]) -> CallTest | None:
    """Return a test without a judge if the condition compares one value of the program with a literal."""
    match condition:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            # The literal may be on either side.
            for call, literal in ((left, right), (right, left)):
                match call:
                    case ast.Call(func=ast.Name(id=name), args=[_, ast.Dict(keys=[])]) if name == REMOTE:
                        try:
                            return CallTest(sources[0], ast.literal_eval(literal), False, imports)
                        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                            continue
    return None


def _names_of_program(text: str, conditions: Sequence[ast.expr], imports: Mapping[str, str]) -> set[str]:
    """Return the names that an assertion takes from the program.

    They are the names that neither Python, an import nor the test itself defines.

    A test may call a function that is also built into Python (`assert sum(10, 15) == 6`). If an assertion has
    no other name, the tested function is the one built-in function that it calls, apart from those that
    assertions apply to results.
    """
    names = {name for condition in conditions for name in _free_names(condition, frozenset())}
    own = {
        name
        for name in names
        if not hasattr(builtins, name)
        and name not in imports
        and name not in _MEMBERS
        and name not in _MODULES
    }

    if own:
        return own

    called = {
        node.func.id
        for each in conditions
        for node in ast.walk(each)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    called -= imports.keys()

    # Functions applied to results count only if nothing else is called.
    called = (called - _WRAPPERS) or called
    if len(called) == 1:
        return called

    raise ValueError(
        f"the test {text[:100]!r} calls nothing that only the program defines; it must call a function of "
        f"the program"
    )


def _free_names(node: ast.AST, bound: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Name):
        if node.id not in bound:
            yield node.id
        return

    inner = bound | _bound_by(node)
    for child in ast.iter_child_nodes(node):
        yield from _free_names(child, inner)


def _bound_by(node: ast.AST) -> frozenset[str]:
    """Return the names that an expression binds itself.

    These are the targets of a comprehension and the parameters of a lambda.
    """
    match node:
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return frozenset(
                name.id
                for loop in node.generators
                for name in ast.walk(loop.target)
                if isinstance(name, ast.Name)
            )
        case ast.Lambda(args=arguments):
            return frozenset(each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg))
    return frozenset()


class _Split(ast.NodeTransformer):
    """Replaces the parts of an expression that the program computes by calls of REMOTE.

    Such a part is a maximal chain of calls, attributes and subscripts that begins with a name of the program,
    such as `Stack().push(1).top`, with all its arguments.
    """

    def __init__(self, names_of_program: set[str], imports: Mapping[str, str]) -> None:
        self._of_program = names_of_program
        self._imports = imports
        self._bound: frozenset[str] = frozenset()
        self.sources: list[str] = []
        self.used: dict[str, str] = {}

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            self._import(node.id)
        root = _root(node)
        if root is not None and root in self._of_program and root not in self._bound:
            return self._remote(node)
        # Names bound by a comprehension or lambda hide names of the program inside it.
        before = self._bound
        self._bound = self._bound | _bound_by(node)
        visited = self.generic_visit(node)
        self._bound = before

        return visited

    def _remote(self, node: ast.AST) -> ast.Call:
        names = sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)})
        for name in names:
            self._import(name)
        given = [name for name in names if name in self._bound]
        source = ast.unparse(node)
        # An expression over bound names has a different value each time, so it is never shared.
        if source not in self.sources or given:
            self.sources.append(source)
        keys: list[ast.expr | None] = [ast.Constant(name) for name in given]
        bound = ast.Dict(keys, [ast.Name(name, ast.Load()) for name in given])
        number = ast.Constant(len(self.sources) - 1 if given else self.sources.index(source))

        return ast.Call(ast.Name(REMOTE, ast.Load()), [number, bound], [])

    def _import(self, name: str) -> None:
        if name in self._bound or name in self._of_program:
            return
        if name in self._imports:
            self.used[name] = self._imports[name]
        elif name in _MEMBERS or name in _MODULES:
            self.used[name] = _MEMBERS.get(name, name)


def _root(node: ast.AST) -> str | None:
    while True:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return None
