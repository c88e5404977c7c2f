"""Release checkpoints: the same numbers as the release gives, round trips, and files that do not fit."""

import re
from pathlib import Path

import pytest
import torch
from release_shapes import SHAPES

from adlm.compat.checkpoints import (
    export_release,
    from_release,
    import_release,
    load_release,
    read_release,
    release_names,
    tokenizer_of,
)
from adlm.io.export import load_folder
from adlm.models import build_model

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


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
