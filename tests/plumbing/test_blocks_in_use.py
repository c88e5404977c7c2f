"""Generation in blocks as users reach it: Python, command line, server."""

import json
import math
from dataclasses import replace

import httpx
import numpy as np
import pytest
from dense_blocks import DenseBlocks
from served import load_tiny, serving

from adlm import cli
from adlm.api.scoring import left_to_right, whole
from adlm.diffusion.process import make_schedule
from adlm.engine import Request, block_of, most_evaluations
from adlm.io.export import CONFIG
from adlm.samplers.base import make_sampler
from adlm.schema import NoiseConfig, SamplingConfig

PROMPT = "the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks") / "model"


@pytest.fixture(scope="module")
def lm(folder):
    return load_tiny(folder, block_length="8,1,4,32", shift=True, conditioning="none")


def test_blocks_from_python(lm):
    own = lm.generate(PROMPT, max_new_tokens=20, seed=2, steps=4)[0]
    assert own == replace(
        lm.generate(PROMPT, max_new_tokens=20, seed=2, steps=4, block_length=8)[0], seconds=own.seconds
    )
    assert own.text.startswith(PROMPT) and len(own.tokens) == 28
    others = [lm.generate(PROMPT, max_new_tokens=20, seed=2, steps=4, block_length=K)[0] for K in (1, 4, 32)]
    assert len({g.text for g in [own, *others]}) > 2
    assert others[0].nfe == 20 and own.nfe <= 4 * 4
    sure = lm.generate(PROMPT, max_new_tokens=20, sampler="confidence", block_length=4, threshold=0.0)[0]
    assert sure.nfe == 5, "one evaluation a block, where any confidence will do"
    assert len(lm.generate(n=3, block_length=8, length=16)) == 3
    *partial, last = lm.stream(PROMPT, max_new_tokens=20, seed=2, steps=4)
    assert last.text == own.text and all(len(p.tokens) == 28 for p in partial)


def test_templates_read_the_whole_canvas(lm):
    filled = lm.generate("the [MASK:3] sat on [MASK:2].", seed=1)[0]
    assert filled.text.startswith("the") and filled.text.endswith(".")
    whole = lm.generate("the [MASK:3] sat on [MASK:2].", seed=1, block_length=32)[0]
    assert filled.tokens == whole.tokens
    with pytest.raises(ValueError, match=r"all holes must stand at the end: .* blocks of 4 .* or block_length=32"):
        lm.generate("the [MASK:3] sat on [MASK:2].", block_length=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_length": 6}, r"^block_length=6: the model was trained for blocks of 1, 4, 8, 32$"),
        ({"block_length": -1}, "block_length=-1 must be at least 0"),
        ({"block_length": 4, "required": ["dog"]}, "required words"),
        ({"length": 40}, "longer than 32"),
    ],
)
def test_what_cannot_be_is_said(lm, settings, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(PROMPT, **settings)


def test_the_command_line(lm, folder, capsys):
    words = ["sampling.block_length=4", f"sampling.prompt={PROMPT}", "sampling.length=24", "sampling.seed=3"]
    assert cli.main(["sample", str(folder), *words, "sampling.steps=3"]) in (0, None)
    assert lm.generate(PROMPT, block_length=4, length=24, seed=3, steps=3)[0].text in capsys.readouterr().out


def test_samples_of_earlier_versions_go_on(lm):
    """A setting that is new leaves the fingerprint of samples as it was, unless it is used."""
    from adlm.api.command import fingerprint

    plain = fingerprint(lm, SamplingConfig())
    assert plain == fingerprint(lm, SamplingConfig(block_length=0)) != fingerprint(lm, SamplingConfig(block_length=4))


def test_evaluations_are_counted_ahead(lm):
    mask = lm.model.mask_id
    for settings in ({"steps": 3}, {"steps": 100}, {"sampler": "first-hitting"}, {"sampler": "confidence", "steps": 3}):
        request = Request([1, *[mask] * 20], SamplingConfig(**settings, block_length=4))
        (result,) = lm.engine(16).run([request])
        assert result.nfe <= most_evaluations(request, lm.model, lm.schedule) <= 6 * 100
    for sampler in ("confidence", "entropy"):  # one token an evaluation if it is never sure, and no step is empty
        settings = SamplingConfig(sampler=sampler, steps=100, threshold=2.0 * (sampler == "confidence"), block_length=4)
        request = Request([1, *[mask] * 20], settings)
        (result,) = lm.engine(16).run([request])
        assert result.nfe <= most_evaluations(request, lm.model, lm.schedule) == 20
        assert sampler == "entropy" or result.nfe == 20
    assert block_of(Request([1, mask], SamplingConfig()), lm.model) == 8


@pytest.mark.parametrize("sampler", ["ddpm", "mdlm", "analytic", "remdm-cap", "remdm-loop", "dfm"])
@pytest.mark.parametrize("parity", ["", "release"])
def test_the_filling_step_is_counted_ahead(lm, sampler, parity):
    """A sequence may take one evaluation more than the sampler has steps, where the last step leaves masks."""
    schedule = make_schedule(NoiseConfig(name="geometric" if sampler in ("ddpm", "analytic") else "loglinear"))
    settings = SamplingConfig(sampler=sampler, steps=4, parity=parity, block_length=32)
    request = Request([1, *[lm.model.mask_id] * 31], settings)
    drawn = make_sampler(settings, schedule)
    taken = [sum(1 for _ in drawn.trajectory(np.arange(31), seed)) for seed in range(40)]
    assert max(taken) <= most_evaluations(request, lm.model, schedule) <= max(taken) + 1


def test_the_server(lm):
    with serving({"blocks": lm}) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        asked = {"prompt": PROMPT, "max_tokens": 20, "seed": 2, "block_length": 4, "stop": False, "steps": 4}
        for settings in ({}, {"sampler": "remdm-cap", "eta": 0.5}, {"sampler": "confidence"}, {"banned": ["xy"]}):
            whole = http.post("/v1/completions", json=asked | settings).json()["choices"][0]["text"]
            drawn = lm.generate(PROMPT, max_new_tokens=20, seed=2, block_length=4, steps=4, **settings)[0].text
            assert whole == drawn.removeprefix(PROMPT)
            with http.stream("POST", "/v1/completions", json=asked | settings | {"stream": True}) as response:
                lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
            parts = [t for line in lines if (t := json.loads(line)["choices"][0]["text"])]
            assert "".join(parts) == whole
            assert len(parts) >= 4, "finished blocks are sent as they settle, even if a block may be masked again"
        refused = http.post("/v1/completions", json=asked | {"block_length": 5})
        assert refused.status_code == 400 and "trained for blocks of 1, 4, 8, 32" in refused.text
        with http.stream("POST", "/v1/frames", json={"prompt": PROMPT, "block_length": 4, "steps": 4}) as response:
            start = json.loads(next(line for line in response.iter_lines() if line.startswith("data: "))[6:])
        assert start["block_length"] == 4 and start["steps"] == 6 * 4


def test_the_export_says_what_it_was_trained_for(folder, lm):
    assert json.loads((folder / CONFIG).read_text())["model"]["block_length"] == "8,1,4,32"


@pytest.mark.parametrize("K", [1, 3, 4])
@pytest.mark.parametrize("shift", [False, True])
def test_the_chain_rule_reads_blocks(tmp_path, K, shift):
    """Left to right, a block model says what it would when it writes: with K = 1 that is its exact likelihood."""
    own = load_tiny(tmp_path / "model", block_length=f"{K},2", shift=shift, conditioning="none")
    tok, text = own.tokenizer, own.tokenizer.encode(PROMPT)
    row = [tok.bos_id, *text]
    found = [k.log_p for k in whole(left_to_right(own.model, text, row[:1], own.schedule, 1))]
    assert own.score(PROMPT, draws=2).exact == (K == 1)
    if K == 1:
        assert sum(found) == pytest.approx(-own.score(PROMPT).nll * len(text), rel=1e-5)
    dense = DenseBlocks(own.model, K)
    for l, log_p in enumerate(found, start=1):
        p = dense.p((*row[:l], *[tok.mask_id] * (len(row) - l)))
        assert log_p == pytest.approx(math.log(p[l][row[l]]), abs=1e-4)


def test_what_reads_the_whole_canvas_needs_a_model_that_was_trained_for_it(lm, tmp_path):
    assert len(lm.fill_distribution("the [MASK] sat on [MASK]")) == 2
    own = load_tiny(tmp_path / "model", block_length="4,1", conditioning="none")
    with pytest.raises(ValueError, match=r"trained for blocks of 1, 4; 32 \(or 0\) would have to be among them"):
        own.fill_distribution("the [MASK] sat on [MASK]")
