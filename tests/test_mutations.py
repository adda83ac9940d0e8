"""The list of tests/mutations.toml can be applied: a mutation that no longer fits tests nothing."""

import ast
import functools

import pytest

from tests.mutations import ROOT, chosen, read

AT_LEAST = 120


@functools.cache
def names(file: str) -> set[str]:
    """The functions that a file defines."""
    return {node.name for node in ast.parse((ROOT / file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)}


def test_every_mutation_changes_one_place_and_compiles():
    """What is found twice changes more than it says; a syntax error is no mutation."""
    for mutation in read():
        text = (ROOT / mutation.file).read_text("utf-8")
        assert text.count(mutation.old) == 1, mutation
        assert mutation.old != mutation.new, mutation
        ast.parse(text.replace(mutation.old, mutation.new), mutation.file)


def test_the_tests_of_every_mutation_exist():
    """pytest that finds no test kills nothing."""
    for mutation in read():
        assert mutation.tests, mutation
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), f"{file}: {mutation}"
            assert not name or name in names(file), f"{test}: {mutation}"


def test_every_room_has_mutations():
    """The tests of a room without any may notice nothing."""
    mutations, package = read(), ROOT / "rag_jax"
    rooms = {path.parent.name for path in package.glob("*/*.py")} | {
        path.stem for path in package.glob("*.py")
        if names(f"rag_jax/{path.name}") and not path.name.startswith("__")}
    assert rooms == {mutation.room for mutation in mutations}
    assert len({mutation[:3] for mutation in mutations}) == len(mutations) >= AT_LEAST


def test_rooms_and_numbers_choose():
    """A misspelt room that chose nothing would look like a run without survivors."""
    mutations = read()
    assert list(chosen(mutations, [])) == list(range(1, len(mutations) + 1))
    some = chosen(mutations, ["lines", "2"])
    assert 2 in some and {m.room for n, m in some.items() if n != 2} == {"lines"}
    with pytest.raises(SystemExit, match="liens: neither a number"):
        chosen(mutations, ["liens"])
