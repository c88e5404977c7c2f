"""`adlm adapt`: a causal model becomes a block-diffusion model that starts as what it was."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from tiny import random_tokens

from adlm import cli
from adlm.finetuning import adapted_settings
from adlm.io.export import save_folder
from adlm.io.load import load_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
DATA = (f"data.path={GOLDEN / 'train.txt'}", f"data.valid_path={GOLDEN / 'valid.txt'}")
LITTLE = ("train.device=cpu", "train.num_threads=1", "train.valid_every=0", "train.global_batch_size=8")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    assert pretrain(folder, "ar") == 0
    return folder


def pretrain(folder, algo):
    line = ["train", "data=file", *DATA, *LITTLE, "data.tokenizer=text8", "recipe=published", f"algo={algo}"]
    line += ["model.hidden_size=16", "model.n_heads=2", "model.n_blocks=3", "model.length=32", "train.steps=2"]
    return cli.main([*line, f"data.cache_dir={folder / 'cache'}", f"out={folder / algo}"])


def adapt(base, name, *more):
    words = ("data=file", *DATA, f"data.cache_dir={base / 'cache'}", *LITTLE, "train.steps=2", "optim.warmup=1")
    return cli.main(["adapt", str(base / "ar"), *words, f"out={base / name}", *more])


def measured(base, place, capsys, *more):
    line = ["ppl", str(place), "data=file", f"data.path={GOLDEN / 'valid.txt'}", "train.num_threads=1", "eval.draws=1"]
    line += [f"data.cache_dir={base / 'cache'}", "train.device=cpu", "train.num_threads=1", "--json"]
    assert cli.main([*line, f"out={base / 'results'}", *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_blocks_of_one_token_are_the_causal_model_before_training(base, capsys):
    assert adapt(base, "any") == 0
    before = measured(base, base / "ar", capsys)
    start = measured(base, base / "any/start", capsys, "eval.block_length=1,4,0")
    assert start["K=1"]["nats_per_token"] == pytest.approx(before["exact"]["nats_per_token"], rel=1e-5)
    assert start["K=1"]["bits_per_byte"] == pytest.approx(before["exact"]["bits_per_byte"], rel=1e-5)
    assert all(math.isfinite(start[K]["nats_per_token"]) for K in ("K=4", "K=32"))
    own = measured(base, base / "any", capsys)
    assert [name for name in own if name.startswith("K=")] == ["K=16"], "the first number of model.block_length"
    model = load_checkpoint(base / "any/start").model
    others = torch.arange(model.vocab_size) != model.mask_id
    torch.testing.assert_close(model.embedding[model.mask_id], model.embedding[others].mean(0))


def test_only_a_number_without_noise_is_called_exact(base, capsys):
    assert adapt(base, "any") == 0
    data = ["data=file", f"data.path={GOLDEN / 'valid.txt'}", f"data.cache_dir={base / 'cache'}", "train.device=cpu"]
    for estimator, kinds in (("both", ["upper bound", "exact"]), ("continuous", ["upper bound"])):
        capsys.readouterr()
        words = ["eval.block_length=1", f"eval.estimator={estimator}", "eval.draws=2", f"out={base / 'results'}"]
        assert cli.main(["ppl", str(base / "any"), *data, *words]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "perplexity" in line]
        assert [line.rpartition(", ")[2] for line in lines] == kinds


def test_an_anchored_model_has_the_same_blocks(base):
    assert adapt(base, "anchored", "algo=adlm") == 0
    causal, model = (load_checkpoint(base / name).model for name in ("ar", "anchored/start"))
    assert (model.config.n_blocks, model.config.n_denoiser_blocks) == (2, 1)
    x = random_tokens(2, 32, model.mask_id)
    noisy = torch.full_like(x, model.mask_id)
    states = model(torch.cat((noisy, x), 1), block_B=torch.tensor([1, 1])).denoiser_BLD
    torch.testing.assert_close(states[:, 1:], causal(x).denoiser_BLD[:, :-1], rtol=1e-4, atol=1e-5)
    assert load_checkpoint(base / "anchored").info["algo"] == "adlm"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("model.n_blocks=5",), "another network than the base's"),
        (("recipe=fast",), "recipe cannot be set here"),
        (("model.block_length=4,x",), "model.block_length='4,x' must be whole numbers"),
    ],
)
def test_what_cannot_be_adapted_is_said_in_one_line(base, capsys, more, said):
    assert adapt(base, "refused", *more) == 1
    assert said in capsys.readouterr().err


def test_a_diffusion_model_is_refused(base, capsys):
    assert pretrain(base, "mdlm") == 0
    assert adapt(base, "no", f"checkpoint.init_from={base / 'mdlm'}") == 1
    assert "is a diffusion model already" in capsys.readouterr().err


def test_another_base_in_the_folder_of_a_run_is_refused(base, capsys):
    assert adapt(base, "first") == 0 and adapt(base, "first") == 0
    other = load_checkpoint(base / "ar")
    with torch.no_grad():
        other.model.embedding.mul_(2)
    save_folder(base / "other", other.model.state_dict(), other.tokenizer, other.info)
    assert adapt(base, "first", f"checkpoint.init_from={base / 'other'}") == 1
    assert "began with other weights" in capsys.readouterr().err


def test_a_text_is_enough_and_the_rest_fits_it(base, tmp_path, monkeypatch, capsys):
    """As in adlm train: a tenth of a small text is held out, and warm-up follows the steps; each kind has a folder."""
    monkeypatch.chdir(tmp_path)
    for more, folder in ((), "ar-adapted"), (("algo=adlm",), "ar-adapted-adlm"):
        line = ["adapt", str(base / "ar"), str(GOLDEN / "train.txt"), f"data.cache_dir={base / 'cache'}", *LITTLE]
        assert cli.main([*line, "train.steps=3", *more]) == 0
        settings = yaml.safe_load((tmp_path / "runs" / folder / "config.yaml").read_text())
        assert settings["data"]["name"] == "file" and settings["data"]["valid_fraction"] == 0.1
        assert (settings["optim"]["warmup"], settings["train"]["steps"]) == (1, 3)
    assert "warning: optim.warmup" not in capsys.readouterr().err


def test_a_typed_group_decides_what_it_sets(base):
    loaded = load_checkpoint(base / "ar")
    words = ["data=file", *DATA, f"data.cache_dir={base / 'cache'}", f"out={base / 'groups'}"]
    cfg = adapted_settings(loaded, base / "ar", words)
    plain = cfg.optim
    assert cfg.objective.time_density == 3 and loaded.objective.time_density == 1
    typed = adapted_settings(loaded, base / "ar", [*words, "optim=muon", "lr_scheduler=cosine"]).optim
    assert (plain.name, plain.lr, plain.schedule) == ("adamw", 5e-4, "linear")
    assert (typed.name, typed.lr, typed.schedule, typed.ema) == ("muon", 6e-4, "cosine", plain.ema)


def test_an_adapted_model_is_trained_on(base, capsys):
    """With the weights and block lengths it has, from the same bound."""
    assert adapt(base, "once", "model.block_length=4,1") == 0
    first, before = base / "once" / "export", measured(base, base / "once", capsys, "eval.block_length=4")
    assert adapt(base, "twice", f"checkpoint.init_from={first}") == 0
    again = load_checkpoint(base / "twice")
    assert again.objective.time_density == 1
    assert again.model.config == load_checkpoint(first).model.config and again.model.config.block_length == "4,1"
    assert measured(base, base / "twice/start", capsys, "eval.block_length=4")["K=4"] == before["K=4"]
    assert measured(base, base / "twice", capsys, "eval.block_length=4")["K=4"] != before["K=4"]
    assert adapt(base, "third", f"checkpoint.init_from={first}", "algo=adlm") == 1
    assert "has no anchors, and adlm adapt cannot change that" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_resumes_with_its_own_times(base):
    assert adapt(base, "older", "objective.time_density=1") == 0
    assert adapt(base, "older", "train.steps=3") == 0
    assert yaml.safe_load((base / "older" / "config.yaml").read_text())["objective"]["time_density"] == 1


def test_an_adapted_model_with_anchors_keeps_them(base):
    assert adapt(base, "with", "algo=adlm") == 0
    assert adapt(base, "longer", f"checkpoint.init_from={base / 'with' / 'export'}") == 0
    loaded = load_checkpoint(base / "longer")
    assert loaded.model.config.anchored and loaded.info["algo"] == "adlm" and loaded.objective.name == "anelbo"
