"""Files that other commands read: cases from elsewhere, reasoning runs, results, corpora."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

from runs import overrides

from hostile.cases import CASES, base, case, cases
from hostile.exported_folders import exported


def other(command: str, *words: str) -> Callable[[list[str]], list[str]]:
    """The same folder, given to another command."""
    return lambda line: [command, line[1], *words, "train.device=cpu"]


OTHERS = {
    "ppl": other("ppl"),
    "anchors": other("anchors", "some words"),
    "raw weights": lambda line: [*line, "eval.ema=false"],
    "evaluate": other("evaluate"),
    "zeroshot": other("zeroshot"),
    "serve": lambda line: ["serve", line[1], "port=0"],
    "export": lambda line: ["convert", line[1], line[1] + "/out.ckpt"],
    "import": lambda line: ["import", line[1], line[1] + "-out"],
}
for _name, _other in OTHERS.items():
    for _of in ("metadata: os.system", "config: []", "ckpt: os.system", "tokenizer: 40 doublings"):
        if (_name == "import") == _of.startswith("ckpt") or _name not in ("import", "export"):
            # The first look at some commands imports a second's worth of packages.
            case(f"{_name} of {_of}", heavy=_name in ("serve", "evaluate", "zeroshot"))(
                lambda folder, o=_other, of=_of: o(CASES[of](folder))
            )


def initialised(folder: Path, of: str) -> list[str]:
    line = CASES[of](folder)
    train = [word for word in overrides(base().folder) if not word.startswith("out=")]
    return ["train", *train, f"checkpoint.init_from={line[1]}", f"out={folder / 'new'}", "train.device=cpu"]


cases("init_from", {of: of for of in ("config: []", "config: a million blocks", "weights: a header of 2^60 bytes",
                                      "tokenizer: 40 doublings", "metadata: os.system", "ckpt: os.system")},
      initialised)  # fmt: skip


def reason_with(folder: Path, text: str) -> list[str]:
    model = exported(folder)
    (model / "reason.json").write_text(text)
    return ["reason", "eval", str(model), "train.device=cpu"]


REASON = {"reason": {"task": "prosqa", "method": "cot"}, "seed": 1, "stage": 0, "max_new_tokens": 4}
cases("reason", {
    "a list": "[1]",
    "{}": "{}",
    "deep": "[" * 100_000,
    "no seed": json.dumps({k: v for k, v in REASON.items() if k != "seed"}),
    "stage -5": json.dumps(REASON | {"stage": -5}),
    "stage 10^9": json.dumps(REASON | {"stage": 10**9}),
    "an unknown method": json.dumps(REASON | {"reason": {"method": "os.system"}}),
    "a reason that is a text": json.dumps(REASON | {"reason": "x"}),
}, reason_with)  # fmt: skip


def results_with(folder: Path, text: str) -> list[str]:
    (folder / "results.json").write_text(text)
    return ["reason", "table", str(folder)]


cases("results", {"a list": "[1]", "{}": "{}", "no scores": '{"tests": {"a": 1}}', "deep": "[" * 100_000}, results_with)


def corpus_with(folder: Path, data: bytes) -> list[str]:
    (folder / "data.jsonl").write_bytes(data)
    return ["data", "prepare", "train", "data=file", f"data.path={folder / 'data.jsonl'}", "data.tokenizer=bytes",
            f"data.cache_dir={folder / 'cache'}", "model.length=32"]  # fmt: skip


cases("jsonl", {
    "empty": b"",
    "not JSON": b"{{{\n",
    "lists": b"[1]\n[2]\n",
    "numbers for texts": b'{"text": 5}\n',
    "no text": b'{"x": "y"}\n',
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "a pickle": pickle.dumps({"a": 1}),
}, corpus_with)  # fmt: skip
