"""Write docs/configuration.md from the schema, the groups and the names of the public release.

    python scripts/make_configuration_md.py [--check]

With --check nothing is written, and the status is 1 if the page is out of date. Run it after a change of
src/adlm/schema.py, src/adlm/migration.py, src/adlm/compat/command_lines.py or a group.
"""
# ruff: noqa: E501

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_type_hints

from adlm.compat.command_lines import GROUP_NAMES, IGNORED_PREFIXES, RELEASE_DEFAULTS, TRANSLATIONS
from adlm.config.keys import Key, group_choices, group_help, keys
from adlm.migration import JOINED, REMOVED, RENAMED, VALUES
from adlm.schema import Config
from adlm.tables import GROUPS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

PREAMBLE = """# Configuration

<!-- Written by scripts/make_configuration_md.py from src/adlm/schema.py: change that, and run it again. -->

You want to know what can be set, what it means, and what it is if you say nothing.

```
adlm train model=small data=openwebtext train.steps=100_000 optim.lr=1e-3
adlm train experiment=adlm-owt-262b out=runs/first
adlm evaluate runs/first sampling.steps=64,128 sampling.top_p=0.9,1    # every combination
adlm config model=nano algo=mdlm          # print what a command would use
adlm config model=list                    # what a group, or a key such as sampling.sampler, may be
adlm train --help                         # the keys of a command
```

- A **group** (`model=small`) sets several keys at once. Groups later in the list below win over earlier ones. A single key wins
  over all groups, wherever it stands. Of two settings of one key, the last counts.
- Whole numbers may be written `1_000_000` or `1e6`. Texts are taken as they stand, quotes optional. `+key=` and `++key=` mean `key=`.
- An unknown group, key or value is refused at once, with the nearest valid name. Settings that cannot work together are refused
  with the key to change.
- `out` is where a command writes. `adlm train`, `demo`, `compare` and `reason` make a run folder: by default `runs/<algo>-<data>-<model>`,
  or `runs/<experiment>`. The others say in their `--help` what they write.
- `train.batch_size=0` becomes the sequences per rank. `algo=mdlm-matched` and `ar-matched` give one stack all
  `n_blocks + n_denoiser_blocks` blocks.
- `objective.gamma` rises from 0 over the first `objective.gamma_warmup` of the run and then stays, until
  `objective.gamma_until`. The anchor loss is a sum over anchors divided by all tokens, so a rule with fewer anchors has a smaller loss
  at the same `objective.gamma`.
- Nothing changes directory, and no folder is made before a command writes to it. The settings of a run are in its `config.yaml`.
- From Python, `adlm.config.load(["model=nano", "data=ptb"])` returns the same tree as plain dataclasses (`adlm/schema.py`).
- A package of yours adds groups, corpora, samplers and more by entry points (`adlm/tables.py`).
"""

RELEASE = """
## The public release's command lines

`python -m adlm_main mode=train|ppl_eval|sample_eval ...` (two-stage) and `python -m main ...` (MDLM, AR, SEDD, D3PM) run as typed in the
release's README, also under `torchrun`, with the release's defaults: {defaults}.
`sampling.parity=release` and `data.packing=release` keep its nucleus filter, step grid and packing, so that numbers compare.
`adlm` itself understands the same names. A name without meaning here is accepted, and one line on stderr says so.
"""


def page() -> str:
    return "\n".join([PREAMBLE, *groups(), *sections(), *release(), *earlier(), ""])


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    rows = [list(head), *map(list, lines)]
    rows.insert(1, ["---"] * len(rows[0]))
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows] + [""]


def groups() -> list[str]:
    found = ["## Groups", ""]
    for group in GROUPS:
        lines = [(f"`{name}`", group_help(group, name)) for name in group_choices(group)]
        found += [f"### {group}", "", *table((f"`{group}=`", "what it is"), lines)]
    return found


def sections() -> list[str]:
    hints = get_type_hints(Config)
    found = ["## Keys", ""]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in keys()):
        said = (hints[section].__doc__ or "") if section else ""
        lead = [] if not section or said.startswith(f"{hints[section].__name__}(") else [" ".join(said.split()), ""]
        lines = [entry(key) for key in keys().values() if key.name.rpartition(".")[0] == section]
        found += [f"### {section or 'general'}", "", *lead, *table(("key", "default", "allowed", "meaning"), lines)]
    return found


def entry(key: Key) -> tuple[str, str, str, str]:
    default = f"`{key.default!r}`" if key.kind is str else f"`{str(key.default).lower()}`"
    section = key.name.split(".")[0]
    if key.choices is not None and len(key.choices) > 8 and section in GROUPS:  # the group's table lists them
        allowed = f"a name of `{section}=`" + (", or empty" if "" in key.choices else "")
    elif key.choices is not None:
        allowed = ", ".join(f"`{name}`" if name else "empty" for name in key.choices)
    else:
        allowed = str(key.rule or {str: "text", bool: "`true`, `false`"}.get(key.kind, key.kind.__name__))
    return f"`{key.name}`", default, allowed, key.help


def release() -> list[str]:
    lines = [(", ".join(f"`{key}`" for key in t.keys), t.becomes) for t in TRANSLATIONS]
    lines += [(f"`{prefix}*`", f"ignored: {why}") for prefix, why in IGNORED_PREFIXES.items()]
    lines += [(f"`{group}={theirs}`", f"`{group}={ours}`") for (group, theirs), ours in GROUP_NAMES.items()]
    defaults = ", ".join(f"`{default}`" for default in RELEASE_DEFAULTS)
    return [RELEASE.format(defaults=defaults), *table(("release", "here"), lines)]


def earlier() -> list[str]:
    names = RENAMED | {old: joined.key for joined in JOINED for old in joined.old}
    lines = [(f"`{old}`", f"`{new}`") for old, new in sorted(names.items())]
    lines += [(f"`{key}={old}`", f"`{key}={new}`") for (key, old), new in sorted(VALUES.items())]
    gone = ", ".join(f"`{key}`" for key in sorted(set(REMOVED) - set(RENAMED)))
    return [
        "## Names of earlier versions",
        "",
        "They are still read: on the command line, in run folders and in exported models.",
        "",
        *table(("before", "now"), lines),
        f"Gone: {gone}. Settings that used one of them in a way that changes a model are refused; docs/LOG.md says why it is gone.",
    ]


def main(argv: list[str]) -> int:
    if argv == ["--check"]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
