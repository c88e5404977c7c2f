"""Configuration: groups compose, values are typed, mistakes are answered in one line that names the key."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adlm import config
from adlm.config import as_yaml
from adlm.config.keys import group_choices, group_help, keys
from adlm.migration import migrate
from adlm.rules import Choices, Location, Range
from adlm.schema import Config
from adlm.tables import GROUPS

ALL_YAMLS = [(group, name) for group in GROUPS for name in group_choices(group)]


@pytest.fixture(scope="module")
def defaults() -> Config:
    return config.load([])


@pytest.mark.parametrize(("group", "name"), ALL_YAMLS, ids="=".join)
def test_every_group_file_composes(group, name):
    cfg = config.load([f"{group}={name}", "data.path=x"])
    assert type(cfg) is Config and type(cfg.model).__name__ == "ModelConfig"
    assert group_help(group, name), "a group file starts with a comment that says what it is"
    named = {"algo": cfg.algo, "noise": cfg.noise.name, "optim": cfg.optim.name, "sampling": cfg.sampling.sampler}
    assert named.get(group, name) == name


def test_every_choice_of_a_sampler_a_noise_and_a_corpus_is_a_group():
    for group, key in (("sampling", "sampling.sampler"), ("noise", "noise.name"), ("data", "data.name")):
        assert set(group_choices(group)) == set(keys()[key].choices or ()) - {""}


@pytest.mark.parametrize("key", [key.name for key in keys().values() if isinstance(key.rule, Location)])
def test_home_is_home_wherever_the_tilde_stands(key, monkeypatch):
    """Some shells expand `out=~/x`, others do not: samples went to a folder called ~."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert config.flatten(config.load([f"{key}=~/x"]))[key] == "/home/someone/x"
    assert config.flatten(config.load([f"{key}=a/~/x"]))[key] == "a/~/x"
    with pytest.raises(ValueError, match=r"'~nobody-here/x': there is no such user"):
        config.load([f"{key}=~nobody-here/x"])


def test_every_key_has_help_and_is_checked():
    unchecked = [k.name for k in keys().values() if k.kind in (int, float) and not isinstance(k.rule, Range)]
    assert not unchecked, "numbers without a range"
    assert all(key.help for key in keys().values()), [k.name for k in keys().values() if not k.help]


def test_defaults_are_the_papers_model(defaults):
    assert (defaults.model.hidden_size, defaults.model.n_blocks, defaults.model.n_denoiser_blocks) == (768, 12, 6)
    assert (defaults.objective.name, defaults.objective.gamma, defaults.objective.tau) == ("anelbo", 3e-3, 5)
    assert (defaults.optim.lr, defaults.optim.warmup, defaults.optim.ema) == (3e-4, 2500, 0.9999)
    # the YAML groups of the defaults repeat the schema's numbers: they must not drift apart
    plain, composed = config.flatten(Config()), config.flatten(defaults)
    assert {key for key in plain if plain[key] != composed[key]} == {"out", "train.batch_size"}


def test_values_are_read_by_the_type_of_their_key():
    cfg = config.load(
        ["train.steps=1_000_000", "checkpoint.every=1e3", "optim.lr=1", "+model.qk_norm=yes", "++seed=7", "seed=8",
         "eval.judge=2024_01", "data.path=a=b (1).txt", "out='runs/x y'", "train.compile=True", "data.cache_dir=null"]
    )  # fmt: skip
    assert (cfg.train.steps, cfg.checkpoint.every, cfg.seed) == (1_000_000, 1000, 8)
    assert type(cfg.optim.lr) is float and type(cfg.checkpoint.every) is int
    assert cfg.model.qk_norm is True
    assert (cfg.eval.judge, cfg.data.path, cfg.out) == ("2024_01", "a=b (1).txt", "runs/x y")
    assert cfg.train.compile == "true"
    assert cfg.data.cache_dir == "null"


def test_later_groups_and_the_command_line_win():
    assert config.load(["data=lm1b"]).model.length == 128
    assert config.load(["data=lm1b", "model.length=64"]).model.length == 64
    fast = config.load(["recipe=fast"])
    assert (fast.optim.name, fast.optim.schedule, fast.model.bridge) == ("muon", "linear", "none")
    assert config.load(["recipe=fast", "optim=adamw"]).optim.name == "adamw"
    assert config.load(["recipe=fast", "algo=two-stage"]).objective.gamma == 0
    assert config.load(["algo=adlm-time", "recipe=fast"]).model.conditioning == "sigma"
    assert (fast.objective.anchor_rule, fast.objective.anchor_fraction) == ("all", 0.25)
    for choice in (["recipe=fast", "algo=a2r"], ["recipe=published"]):  # as they were measured
        objective = config.load(choice).objective
        assert (objective.anchor_rule, objective.tau, objective.anchor_fraction) == ("count", 5, 1.0)
    quick = config.load(["recipe=quick"])
    assert (quick.model, quick.optim) == (fast.model, fast.optim)
    assert (quick.train.length_warmup, quick.objective.time_density, quick.objective.gamma) == (4, 2.0, 0.5)
    assert config.load(["experiment=demo", "model=tiny"]).model.hidden_size == 512
    assert config.load(["algo=sedd", "sampling=mdlm"]).sampling.sampler == "mdlm"


def test_derived_settings(defaults):
    assert defaults.out == "runs/adlm-pydocs-small"
    assert config.load(["algo=mdlm", "data=ptb", "model=nano"]).out == "runs/mdlm-ptb-nano"
    assert config.load(["experiment=demo"]).out == "runs/demo"
    assert config.load(["out=elsewhere"]).out == "elsewhere"
    assert defaults.train.batch_size == 512
    assert config.load([], world_size=8).train.batch_size == 64
    assert config.load(["train.batch_size=16"], world_size=8).train.batch_size == 16


def test_a_matched_baseline_has_all_blocks_and_stays_so(tmp_path):
    matched = config.load(["algo=mdlm-matched", "model=small"])
    assert (matched.model.n_blocks, matched.model.anchored) == (18, False)
    (tmp_path / "config.yaml").write_text(as_yaml(matched))
    assert config.from_yaml(tmp_path / "config.yaml") == matched
    assert config.load(["algo=ar-matched", "model=medium"]).model.n_blocks == 36


# Characters of four bytes, those that are line breaks or forbidden in YAML, and a file name that is not UTF-8
ODD = "caf\u00e9 \U0001f642 \u2028\x85\x7f\ufeff\udc80 \\ud83d\\n"


@pytest.mark.parametrize(
    "argv",
    [[], ["experiment=demo"], ["algo=a2r", "data.path='3'", "eval.judge=true"], [f"eval.judge={ODD}"]],
    ids=ascii,
)
def test_save_and_read_give_the_same_tree(tmp_path, argv):
    cfg = config.load(argv)
    (tmp_path / "config.yaml").write_text(as_yaml(cfg))
    assert config.from_yaml(tmp_path / "config.yaml") == cfg


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model:\n  hiden_size: 3\n", "model.hidden_size"),
        ("model:\n  hidden_size: wide\n", "model.hidden_size=wide is not a whole number"),
        ("- 1\n", "holds no settings"),
        ("a: [", "is not YAML"),
        ("model:\n  n_heads: 7\n", "model.n_heads=7"),
    ],
)
def test_a_spoilt_config_file_is_refused(tmp_path, text, says):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        config.from_yaml(path)
    assert says in str(error.value) and "\n" not in str(error.value)


BAD = [
    # what is typed; what the answer must say
    ("model=smal", "model='smal' is unknown (did you mean 'small'?)"),
    ("model=[small]", "choose one of"),
    ("data=openwebtxt", "did you mean 'openwebtext'?"),
    ("algo=aldm", "did you mean 'adlm'?"),
    ("sampling=remdm-lop", "did you mean 'remdm-loop'?"),
    ("experiment=adlm-owt", "adlm-owt-262b"),
    ("modl=small", "did you mean 'model'?"),
    ("model.hiden_size=3", "did you mean 'model.hidden_size'?"),
    ("stepz=3", "unknown key 'stepz'"),
    ("steps=3", "'train.steps' or 'sampling.steps' or 'bench.steps'"),
    ("trainer.max_step=3", "did you mean 'trainer.max_steps'?"),
    ("loader.global_batchsize=3", "did you mean 'loader.global_batch_size'?"),
    ("+foo.bar=3", "unknown key 'foo.bar'"),
    ("train.steps", "is not of the form key=value"),
    ("~model.length=3", "cannot be removed"),
    ("train.steps=abc", "train.steps=abc is not a whole number"),
    ("train.steps=1.5", "not a whole number"),
    ("train.steps=inf", "not a whole number"),
    ("train.steps=", "not a whole number"),
    ("train.steps=1,2", "not a whole number"),
    ("optim.lr=fast", "optim.lr=fast is not a number"),
    ("optim.lr=nan", "optim.lr=nan must be above 0"),
    ("optim.lr=inf", "optim.lr=inf must be finite and above 0"),
    ("sampling.parity=ours", "choose one of '', release"),
    ("model.anchored=maybe", "is not true or false"),
    ("train.steps=0", "train.steps=0 must be at least 1"),
    ("model.dropout=1", "model.dropout=1.0 must be in [0, 1)"),
    ("sampling.sampler=remdm-lop", "did you mean 'remdm-loop'?"),
    ("sampling.steps=0", "sampling.steps=0 must be at least 1"),
    ("sampling.top_p=0", "sampling.top_p=0.0 must be in (0, 1]"),
    ("sampling.top_p=1.5", "sampling.top_p=1.5"),
    ("sampling.temperature=-1", "sampling.temperature"),
    ("sampling.temperature=1e39", "sampling.temperature=1e+39 must be in [0, 3e+38]"),
    ("sampling.top_k=10000000000", "sampling.top_k"),
    ("sampling.guidance=1", "sampling.guidance=1 is not supported any more"),
    ("sampling=remdm-loop sampling.eta=0.2", "sampling.eta <= 0.1111"),
    ("sampling=remdm-loop sampling.t_off=0.6", "sampling.t_off=0.6 must lie below sampling.t_on=0.55"),
    ("model.n_heads=7", "model.n_heads=7 must split model.hidden_size=768"),
    ("model.n_denoiser_blocks=0", "model.anchored=false"),
    ("model.time_conditioning=true model.adaln=false", "model.time_conditioning=true needs model.adaln=true"),
    ("model.mlp_ratio=2", "model.mlp_ratio=2 is now model.mlp_size=2 * model.hidden_size: give that number"),
    ("model.mlp_ratio=2.5 model=nano", "model.mlp_ratio=2.5 is no whole number"),
    ("model.bridge=linaer", "did you mean 'linear'?"),
    ("model.length=1", "model.length=1 must be at least 4"),
    ("model.causal=true", "objective.name=autoregressive"),
    ("objective.name=autoregressive", "algo=ar"),
    ("model.anchored=false", "objective.name=anelbo needs model.anchored=true"),
    ("algo=d3pm objective.T=0", "set objective.T"),
    ("objective.T=1000", "needs objective.T=0"),
    ("recipe=quick objective.time_density_anneal=0", "objective.time_density_anneal=0 is not supported any more"),
    ("bench.vocab_size=40", "bench.vocab_size=40 is not supported any more"),
    ("noise.name=polynomial", "noise.name=polynomial is not supported any more"),
    ("objective.gamma_end=0", "objective.gamma_end=0 is not supported any more"),
    ("algo=sedd model.anchored=true", "model.anchored=false"),
    ("noise.sigma_min=30", "noise.sigma_max"),
    ("train.length_warmup=3", "train.length_warmup=3 must divide model.length=1024"),
    (
        "train.length_warmup=1024 algo=ar",
        "cuts model.length=1024 into sequences of 1; they must be at least 4 tokens long",
    ),
    ("train.cuda_graphs=true train.device=cpu", "train.cuda_graphs=true needs a GPU"),
    ("train.cuda_graphs=true train.batch_size=4", "all sequences of a step at once: train.batch_size=512, not 4"),
    ("train.cuda_graphs=true train.strategy=fsdp", "needs whole weights in one place"),
    ("train.cuda_graphs=true train.checkpoint_activations=true", "cannot record train.checkpoint_activations"),
    ("objective.time_density=0.5", "objective.time_density=0.5 must be at least 1"),
    ("seed=9223372036854775808", "seed=9223372036854775808 must be in [0, 2^63)"),
    ("train.num_threads=100000", "train.num_threads=100000 must be in [0, 1024]"),
    ("train.device=gpu", "train.device='gpu' must be auto, cpu, cuda, cuda:N or mps"),
    ("train.device=cpu:1", "train.device"),
    ("train.precision=fp16", "choose one of auto, bf16, fp32"),
    ("data=file", "data.name=file needs data.path"),
    ("data.name=openwebtex", "did you mean 'openwebtext'?"),
]


@pytest.mark.parametrize(("typed", "says"), BAD, ids=[typed for typed, _ in BAD])
def test_bad_input_gets_one_line_that_names_the_key(typed, says):
    with pytest.raises(ValueError) as error:
        config.load(typed.split())
    message = str(error.value)
    assert says in message
    assert "\n" not in message


def test_a_list_of_sampling_settings_is_a_sweep():
    cfg, sweep = config.load_sweep(
        ["sampling.steps=8, 16", "sampling.temperature=0.5,1", "sampling.n=3", "data.path=a,b", "model=nano"]
    )
    assert [(s.steps, s.temperature, s.n) for s in sweep] == [(8, 0.5, 3), (8, 1.0, 3), (16, 0.5, 3), (16, 1.0, 3)]
    assert cfg.sampling == sweep[0] and (cfg.data.path, cfg.out) == ("a,b", "")
    assert [s.sampler for s in config.load_sweep(["sampling=mdlm,remdm-loop,mdlm"])[1]] == ["mdlm", "remdm-loop"]
    assert [s.eta for s in config.load_sweep(["sampling.sampler=remdm-cap", "sampling.eta=0.1,0.2"])[1]] == [0.1, 0.2]
    assert len(config.load_sweep(["sampling.prompt=one, two"])[1]) == 1, "a text may hold commas"
    for line, says in (
        ("sampling.temperature=1,inf", "sampling.temperature=inf must be finite and in"),
        ("sampling.sampler=mdlm,remdm-lop", "did you mean 'remdm-loop'?"),
        ("sampling.steps=8,x", "sampling.steps=x is not a whole number"),
        ("sampling.sampler=mdlm,remdm-loop sampling.eta=0.02,0.2", "sampling.eta <= 0.1111"),
    ):
        with pytest.raises(ValueError) as error:
            config.load_sweep(line.split())
        assert says in str(error.value)


def test_names_of_earlier_versions_are_read_and_said(capsys, tmp_path):
    cfg = config.load(["train.row_pieces=4", "model.bridge=collapsed", "mode=train", "model.skips=False"])
    assert (cfg.train.length_warmup, cfg.model.bridge) == (4, "linear")
    assert capsys.readouterr().err.splitlines() == [
        "adlm: note: train.row_pieces is now train.length_warmup",
        "adlm: note: mode=train ignored: the key is gone",
        "adlm: note: model.skips=False ignored: the key is gone",
    ]
    assert config.load(["objective.time_density_a=2", "objective.time_density_b=2.0"]).objective.time_density == 2
    with pytest.raises(ValueError, match=r"command line: objective.time_density_a=2 and time_density_b=3 differ"):
        config.load(["objective.time_density_a=2", "objective.time_density_b=3"])
    with pytest.raises(ValueError, match=r"command line: model.skips=true is not supported any more"):
        config.load(["model.skips=true"])
    saved = "mode: train\nout: runs/x\neval:\n  out: elsewhere\n  steps: '8,16'\ntrain:\n  row_pieces: 2\n"
    (tmp_path / "config.yaml").write_text(saved)
    cfg = config.from_yaml(tmp_path / "config.yaml")
    assert (cfg.out, cfg.train.length_warmup, cfg.sampling.steps) == ("runs/x", 2, 256)
    assert config.load(["eval.out=elsewhere"]).out == "elsewhere"
    assert [s.steps for s in config.load_sweep(["eval.steps=8,16"])[1]] == [8, 16]


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("model.adaln=false", "model.conditioning", "none"),
        ("recipe=fast model.adaln=true", "model.conditioning", "constant"),
        ("algo=sedd model.adaln=true", "model.conditioning", "sigma"),
        ("algo=mdlm model.time_conditioning=yes", "model.conditioning", "sigma"),
        ("algo=sedd model.time_conditioning=false", "model.conditioning", "constant"),
        ("recipe=fast model.time_conditioning=false", "model.conditioning", "none"),
        ("recipe=fast time_conditioning=false", "model.conditioning", "none"),
        ("algo=d3pm time_conditioning=false", "model.conditioning", "constant"),
        ("algo=mdlm model.time_conditioning=true model.time_input=t", "model.conditioning", "t"),
        ("model.adaln=true model.conditioning=none", "model.conditioning", "none"),
        ("data=lm1b", "data.packing", "documents"),
        ("data=lm1b data.wrap=true", "data.packing", "stream"),
        ("data=lm1b data.wrap=true data.packing=release", "data.packing", "release"),
        ("data=ptb data.wrap=false", "data.packing", "documents"),
        ("track.wandb=true", "train.track", "wandb"),
        ("track.wandb=false", "train.track", ""),
        ("recipe=fast model.zero_init=false", "model.init", "normal"),
        ("recipe=fast model.init=torch", "model.init", "torch"),
        ("model.init=normal model.zero_init=true", "model.init", "normal-zero"),
        ("model.zero_init=true", "model.init", "torch"),
        ("model=nano model.mlp_ratio=2", "model.mlp_size", 256),
        ("model.hidden_size=48 model.mlp_ratio=2", "model.mlp_size", 96),
        ("task=prosqa-2hop algo=ar model.mlp_ratio=4", "model.mlp_size", 0),
    ],
)
def test_old_keys_that_are_one_today_change_what_the_groups_say(typed, key, value):
    assert config.flatten(config.load(typed.split()))[key] == value


@pytest.mark.parametrize(
    ("saved", "key", "value"),
    [
        ({"model": {"adaln": False, "time_conditioning": False}}, "model.conditioning", "none"),
        ({"model": {"adaln": True, "time_conditioning": False, "time_input": "t"}}, "model.conditioning", "constant"),
        ({"model": {"time_conditioning": True}}, "model.conditioning", "sigma"),
        ({"data": {"wrap": False, "packing": "release"}}, "data.packing", "documents"),
        ({"data": {"wrap": True, "packing": "release"}}, "data.packing", "release"),
        ({"track": {"tensorboard": True, "wandb": False}}, "train.track", "tensorboard"),
        ({"model": {"zero_init": True, "init": "normal"}}, "model.init", "normal-zero"),
        ({"model": {"zero_init": False, "init": "normal"}}, "model.init", "normal"),
        ({"model": {"zero_init": True}}, "model.init", "torch"),
        ({"model": {"mlp_ratio": 4, "hidden_size": 48}}, "model.mlp_size", 0),
        ({"model": {"mlp_ratio": 1, "hidden_size": 64, "mlp_size": 0}}, "model.mlp_size", 64),
        ({"model": {"mlp_ratio": 3, "hidden_size": 64, "mlp_size": 100}}, "model.mlp_size", 100),
        ({"model": {"adaln": True, "time_conditioning": True, "time_input": "t"}}, "model.conditioning", "t"),
    ],
)
def test_old_keys_that_are_one_today_are_read_from_files(saved, key, value):
    assert config.flatten(config.from_tree(saved, "here"))[key] == value


def test_a_key_of_training_that_is_gone_hinders_resuming_and_nothing_else():
    for settings in (
        {"objective.gamma_end": 0.0},
        {"train.spike_factor": 3.0},
        {"lora.rank": 4, "lora.alpha": 8.0},
        {"objective.time_density": 2.0, "objective.time_density_anneal": 0.0},
    ):
        assert migrate(settings, "here").keys() <= keys().keys()
        with pytest.raises(ValueError, match=rf"here: {[*settings][-1]}=.* is not supported any more"):
            migrate(settings, "here", resumed=("train", "objective", "lora"))
    for key, value in {"objective.gamma_end": -1, "objective.time_density_anneal": 0.0}.items():
        assert migrate({key: value}, "here", resumed=("objective",)) == {}


def test_every_old_name_leads_to_a_key():
    from adlm.migration import JOINED, REMOVED, RENAMED, TRAINING_ONLY, VALUES

    assert set(RENAMED.values()) <= set(keys())
    assert not set(keys()) & {*RENAMED, *REMOVED}.union(*(joined.old for joined in JOINED))
    for joined in JOINED:
        assert joined.default == keys()[joined.key].default
        for value in keys()[joined.key].choices or ():
            assert joined.join(joined.split(value)) == value
    assert {key for key, _ in VALUES} <= set(keys()) and set(REMOVED) >= TRAINING_ONLY


def test_part_of_the_settings_can_be_read_alone():
    cfg = config.from_tree({"objective": {"name": "autoregressive"}}, "here")
    assert cfg.objective.name == "autoregressive"
    with pytest.raises(ValueError, match=r"objective.tau=0 must be at least 1"):
        config.from_tree({"objective": {"tau": 0}}, "here")
    with pytest.raises(ValueError, match=r"here: unknown key 'objective.tua' \(did you mean 'objective.tau'\?\)"):
        config.from_tree({"objective": {"tua": 1}}, "here")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Range(low=1), "at least 1"), (Range(low=0, open_low=True), "above 0"),
        (Range(low=0, also=-1), "at least 0, or -1"), (Range(low=0, high=1, open_high=True), "in [0, 1)"),
        (Range(low=0, high=1 << 63, open_high=True), "in [0, 2^63)"),
        (Range(low=0, high=65535), "in [0, 65535]"), (Choices(("a",), also=("",)), "'', a"),
    ],
)  # fmt: skip
def test_a_rule_says_what_it_wants(rule, said):
    assert str(rule) == said


def test_the_page_of_settings_is_up_to_date():
    """docs/configuration.md is written by scripts/make_configuration_md.py; run it when this fails."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "scripts/make_configuration_md.py", "--check"], cwd=root)
    assert done.returncode == 0


def test_the_global_batch_must_fit_the_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"train\.global_batch_size=2 leaves nothing to do for some of 3 ranks"):
        config.load(["train.global_batch_size=2"])
    assert config.load([]).train.batch_size == 171, "one rank has one sequence less"
    assert config.load(["train.global_batch_size=513"]).train.batch_size == 171
    with pytest.raises(ValueError, match=r"train\.cuda_graphs=true is for one process, not 3"):
        config.load(["train.global_batch_size=513", "train.cuda_graphs=true"])


@pytest.mark.parametrize("total", [1, 2, 7, 8, 512])
@pytest.mark.parametrize("at_once", [0, 1, 2, 3, 100, 512])
def test_micro_batches_are_as_many_on_every_rank_and_never_empty(total, at_once):
    for ranks in range(1, min(total, 24) + 1):
        cfg = config.load([f"train.global_batch_size={total}", f"train.batch_size={at_once}"]).train
        parts = cfg.micro_batches(ranks)
        sizes = [total * (r + 1) // ranks - total * r // ranks for r in range(ranks)]
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
        assert 1 <= parts <= min(sizes)
        largest = -(-max(sizes) // parts)
        assert largest <= cfg.at_once(ranks) or (cfg.at_once(ranks) == 1 and largest == 2)


def test_loading_leaves_the_folder_and_hydra_alone(tmp_path, monkeypatch):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        config._compose.cache_clear()
        config.load(["model=nano", "hydra.run.dir=elsewhere"])
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []


def test_schema_instances_are_not_shared(defaults):
    config.load([]).model.length = 3
    assert config.load([]).model.length == 1024
    assert dataclasses.asdict(defaults)["model"]["length"] == 1024


def test_config_and_cli_do_not_import_torch(tmp_path):
    code = (
        "import sys, adlm.config, adlm.cli, adlm.compat\n"
        "adlm.config.load(['model=nano'])\n"
        "adlm.cli.main(['config', '--help'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
