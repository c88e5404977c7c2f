"""`adlm ppl`: the validation of training again, other weights and corpora, any number of ranks, what is refused."""

import json
import os
import subprocess
import sys

import pytest
from runs import overrides, run_config, write_corpus

from adlm import cli, config
from adlm.compat.checkpoints import export_release
from adlm.data.preparation import prepare
from adlm.evaluation import perplexity
from adlm.evaluation.perplexity import run_ppl
from adlm.io.load import load_checkpoint
from adlm.training.loop import train
from adlm.training.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppl")
    train(run_config(folder, train__valid_sequences=0))
    return folder


def ppl_line(folder, *more: str) -> list[str]:
    return ["ppl", str(folder / "run"), f"data.cache_dir={folder / 'cache'}", *more]


def test_the_command_repeats_the_validation_of_training(trained, capsys):
    assert cli.main([*ppl_line(trained), "eval.draws=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = [e["nll"] for e in read_metrics(trained / "run") if e["kind"] == "valid"][-1]
    assert result["continuous"]["nats_per_token"] == pytest.approx(last, rel=1e-6)
    assert json.loads((trained / "run" / "ppl-file.json").read_text()) == result
    assert result["data"]["fingerprint"] and result["data"]["detokenizer_version"] is not None
    assert result["versions"]["torch"] and result["settings"]["draws"] == 1 and result["weights"] == "averaged"
    low, high = result["continuous"]["perplexity_interval"]
    assert low < result["continuous"]["perplexity"] < high


def test_raw_weights_and_another_corpus(trained, tmp_path, capsys):
    text = write_corpus(tmp_path / "other.jsonl", documents=20, seed=9)
    out = tmp_path / "result.json"
    more = [
        "data=file",
        f"data.path={text}",
        "data.valid_fraction=0.5",
        "eval.ema=false",
        "eval.sequences=5",
        f"out={out}",
    ]
    assert cli.main(ppl_line(trained, *more, "eval.draws=2", "eval.estimator=both")) == 0
    result = json.loads(out.read_text())
    assert result["weights"] == "raw" and result["continuous"]["rows"] == 5
    assert result["exact-count"]["monte_carlo_error_nats"] > 0
    assert "upper bound" in capsys.readouterr().out


def test_a_file_is_scored_whole(trained, tmp_path):
    """Not the part of it that training on it would hold out."""
    text = write_corpus(tmp_path / "other.jsonl", documents=20, seed=9)
    loaded = load_checkpoint(trained / "run")
    cfg = config.load(["data=file", f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}"])
    blocks = prepare(perplexity.own_data(loaded, cfg.data), loaded.tokenizer, 32, "valid")
    assert blocks.manifest["documents"] == 20


def test_the_releases_line_on_its_own_kind_of_checkpoint(trained, tmp_path, monkeypatch, capsys):
    """mode=ppl_eval of the public release, typed as in its README apart from sizes, files and the tokenizer."""
    export_release(trained / "run", tmp_path / "tiny.ckpt")
    text = write_corpus(tmp_path / "openwebtext.jsonl", documents=60, seed=3)
    monkeypatch.setenv("ADLM_CACHE", str(tmp_path / "cache"))
    line = (
        "mode=ppl_eval loader.global_batch_size=16 loader.batch_size=4 loader.eval_batch_size=4 data=openwebtext-split"
        " model=small parameterization=subs backbone=dit model.length=32 T=0 +wandb.offline=true"
        f" eval.checkpoint_path={tmp_path / 'tiny.ckpt'} data.path={text} data.tokenizer=bytes"
    )
    assert cli.release_main("adlm_main", line.split()) == 0
    result = json.loads((tmp_path / "ppl-openwebtext.json").read_text())
    assert result["data"]["packing"] == "release" and result["length"] == 32
    capsys.readouterr()
    more = ["data=openwebtext", "data.packing=release", f"data.path={text}"]
    assert cli.main([*ppl_line(trained, *more), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["continuous"] == ours["continuous"]


def test_loading_refuses_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a run folder nor an exported folder"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"does not say what it was trained on; name a corpus, e\.g\. data=pydocs"):
        run_ppl(config.load(["data=checkpoint"]))  # of the model in the package


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_gives_the_same_number(trained, tmp_path, ranks):
    more = [
        "eval.draws=2",
        "eval.estimator=both",
        "eval.batch_size=2",
        "train.device=cpu",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for n in (1, ranks):
        out = tmp_path / f"{n}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m", "adlm"]
        line = [*command, *ppl_line(trained, *more, f"out={out}")]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(out.read_text()))
    for name in ("continuous", "exact-count"):
        assert found[0][name] == found[1][name]


@pytest.mark.parametrize(
    "key", ["data.path=other.txt", "data.valid_path=x", "data.packing=release", "data.packing=documents"]
)
def test_data_keys_that_the_checkpoints_own_corpus_ignores_are_refused(trained, key):
    loaded = load_checkpoint(trained / "run")
    with pytest.raises(ValueError, match=f"{key.partition('=')[0]}: not read with data=checkpoint"):
        perplexity.own_data(loaded, config.load(["data=checkpoint", key]).data)


def test_fewer_rows_of_the_checkpoints_own_corpus(trained):
    loaded = load_checkpoint(trained / "run")
    assert perplexity.own_data(loaded, config.load(["data=checkpoint", "data.max_sequences=3"]).data).max_sequences == 3


def test_overrides_of_the_tiny_run_are_what_the_checkpoint_says(trained):
    """data=checkpoint reads the training data settings back from the export."""
    loaded = load_checkpoint(trained / "run")
    line = dict(text.split("=", 1) for text in overrides(trained))
    assert loaded.info["data_settings"]["path"] == line["data.path"]
    assert perplexity.own_data(loaded, config.load(["data=checkpoint"]).data).valid_fraction == 0.1
