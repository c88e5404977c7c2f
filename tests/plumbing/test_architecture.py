"""Imports point one way: a module may import its own layer and the layers below it, nothing above. Modules and
functions stay small, names are used once, and each choice has one table."""

import ast
from pathlib import Path

from adlm import tables
from adlm.config.keys import keys

PACKAGE = Path(__file__).parents[2] / "src" / "adlm"
TESTS = Path(__file__).parents[1]
# Lowest first. errors imports nothing of ours; data imports only what stands before diffusion.
LAYERS = [
    "errors", "rules", "tables", "schema_commands", "schema", "config.keys", "migration", "io.paths", "compat.pickles",
    "diffusion", "models", "objectives", "samplers", "data", "compat.command_lines", "config", "constrain", "engine",
    "io.export", "compat.foreign_files", "training", "compat.checkpoints", "compat.layouts", "io.load", "api",
    "reporting", "evaluation", "reasoning", "serving", "bench", "demo", "finetuning", "compare", "commands", "cli",
    "__main__",
]  # fmt: skip
BELOW_DATA = {"errors", "rules", "tables", "schema_commands", "schema", "io.paths", "data"}
# What may be imported at the top of a module; the rest is optional and imported where used.
ALWAYS_PRESENT = {"torch", "numpy", "safetensors", "tokenizers", "rich", "hydra", "omegaconf"}
# These are useless without the packages of their extra (or of torch's CUDA build), and imported only where used.
NEED_AN_EXTRA = {
    "serving", "evaluation/harness.py", "models/kernels.py", "training/kernels.py", "compat/modeling_adlm.py",
}  # fmt: skip
# No tensors here: the command line must answer `--help` without loading torch.
NO_TORCH = {
    "rules", "tables", "migration", "schema_commands", "schema", "errors", "config", "config.keys", "data",
    "compat.command_lines", "compat.pickles", "compat.checkpoints", "commands", "cli",
}  # fmt: skip


def layer_of(path: Path) -> str:
    return layer(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def layer(module: str) -> str:
    """The layer of `package.module` is its package, unless the module stands at a height of its own."""
    parts = module.removesuffix(".__init__").split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYERS else parts[0]


def imported(tree: ast.AST, top_level_only: bool) -> set[str]:
    found = set()
    nodes = tree.body if top_level_only and isinstance(tree, ast.Module) else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the full name, so that layers are visible"
            if node.module == "adlm":
                found |= {f"adlm.{alias.name}" for alias in node.names}
            elif node.module:
                found.add(node.module)
    return found


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_module_belongs_to_a_layer():
    assert MODULES
    assert {layer_of(p) for p in MODULES} <= {*LAYERS, "io", "compat"}


def test_imports_point_down():
    wrong = []
    for path in MODULES:
        own = LAYERS.index(layer_of(path)) if layer_of(path) in LAYERS else 0
        for name in imported(ast.parse(path.read_text()), top_level_only=False):
            if not name.startswith("adlm."):
                continue
            target = layer(name.removeprefix("adlm."))
            # cli is the only place where commands meet everything
            if target in LAYERS and LAYERS.index(target) > own:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, wrong


def test_data_knows_only_settings_and_paths():
    for path in (PACKAGE / "data").glob("*.py"):
        names = imported(ast.parse(path.read_text()), top_level_only=False)
        used = {layer(name.removeprefix("adlm.")) for name in names if name.startswith("adlm.")}
        assert used <= BELOW_DATA, (path.name, used - BELOW_DATA)


def test_optional_packages_are_imported_where_used():
    import sys

    allowed = ALWAYS_PRESENT | set(sys.stdlib_module_names) | {"adlm", "__future__"}
    wrong = []
    for path in MODULES:
        for name in imported(ast.parse(path.read_text()), top_level_only=True):
            top = name.split(".")[0]
            optional = {layer_of(path), path.relative_to(PACKAGE).as_posix()} & NEED_AN_EXTRA
            if top not in allowed and not optional:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
            if layer_of(path) in NO_TORCH and top == "torch":
                wrong.append(f"{path.relative_to(PACKAGE)} imports torch at the top")
    assert not wrong, wrong


# ---- size and names --------------------------------------------------------------------------------------------------

TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in [*MODULES, PACKAGE / "__init__.py"]}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{name}:{node.name}", node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton passes one argument for each pointer and stride."""
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    a = node.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def longer_than_450_lines(folder: Path) -> dict[str, int]:
    lines = {p.relative_to(folder).as_posix(): len(p.read_text().splitlines()) for p in folder.rglob("*.py")}
    assert lines
    return {name: n for name, n in lines.items() if n > 450}


def test_modules_stay_readable():
    assert not longer_than_450_lines(PACKAGE)


def test_tests_stay_readable():
    assert not longer_than_450_lines(TESTS)


def test_no_test_imports_a_test():
    """What tests share stands in tests/support or in a conftest.py."""
    tests = {p.stem for p in TESTS.rglob("test_*.py")}
    found = {p.name: both for p in TESTS.rglob("*.py") if (both := imported(ast.parse(p.read_text()), False) & tests)}
    assert tests and not found, found


def test_the_package_has_at_most_120_modules():
    assert len(TREES) <= 120, len(TREES)


def test_there_are_at_most_160_keys():
    assert len(keys()) <= 160, len(keys())


def test_no_class_name_is_used_twice():
    found: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert not twice, twice


def test_no_function_has_more_than_8_parameters():
    many = {
        name: len(parameters(node)) for name, node in functions() if len(parameters(node)) > 8 and not is_kernel(node)
    }
    assert not many, many


def test_no_function_has_more_than_80_lines():
    long = {name: n for name, node in functions() if (n := (node.end_lineno or 0) - node.lineno + 1) > 80}
    assert not long, long


# ---- one table for each choice ---------------------------------------------------------------------------------------

# Maps between the release's names and ours, which name ours again.
ALLOWED = {"compat/command_lines.py", "compat/checkpoints.py"}


def name_sets() -> dict[str, set[str]]:
    """What must be said only once: the names of each table and the choices of each key."""
    found = {name: set(table.entries) for name, table in vars(tables).items() if isinstance(table, tables.Table)}
    found |= {f"group {name}": set(group) for name, group in tables.GROUPS.items()}
    return found | {key.name: {n for n in key.choices if n} for key in keys().values() if key.choices is not None}


def names_of(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_no_second_tables():
    """Tuples, lists, sets and dicts of a module that repeat three names or more of a table."""
    wrong = []
    for module, tree in TREES.items():
        if module in {"tables.py", "commands.py", "schema.py", "schema_commands.py", *ALLOWED}:
            continue
        for statement in tree.body:
            # PAPER: published numbers by name are facts, and no table.
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or "PAPER" in names_of(statement):
                continue
            for node in ast.walk(statement):
                items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
                words = {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}
                wrong += [
                    f"{module}:{node.lineno} repeats {sorted(words & names)} of {table}"
                    for table, names in name_sets().items()
                    if len(words & names) >= 3
                ]
    assert not wrong, "\n".join(wrong)
