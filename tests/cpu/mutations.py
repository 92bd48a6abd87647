"""Changes to the source of a role program, one at a time: mutants, which `tests.cpu.test_mutations*` run."""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import itertools
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from schedules.machine import ScheduleError
from tests.cpu.simulation import ADVERSARIES, WrongNumbers

CRASHES = (ArithmeticError, LookupError)  # of programs that divide, and look up in tables
ONE_KIND = ("post", "work", "borrow", "give_back", "reclaim")  # what other rings cannot do


class Alike(NamedTuple):
    """What stands for what: any of a group for the others, where they are bound, or one expression for another, or an
    operator for another."""

    groups: Sequence[Sequence[str]]
    instead: Mapping[str, str]
    operators: Mapping[type[ast.operator], type[ast.operator]] = {}


class Mutant(NamedTuple):
    """A method of `subject`, changed."""

    subject: type
    method: ast.FunctionDef

    def methods(self) -> dict[str, Any]:
        """The changed one, by its name."""
        namespace = dict(vars(sys.modules[self.subject.__module__]))
        exec(compile(ast.fix_missing_locations(ast.Module([self.method], [])), "<mutant>", "exec"), namespace)
        return {self.method.name: namespace[self.method.name]}


def mutants_of(subjects: Mapping[type, Alike], without: Sequence[str] = ()) -> dict[str, Mutant]:
    """Every mutant by its name: class, method, what was changed and, if that is not unique, which time; but for changes
    that have `without` in them."""
    found: dict[str, Mutant] = {}
    times: Counter[str] = Counter()
    for subject, alike in subjects.items():
        for method in written_methods(subject):
            for change, mutated in changes(method, alike):
                if any(text in change for text in without):
                    continue
                name = f"{subject.__name__}.{method.name}: {change}"
                times[name] += 1
                found[name if times[name] == 1 else f"{name}  [{times[name]}]"] = Mutant(subject, mutated)
    return found


def first_objection(
    simulate: Callable[..., Any],
    problems: Iterable[Any],
    seeds: Iterable[int],
    policies: Sequence[str] = ADVERSARIES,
    crashes: tuple[type[Exception], ...] = (),
) -> Exception | None:
    """The first thing that goes wrong, over all seeds, policies and problems; `crashes` are what else a broken program
    may end with."""
    for seed, policy, problem in itertools.product(seeds, policies, problems):
        try:
            simulate(problem, seed, policy)
        except (ScheduleError, WrongNumbers, *crashes) as error:
            return error
    return None


def judge(name: str, error: Exception | None, reasons: Mapping[str, str]) -> None:
    """Someone must have objected, unless there is a reason why not."""
    if name in reasons:
        assert error is None, "it stands in HARMLESS"
    else:
        assert error is not None, "nobody noticed"


def seeds_for(name: str, seeds: Sequence[int], reasons: Mapping[str, str]) -> Sequence[int]:
    """One is enough for a mutant that is known to be harmless: it costs what nobody's objection ends."""
    return seeds[:1] if name in reasons else seeds


def is_not_stale(harmless: Mapping[str, Sequence[str]], mutants: Iterable[str]) -> None:
    names = [name for group in harmless.values() for name in group]
    assert sorted(set(names) - set(mutants)) == []
    assert len(names) == len(set(names)), "each has one reason"


def reach_every_call(subjects: Iterable[type], mutants: Iterable[str]) -> None:
    """Every call statement of the programs is removed in one mutant, and every method has mutants that does more than
    to return something."""
    for subject in subjects:
        for method in written_methods(subject):
            mine = [name for name in mutants if name.startswith(f"{subject.__name__}.{method.name}: ")]
            calls = [s for s in ast.walk(method) if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
            assert mine or isinstance(method.body[-1], ast.Return | ast.Expr), method.name
            assert len([name for name in mine if ": without " in name]) == len(calls), method.name


def tell(ctas: Mapping[str, Any], objection: Callable[[Any], Exception | None], reasons: Mapping[str, str]) -> None:
    """Prints what becomes of each."""
    for name, cta in ctas.items():
        error = objection(cta)
        because = reasons.get(name, "NOBODY NOTICED") if error is None else error
        print(f"{type(error).__name__ if error else '-':12} {name}\n{'':12} {because}", flush=True)


def written_methods(subject: type) -> Iterator[ast.FunctionDef]:
    """The methods that a schedule writes down, as against the operations it leaves open."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
    for method in tree.body:
        if isinstance(method, ast.FunctionDef) and method.name not in subject.__abstractmethods__:
            yield method


def changes(method: ast.FunctionDef, alike: Alike) -> Iterator[tuple[str, ast.FunctionDef]]:
    """What is changed in a method, and the method."""
    for block, i, bound in statements(method.body, {argument.arg for argument in method.args.args}):
        statement = block[i]
        if isinstance(statement, ast.Expr):
            yield f"without {text(statement)}", edited(method, block, i, ast.Pass())
        if i + 1 < len(block) and swappable(statement, block[i + 1], bound):
            after = block[i + 1]
            yield f"{text(after)} before {text(statement)}", edited(method, block, i, after, statement)
        for node, other in replacements(statement, bound, alike):
            changed = text(replaced(statement, node, other))
            yield f"{text(statement)} as {changed}", replaced(method, node, other)


def statements(block: list[ast.stmt], bound: set[str]) -> Iterator[tuple[list[ast.stmt], int, set[str]]]:
    """Every statement but docstrings: its block, its place in it, and the names that are bound there."""
    bound = set(bound)
    for i, statement in enumerate(block):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        yield block, i, set(bound)
        if isinstance(statement, (ast.For, ast.While, ast.If, ast.With)):
            inside = bound | names(statement.target, ast.Store) if isinstance(statement, ast.For) else bound
            for inner in (statement.body, getattr(statement, "orelse", [])):
                yield from statements(inner, inside)
        else:
            bound |= names(statement, ast.Store)


def names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def text(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0].replace("self.", "").removesuffix(":")


def swappable(first: ast.stmt, second: ast.stmt, bound: set[str]) -> bool:
    """Whether the swapped statements are a program at all, and not trivially the same one."""
    if isinstance(second, ast.Return) or (names(first, ast.Store) - bound) & names(second, ast.Load):
        return False
    meet = names(first, ast.Store) & names(second, ast.Load) or names(first, ast.Load) & names(second, ast.Store)
    return bool(meet) or not (is_arithmetic(first) or is_arithmetic(second))


def is_arithmetic(statement: ast.stmt) -> bool:
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    plain = all(isinstance(call, ast.Attribute) and call.attr in ("first", "next", "ahead") for call in calls)
    return isinstance(statement, ast.Assign) and plain


def replacements(statement: ast.stmt, bound: set[str], alike: Alike) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions of a statement, not of those inside it, and what to put in their place."""
    tree: ast.AST = statement
    if isinstance(statement, (ast.If, ast.While)):
        tree = test = statement.test
        yield from ((test, other) for other in (ast.UnaryOp(ast.Not(), test), ast.Constant(False), ast.Constant(True)))
    elif isinstance(statement, ast.For):
        tree = statement.iter
    elif isinstance(statement, ast.With):
        return
    whole = {id(node.value) for node in ast.walk(tree) if isinstance(node, (ast.keyword, ast.Subscript))}
    whole |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ONE_KIND}
    whole |= {id(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in whole:
            yield from ((node, other) for other in substitutes(node, bound, alike))


def substitutes(node: ast.expr, bound: set[str], alike: Alike) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=int(n)):
            yield from (ast.Constant(other) for other in (n + 1, n - 1) if other >= 0)
        case ast.Call(func=ast.Attribute(attr="next" | "ahead"), args=[slot, *_]):
            yield slot
        case ast.BinOp(left=left, op=op, right=right) if type(op) in alike.operators:
            yield ast.BinOp(left, alike.operators[type(op)](), right)
        case ast.IfExp(body=yes, orelse=no):
            yield from (yes, no)
        case ast.Compare(left=left, ops=[ast.Lt() | ast.GtE() as op], comparators=right):
            yield ast.Compare(left, [ast.LtE() if isinstance(op, ast.Lt) else ast.Gt()], right)
    if isinstance(getattr(node, "ctx", None), ast.Load):
        name = ast.unparse(node)
        others = [other for group in alike.groups if name in group for other in group if other != name]
        if name in alike.instead and not others:
            others.append(alike.instead[name])
        yield from (ast.parse(o, mode="eval").body for o in others if is_bound(o, bound))


def is_bound(expression: str, bound: set[str]) -> bool:
    return not expression.isidentifier() or expression in bound or hasattr(builtins, expression)


def edited(method: ast.FunctionDef, block: list[ast.stmt], i: int, *others: ast.stmt) -> ast.FunctionDef:
    """A copy of `method` with `others` in `block` from place `i` on."""
    memo: dict[int, list[ast.stmt]] = {}
    mutated = copy.deepcopy(method, memo)
    memo[id(block)][i : i + len(others)] = copy.deepcopy(others)
    return mutated


def replaced(root: ast.stmt, node: ast.expr, other: ast.expr) -> Any:
    """A copy of `root` with `other` in the place of `node`."""
    memo: dict[int, ast.expr] = {}
    mutated = copy.deepcopy(root, memo)
    target = memo[id(node)]

    class Replace(ast.NodeTransformer):
        def visit(self, here: ast.AST) -> ast.AST:
            return other if here is target else super().visit(here)

    return Replace().visit(mutated)
