"""Imports run one way only, and nothing outside the entry points imports them."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "rag_jax"

# Room -> the rooms that it may import, beside errors. A module of the top level is a room itself.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "types": set(),
    "files": set(),
    "lines": set(),
    "visible": set(),
    "paper": set(),
    "hosts": {"config"},
    "locks": {"files", "hosts"},
    "heatmap": {"files", "visible"},
    "display": {"heatmap", "trained", "types", "visible"},
    "hub": {"config", "files", "types", "data", "models", "parallel"},
    "conversion": {"config", "overrides", "files", "parallel", "data", "hub", "models",
                   "retrieval", "training"},
    "metrics": set(),
    "retrieval": {"files", "lines", "locks"},
    "countries": {"data", "retrieval"},  # world.py makes Examples and Passages
    "models": {"config", "types", "marginal", "parallel"},
    "marginal": {"models"},
    "decoding": {"config", "types", "marginal", "models", "parallel"},
    "parallel": {"config"},
    "data": {"config", "types", "files", "lines", "retrieval", "countries", "metrics"},
    "answering": {"hosts", "config", "types", "models", "decoding", "data", "retrieval",
                  "parallel"},
    "scoring": {"config", "data", "metrics", "retrieval"},
    "evaluation": {"config", "answering", "data", "files", "metrics", "retrieval", "scoring",
                   "types"},
    "training": {"hosts", "locks", "config", "types", "marginal", "models", "decoding", "data",
                 "retrieval", "parallel", "answering", "evaluation", "overrides", "files", "hub",
                 "metrics", "paper"},
    "trained": {"hosts", "locks", "files", "config", "overrides", "types", "data", "retrieval",
                "answering", "training"},
    "aot": {"config", "overrides", "types", "data", "models", "parallel", "retrieval", "answering",
            "training"},
    "reproduction": {"config", "overrides", "flags", "files", "locks", "paper", "types",
                     "countries", "data", "retrieval", "metrics", "answering", "evaluation",
                     "training", "conversion", "visible"},
    "overrides": {"config"},
    "flags": {"hosts", "config", "overrides", "training", "visible"},
}
ENTRY_POINTS = {"train", "evaluate", "generate", "build_index", "convert", "compile_report",
                "reproduce", "verify"}


def room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: pathlib.Path) -> set[str]:
    """Rooms of this package that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            parts = node.module.split(".")
            if parts[0] == "rag_jax":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rag_jax.")}
    return found


def test_imports_run_one_way():
    for path in PACKAGE.rglob("*.py"):
        here = room(path)
        if here in ENTRY_POINTS or here == "__init__":
            continue
        beyond = imported_rooms(path) - ALLOWED[here] - {here, "errors", "__version__"}
        assert not beyond, f"{path.relative_to(PACKAGE)} imports {beyond}"


def test_entry_points_are_imported_by_nothing_and_stay_small():
    for path in PACKAGE.rglob("*.py"):
        assert not imported_rooms(path) & ENTRY_POINTS, path
    for name in ENTRY_POINTS:
        assert len((PACKAGE / f"{name}.py").read_text().splitlines()) <= 100, name


def test_top_level_modules_import_nothing_heavy():
    """`import rag_jax` and flags must not load jax: --help answers in a fraction of a second."""
    for name in ("__init__", "config", "overrides", "flags", *ENTRY_POINTS):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [
                    a.name for a in node.names]
                heavy = {n.split(".")[0] for n in names} & {
                    "jax", "flax", "optax", "orbax", "transformers", "tensorflow_datasets"}
                assert not heavy, f"{name}.py imports {heavy}"


def renames_or_removes(node: ast.AST) -> bool:
    """Whether a node renames a file, or removes or moves a tree: os, shutil or pathlib.Path."""
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return node.module in ("os", "shutil") and bool(
            names & {"rename", "renames", "replace", "rmtree", "move"})
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    module, name = ast.unparse(node.func.value), node.func.attr
    return (name in ("rename", "renames", "rmtree")
            or f"{module}.{name}" in ("os.replace", "shutil.move")
            # Of one argument it is Path's: texts take two, dataclasses names.
            or name == "replace" and len(node.args) == 1 and not node.keywords)


def test_files_alone_renames_and_removes():
    """A rename that is not waited for, or a removal without our mark, loses what others wrote."""
    for path in PACKAGE.rglob("*.py"):
        found = [node.lineno for node in ast.walk(ast.parse(path.read_text("utf-8")))
                 if renames_or_removes(node)]
        assert bool(found) == (path == PACKAGE / "files.py"), f"{path}: lines {found}"
