"""The judge: a causal model that reads generated text, for generative perplexity and for the features of MAUVE.

`smollm2`, a GGUF file, a folder or hub name of a causal Hugging Face model, or a causal run or export of our own. How
it reads a sequence is a rule (schema_commands.JUDGE_RULES), stated with every result, since the number depends on it:

text     each text of the sequence is decoded and tokenised by the judge; the judge's begin-of-text token comes before
         every text and is not scored; everything else is
tokens   the sequence as it was drawn (only for our own judges with the model's tokenizer); the first token is given
release  the public release's rule: the whole sequence is decoded with its end tokens by name, tokenised, truncated to
         the model's length and padded with end tokens; scored are all tokens from the second on, except end tokens
         after the first end token

Scores are stored on disk in chunks of fixed size, each written when it is complete and named by its index; each rank
takes every size-th chunk. A killed run resumes at the first missing chunk, the judge is only loaded if a chunk is
missing, and no result depends on the number of ranks.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.io import progress
from adlm.io.export import CONFIG, TOKENIZER, WEIGHTS
from adlm.io.load import SMOLLM2, load_checkpoint, smollm2
from adlm.io.paths import LARGEST_JSON, path_of, read_regular, write_atomically
from adlm.models import linear_nll
from adlm.schema import EvalConfig
from adlm.training.parallel import World
from adlm.training.storage import MANIFEST

# Positions scored at once. Our own judges compute only their logits; a Hugging Face model returns those of its whole
# batch, which eval.batch_size bounds.
POSITIONS_AT_ONCE = 2048
# Samples judged together and stored in one file; texts of a forward pass unless eval.batch_size is set.
CHUNK, TEXTS = 64, 8


class JudgedText(NamedTuple):
    """One sample in the judge's tokens."""

    tokens: list[int]
    scored: list[bool]
    """False for tokens that are only context; the first one always is."""


class Scored(NamedTuple):
    """The judge's scores of N samples."""

    nats_N: np.ndarray
    """Sum over all scored tokens of a sample, float64."""
    tokens_N: np.ndarray
    features_ND: np.ndarray
    """Last hidden state at the last token, float32."""


class Judge(NamedTuple):
    """A loaded causal model."""

    name: str
    encode: Callable[[str], list[int]]
    """Encode text alone: nothing in it becomes a special token."""
    encode_marked: Callable[[str], list[int]]
    """Encode text in which special tokens are written by name; the tokenizer's own extra tokens are added."""
    start_id: int
    end_id: int
    context: int
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]]
    """tokens, attention mask [B, L] -> hidden [B, L, D] and a function: positions [N] in B*L, targets -> nats [N]."""
    tokenizer: str
    """Fingerprint, if the tokenizer is one of ours."""
    facts: dict[str, Any]
    device: torch.device


# Reading


class ReadingRule(NamedTuple):
    """How a judge reads the sequences of a model."""

    name: str
    """One of schema_commands.JUDGE_RULES."""
    tokenizer: Tokenizer
    length: int
    """Tokenizer and length of the model that drew the sequences."""

    def check(self, judge: Judge) -> None:
        """Refuse a rule that does not work with this judge's tokenizer."""
        require(
            self.name != "tokens" or judge.tokenizer == self.tokenizer.fingerprint,
            f"eval.judge_rule=tokens needs a judge with the model's own tokenizer; {judge.name} has another one",
        )

    def read(self, judge: Judge, tokens: Sequence[int]) -> JudgedText:
        """A drawn sequence in the judge's tokens, truncated to its context."""
        if self.name == "text":
            read, scored = [], []
            for text in documents(self.tokenizer, tokens):
                ids = judge.encode(text)
                read += [judge.start_id, *ids]
                scored += [False, *[True] * len(ids)]
            return JudgedText(read[: judge.context], scored[: judge.context])
        if self.name == "tokens":
            given = [] if tokens and tokens[0] == self.tokenizer.bos_id else [self.tokenizer.bos_id]
            ids = [*given, *(int(t) for t in tokens)][: judge.context]
            return JudgedText(ids, [False, *[True] * (len(ids) - 1)])
        width = min(self.length, judge.context)
        ids = judge.encode_marked(self.tokenizer.decode(tokens))[:width]
        if len(ids) < width and judge.end_id not in ids:
            ids.append(judge.end_id)  # the first padding token is a scored end token
        first = ids.index(judge.end_id) if judge.end_id in ids else -1
        return JudgedText(ids, [i > 0 and (t != judge.end_id or i == first) for i, t in enumerate(ids)])


def documents(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The decoded texts of a sequence, which begin, end and padding tokens separate."""
    ends = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token in ends:
            texts.append([])
        else:
            texts[-1].append(int(token))
    return [tokenizer.decode(text) for text in texts if text]


# Scoring


@torch.no_grad()
def score_texts(judge: Judge, texts: Sequence[JudgedText], batch_size: int) -> Scored:
    """Score every text on its own. Texts are padded on the right, which a causal model cannot see; padding is not
    scored."""
    nats_N, tokens_N = np.zeros(len(texts)), np.array([sum(t.scored) for t in texts], dtype=np.int64)
    features: list[np.ndarray | None] = [None] * len(texts)
    order = sorted((i for i in range(len(texts)) if texts[i].tokens), key=lambda i: len(texts[i].tokens))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        lengths = [len(texts[i].tokens) for i in batch]
        tokens_BL = torch.full((len(batch), max(lengths)), judge.end_id, dtype=torch.long)
        scored_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        for b, i in enumerate(batch):
            tokens_BL[b, : lengths[b]] = torch.tensor(texts[i].tokens)
            scored_BL[b, : lengths[b]] = torch.tensor(texts[i].scored)
        real_BL = torch.arange(tokens_BL.shape[1]) < torch.tensor(lengths)[:, None]
        hidden_BLD, nll = judge.forward(tokens_BL.to(judge.device), real_BL.long().to(judge.device))
        # position l predicts token l + 1
        text_M, position_M = scored_BL[:, 1:].nonzero(as_tuple=True)
        flat_M = (text_M * tokens_BL.shape[1] + position_M).to(judge.device)
        targets_M = tokens_BL[text_M, position_M + 1].to(judge.device)
        parts = [nll(f, t) for f, t in zip(flat_M.split(POSITIONS_AT_ONCE), targets_M.split(POSITIONS_AT_ONCE))]
        nats_M = torch.cat(parts).cpu().double() if parts else torch.zeros(0, dtype=torch.float64)
        totals_B = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, text_M, nats_M)
        for b, i in enumerate(batch):
            nats_N[i] = totals_B[b].item()
            features[i] = hidden_BLD[b, lengths[b] - 1].float().cpu().numpy()
    width = next((len(f) for f in features if f is not None), 0)
    empty = np.zeros(width, dtype=np.float32)  # a sequence without any text
    return Scored(nats_N, tokens_N, np.stack([empty if f is None else f for f in features]))


def judge_key(name: str, rule: ReadingRule) -> str:
    """A digest of what a score depends on besides the sequence: the judge, the rule, and the length it truncates to."""
    return digest([identity(locate(name)), rule.name, rule.length if rule.name == "release" else 0])


def digest(what: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judge_samples(
    judge: Callable[[], Judge],
    rule: ReadingRule,
    samples: Sequence[tuple[int, Sequence[int]]],
    folder: Path,
    cfg: EvalConfig,
    ranks: World,
    label: str,
) -> Scored:
    """Scores of (id, tokens) sequences in their order; `judge` opens the judge and is called only when needed."""
    chunks = [samples[a : a + CHUNK] for a in range(0, len(samples), CHUNK)]
    todo = [c for c, chunk in enumerate(chunks) if read_chunk(folder, c, chunk) is None]
    ranks.barrier()  # every rank reads before any rank writes
    mine = todo[ranks.rank :: ranks.size]
    opened = open_together(judge, bool(mine), rule, ranks)
    with progress(f"judging {label}", len(mine), ranks.is_main) as advance:
        for c in mine:
            assert opened is not None
            texts = [rule.read(opened, tokens) for _, tokens in chunks[c]]
            scored = score_texts(opened, texts, cfg.batch_size or TEXTS)
            arrays = {"ids": np.array([i for i, _ in chunks[c]]), **scored._asdict()}
            write_atomically(chunk_path(folder, c), functools.partial(np.savez, **arrays))
            advance()
    ranks.barrier()
    found = [read_chunk(folder, c, chunk) for c, chunk in enumerate(chunks)]
    complete = [f for f in found if f is not None]
    assert len(complete) == len(found), f"{folder} lost a chunk while it was read"
    return Scored(*(np.concatenate(column) for column in zip(*complete)))


def open_together(judge: Callable[[], Judge], needed: bool, rule: ReadingRule, ranks: World) -> Judge | None:
    """The judge on ranks that need it. If it cannot be opened on one rank, or does not fit the rule, all ranks fail, so
    that none waits for another."""
    opened, problem = None, None
    try:
        if needed:
            opened = judge()
            rule.check(opened)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        problem = error
    if ranks.any(problem is not None):
        raise problem or ValueError("the judge cannot be opened on another rank")
    return opened


def chunk_path(folder: Path, c: int) -> Path:
    return folder / f"{c:05d}.npz"


def read_chunk(folder: Path, c: int, chunk: Sequence[tuple[int, Sequence[int]]]) -> Scored | None:
    """The scores of a chunk; None unless its file exists, is complete, and is about these sequences."""
    try:
        with np.load(chunk_path(folder, c)) as found:
            if found["ids"].tolist() != [i for i, _ in chunk]:
                return None
            return Scored(*(found[name] for name in Scored._fields))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


# Opening


def locate(name: str) -> str:
    """The place of eval.judge: an existing path or a hub name. What is known to fail is refused here, before samples
    are drawn."""
    if name == SMOLLM2:
        name = str(smollm2())
    path = path_of(name)
    if path.exists():
        require(
            path.is_dir() or path.suffix == ".gguf",
            f"eval.judge={name!r} is a file but no .gguf; give a folder or a hub name",
        )
        require(
            path.is_file() or is_ours(str(path)) or (path / CONFIG).is_file(),
            f"eval.judge={name!r} is a folder without a model: no {CONFIG}, no export/ and no checkpoints/",
        )
        return str(path)
    looks_local = name.endswith((".gguf", "/")) or name.startswith((".", "/", "~")) or name.count("/") > 1
    require(not looks_local, f"eval.judge={name!r} does not exist")
    return name


def is_ours(place: str) -> bool:
    """Whether this is a run folder or an export of this package, as opposed to a Hugging Face folder."""
    folder = Path(place)
    if (folder / "checkpoints").is_dir() or (folder / "export" / CONFIG).is_file():
        return True
    return (folder / CONFIG).is_file() and b'"mask_id"' in read_regular(folder / CONFIG, LARGEST_JSON)


def files_of(place: Path) -> dict[str, Path]:
    """The files of a judge, by name. From our own folders only what `load_checkpoint` reads: they hold results, too."""
    if place.is_file():
        return {"": place}
    if not is_ours(str(place)):
        kinds = (".json", ".safetensors", ".gguf", ".bin", ".model", ".txt")
        found = sorted(p for p in place.rglob("*") if p.is_file() and p.suffix in kinds)
        return {str(p.relative_to(place)): p for p in found}
    exported = place / "export" if (place / "export" / CONFIG).is_file() else place
    if exported == place and (place / "checkpoints").is_dir():
        newest = max((place / "checkpoints").glob("step-*"), default=place)
        return {MANIFEST: newest / MANIFEST}  # the manifest has the digests of all files
    return {name: exported / name for name in (CONFIG, WEIGHTS, TOKENIZER)}


def identity(place: str) -> str:
    """A digest of the judge: names, sizes, and both ends of its files; for a hub name, the name."""
    if not Path(place).exists():
        return place
    digest = hashlib.sha256()
    for name, file in files_of(Path(place)).items():
        if not file.is_file():  # loading the judge reports what is missing
            continue
        size = file.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 20))
            handle.seek(max(0, size - (1 << 20)))
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def open_judge(name: str, device: torch.device) -> Judge:
    """Open the judge, in float32."""
    place = locate(name)
    ours = is_ours(place) or place.endswith(".gguf")  # our own code reads GGUF
    return own_judge(name, place, device) if ours else hugging_face_judge(name, place, device)


def own_judge(name: str, place: str, device: torch.device) -> Judge:
    """A causal run or export of ours, or a GGUF file, as a judge."""
    loaded = load_checkpoint(place, device=device)
    model, tok = loaded.model, loaded.tokenizer
    require(model.config.causal, f"eval.judge={name!r} is a diffusion model; a judge must be causal (algo=ar or a2r)")

    def forward(tokens_BL: Tensor, real_BL: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        hidden_BLD = model(tokens_BL).denoiser_BLD
        flat_ND = hidden_BLD.flatten(0, 1)

        def nll(at_N: Tensor, targets_N: Tensor) -> Tensor:
            return linear_nll(flat_ND[at_N], model.head, targets_N, model.mask_id)

        return hidden_BLD, nll

    def encode_marked(text: str) -> list[int]:
        """Turn the names of end tokens back into end tokens; our tokenizer never reads special tokens from text."""
        end = tok.token(tok.eos_id)
        pieces = [tok.encode(piece) for piece in text.split(end)]
        return [t for k, piece in enumerate(pieces) for t in ([tok.eos_id] * (k > 0) + piece)]

    kind = "GGUF" if place.endswith(".gguf") else "causal model of ours"
    facts = {"kind": kind, "algo": loaded.info["algo"], "step": loaded.info.get("step")}
    length = model.config.length
    return Judge(
        name, tok.encode, encode_marked, tok.bos_id, tok.eos_id, length, forward, tok.fingerprint, facts, device
    )


def hugging_face_judge(name: str, place: str, device: torch.device) -> Judge:
    """A causal Hugging Face model (hub name or folder) as a judge."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adlm.data.remote import notice_missing_network

    if not Path(place).exists():
        notice_missing_network()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides its progress bars; errors are raised
            tok: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problem = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"eval.judge={name!r} cannot be loaded ({problem}); give another hub name, a folder or a GGUF file"
        ) from None
    model = model.to(device).eval().requires_grad_(False)
    head = model.get_output_embeddings()
    require(head is not None, f"eval.judge={name!r} has no language-model head: a causal model is needed")
    seen: list[Tensor] = []
    head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))

    def forward(tokens_BL: Tensor, real_BL: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        seen.clear()
        logits_NV = model(input_ids=tokens_BL, attention_mask=real_BL, use_cache=False).logits.flatten(0, 1)
        hidden_BLD = seen.pop()  # the head's input: the last hidden state after the final norm, in every architecture

        def nll(at_N: Tensor, targets_N: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(logits_NV[at_N].float(), targets_N, reduction="none")

        return hidden_BLD, nll

    backend = tok.backend_tokenizer

    def encoder(plain: bool) -> Callable[[str], list[int]]:
        def encode(text: str) -> list[int]:
            backend.encode_special_tokens = plain
            return backend.encode(text, add_special_tokens=not plain).ids

        return encode

    backend.no_truncation()
    backend.no_padding()
    known = tok.get_vocab()
    # The token that separates documents in pre-training; chat models declare another one as their begin or end.
    plain_start = known.get("<|endoftext|>")
    starts = [i for i in (plain_start, tok.bos_token_id, tok.eos_token_id) if i is not None]
    ends = [i for i in (tok.eos_token_id, plain_start) if i is not None]
    require(bool(starts and ends), f"eval.judge={name!r} has no begin- or end-of-text token")
    context = getattr(model.config, "max_position_embeddings", None) or 1024
    facts = {
        "kind": f"Hugging Face {model.config.model_type}",
        "revision": getattr(model.config, "_commit_hash", None),
        "start_token": tok.convert_ids_to_tokens(starts[0]),
    }
    return Judge(name, encoder(True), encoder(False), starts[0], ends[0], context, forward, "", facts, device)
