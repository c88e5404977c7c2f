"""The release's command lines, as its README and scripts give them, parse to the right settings of ours."""

import shlex

import pytest
from release import README_SAMPLE, README_TRAIN

from adlm import config
from adlm.compat.command_lines import GROUP_NAMES, RELEASE_KEYS, TRANSLATIONS, release_line, rewrite

SCRIPT_ZERO_SHOT = """
mode=ppl_eval loader.global_batch_size=16 data=wikitext2 model=small parameterization=subs backbone=dit
model.length=1024 eval.checkpoint_path=ckpts/adlm-medium.ckpt time_conditioning=false +wandb.offline=true
hydra.run.dir="outputs/zero-shot" T=0 sampling.steps=1024 seed=1 sampling.nucleus_p=0.9 sampling.sampler="remdm-loop"
sampling.eta=0.02 sampling.t_on=0.55 sampling.t_off=0.05 sampling.alpha_on=0.9
"""
SCRIPT_SAMPLE = """
mode=sample_eval loader.batch_size=1 loader.eval_batch_size=1 eval.perplexity_batch_size=1 data=openwebtext-split
model=small parameterization=subs backbone=dit model.length=1024 eval.checkpoint_path=mdlm.ckpt time_conditioning=false
+wandb.offline=true hydra.run.dir="outputs/x" T=0 sampling.steps=1024 seed=1 sampling.num_sample_batches=5000
sampling.generated_seqs_path=x.json sampling.nucleus_p=0.9
"""


def parse(program: str, line: str) -> config.Config:
    _, *overrides = release_line(program, shlex.split(line))
    return config.load(overrides)


def test_readme_training_line():
    cfg = parse("adlm_main", README_TRAIN)
    assert (cfg.algo, cfg.objective.name) == ("adlm", "anelbo")
    assert (cfg.objective.gamma, cfg.objective.gamma_warmup, cfg.objective.tau) == (3e-3, 3e-3, 5)
    assert (cfg.train.steps, cfg.train.global_batch_size, cfg.train.batch_size) == (1_000_000, 64, 64)
    assert (cfg.train.valid_every, cfg.train.log_every) == (10_000, 1000)
    assert (cfg.data.name, cfg.data.tokenizer, cfg.data.packing, cfg.data.valid_name) == (
        "openwebtext",
        "gpt2",
        "release",
        "",
    )
    assert (cfg.model.hidden_size, cfg.model.length, cfg.model.conditioning) == (768, 1024, "constant")
    assert (cfg.out, cfg.checkpoint.resume, cfg.train.track) == ("outputs/adlm", True, "")
    assert cfg.sampling.steps == 1000


def test_readme_sampling_line():
    cfg = parse("adlm_main", README_SAMPLE)
    s = cfg.sampling
    assert (s.sampler, s.steps, s.n, s.seed, s.top_p) == ("remdm-loop", 128, 10, 5, 0.9)
    assert (s.eta, s.t_on, s.t_off, s.alpha_on) == (0.02, 0.55, 0.05, 0.9)
    assert (s.parity, cfg.eval.judge_rule) == ("release", "release")
    assert (cfg.eval.checkpoint, cfg.eval.batch_size) == ("ckpts/adlm-medium.ckpt", 1)
    assert cfg.out == "outputs/adlm_samples-10_seed-5.json", "and not hydra.run.dir"
    assert (cfg.seed, cfg.objective.T) == (5, 0)


def test_zero_shot_script_line():
    cfg = parse("adlm_main", SCRIPT_ZERO_SHOT)
    assert (cfg.data.name, cfg.eval.checkpoint) == ("wikitext2", "ckpts/adlm-medium.ckpt")
    assert (cfg.train.global_batch_size, cfg.eval.ema, cfg.data.valid_name) == (16, True, "")


@pytest.mark.parametrize(
    ("more", "sampler", "eta"),
    [
        ('sampling.sampler="mdlm"', "mdlm", 0.02),
        ('sampling.sampler="remdm-cap" sampling.eta=0.008', "remdm-cap", 0.008),
        ('sampling.sampler="remdm-rescale" sampling.eta=0.015', "remdm-rescale", 0.015),
        ('sampling.sampler="remdm-conf"', "remdm-conf", 0.02),
        ('sampling.sampler="forward-backward"', "forward-backward", 0.02),
        ("sampling.dfm=true", "dfm", 0.02),
        ("sampling.predictor=ddpm_cache", "", 0.02),
        ("sampling.predictor=ddpm", "ddpm", 0.02),
        ("sampling.sampler=remdm-cap sampling.predictor=analytic", "analytic", 0.02),
    ],
)
def test_baseline_sampling_scripts(more, sampler, eta):
    cfg = parse("main", SCRIPT_SAMPLE + more)
    assert (cfg.algo, cfg.model.anchored, cfg.objective.name) == ("mdlm", False, "nelbo")
    assert (cfg.sampling.sampler, cfg.sampling.eta, cfg.sampling.n) == (sampler, eta, 5000)


def test_sedd_ar_and_d3pm_scripts():
    sedd = parse(
        "main", "mode=sample_eval parameterization=sedd backbone=dit time_conditioning=true sampling.predictor=analytic"
    )
    assert (sedd.algo, sedd.model.conditioning, sedd.sampling.sampler) == ("sedd", "sigma", "score")
    ar = parse(
        "main",
        "loader.batch_size=16 loader.eval_batch_size=16 model=small-ar backbone=ar data=lm1b wandb.name=ar-lm1b "
        "parameterization=ar model.length=128 sampling.steps=1000 time_conditioning=True",
    )
    assert (ar.algo, ar.model.causal, ar.model.conditioning, ar.data.packing) == ("ar", True, "none", "documents")
    assert (ar.train.batch_size, ar.model.length) == (16, 128)
    assert parse("main", "data=lm1b data.wrap=true").data.packing == "release"
    assert parse("main", "data=ptb data.wrap=False").data.packing == "documents"
    d3pm = parse("main", "model=small data=lm1b parameterization=d3pm model.length=128 time_conditioning=True T=1000")
    assert (d3pm.algo, d3pm.objective.T, d3pm.data.tokenizer) == ("d3pm", 1000, "bert-base-uncased")


def test_release_defaults_without_a_key():
    plain = parse("adlm_main", "")
    assert (plain.algo, plain.objective.gamma) == ("two-stage", 0)  # enable_anchor_loss is off in the release
    assert (plain.data.name, plain.data.valid_name) == ("openwebtext", "wikitext103")
    assert parse("adlm_main", "model.n_blocks=4").model.n_denoiser_blocks == 2
    assert parse("main", "").algo == "mdlm"


@pytest.mark.parametrize(
    ("release", "ours"),
    [
        ("enable_anchor_loss=True base_scaling_factor1=0.03 base_scaling_factor2=0.5",
         {"algo": "adlm", "objective.gamma": 0.03, "objective.gamma_warmup": 0.06}),
        ("base_scaling_factor1=0.03 enable_anchor_loss=True", {"objective.gamma": 0.03}),
        ("enable_anchor_loss=True base_scaling_factor1=2", {"objective.gamma": 2.0, "objective.gamma_warmup": 1.0}),
        ("enable_anchor_loss=True base_scaling_factor2=0", {"objective.gamma": 0.0}),
        ("algo=adlm base_scaling_factor1=0.03", {"algo": "adlm", "objective.gamma": 0.03}),
        ("algo=mdlm base_scaling_factor1=0.03", {"algo": "mdlm"}),
        ("enable_anchor_loss=False", {"algo": "two-stage", "objective.gamma": 0.0}),
        ("eval.disable_ema=True", {"eval.ema": False}),
        ("trainer.precision=32", {"train.precision": "fp32"}),
        ("trainer.precision=bf16-mixed trainer.accelerator=cpu", {"train.precision": "bf16", "train.device": "cpu"}),
        ("strategy=fsdp", {"train.strategy": "fsdp"}),
        ("trainer.gradient_clip_val=0.5 training.ema=0.999", {"optim.clip": 0.5, "optim.ema": 0.999}),
        ("optim.lr=1e-3 optim.weight_decay=0.01 optim.beta2=0.95", {"optim.lr": 1e-3, "optim.beta2": 0.95}),
        ("lr_scheduler=cosine_decay_warmup", {"optim.schedule": "cosine"}),
        ("lr_scheduler.num_warmup_steps=10", {"optim.warmup": 10}),
        ("callbacks.checkpoint_every_n_steps.every_n_train_steps=50", {"checkpoint.every": 50}),
        ("data=scientific_papers_arxiv", {"data.name": "arxiv"}),
        ("data.train=openwebtext-train data.valid=ptb", {"data.name": "openwebtext-train", "data.valid_name": "ptb"}),
        ("data.tokenizer_name_or_path=gpt2", {"data.tokenizer": "gpt2"}),
        ("eval.gen_ppl_eval_model_name_or_path=gpt2", {"eval.judge": "gpt2"}),
        ("sampling.semi_ar=True sampling.stride_length=512 sampling.num_strides=2 model.length=1024",
         {"sampling.stride": 512, "sampling.length": 2048}),
        ("sampling.num_sample_batches=5 loader.eval_batch_size=4", {"sampling.n": 20}),
        ("hydra.run.dir=a checkpointing.save_dir=b/", {"out": "b"}),
        ("trainer.max_steps=5 train.steps=7", {"train.steps": 7}),
        ("train.steps=7 trainer.max_steps=5", {"train.steps": 5}),
        ("noise=loglinear noise.type=cosine", {"noise.name": "cosine"}),
    ],
)  # fmt: skip
def test_single_names(release, ours):
    flat = config.flatten(config.load(release.split()))
    assert {key: flat[key] for key in ours} == ours


@pytest.mark.parametrize("switch", ["", "enable_anchor_loss=False", "enable_anchor_loss=True enable_anchor_loss=False"])
@pytest.mark.parametrize("factors", ["base_scaling_factor1=3e-3", "base_scaling_factor1=1 base_scaling_factor2=1"])
def test_scaling_factors_do_not_switch_the_anchor_loss_on(switch, factors, capsys):
    """In the release they are read only where enable_anchor_loss is true, and it is false unless given: the ablation
    without the loss has no loss, whatever its factor."""
    for order in (f"{switch} {factors}", f"{factors} {switch}"):
        for load in (lambda line: parse("adlm_main", line), lambda line: config.load(line.split())):
            cfg = load(order)
            assert (cfg.algo, cfg.objective.gamma, cfg.objective.gamma_warmup) == ("two-stage", 0, 0)
            assert "base_scaling_factor1" in capsys.readouterr().err, "and it is said"
    on = parse("adlm_main", f"{factors} enable_anchor_loss=True")
    assert on.algo == "adlm" and on.objective.gamma > 0


def test_what_means_nothing_here_is_accepted_with_a_reason(capsys):
    config.load(
        ["+wandb.offline=true", "trainer.num_nodes=32", "hydra.job.chdir=true", "training.antithetic_sampling=True"]
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 4 and all(line.startswith("adlm: note: ") and " ignored: " in line for line in lines)
    assert "wandb.offline=true" in lines[0] and "train.track=wandb" in lines[0]


def test_only_the_first_rank_tells_the_notes(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config.load(["trainer.num_nodes=32"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("backbone=dimamba", "backbone='dimamba' is unknown"),
        ("parameterization=sub", "did you mean 'subs'?"),
        ("checkpointing.resume_ckpt_path=x.ckpt", "checkpoint.init_from"),
        ("training.importance_sampling=True", "objective.time_density"),
        ("model.tie_word_embeddings=True", "never tied"),
        ("trainer.precision=16", "choose one of 32"),
        ("base_scaling_factor1=x", "base_scaling_factor1=x is not a number"),
        ("sampling.predictor=ddpm_cash", "did you mean 'ddpm_cache'?"),
        ("trainer.val_check_interval=0.5", "train.valid_every=0.5 is not a whole number"),
        ("loader.batchsize=3", "did you mean 'loader.batch_size'?"),
    ],
)
def test_refused(line, says):
    with pytest.raises(ValueError) as error:
        config.load(line.split())
    assert says in str(error.value)


def test_a_schedule_of_another_meaning_is_refused():
    with pytest.raises(ValueError, match="noise=linear"):
        parse("main", "noise=linear")


def test_the_table_has_no_key_twice_and_none_that_is_ours():
    from adlm.config.keys import group_choices, keys
    from adlm.tables import GROUPS

    assert len(RELEASE_KEYS) == sum(len(t.keys) for t in TRANSLATIONS)
    assert not set(RELEASE_KEYS) & (set(keys()) | set(GROUPS))
    for (group, theirs), ours in GROUP_NAMES.items():
        assert theirs not in group_choices(group) and ours in group_choices(group)


def test_rewriting_ours_changes_nothing():
    ours = ["model=small", "train.steps=3", "+sampling.eta=0.1", "word", "~model.length"]
    assert rewrite(ours) == (ours, [])


@pytest.mark.parametrize(("mode", "command"), [("train", "train"), ("ppl_eval", "ppl"), ("sample_eval", "evaluate")])
def test_a_mode_is_a_command(mode, command):
    line = release_line("main", ["seed=3", f"mode={mode}"])
    assert line[0] == command and line[-1] == "seed=3"
    assert release_line("main", [])[0] == "train"
