"""The exported folder: everything needed to use a model elsewhere, and nothing executable.

model.safetensors   weights, perhaps in four bits (quantised.py)
config.json         model, noise and objective settings, vocabulary, training facts
tokenizer.json      the tokenizer
README.md           a model card with the training command and metrics

An adapter folder holds adapter.safetensors instead of the weights, and its config.json names the model it adapts.
"""

import json
import math
import shlex
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import require
from adlm.io.paths import BOX, BOX_NAME, check_object, digest, path_of, read_json
from adlm.io.quantised import CODES, expand, expanded_shapes
from adlm.migration import migrate
from adlm.models import Network, build_model
from adlm.models.network import check_adapters, merged, tie, weights_digest
from adlm.rules import Choices, accept
from adlm.schema import Config, LoraConfig, ModelConfig, NoiseConfig, ObjectiveConfig
from adlm.tables import Table

FORMAT = 1
WEIGHTS, CONFIG, TOKENIZER, CARD = "model.safetensors", "config.json", "tokenizer.json", "README.md"
ADAPTER = "adapter.safetensors"
MARK = "library_name: adlm"
"""A line of every model card that this module writes."""
WEIGHTS_DIGEST = "weights_file_sha256"
# Name of the folder in the model card until it has a name on the hub.
PLACEHOLDER = "this-folder"
T = TypeVar("T")
REQUIRED = {
    "algo": str, "model": dict, "noise": dict, "objective": dict, "vocab_size": int, "mask_id": int,
}  # fmt: skip
"""Fields that a config.json must have, with their types."""
FACTS = {
    "step": int, "tokens": int, "parameters": int, "valid_nll": float, "bits_per_byte": float, "data": str,
    "bounds": str, "base": str, "new_tokens": int,
    "data_settings": dict, "tokenizer": dict, "licence": str, "command": list, WEIGHTS_DIGEST: str, "adapter": dict,
}  # fmt: skip
"""Fields that it may have. `new_tokens`: tokens to draw after a prompt when a request does not say how many."""
ADAPTER_FACTS = {"rank": int, "alpha": float, "base": str, "base_sha256": str}
"""Fields for an adapter in config.json: its settings, the path of the model it adapts, and that model's digest."""
DEEPEST = 8
"""Longest chain of adapters of adapters that is loaded."""
LARGEST_HEADER = 8 * 2**20
"""Most bytes of the names and shapes in a model.safetensors; a model of 1,000 blocks has less than 2 MB."""
MOST_TENSORS = 20_000
"""Most tensors of a model that is read; 1,000 blocks have about 12,000."""
MOST_POSITIONS = 2**26
"""Most bytes that position tables may have beyond those of the weights."""
FLOATS = ("F64", "F32", "F16", "BF16")


class Loaded(NamedTuple):
    """A model ready for inference, with its tokenizer and settings."""

    model: Network
    tokenizer: Tokenizer
    noise: NoiseConfig
    objective: ObjectiveConfig
    info: dict[str, Any]
    """The whole config.json."""


def describe(cfg: Config, tokenizer: Tokenizer, **facts: Any) -> dict[str, Any]:
    """The config.json of a trained model; `facts` are training facts such as step, tokens and bound."""
    return {
        "format": FORMAT,
        "algo": cfg.algo,
        "model": asdict(cfg.model),
        "noise": asdict(cfg.noise),
        "objective": asdict(cfg.objective),
        "vocab_size": tokenizer.vocab_size,
        "mask_id": tokenizer.mask_id,
        "tokenizer": {"name": cfg.data.tokenizer, "fingerprint": tokenizer.fingerprint},
        "data": cfg.data.name,
        "data_settings": asdict(cfg.data),
        **facts,
    }


def save_folder(folder: Path, weights: dict[str, Tensor], tokenizer: Tokenizer, info: dict[str, Any]) -> None:
    """Write the files to a temporary folder beside the final one, and move them in when all are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        new, kept = Path(name), weights_file(info)
        values = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        save_file(values, new / kept, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(info | {WEIGHTS_DIGEST: digest(new / kept)}, indent=1), encoding="utf-8")
        tokenizer.save(new / TOKENIZER)
        (new / CARD).write_text(card(info), encoding="utf-8")
        (new / kept).chmod((new / CONFIG).stat().st_mode)  # safetensors makes files that only this user can read
        for file in (TOKENIZER, kept, CARD, CONFIG):
            (new / file).replace(folder / file)


def place_for_export(folder: Path) -> Path:
    """Return the folder to export to; refuse it if the export would hide a run's own model, or would replace files that
    are not an exported model."""
    where = f"folder={str(folder)!r}"
    is_run = (folder / "config.yaml").exists() or (folder / "checkpoints").exists()
    require(not is_run, f"{where} is a run folder, whose model an export in it would hide; choose another")
    there = [name for name in (CONFIG, WEIGHTS, ADAPTER, TOKENIZER, CARD) if (folder / name).exists()]
    if there:
        marks = ((CONFIG, b'"format"'), (CARD, MARK.encode()))  # transformers' layouts have only the second
        ours = any((folder / name).is_file() and mark in (folder / name).read_bytes() for name, mark in marks)
        require(ours, f"{where} holds {', '.join(there)}, but no exported model; choose another")
    return folder


def weights_file(info: dict[str, Any]) -> str:
    """The file of the weights that belong to a config.json."""
    return ADAPTER if info.get("adapter") else WEIGHTS


def is_export_of(folder: Path, weights: dict[str, Tensor], tokenizer: Tokenizer, info: dict[str, Any]) -> bool:
    """Whether the folder is complete and valid, and holds these weights, this tokenizer, and the settings and step of
    `info`."""
    settings = ("format", "algo", "model", "noise", "objective", "vocab_size", "mask_id", "step")
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kept = folder / weights_file(info)
        if any(found[key] != info[key] for key in settings) or found[WEIGHTS_DIGEST] != digest(kept):
            return False
        stored, fingerprint = load_file(kept), load_tokenizer(str(folder / TOKENIZER)).fingerprint
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return False
    same = stored.keys() == weights.keys() and all(torch.equal(x, weights[name].cpu()) for name, x in stored.items())
    return same and fingerprint == tokenizer.fingerprint and (folder / CARD).is_file()


def load_folder(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, depth: int = 0
) -> Loaded:
    """Load the model of an exported folder, ready for inference; adapters are merged into the model that they adapt.
    `depth`: how many adapters, each on top of the next, adapt this model."""
    require((folder / CONFIG).is_file(), f"{folder} is not an exported model: {CONFIG} is missing")
    info = check_object(read_json(folder / CONFIG), {"format": int}, {}, str(folder / CONFIG))
    require(
        info["format"] == FORMAT, f"{folder / CONFIG} has format {info['format']!r:.20}; this version reads {FORMAT}"
    )
    check_object(info, REQUIRED, FACTS, str(folder / CONFIG))
    new = info.get("new_tokens")
    require(new is None or new >= 0, f"{folder / CONFIG}: new_tokens must be at least 0, got {new}")
    for name in (weights_file(info), TOKENIZER):
        require((folder / name).is_file(), f"{folder} is not an exported model: {name} is missing")
    if info.get("adapter"):
        return load_adapter(folder, info, device, dtype, depth)
    cfg = section(ModelConfig, info["model"], str(folder / CONFIG))
    noise = section(NoiseConfig, info["noise"], str(folder / CONFIG))
    objective = section(ObjectiveConfig, info["objective"], str(folder / CONFIG))
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    spare = info.get("released") is not None  # such models may have embedding rows without a token
    require(
        tokenizer.vocab_size == info["vocab_size"] or (spare and tokenizer.vocab_size < info["vocab_size"]),
        f"{folder}: the tokenizer has {tokenizer.vocab_size} entries and the model {info['vocab_size']}",
    )
    require(
        tokenizer.mask_id == info["mask_id"],
        f"{folder}: the mask is token {tokenizer.mask_id} of {TOKENIZER} and {info['mask_id']} of {CONFIG}",
    )
    shapes = expanded_shapes(read_shapes(folder / WEIGHTS))
    check_shapes(shapes, cfg, info["vocab_size"], info["mask_id"], f"{folder / WEIGHTS} does not fit its {CONFIG}")
    check_digest(folder / WEIGHTS, info)
    with torch.device("meta"):  # shapes only: the file's weights are assigned, with no second copy or initialisation
        model = build_model(cfg, info["vocab_size"], info["mask_id"])
    try:
        weights = expand(load_file(folder / WEIGHTS))
        for name in weights:  # they are mapped from the file until they are copied
            weights[name] = weights[name].to(dtype, copy=True)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit its config.json: {str(error).splitlines()[-1]}") from None
    if cfg.tied:
        tie(model)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    model.freeze_bridge()
    today = {"model": asdict(cfg), "noise": asdict(noise), "objective": asdict(objective)}
    return Loaded(model, tokenizer, noise, objective, info | today)


def check_digest(path: Path, info: dict[str, Any]) -> None:
    """Refuse weights that were corrupted on disk or in a copy: safetensors has no checksum. This reads a gigabyte per
    second or more, which is fast compared with building the model. Exports of older versions have no digest."""
    require(
        info.get(WEIGHTS_DIGEST) is None or info[WEIGHTS_DIGEST] == digest(path),
        f"{path} is corrupt: its sha256 is not {WEIGHTS_DIGEST} of {CONFIG}; copy or export it again",
    )


def load_adapter(
    folder: Path, info: dict[str, Any], device: torch.device | str, dtype: torch.dtype, depth: int
) -> Loaded:
    """The model that an adapter folder adapts, with the adapters merged into it."""
    shapes = read_shapes(folder / ADAPTER)
    base = load_base(info["adapter"], folder, device, depth)
    check_adapters(shapes, base.model.state_dict(), info["adapter"]["rank"], f"{folder / ADAPTER} does not fit")
    check_digest(folder / ADAPTER, info)
    return with_adapters(base, load_file(folder / ADAPTER), info, dtype)


def load_base(adapter: dict[str, Any], folder: Path, device: torch.device | str = "cpu", depth: int = 0) -> Loaded:
    """The model that the adapters in `folder` adapt: at its recorded path, else in the subfolder `base`, else in a
    folder of its name next to `folder`. Its weights must be those that the adapters were trained on."""
    require(depth < DEEPEST, f"{folder} adapts an adapter of an adapter, more than {DEEPEST} deep")
    check_object(adapter, ADAPTER_FACTS, {}, f"{folder / CONFIG}: adapter")
    named = BOX if adapter["base"] == BOX_NAME else path_of(adapter["base"])
    places = (named, folder / "base", folder.parent / named.name)
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        searched = ", ".join(str(place) for place in places)
        raise ValueError(f"{folder} adapts {adapter['base']!r}, which is in none of {searched}: copy it to one of them")
    base = load_folder(found, device, depth=depth + 1)
    require(
        weights_digest(base.model.state_dict()) == adapter["base_sha256"],
        f"{folder} adapts another model than {found} holds now: its weights have changed",
    )
    return base


def with_adapters(
    base: Loaded, weights: dict[str, Tensor], info: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Loaded:
    """The base with adapters merged into it, and the settings and facts of `info`, the config.json of the adapters."""
    low_rank = LoraConfig(info["adapter"]["rank"])
    base.model.load_state_dict(merged(base.model.state_dict() | weights, low_rank, info["adapter"]["alpha"]))
    model = base.model.to(dtype=dtype)
    noise, objective = section(NoiseConfig, info["noise"]), section(ObjectiveConfig, info["objective"])
    facts = {name: value for name, value in info.items() if name not in ("adapter", WEIGHTS_DIGEST)}
    facts |= {name: base.info[name] for name in ("new_tokens",) if base.info.get(name)}
    facts |= {"model": asdict(model.config), "noise": asdict(noise), "objective": asdict(objective)}
    return Loaded(model, base.tokenizer, noise, objective, facts)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors file; only its header is read."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    require(
        header <= LARGEST_HEADER, f"{path}: its header claims {header:,} bytes, at most {LARGEST_HEADER:,} are read"
    )
    try:
        with safe_open(path, "pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            shapes = {name: tuple(entry.get_shape()) for name, entry in entries.items()}
            codes = {name for name, entry in entries.items() if entry.get_dtype() == "U8" and name.endswith(CODES)}
            other = [name for name, entry in entries.items() if entry.get_dtype() not in FLOATS and name not in codes]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {str(error).splitlines()[0]:.200}") from None
    require(not other, f"{path}: {other[:1]} does not hold floating-point numbers")
    return shapes


def expected_shapes(
    cfg: ModelConfig, vocab_size: int, mask_id: int, n_tensors: int, what: str
) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model, without allocating it. `n_tensors`, the number in the file, bounds the work, so
    that settings cannot demand a million blocks. `what`: the beginning of messages."""
    blocks = cfg.n_blocks + (cfg.n_denoiser_blocks if cfg.anchored else 0)
    require(n_tensors <= MOST_TENSORS, f"{what}: it has {n_tensors} tensors, at most {MOST_TENSORS} are read")
    require(blocks <= n_tensors, f"{what}: {blocks} blocks, but {n_tensors} tensors")
    try:
        with torch.device("meta"):
            blank = build_model(replace(cfg, length=4), vocab_size, mask_id)  # no weight depends on the length
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes too large for a tensor
        raise ValueError(f"{what}: {str(error).splitlines()[0]:.200}") from None
    shapes = {name: tuple(value.shape) for name, value in blank.state_dict().items()}
    positions = 4 * cfg.length * cfg.head_width
    weights = 4 * sum(math.prod(shape) for shape in shapes.values())
    require(positions <= weights + MOST_POSITIONS, f"{what}: model.length={cfg.length} is too long for its weights")
    return shapes


def check_shapes(found: dict[str, tuple[int, ...]], cfg: ModelConfig, vocab_size: int, mask_id: int, what: str) -> None:
    """Refuse settings that do not fit the weights `found`, before anything is allocated. `what` begins messages."""
    expected = expected_shapes(cfg, vocab_size, mask_id, len(found), what)
    for name in sorted(expected.keys() | found.keys()):
        got, want = found.get(name, "missing"), expected.get(name, "unknown")
        require(got == want, f"{what}: {name:.80} is {got} in the file and {want} in the model")


def section(kind: type[T], values: dict[str, Any], source: str = CONFIG) -> T:
    """One section of saved settings of any version as its class: `section(ModelConfig, info["model"])`.

    Keys that this version has moved to another section are left out; unknown ones are refused by name.
    Names of a table are not looked up here: a model whose anchor rule was removed can still be used.
    """
    name = next(name for name, hint in get_type_hints(Config).items() if hint is kind)
    return sections({name: values}, source).get(name, kind())


def sections(tree: dict[str, dict[str, Any]], source: str = CONFIG) -> dict[str, Any]:
    """Sections of saved settings, including the ones to which this version has moved some of their keys."""
    kinds, flat = get_type_hints(Config), {}
    for name, values in tree.items():
        check_object(values, {}, {}, f"{source}: {name}")
        flat |= {f"{name}.{key}": value for key, value in values.items()}
    found: dict[str, dict[str, Any]] = {}
    for key, value in migrate(flat, source).items():
        section, dot, name = key.partition(".")
        if dot:
            found.setdefault(section, {})[name] = value
    return {name: _made(kinds[name], name, values, source) for name, values in found.items()}


def _made(kind: type[T], section: str, values: dict[str, Any], source: str) -> T:
    unknown = sorted(set(values) - {f.name for f in fields(kind)})  # type: ignore[arg-type]
    require(not unknown, f"{source} has unknown {kind.__name__} keys: {', '.join(unknown)}")
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if any(isinstance(rule, Choices) and isinstance(rule.of, Table) for rule in getattr(hint, "__metadata__", ())):
            hints[name] = str
    try:
        return kind(**{name: accept(f"{section}.{name}", value, hints[name]) for name, value in values.items()})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def card(info: dict[str, Any]) -> str:
    """The model card: a table of facts, how to use the model, and the command that made it."""
    model, lines = info["model"], []
    bound = info.get("valid_nll")
    for label, value in {
        "algorithm": info["algo"],
        "training data": info.get("data"),
        "steps": info.get("step"),
        "training tokens": f"{info['tokens']:,}" if "tokens" in info else None,
        "validation": None
        if bound is None
        else f"{bound:.4f} nats per token, perplexity {math.exp(min(bound, 50)):.2f}"
        + ("" if model["causal"] else " (upper bounds)"),
        "bits per byte": f"{info['bits_per_byte']:.3f} on held-out text" if "bits_per_byte" in info else None,
        "bits per byte by block length": info.get("bounds"),
        "adapted from": info.get("base"),
        "licence": info.get("licence"),
        "size": f"{info['parameters']:,} parameters" if "parameters" in info else None,
        "adapter": "rank {rank}, of the model {base}".format(**info["adapter"]) if "adapter" in info else None,
        "vocabulary": f"{info['vocab_size']:,} entries with the mask",
        "longest sequence": f"{model['length']} tokens",
    }.items():
        if value is not None:
            lines.append(f"| {label} | {value} |")
    command = shlex.join(info["command"]) if info.get("command") else "adlm train"
    return "\n".join(
        [
            # metadata for the hub
            "---",
            MARK,
            *([f"license: {info['licence']}"] if "licence" in info else []),
            "pipeline_tag: text-generation",
            f"tags: [{'autoregressive' if model['causal'] else 'masked-diffusion'}, {info['algo']}]",
            "---",
            "",
            "# An adlm language model",
            "",
            "| | |",
            "|---|---|",
            *lines,
            "",
            "Use it:",
            "",
            "```python",
            "import adlm",
            "",
            f'lm = adlm.load("{PLACEHOLDER}")',
            "print(lm.generate(n=1)[0].text)",
            "```",
            "",
            "Made with:",
            "",
            "```",
            command,
            "```",
            "",
        ]
    )
