"""The settings: every dotted key of the schema with its type, default, help and rule, and every YAML group.

    keys()["sampling.top_p"]  # Key(kind=float, default=1.0, help="Nucleus: ...", rule=Range(low=0, high=1, ...))

Help texts are read from the source of the schema (the string under a field), so that a setting is described once.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from adlm import schema, schema_commands
from adlm.errors import require, similar
from adlm.rules import Choices, Range, Rule
from adlm.tables import CORPORA, GROUPS


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: `model.n_heads`, of type int, with its default and its meaning."""

    name: str
    kind: type
    default: Any
    help: str
    rule: Rule | None
    """The values it may take, besides its type."""

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The names that the setting may take; None if it is not limited to names."""
        return self.rule.names if isinstance(self.rule, Choices) else None


TRAINING = ("", "model", "noise", "objective", "data", "optim", "train", "checkpoint")
"""Sections that define a training run: model, data and procedure."""

PER_REQUEST = (
    "n", "length", "prompt", "template", "banned", "required", "regex", "choices", "response_format",
    "batch_size", "seed",
)  # fmt: skip
"""Settings of `sampling` for which a server has no defaults: each request gives them, or cannot set them."""


@functools.cache
def keys() -> dict[str, Key]:
    """Every dotted key of the schema, in the order in which `adlm config` prints them."""
    texts = _field_docstrings()

    def walk(cls: type, prefix: str) -> Iterable[Key]:
        hints, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                yield from walk(hints[field.name], f"{prefix}{field.name}.")
            else:
                (*_, rule) = getattr(annotated[field.name], "__metadata__", (None,))
                text = texts[cls.__name__, field.name]
                yield Key(prefix + field.name, hints[field.name], field.default, text, rule)

    return {key.name: key for key in walk(schema.Config, "")}


def _field_docstrings() -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field, on one line."""
    found = {}
    modules = (schema, schema_commands)
    trees = (ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules)
    for cls in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], ast.Pass()]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                found[cls.name, field.target.id] = " ".join(str(said or "").split())
    return found


def group_choices(group: str) -> tuple[str, ...]:
    """The names for `group=NAME`: its YAML files; for `data`, every corpus."""
    return tuple(sorted({*GROUPS[group], *(CORPORA if group == "data" else ())}))


def group_help(group: str, name: str) -> str:
    """One line about a name of a group."""
    return GROUPS[group].help(name) if name in GROUPS[group] else CORPORA.load(name).about


def full_name(name: str, sections: Iterable[str]) -> str:
    """`steps` -> `train.steps`. A group or a full key is unchanged; a short name must exist in only one section."""
    if name in GROUPS or name in keys():
        return name
    found = [key for key in keys() if key.rpartition(".")[0] in sections and key.rpartition(".")[2] == name]
    if not found:
        raise ValueError(f"unknown setting {name!r}{nearest(name, keys())}")
    whole = f"give the whole name: **{{{found[0]!r}: ...}}"
    require(len(found) == 1, f"{name} is the end of {' and '.join(found)}; {whole}")
    return found[0]


def default_text(key: Key) -> str:
    """A default as a user would type it."""
    return repr(key.default) if key.kind is str else str(key.default).lower()


def allowed_text(key: Key) -> str:
    """The allowed values of a key, unless its help already lists them."""
    if isinstance(key.rule, Range):
        return f"[{key.rule}]"
    unsaid = key.choices is not None and not all(name in key.help for name in key.choices)
    return f"[{key.rule}]" if unsaid else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing. `steps` finds `train.steps`; `train.stepz` finds `train.steps`."""

    def last(key: str) -> str:
        return key.rsplit(".", 1)[-1]

    names = list(names)
    near = [n for n in names if "." not in name and last(n) == name]
    if not near and (found := similar(name, names)):
        near = [found]
    if not near and (found := similar(last(name), map(last, names))):
        near = [n for n in names if last(n) == found]
    return f" (did you mean {' or '.join(repr(n) for n in near[:3])}?)" if near else ""
