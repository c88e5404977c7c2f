"""Imports point one way: a module may import its own layer and the layers below it, nothing above."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "adlm"
# Lowest first. schema and errors import nothing of ours.
LAYERS = [
    "errors", "rules", "tables", "schema", "config.keys", "migration", "io.paths", "diffusion", "models", "objectives",
    "samplers", "engine", "data", "io.export",
    "training", "compat", "io.load", "api", "reporting", "evaluation", "reasoning", "serving", "bench", "demo",
    "config", "compare", "cli", "__main__",
]  # fmt: skip
# What may be imported at the top of a module; the rest is optional and imported where used.
ALWAYS_PRESENT = {"torch", "numpy", "safetensors", "tokenizers", "rich", "hydra", "omegaconf"}
# These are useless without the packages of their extra (or of torch's CUDA build), and imported only where used.
NEED_AN_EXTRA = {"serving", "evaluation/harness.py", "models/kernels.py", "engine/kernels.py", "training/kernels.py"}
# No tensors here: the command line must answer `--help` without loading torch.
NO_TORCH = {"rules", "tables", "migration", "schema", "errors", "config", "compat", "cli"}


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
    assert {layer_of(p) for p in MODULES} <= {*LAYERS, "io"}


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


def test_modules_stay_readable():
    # the schema is a table of settings with their help, not code
    limit = {"schema.py": 600}
    lines = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in MODULES}
    long = {name: n for name, n in lines.items() if n > limit.get(name, 450)}
    assert not long, long
