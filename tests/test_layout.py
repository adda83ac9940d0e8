"""The shape of the package: imports run one way, functions stay small, risky calls have one place.

What is not true yet stands in `KNOWN`. That list may only shrink: a test also fails where
something listed there has been mended, until it is taken off the list.
"""

import ast
import functools
import graphlib
import pathlib
import re

import rag_jax

PACKAGE = pathlib.Path(__file__).parents[1] / "rag_jax"

KNOWN: dict[str, set[str]] = {
    # Imports that close a cycle: of files by their modules, of rooms by their folders.
    "cycles": set(),
    "functions of more than 60 lines": set(),
    "functions of more than 8 parameters": set(),
    # jax.distributed's key-value store has no public name.
    "private parts of other libraries": {
        "hosts: jax._src",
    },
}

# Rooms from the ground up: none imports one that comes later, directly or through others.
ORDER = ("errors", "types", "config", "marginal", "models", "decoding", "training", "api", "cli")
SUBJECT = {"marginal", "models", "decoding"}
# Who retrieves, reads or scores knows no model; models and decoding know no files.
APART = {**dict.fromkeys(("retrieval", "data", "metrics", "countries", "files"),
                         SUBJECT | {"hub", "training"}),
         **dict.fromkeys(SUBJECT, {"data", "retrieval", "files", "hub"}),
         "hub": {"decoding", "training"}}
HEAVY = {"jax", "flax", "optax", "orbax", "transformers", "tensorflow_datasets"}
LIGHT = ("rag_jax", "rag_jax.config", "rag_jax.cli.flags")  # and all that are run by a command
OURS = {"job", "answerer", "index", "store", "prepared", "rag"}  # never what a library made
BY_NAME = {"rag_jax", "rag_jax.cli"}  # whose names are imported when they are first used
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Graph = dict[str, set[str]]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its full name."""
    def name(path: pathlib.Path) -> str:
        return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)

    return {name(path).removesuffix(".__init__"): ast.parse(path.read_text("utf-8"))
            for path in sorted(PACKAGE.rglob("*.py"))}


def imported(nodes: list[ast.stmt] | ast.Module) -> set[str]:
    """Full names that import statements ask for, also inside functions if a module is given."""
    names = set()
    for node in ast.walk(nodes) if isinstance(nodes, ast.AST) else nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative imports hide where they lead"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imports(only_at_import: bool = False) -> Graph:
    """Module -> the modules of this package that it imports. What all of them load first, the
    package's own __init__, is no part: its lazy names lead to everything."""
    return {name: {other for other in imported(tree.body if only_at_import else tree)
                   if other in trees() and other not in (name, "rag_jax")}
            for name, tree in trees().items()}


def rooms(graph: Graph) -> Graph:
    """The same between folders; a file of the top level is a room itself."""
    def room(name: str) -> str:
        return name.split(".")[1]

    result: Graph = {room(name): set() for name in graph if name != "rag_jax"}
    for name, others in graph.items():
        if name != "rag_jax":
            result[room(name)] |= {room(other) for other in others} - {room(name)}
    return result


def reach(graph: Graph, start: str) -> set[str]:
    """All that is imported from `start`, directly or through others; itself only by a cycle."""
    seen: set[str] = set()
    open_ones = [start]
    while open_ones:
        new = graph[open_ones.pop()] - seen
        seen |= new
        open_ones += new
    return seen


def check_against(kind: str, actual: set[str]) -> None:
    new, mended = actual - KNOWN[kind], KNOWN[kind] - actual
    assert not new, f"{kind}: {sorted(new)}"
    assert not mended, f"no longer true, take it off KNOWN[{kind!r}]: {sorted(mended)}"


def test_imports_have_no_cycles():
    """A cycle of files loads or not depending on who comes first; one of rooms is one room."""
    closing = set()
    for graph in (imports(), rooms(imports())):
        for edge in KNOWN["cycles"]:
            source, target = edge.split(" -> ")
            if target in graph.get(source, ()) and source in reach(graph, target):
                closing.add(edge)
        without = {name: {o for o in others if f"{name} -> {o}" not in KNOWN["cycles"]}
                   for name, others in graph.items()}
        try:
            graphlib.TopologicalSorter(without).prepare()
        except graphlib.CycleError as error:
            raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
    check_against("cycles", closing)


def test_rooms_know_nothing_above_them():
    """A model that reads files, or an index that knows a model, can be used by nobody else."""
    graph = rooms(imports())
    for place, room in enumerate(ORDER):
        above = reach(graph, room) & set(ORDER[place + 1 :]) if room in graph else ()
        assert not above, f"{room} leads to {above}"
    for room, others in APART.items():
        beyond = reach(graph, room) & others
        assert not beyond, f"{room} leads to {beyond}"


@functools.cache
def commands() -> set[str]:
    """Modules that `python -m` runs, and those of the room cli that have a `main`."""
    return {name for name, tree in trees().items() if any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        or ast.unparse(node).startswith("cli.enter(__name__")
        or name.startswith("rag_jax.cli") and getattr(node, "name", "") == "main"
        for node in tree.body)}


def test_commands_are_small_and_imported_by_no_room():
    """What is done by a command alone cannot be done from Python."""
    for name, others in imports().items():
        if name not in commands() and not name.startswith("rag_jax.cli."):
            assert not others & commands(), name
    for name in commands():
        file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        assert len(file.read_text("utf-8").splitlines()) <= 100, name


def test_commands_and_flags_load_nothing_heavy():
    """--help and `import rag_jax` answer in a fraction of a second: they do not load jax."""
    graph = imports(only_at_import=True)
    for start in (*LIGHT, *commands()):
        for name in {start} | reach(graph, start):
            heavy = {other.split(".")[0] for other in imported(trees()[name].body)} & HEAVY
            assert not heavy, f"{start} loads {name}, which imports {heavy}"


def test_nothing_hides_an_import():
    """A cycle behind `job: Any`, or behind a module imported by its name, is a cycle."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.arg in OURS:
                assert node.annotation is None or ast.unparse(node.annotation) != "Any", (
                    f"{name}, line {node.lineno}: {node.arg} has a type of its own")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                assert name in BY_NAME or "rag_jax" not in ast.unparse(node), (
                    f"{name}, line {node.lineno}: import it by a statement")


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Every function and method by the last part of its module and its own name."""
    return [(f"{name.split('.')[-1]}.{node.name}", node) for name, tree in trees().items()
            for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def test_functions_have_at_most_60_lines():
    """Its docstring does not count; a longer one does several things."""
    def lines(node: ast.FunctionDef) -> int:
        first = node.body[0]
        told = ast.get_docstring(node) is not None
        return (node.end_lineno - node.lineno + 1
                - told * (first.end_lineno - first.lineno + 1))

    check_against("functions of more than 60 lines",
                  {name for name, node in functions() if lines(node) > 60})


def test_functions_have_at_most_8_parameters():
    """self and cls do not count; what always goes together belongs into one dataclass."""
    def parameters(node: ast.FunctionDef) -> int:
        each = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs,
                node.args.vararg, node.args.kwarg]
        return sum(arg is not None and arg.arg not in ("self", "cls") for arg in each)

    check_against("functions of more than 8 parameters",
                  {name for name, node in functions() if parameters(node) > 8})


def test_no_private_parts_and_no_patches():
    """jax._src changes without notice; a patched library is another one for all who use it."""
    used = {f"{name.split('.')[-1]}: {part}" for name, tree in trees().items()
            for part in ("unittest.mock", "jax._src")
            if any(f"{other}.".startswith(f"{part}.") for other in imported(tree))}
    check_against("private parts of other libraries", used)


def given(body: list[ast.stmt]) -> list[str]:
    """Names that a module or a class gives in its own lines, under conditions apart."""
    names = []
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            made_of = {ast.unparse(each).split("(")[0].split(".")[-1]
                       for each in node.decorator_list}
            names += [] if made_of & {"setter", "overload"} else [node.name]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [each.id for target in targets for each in ast.walk(target)
                      if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return names


def test_names_are_given_once():
    """A second constant of the same name takes the place of the first without a word."""
    for name, tree in trees().items():
        for node in (tree, *(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef))):
            names = given(node.body)
            twice = sorted({each for each in names if names.count(each) > 1})
            assert not twice, f"{name}: {twice}"


SHAPES = (r"(?:float32|int32|bool|int|dtype)\[([^\]]*)\]",  # float32[B, K]
          r"->\s*\[([^\]]*)\]",  # -> [B, K]
          r"\b[a-z]\w*_([A-Z1]+)\b",  # log_p_BK
          r'einsum\(\s*"([^"]*)"')


def test_dimension_letters_are_those_of_the_legend():
    """A letter that no legend explains, or that means two things, makes a shape unreadable."""
    legend = set(re.findall(r"(?:^|  )([A-Z])  \w", rag_jax.__doc__, re.M))
    files = [PACKAGE / "marginal.py", PACKAGE / "types.py", *PACKAGE.glob("models/*.py"),
             *PACKAGE.glob("decoding/*.py")]
    used = {letter for file in files for shape in SHAPES
            for inside in re.findall(shape, file.read_text("utf-8"))
            for letter in re.findall(r"(?<![a-z])[A-Z](?![a-z])", inside)}
    assert used <= legend, f"not in the legend of rag_jax: {sorted(used - legend)}"
    assert used | {"N"} >= legend, f"in the legend and used nowhere: {sorted(legend - used)}"


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
            # With one argument it is Path's: texts take two, dataclasses names.
            or name == "replace" and len(node.args) == 1 and not node.keywords)


def test_files_alone_renames_and_removes():
    """A rename that is not waited for, or a removal without our mark, loses what others wrote."""
    for name, tree in trees().items():
        lines = [node.lineno for node in ast.walk(tree) if renames_or_removes(node)]
        assert bool(lines) == (name == "rag_jax.files"), f"{name}: lines {lines}"
