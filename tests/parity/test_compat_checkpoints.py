"""Release checkpoints: the same numbers as the release gives, round trips, and hostile files that must not run."""

import io
import os
import pickle
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adlm.compat.checkpoints import (
    export_release,
    from_release,
    import_release,
    load_release,
    read_release,
    release_names,
    tokenizer_of,
)
from adlm.compat.pickles import Checkpoint, Inert, plain
from adlm.data.tokenizers import load_tokenizer
from adlm.io.export import describe, load_folder, save_folder
from adlm.models import build_model
from adlm.schema import Config, ModelConfig, NoiseConfig, ObjectiveConfig

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TINY = {
    "hidden_size": 16,
    "n_heads": 2,
    "n_blocks": 4,
    "n_denoiser_blocks": 2,
    "cond_dim": 8,
    "length": 12,
    "dropout": 0.0,
}
SHAPES = {
    "adlm": (ModelConfig(**TINY), ObjectiveConfig(), NoiseConfig()),
    "adlm-time": (ModelConfig(**TINY, conditioning="sigma"), ObjectiveConfig(tau=3), NoiseConfig("geometric")),
    "mdlm": (ModelConfig(**TINY, anchored=False), ObjectiveConfig(name="nelbo"), NoiseConfig()),
    "sedd": (
        ModelConfig(**TINY, anchored=False, conditioning="sigma"),
        ObjectiveConfig(name="score-entropy"),
        NoiseConfig(),
    ),
    "ar": (
        ModelConfig(**TINY, anchored=False, causal=True, conditioning="none"),
        ObjectiveConfig(name="autoregressive"),
        NoiseConfig(),
    ),
}


@pytest.fixture
def exported(tmp_path):
    """A folder of ours with random weights; text8's 35 characters need no files."""

    def make(kind: str, objective=None, noise=None, **changes) -> Path:
        """`objective`, `noise`: settings of these sections that are not as in SHAPES; `changes`: of the model's."""
        sections = zip(SHAPES[kind], (changes, objective or {}, noise or {}))
        model_cfg, objective, noise = (replace(section, **other) for section, other in sections)
        tokenizer = load_tokenizer("text8")
        torch.manual_seed(0)
        model = build_model(model_cfg, tokenizer.vocab_size, tokenizer.mask_id)
        weights = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
        cfg = Config(algo=kind.removesuffix("-time"), model=model_cfg, objective=objective, noise=noise)
        folder = tmp_path / f"{kind}-folder"
        save_folder(folder, weights, tokenizer, describe(cfg, tokenizer, step=7))
        return folder

    return make


@pytest.fixture
def good(exported, tmp_path) -> Path:
    """A checkpoint in the release's layout."""
    return export_release(exported("adlm"), tmp_path / "good.ckpt")


# ---- the release's own files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ref_mini.ckpt", "ref_mini_plain.ckpt"])
@pytest.mark.parametrize("ema", [False, True], ids=["raw", "ema"])
def test_the_releases_file_gives_the_releases_numbers(parity, name, ema):
    expected = torch.load(parity / "ref_mini_outputs.pt", weights_only=True)
    release = read_release(parity / name, ema)
    assert (release.algo, release.step, release.vocab_size) == ("adlm", 6, 100)
    assert (release.model.n_heads, release.model.n_denoiser_blocks, release.objective.gamma) == (4, 2, 3e-3)
    model = build_model(release.model, release.vocab_size, 99)
    model.load_state_dict(release.weights)
    model.eval()
    prefix = "ema_" if ema else ""
    with torch.no_grad():
        log_probs, anchor_logits = model.log_probs(expected["x_t"]), model.anchor_logits(expected["x_t"])
    torch.testing.assert_close(log_probs, expected[prefix + "log_probs"], **CLOSE)
    torch.testing.assert_close(anchor_logits, expected[prefix + "anchor_logits"], **CLOSE)


def test_the_pickled_tokenizer_is_read_as_data(parity, tmp_path):
    info = import_release(parity / "ref_mini.ckpt", tmp_path / "folder")
    assert (info["vocab_size"], info["mask_id"], info["data"]) == (100, 99, "openwebtext-train")
    loaded = load_folder(tmp_path / "folder")
    assert loaded.tokenizer.mask_id == 99
    assert loaded.tokenizer.eos_id == 98
    again = load_release(parity / "ref_mini.ckpt")
    x = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.model.log_probs(x), loaded.model.log_probs(x))


def test_a_release_file_goes_out_and_comes_back_the_same(parity, tmp_path):
    import_release(parity / "ref_mini.ckpt", tmp_path / "folder", ema=False)
    back = export_release(tmp_path / "folder", tmp_path / "back.ckpt")
    ours = torch.load(back, weights_only=True)
    theirs = torch.load(parity / "ref_mini_plain.ckpt", weights_only=True)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=0, atol=0 if "inv_freq" not in name else 1e-7)
    assert len(ours["ema"]["shadow_params"]) == len(theirs["ema"]["shadow_params"])
    assert ours["hyper_parameters"]["config"]["model"].items() >= {"hidden_size": 32, "n_blocks": 4}.items()


def test_without_a_tokenizer_in_the_file_one_must_be_named(parity):
    release = read_release(parity / "ref_mini_plain.ckpt")
    with pytest.raises(ValueError, match=r"the model has 100 entries and the tokenizer 'text8' 35.*data\.tokenizer"):
        tokenizer_of(release, "text8")


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_single_networks_of_the_release(parity, tmp_path, kind):
    fixture = torch.load(parity / "fixture_mini.pt", weights_only=True)
    state = fixture["state_dict"] if kind == "mdlm" else fixture["ar"]["state_dict"]
    state = {name: value for name, value in state.items() if name.startswith("backbone.")}
    config = {**fixture["config"], "parameterization": "subs" if kind == "mdlm" else "ar"}
    torch.save({"state_dict": state, "hyper_parameters": {"config": config}}, tmp_path / "x.ckpt")
    release = read_release(tmp_path / "x.ckpt", ema=False)
    assert (release.algo, release.model.causal, release.model.anchored) == (kind, kind == "ar", False)
    model = build_model(release.model, 100, 99)
    model.load_state_dict(release.weights)
    x = fixture["forward"]["x_t"] if kind == "mdlm" else fixture["forward"]["x0"][:, :-1]
    with torch.no_grad():
        log_probs = model.eval().log_probs(x)
    expected = fixture[kind]["log_probs"]
    keep = expected > -500  # the release gives the mask -1000 where we give it no mass at all
    torch.testing.assert_close(log_probs[keep], expected[keep], **CLOSE)


# ---- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ema", [False, True], ids=["raw", "ema"])
def test_export_and_import_keep_every_weight_and_setting(exported, tmp_path, kind, ema):
    folder = exported(kind)
    path = export_release(folder, tmp_path / "x.ckpt")
    torch.load(path, weights_only=True)  # nothing in it needs trust
    import_release(path, tmp_path / "back", ema, tokenizer="text8")
    before, after = load_folder(folder), load_folder(tmp_path / "back")
    assert before.model.state_dict().keys() == after.model.state_dict().keys()
    for name, value in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], value), name
    ignored = {"n_denoiser_blocks"} if not before.model.config.anchored else set()
    ignored |= {"cond_dim"} if not before.model.config.has_adaln else set()
    settings = [{k: v for k, v in vars(x.model.config).items() if k not in ignored} for x in (before, after)]
    assert settings[0] == settings[1]
    assert (before.noise, before.info["algo"], before.info["step"]) == (
        after.noise,
        after.info["algo"],
        after.info["step"],
    )
    assert before.objective.tau == after.objective.tau or not before.model.config.anchored


@pytest.mark.parametrize(
    ("settings", "algo", "objective"),
    [
        ({"base_scaling_factor1": 1, "base_scaling_factor2": 4}, "adlm", {"gamma": 1.0, "gamma_warmup": 0.25}),
        ({"base_scaling_factor1": 3, "base_scaling_factor2": 2}, "adlm", {"gamma": 3.0, "gamma_warmup": 1.0}),
        ({"base_scaling_factor1": 0}, "adlm", {"gamma": 0.0, "gamma_warmup": 0.0}),
        ({"training": {"sampling_eps": 0.02}}, "adlm", {"sampling_eps": 0.02, "gamma": 3e-3}),
        (
            {"enable_anchor_loss": False, "training": {"sampling_eps": 0}},
            "two-stage",
            {"sampling_eps": 0.0, "gamma": 0.0},
        ),
        ({"enable_anchor_loss": None}, "two-stage", {"gamma": 0.0}),
    ],
)
def test_settings_of_the_objective_are_read_back(good, tmp_path, settings, algo, objective):
    """Integers count as numbers, and the anchor loss is off unless its switch is true, as the release reads it."""
    path = respoil(good, tmp_path / "x.ckpt", lambda tree: tree["hyper_parameters"]["config"].update(settings))
    release = read_release(path)
    assert release.algo == algo
    assert {key: getattr(release.objective, key) for key in objective} == objective


@pytest.mark.parametrize("kind", ["mdlm", "sedd"])
def test_the_smallest_time_survives_without_anchors(exported, tmp_path, kind):
    path = export_release(exported(kind, objective={"sampling_eps": 0.01}), tmp_path / "x.ckpt")
    assert read_release(path).objective.sampling_eps == 0.01


@pytest.mark.parametrize(
    ("kind", "section", "changes"),
    [
        ("adlm", "noise", {"eps": 1e-4}),
        ("mdlm", "noise", {"eps": 0.0}),
        ("adlm", "objective", {"anchor_rule": "all"}),
        ("adlm", "objective", {"anchor_positions": "masked"}),
        ("adlm", "objective", {"anchor_fraction": 0.5}),
        ("adlm", "objective", {"gamma_until": 0.5}),
        ("adlm", "objective", {"gamma_warmup": 0.0}),
        ("mdlm", "objective", {"time_density": 2.0}),
    ],
)
def test_settings_that_the_release_lacks_are_not_exported(exported, tmp_path, kind, section, changes):
    (key,) = changes
    with pytest.raises(ValueError, match=rf"the release has no .*{section}\.{key}="):
        export_release(exported(kind, **{section: changes}), tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_settings_that_nothing_reads_do_not_stop_an_export(exported, tmp_path):
    """A model without anchor loss has no anchor rule, and a geometric schedule no eps."""
    unread = {"anchor_rule": "all", "anchor_positions": "masked", "gamma": 0.0, "gamma_warmup": 0.0}
    export_release(exported("adlm", objective=unread), tmp_path / "two-stage.ckpt")
    export_release(exported("mdlm", objective={"anchor_rule": "all"}), tmp_path / "mdlm.ckpt")
    export_release(exported("adlm-time", noise={"eps": 0.5}), tmp_path / "time.ckpt")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "replica"])
def test_older_and_compiled_names(good, tmp_path, prefix):
    tree = torch.load(good, weights_only=True)
    if prefix == "replica":
        renamed = {re.sub("^denoiser", "replica", name): value for name, value in tree["state_dict"].items()}
    else:
        renamed = {re.sub(r"^(\w+)\.", rf"\1.{prefix}", name): value for name, value in tree["state_dict"].items()}
    assert renamed.keys() != tree["state_dict"].keys()
    torch.save({**tree, "state_dict": renamed}, tmp_path / "renamed.ckpt")
    ours, theirs = read_release(good), read_release(tmp_path / "renamed.ckpt")
    assert all(torch.equal(theirs.weights[name], value) for name, value in ours.weights.items())


@pytest.mark.parametrize("kind", SHAPES)
def test_every_release_name_has_one_of_ours(kind):
    cfg = SHAPES[kind][0]
    ours = [from_release(name, cfg.anchored) for name in release_names(cfg)]
    assert sorted(filter(None, ours)) == sorted(build_model(cfg, 35, 4).state_dict())


def test_what_the_release_has_no_name_for_is_not_exported(exported, tmp_path):
    for key, value in {
        "norm": "rmsnorm", "bridge": "none", "n_denoiser_blocks": 3, "qk_norm": True,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"model\.{key}="):
            export_release(exported("adlm", **{key: value}), tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


# ---- files that do not fit ------------------------------------------------------------------------------------------


def respoil(good: Path, path: Path, change) -> Path:
    tree = torch.load(good, weights_only=True)
    change(tree)
    torch.save(tree, path)
    return path


def drop(tree):
    del tree["state_dict"]["denoiser.blocks.1.norm2.weight"]


def add(tree):
    tree["state_dict"]["backbone.extra.weight"] = torch.zeros(3)


def reshape(tree):
    tree["state_dict"]["backbone.output_layer.linear.bias"] = torch.zeros(36)


def shorten(tree):
    tree["ema"]["shadow_params"].pop()


def swap(tree):
    shadow = tree["ema"]["shadow_params"]
    shadow[0], shadow[1] = shadow[1], shadow[0]


def expand(tree):
    tree["state_dict"]["backbone.output_layer.linear.bias"] = torch.zeros(1).expand(10**13)


def contradict(tree):
    tree["hyper_parameters"]["config"]["model"]["n_heads"] = 8


def dimamba(tree):
    tree["hyper_parameters"]["config"]["parameterization"] = "flow"


def linear(tree):
    tree["hyper_parameters"]["config"]["noise"]["type"] = "linear"


@pytest.mark.parametrize(
    ("change", "ema", "says"),
    [
        (drop, False, "lacks 1 parameters"),
        (add, False, "has 1 parameters that are not the release's"),
        (reshape, False, "backbone.output_layer.linear.bias has shape (36,), a model of this shape needs (35,)"),
        (shorten, True, "EMA weights for"),
        (swap, True, "backbone.vocab_embed.embedding"),
        (expand, False, "is not a whole tensor of the file"),
        (contradict, False, "its settings say model.n_heads=8, its weights 2"),
        (dimamba, False, "parameterization='flow' is unknown"),
        (linear, False, "noise.type='linear' is unknown"),
        (lambda tree: tree.pop("ema"), True, "eval.ema=false"),
        (lambda tree: tree.pop("state_dict"), False, "no state_dict"),
    ],
)
def test_files_that_do_not_fit_are_refused(good, tmp_path, change, ema, says):
    path = respoil(good, tmp_path / "bad.ckpt", change)
    with pytest.raises(ValueError) as error:
        read_release(path, ema)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# ---- hostile files --------------------------------------------------------------------------------------------------


def with_pickle(good: Path, path: Path, data: bytes) -> Path:
    """The same archive with another data.pkl."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            new.writestr(member.filename, data if member.filename.endswith("data.pkl") else old.read(member))
    return path


class Call:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile(function, *args) -> bytes:
    return pickle.dumps({"state_dict": {}, "hyper_parameters": {"config": Call(function, *args)}}, protocol=2)


@pytest.mark.parametrize("where", ["os.system", "eval", "exec", "getattr", "__import__", "subprocess", "open"])
def test_code_in_a_pickle_is_refused_and_not_run(good, tmp_path, where):
    import subprocess

    mark = tmp_path / "it-ran"
    data = {
        "os.system": hostile(os.system, f"touch {mark}"),
        "eval": hostile(eval, f"open({str(mark)!r}, 'w')"),
        "exec": hostile(exec, f"open({str(mark)!r}, 'w')"),
        "getattr": hostile(getattr, "x", "upper"),
        "__import__": hostile(__import__, "antigravity"),
        "subprocess": hostile(subprocess.Popen, ["touch", str(mark)]),
        "open": hostile(open, str(mark), "w"),
    }[where]
    path = with_pickle(good, tmp_path / "bad.ckpt", data)
    with pytest.raises(ValueError, match="refused, nothing of it was run"):
        read_release(path)
    assert not mark.exists()
    pickle.loads(hostile(os.system, f"touch {mark}"))  # the trap is real: an ordinary reader springs it
    assert mark.exists()


def test_calls_into_known_packages_are_remembered_and_not_made(good, tmp_path):
    import torch.hub

    calls = {"config": {}, "tokenizer": Call(torch.hub.load, "nobody/nothing", "model")}
    data = pickle.dumps({"state_dict": {}, "hyper_parameters": calls}, protocol=4)
    with Checkpoint(with_pickle(good, tmp_path / "x.ckpt", data)) as file:
        found = file.tree["hyper_parameters"]["tokenizer"]
    assert isinstance(found, Inert)
    assert (found.origin, found.args) == ("torch.hub.load", ("nobody/nothing", "model"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        b"\x80\x02}",  # no end
        b"\x80\x02]q\x00.",  # a list
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo index that would ask the C machine for 32 GB
        b"\x80\x02(X\xff\xff\xff\x7fab.",  # a string of 2 GB that is not there
        b"\x80\x02c__builtin__\ndict\n}b.",  # state set on a class
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02U\x03abcQ.",  # a persistent id of another kind
        b"\x80\x02\x82\x01.",  # the extension registry
    ],
)
def test_malformed_pickles_are_refused(good, tmp_path, data):
    with pytest.raises(ValueError, match=r"is damaged|not a checkpoint|no state_dict"):
        read_release(with_pickle(good, tmp_path / "bad.ckpt", data))


def test_settings_that_explode_are_refused(good, tmp_path):
    laughs = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    data = pickle.dumps({"state_dict": {}, "hyper_parameters": {"config": laughs}}, protocol=2)
    with pytest.raises(ValueError, match="too large to be settings"):
        read_release(with_pickle(good, tmp_path / "bad.ckpt", data))


def test_a_packed_member_is_refused(good, tmp_path):
    path = tmp_path / "bomb.ckpt"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
        new.writestr("good/data/999", bytes(50_000_000), compress_type=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < good.stat().st_size + 100_000
    with pytest.raises(ValueError, match="is compressed, which torch never does: refused"):
        read_release(path)


def test_members_that_claim_more_than_the_file_are_refused(good, tmp_path):
    data = bytearray(good.read_bytes())
    entry = data.index(b"PK\x01\x02", data.rindex(b"PK\x01\x02") - 4000)
    data[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)  # stored and original size
    (tmp_path / "forged.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="more than the file has: refused"):
        read_release(tmp_path / "forged.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(good, tmp_path, share):
    data = good.read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="not a complete torch checkpoint"):
        read_release(tmp_path / "cut.ckpt")


def test_a_flipped_bit_is_noticed(good, tmp_path):
    with zipfile.ZipFile(good) as archive:
        member = max(archive.infolist(), key=lambda m: m.file_size)
    data = bytearray(good.read_bytes())
    data[member.header_offset + member.file_size // 2 + 100] ^= 1
    (tmp_path / "flipped.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        read_release(tmp_path / "flipped.ckpt", ema=False)


def test_old_pickles_and_other_files_are_not_read(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="a pickle of the old kind, which is not read"):
        read_release(tmp_path / "old.ckpt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match=r"has no data\.pkl"):
        read_release(tmp_path / "other.zip")
    with pytest.raises(ValueError, match="is not a file"):
        read_release(tmp_path / "missing.ckpt")


def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "view": base[1:3, ::2], "transposed": base.t(), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3),
        "half": base.half(), "bfloat16": base.bfloat16(), "long": base.long(), "bool": base > 3,
        "double": base.double(), "parameter": torch.nn.Parameter(base),
    }  # fmt: skip
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    (tmp_path / "x.ckpt").write_bytes(buffer.getvalue())
    with Checkpoint(tmp_path / "x.ckpt") as file:
        for name, value in tensors.items():
            read = file.tensor(file.tree[name], name)
            assert read.dtype == value.dtype and torch.equal(read, value.detach()), name


def test_plain_reads_omegaconf_as_data(tmp_path):
    from omegaconf import OmegaConf

    tree = {"a": {"b": 1, "c": [1.5, None, "x"]}, "d": "${a.b}", "e": True}
    torch.save({"config": OmegaConf.create(tree)}, tmp_path / "x.ckpt")
    with Checkpoint(tmp_path / "x.ckpt") as file:
        assert plain(file.tree["config"]) == tree
