"""`adlm train --dry-run gpus=64`: the measured steps come out, traffic is what a slow count says, limits are clear."""

import itertools
import json

import pytest

from adlm import cli, config
from adlm.training.prediction import (
    MEASURED,
    Links,
    Measured,
    card,
    demands,
    fit,
    gather,
    per_pass,
    predict,
    traffic,
)
from adlm.training.setup import memory_estimate


def test_one_card_is_within_a_tenth_of_what_was_measured():
    """docs/results.md: model=small, 16 sequences in 52.03 ms and 13.42 GiB, 64 in 187.4 ms and 35.0 GiB."""
    for batch, ms, gib in ((16, 52.03, 13.42), (64, 187.4, 35.0)):
        cfg = config.load(["model=small", f"train.global_batch_size={batch}", "cluster.gpus=1"])
        found = predict(cfg, "ddp", card("h200"))
        assert found.step_ms == pytest.approx(ms, rel=0.1)
        assert found.tokens_per_s == pytest.approx(batch * 1024e3 / ms, rel=0.1)
        assert found.memory_gib == pytest.approx(gib, rel=0.1)
        assert found.waiting_ms == found.sent_gib == 0
        parameters, flops = demands(cfg)
        known = next(m for m in MEASURED["h200"] if m.seconds == pytest.approx(ms / 1e3))
        assert parameters == pytest.approx(known.parameters, rel=1e-3)
        assert flops * batch * 1024 == pytest.approx(known.flops, rel=0.02)


def test_constants_are_found_again():
    steps = [Measured(f, p, 2e-15 * f + 3e-11 * p) for f, p in ((1e13, 1e8), (3e13, 1e8), (2e13, 3e8))]
    assert fit(steps) == pytest.approx((2e-15, 3e-11))
    assert fit(steps[:1]) == (pytest.approx(steps[0].seconds / 1e13), 0.0), "one size fixes one constant"


@pytest.mark.parametrize(("inside", "nodes"), [(1, 1), (8, 1), (1, 4), (4, 3)])
def test_traffic_is_that_of_chunks_counted_one_by_one(inside, nodes):
    """Every GPU owns one chunk and needs all: chunks of other nodes come in once, shared out by the GPUs of a node;
    those of the node, and what the others brought, by way of its links."""
    ranks = inside * nodes
    chunk = 1.0 / ranks
    between = len([c for c, g in itertools.product(range(ranks), range(inside)) if c // inside and c % inside == g])
    found = gather(1.0, inside, nodes)
    assert found.between == pytest.approx(between * chunk / inside)
    within = (inside - 1) * nodes * chunk  # of each GPU of the node, what it owns or has brought in
    assert found.inside == pytest.approx(within)


def test_strategies():
    """ddp: an all-reduce; fsdp: twice the weights and once the gradients; hsdp: the same inside, a part between."""
    total = {s: sum(traffic(s, 1.0, 64, 18, 1), start=gather(0, 1, 1, 0)) for s in ("ddp", "fsdp", "hsdp")}
    assert total["ddp"].inside == pytest.approx(2 * 7 / 8) and total["ddp"].between == pytest.approx(2 * 7 / 64)
    assert total["fsdp"].inside == pytest.approx(3 * 7 / 8) and total["fsdp"].between == pytest.approx(3 * 7 / 64)
    assert total["hsdp"].inside == pytest.approx(3 * 7 / 8) and total["hsdp"].between == pytest.approx(2 * 7 / 64)
    several = sum(traffic("fsdp", 1.0, 64, 18, 4), start=gather(0, 1, 1, 0))
    assert several.inside == pytest.approx(9 * 7 / 8), "every micro-batch gathers the weights twice"
    slow, fast = (gather(8e9, 8, 8).seconds(links, 64) for links in (Links(450e9, 5e9), Links(450e9, 50e9)))
    assert slow > 5 * fast


def test_memory_of_shards():
    cfg = config.load(["model=small"])
    whole, part = (memory_estimate(cfg, 10**9, 10**9, 2, shards) for shards in (1, 8))
    assert whole - part == pytest.approx(7 / 8 * 20e9 / 2**30, rel=1e-6)


def test_what_was_derived_for_this_machine_is_not_taken_for_the_other():
    assert per_pass(config.load([])) == 0 and per_pass(config.load(["train.batch_size=16"])) == 16


def test_the_command(capsys, tmp_path):
    line = ["train", "--dry-run", "gpus=64", "gpu=h200", "experiment=adlm-owt-262b", "--json"]
    assert cli.main([*line, f"out={tmp_path}/never"]) == 0
    out = capsys.readouterr().out
    assert "predicted, not measured" in out and "Assumed:" in out and "checkpoint.every (Young/Daly)" in out
    found = json.loads(out.splitlines()[-1])
    assert [row["strategy"] for row in found["predicted"]] == ["ddp", "fsdp", "hsdp"]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=1024 experiment=adlm-owt-262b", "train.global_batch_size=1024 train.steps=500000"),
        ("gpus=12", "cluster.gpus=12 must be at most 8, or a multiple of it"),
        ("gpus=8 gpu=h300", "did you mean 'h200'?"),
        ("gpus=8 links=900,100", "cluster.links=900,100 is not supported any more"),
    ],
)
def test_what_cannot_be_predicted(line, said, capsys):
    assert cli.main(["train", "--dry-run", *line.split()]) == 1
    assert said in capsys.readouterr().err


def test_gpus_are_for_a_prediction(capsys):
    assert cli.main(["train", "gpus=8"]) == 1
    assert "add --dry-run" in capsys.readouterr().err


def test_a_file_of_measurements(tmp_path, capsys):
    step = {"ms": 100.0, "flops": 2e13, "parameters": 3e8}
    (tmp_path / "mine.jsonl").write_text(json.dumps({"rows": {"16": {"ours": step}}}) + "\n")
    found = card(str(tmp_path / "mine.jsonl"))
    assert found.step(2e13, 3e8) == pytest.approx(0.1) and found.name == "mine"
    assert (found.links, found.hours_to_failure) == (Links(450e9, 50e9), 50_000)
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write('{"links": [300, 25], "hours_to_failure": 9000}\n')
    found = card(str(tmp_path / "mine.jsonl"))
    assert (found.links, found.hours_to_failure) == (Links(300e9, 25e9), 9000)
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write('{"links": [300, 0]}\n')
    with pytest.raises(ValueError, match="links and hours_to_failure must be above 0"):
        card(str(tmp_path / "mine.jsonl"))
    (tmp_path / "text.txt").write_text("nothing")
    assert cli.main(["train", "--dry-run", "gpus=8", f"gpu={tmp_path}/text.txt"]) == 1
    assert "is not a file of `adlm bench train" in capsys.readouterr().err
