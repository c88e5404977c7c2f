"""Released models: a folder or file of another project as a model of ours, ready for inference.

The network is built as shapes; then each parameter is made on the device and filled from the file, one tensor at a
time: there is never a second copy of the weights. They keep the file's precision (float16 becomes float32).
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from adlm.compat.gguf_files import open_gguf
from adlm.compat.layouts import ANY_MASK, Released, read_config, refuse
from adlm.compat.tensors import Tensors, open_folder
from adlm.compat.vocabularies import PRE_TOKENIZERS, tokenizer_of_files
from adlm.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from
from adlm.errors import require
from adlm.io.export import CONFIG, Loaded, describe, expected_shapes
from adlm.io.paths import read_json
from adlm.models import Network, build_model
from adlm.models.network import tie
from adlm.rules import check_fields
from adlm.schema import Config, DataConfig

SPARE_ROWS = 1024
"""Rows of an embedding beyond its vocabulary, at most: models are padded to round sizes."""


def load_released(path: Path, device: torch.device | str, tokenizer: str = "", root: str = "") -> Loaded:
    """Load a folder with a config.json of another project, or a GGUF file."""
    if path.is_file():
        config, tensors, own = open_gguf(path)
        found = read_config(config, tensors)
        used = load_tokenizer(tokenizer, root=root) if tokenizer else own
    else:
        config = read_json(path / CONFIG)
        refuse(config, str(path))
        tensors = open_folder(path)
        found = read_config(config, tensors)
        used = tokenizer_of_folder(path, found, tokenizer, root)
    source = tensors.source
    for name, values in (("model", found.model), ("objective", found.objective), ("noise", found.noise)):
        check_fields(values, f"{source}: {name}")
    vocab_size, mask_id = vocabulary(found, used, source)
    check_parameters(found, tensors, vocab_size, mask_id)
    with torch.device("meta"):
        model = build_model(found.model, vocab_size, mask_id)
    fill(model, found, tensors, torch.device(device))
    cfg = Config(
        algo=found.algo, model=found.model, noise=found.noise, objective=found.objective,
        data=DataConfig(tokenizer=used.name),
    )  # fmt: skip
    info = describe(cfg, used, parameters=sum(p.numel() for p in model.parameters()), released=path.name)
    return Loaded(model, used, found.noise, found.objective, info | {"vocab_size": vocab_size, "mask_id": mask_id})


def tokenizer_of_folder(folder: Path, found: Released, name: str, root: str) -> Tokenizer:
    """The tokenizer named, else the folder's own, else the one that models of this layout have."""
    if name:
        return load_tokenizer(name, root=root)
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(str(folder))
    if found.tokenizer in PRE_TOKENIZERS and (folder / "vocab.json").is_file():
        return tokenizer_of_files(folder, found.tokenizer)
    require(
        found.tokenizer.startswith("gpt2"),
        f"{folder} holds no tokenizer: put its tokenizer.json there, or name one as data.tokenizer",
    )
    gpt2 = load_tokenizer("gpt2", root=root or str(folder))
    return with_padding(gpt2) if found.tokenizer == "gpt2-pad" else gpt2


def with_padding(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary with [PAD] before the mask, as GIDD has it."""
    described = json.loads(tokenizer.backend.to_str())
    at = tokenizer.mask_id
    kept = [token for token in described["added_tokens"] if token["id"] != at]
    mask = next(token for token in described["added_tokens"] if token["id"] == at)
    described["added_tokens"] = [*kept, {**mask, "content": "[PAD]"}, {**mask, "id": at + 1}]
    return tokenizer_from(json.dumps(described).encode(), tokenizer.name, f"the tokenizer {tokenizer.name!r}")


def vocabulary(found: Released, tokenizer: Tokenizer, source: str) -> tuple[int, int]:
    """(rows of our embedding, mask id). A model without a mask gets one: a row it has to spare, or one more."""
    rows, mask_id = found.vocab_size, found.mask_id
    mask_id = tokenizer.mask_id if mask_id == ANY_MASK else mask_id
    most = rows + (mask_id is None)
    require(
        rows - SPARE_ROWS < tokenizer.vocab_size <= most,
        f"the model in {source} has {rows} entries and the tokenizer {tokenizer.name!r} {tokenizer.vocab_size} with"
        " its mask: give the right one as data.tokenizer",
    )
    require(
        mask_id is None or 0 <= mask_id < rows,
        f"{source}: its mask has the id {mask_id}, outside of its vocabulary 0..{rows - 1}",
    )
    require(
        mask_id is None or mask_id == tokenizer.mask_id,
        f"{source}: its mask has the id {mask_id}, but {tokenizer.mask_id} in the tokenizer {tokenizer.name!r}: give"
        " the right one as data.tokenizer",
    )
    return max(rows, tokenizer.vocab_size), tokenizer.mask_id


def check_parameters(found: Released, tensors: Tensors, vocab_size: int, mask_id: int) -> None:
    """Refuse weights that are not those of the settings, before anything is allocated."""
    needed = {name for parts in found.names.values() for name in parts}
    missing = sorted(needed - tensors.shapes.keys())
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    require(not missing, f"{tensors.source} lacks {''.join(missing[:1])}{more}: incomplete, or of another layout")
    what = f"{tensors.source}: its weights do not fit its settings"
    expected = expected_shapes(found.model, vocab_size, mask_id, len(tensors.shapes), what)
    assert expected.keys() == found.names.keys(), expected.keys() ^ found.names.keys()
    for ours, parts in found.names.items():
        shapes = [tensors.shapes[name] for name in parts]
        same = all(shape[1:] == expected[ours][1:] and len(shape) == len(expected[ours]) for shape in shapes)
        rows = sum(shape[0] for shape in shapes if shape)
        wanted = found.vocab_size if expected[ours][0] == vocab_size else expected[ours][0]
        require(
            same and rows == wanted,
            f"{what}: {parts[0]:.80} is {shapes[0]}, and {ours} {(wanted, *expected[ours][1:])}",
        )


@torch.no_grad()
def fill(model: Network, found: Released, tensors: Tensors, device: torch.device) -> None:
    """Give a network that is only shapes its weights on the device."""
    for ours, parts in found.names.items():
        owner = model.get_submodule(ours.rpartition(".")[0])
        name = ours.rpartition(".")[2]
        shape = getattr(owner, name).shape
        value: Tensor | None = None
        row = 0
        for part in parts:
            read = tensors.read(part)
            if value is None:
                dtype = torch.float32 if read.dtype in (torch.float16, torch.float64) else read.dtype
                value = torch.empty(shape, dtype=dtype, device=device)
            value[row : row + read.shape[0]] = read
            row += read.shape[0]
        assert value is not None
        value[row:] = 0  # of a mask that the model never reads
        setattr(owner, name, nn.Parameter(value, requires_grad=False))
    if found.model.tied:
        tie(model)
    for module in model.modules():  # tables of positions and noise levels are numbers already, on the CPU
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.eval()
    assert not any(p.is_meta for p in model.parameters())
