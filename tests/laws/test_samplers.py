"""Samplers without a network: formulas against the paper's and the release's numbers, number of evaluations, and what
they refuse."""

import numpy as np
import pytest
import torch
from release import load
from score_form import analytic_last_step, score_from_probs

from adlm.diffusion.process import LogLinear
from adlm.diffusion.random import Stream, filter_logits, uniforms
from adlm.samplers import scheduled
from adlm.samplers.base import Prediction, make_sampler
from adlm.samplers.reading import Ordered, conf_remask
from adlm.samplers.scheduled import Mdlm, Scheduled
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS


@pytest.fixture(scope="module")
def fixture(parity):
    return torch.load(parity / "fixture_mini.pt", weights_only=True)


def release_rates(step: dict) -> scheduled.Rates:
    """The package's probabilities for one recorded step, under parity=release."""
    t = torch.tensor([step["t"]], dtype=torch.float64)
    # the recorded dt steps past 0 from the last time; the negative entries of q it gives are never drawn
    s = t - step.get("dt", 0.0)
    c, name = step["params"], step["sampler"]
    return {
        "mdlm": lambda: scheduled.mdlm(t, s),
        "forward-backward": lambda: scheduled.forward_backward(t, s, release=True),
        "remdm-cap": lambda: scheduled.remdm_cap(t, s, c["eta"]),
        "remdm-rescale": lambda: scheduled.remdm_rescale(t, s, c["eta"]),
        "remdm-conf": lambda: scheduled.remdm_conf(t, s),
        "remdm-loop": lambda: scheduled.remdm_loop(t, s, **c, release=True),
        "dfm": lambda: scheduled.dfm(t, c["steps"])[1],
        "predictor:ddpm": lambda: scheduled.ddpm(t, s.clamp(min=0), LogLinear()),
        "predictor:analytic": lambda: scheduled.analytic(t, s.clamp(min=0), LogLinear()),
    }[name]()


def test_one_step_of_every_sampler_equals_the_releases(fixture):
    """Normalised q of all recorded steps, within 1e-6."""
    x_t, p_x0, mask = fixture["samplers"]["x_t"], fixture["samplers"]["p_x0"], fixture["mask_index"]
    model, seen = load(fixture["state_dict"]), set()
    for step in fixture["samplers"]["steps"]:
        name, at = step["sampler"], str(step.get("x_t_key", step["t"]))
        z = x_t[at]
        p = p_x0.get(f"{at}/{step['nucleus_p']}")
        if p is None:  # uncut predictions are recorded at two of the four times
            with torch.no_grad():
                p = model.log_probs(z).exp()
        q = step["q"].double().clamp(min=0)
        q = q / q.sum(-1, keepdim=True)
        p, masked = p.double(), (z == mask).unsqueeze(-1)
        is_mask = torch.nn.functional.one_hot(torch.tensor(mask), p.shape[-1])
        if name == "analytic noise removal":
            sigma = LogLinear().sigma(step["t"])
            expected = analytic_last_step(score_from_probs(p, z, sigma, mask), z, sigma, mask)
            expected = expected / expected.sum(-1, keepdim=True)
        else:
            r = scheduled.Rates(*(x.clamp(0, 1) for x in release_rates(step)))
            remask = r.remask.view(1, 1, 1).expand(*z.shape, 1)
            if name == "remdm-conf":
                share = [conf_remask(row.double().numpy(), r.remask.item()) for row in step["conf_in"]]
                remask = torch.from_numpy(np.stack(share)).unsqueeze(-1)
            here = torch.nn.functional.one_hot(z, p.shape[-1])
            expected = torch.where(
                masked, r.reveal * p + (1 - r.reveal) * is_mask, (1 - remask) * here + remask * is_mask
            )
        # where nothing is masked again the release's q is meant for masked positions; tokens are copied over it
        copies = name in ("mdlm", "predictor:ddpm") or (name == "remdm-loop" and not 0.05 < step["t"] <= 0.55)
        kept = masked.squeeze(-1) if copies else torch.ones_like(z, dtype=torch.bool)
        torch.testing.assert_close(expected[kept], q[kept], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        seen.add(name)
    assert {n.removeprefix("predictor:") for n in seen} >= {
        "mdlm", "remdm-cap", "remdm-rescale", "remdm-conf", "remdm-loop", "forward-backward", "dfm", "ddpm", "analytic"
    }  # fmt: skip


def test_the_releases_nucleus_cut(fixture):
    """p(x0) of the release at p=0.9 from its own uncut prediction."""
    p_x0, x_t, mask = fixture["samplers"]["p_x0"], fixture["samplers"]["x_t"], fixture["mask_index"]
    for t in ("0.7", "0.3"):
        masked = x_t[t] == mask
        cut = filter_logits(p_x0[f"{t}/1.0"][masked].log(), top_p=0.9, release_nucleus=True).exp()
        torch.testing.assert_close(cut, p_x0[f"{t}/0.9"][masked], rtol=0, atol=1e-6)


def test_release_dfm_takes_the_releases_times(fixture):
    for step in fixture["samplers"]["steps"]:
        if step["sampler"] == "dfm":
            t = torch.tensor(step["t"], dtype=torch.float64)
            dt = scheduled.dfm(t, step["params"]["steps"])[0]
            assert (t - dt).item() == pytest.approx(step["t_next"], abs=1e-6)


def events(name: str, L: int, seed: int = 0, **settings) -> list:
    sampler = make_sampler(SamplingConfig(sampler=name, **settings), LogLinear())
    assert not sampler.reads
    return list(sampler.trajectory(np.arange(L), seed))


def test_number_of_evaluations():
    """mdlm, L=1024, T=4096: T (1 - (1 - 1/T)^L) = 906 evaluations are expected, not 4096."""
    sampler = make_sampler(SamplingConfig(sampler="mdlm", steps=4096), LogLinear())
    nfe = [sum(1 for _ in sampler.trajectory(np.arange(1024), seed)) for seed in range(30)]
    assert np.mean(nfe) == pytest.approx(4096 * (1 - (1 - 1 / 4096) ** 1024), abs=5)
    assert len(events("first-hitting", 1024)) == 1024
    assert len(events("mdlm", 1024, steps=1)) == 1


BLIND = [n for n in SAMPLERS.entries if not SAMPLERS.load(n).reads]


@pytest.mark.parametrize("parity", ["", "release"])
@pytest.mark.parametrize("name", BLIND)
def test_trajectories_are_consistent(name, parity):
    """Only masked positions are drawn, only visible ones masked, steps increase, and all ends revealed."""
    if parity and not SAMPLERS.load(name).in_release:
        pytest.skip("not in the release")
    visible = np.zeros(200, dtype=bool)
    last = -1
    for e in events(name, 200, seed=3, steps=50, parity=parity):
        assert e.step > last
        assert len(e.draw) > 0
        assert 0 <= e.t <= 1
        assert visible[e.mask].all()
        visible[e.mask] = False
        assert not visible[e.draw].any()
        visible[e.draw] = True
        last = e.step
    assert visible.all()


@pytest.mark.parametrize("name", ["mdlm", "remdm-cap", "remdm-loop", "forward-backward", "dfm"])
def test_fraction_of_masks_follows_the_schedule(name):
    """Marginally a position is masked at time t with probability 1 - alpha: E of the number of masks at mid-time."""
    L, T, seeds = 400, 100, 20
    sampler = make_sampler(SamplingConfig(sampler=name, steps=T), LogLinear())
    assert isinstance(sampler, Scheduled)
    masked = torch.ones(1, dtype=torch.float64)
    expected = []
    for a, b in zip(*sampler.rates):
        masked = masked * (1 - a) + (1 - masked) * b
        expected.append(masked.item())
    half = len(expected) // 2
    share = []
    for seed in range(seeds):
        visible = np.zeros(L, dtype=bool)
        reveal_step, revealed, remask_step, remasked = sampler.changes(np.arange(L), seed)
        order = np.argsort(np.concatenate([reveal_step, remask_step]), kind="stable")
        position, on = np.concatenate([revealed, remasked]), np.arange(len(order)) < len(revealed)
        for i in order:
            if np.concatenate([reveal_step, remask_step])[i] <= half:
                visible[position[i]] = on[i]
        share.append(1 - visible.mean())
    sd = np.sqrt(expected[half] * (1 - expected[half]) / (L * seeds))
    assert np.mean(share) == pytest.approx(expected[half], abs=4.5 * sd)


def test_same_seed_same_trajectory_and_positions_have_their_own_numbers():
    sampler = make_sampler(SamplingConfig(sampler="remdm-loop", steps=64), LogLinear())
    assert isinstance(sampler, Scheduled)
    few, many = np.arange(10), np.arange(50)
    a, b = sampler.changes(few, 5), sampler.changes(many, 5)
    keep = b[1] < 10
    assert sorted(zip(a[0], a[1])) == sorted(zip(b[0][keep], b[1][keep]))
    assert [e.step for e in sampler.trajectory(many, 5)] != [e.step for e in sampler.trajectory(many, 6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "remdm-lop"}, "did you mean 'remdm-loop'"),
        ({"sampler": "confidence", "parity": "release"}, "the release has no sampler 'confidence'"),
        ({"sampler": "remdm-loop", "t_on": 0.1, "t_off": 0.5}, "sampling.t_off=0.5 must lie below sampling.t_on=0.1"),
        ({"sampler": "remdm-loop", "eta": 0.5}, "re-masks more than is revealed"),
        ({"sampler": "remdm-loop", "alpha_on": 1.0}, "sampling.alpha_on"),
    ],
)
def test_bad_settings_are_answered(settings, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(SamplingConfig(**settings), LogLinear())


@pytest.mark.parametrize(("name", "threshold"), [("confidence", 0.9), ("entropy", 0.2)])
def test_a_threshold_is_the_same_from_python_and_from_the_group(name, threshold):
    from adlm import config

    group = config.load(["model=nano", f"sampling={name}"]).sampling
    for settings in (group, SamplingConfig(sampler=name)):
        sampler = make_sampler(settings, LogLinear())
        assert isinstance(sampler, Ordered) and sampler.threshold == threshold
    given = make_sampler(SamplingConfig(sampler=name, threshold=0.0), LogLinear())
    assert isinstance(given, Ordered) and given.threshold == 0


class Improper(Mdlm):
    def step_rates(self, t, s):
        return scheduled.Rates(t + 0.5, t * 0)


def test_improper_rates_are_refused():
    with pytest.raises(ValueError, match="reveal probabilities must lie"):
        Improper(SamplingConfig(steps=2), LogLinear())


# The formulas, one number at a time


def sigma_max(a_s: float, a_t: float) -> float:
    return 1.0 if a_t == 0 else min(1.0, (1 - a_s) / a_t)


def eq6(alpha_s: float, alpha_t: float, sigma: float) -> tuple[float, float]:
    """(probability that a masked position takes a token, that a visible one is masked)."""
    return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), sigma


def remdm_loop(t: float, s: float, c: SamplingConfig) -> tuple[float, float]:
    if t > c.t_on:
        grow = c.alpha_on / (1 - c.t_on)
        return eq6((1 - max(s, c.t_on)) * grow, (1 - t) * grow, 0.0)
    if t > c.t_off:
        return eq6(c.alpha_on, c.alpha_on, c.eta)
    shrink = (1 - c.alpha_on) / c.t_off
    return eq6(1 - s * shrink, 1 - t * shrink, 0.0)


def loglinear(t: float) -> float:
    return 1 - (1 - 1e-3) * t


# From the paper and the release's description, without the package's formulas: (t, s, settings) -> (reveal, remask).
FORMULAS = {
    "mdlm": lambda t, s, c: eq6(1 - s, 1 - t, 0.0),
    "ddpm": lambda t, s, c: eq6(loglinear(s), loglinear(t), 0.0),
    "analytic": lambda t, s, c: eq6(loglinear(s), loglinear(t), 0.0),
    "remdm-cap": lambda t, s, c: eq6(1 - s, 1 - t, min(c.eta, sigma_max(1 - s, 1 - t))),
    "remdm-rescale": lambda t, s, c: eq6(1 - s, 1 - t, c.eta * sigma_max(1 - s, 1 - t)),
    "remdm-conf": lambda t, s, c: (eq6(1 - s, 1 - t, 0.0)[0], sigma_max(1 - s, 1 - t)),
    "forward-backward": lambda t, s, c: eq6(
        1 - s, 1 - t, min(1.0 if t == 1 else (t - s) / (1 - t), sigma_max(1 - s, 1 - t))
    ),
    "remdm-loop": remdm_loop,
}


@pytest.mark.parametrize("T", [1, 2, 5, 64])
@pytest.mark.parametrize("name", FORMULAS)
def test_rates_are_those_of_the_paper(name, T):
    c = SamplingConfig(sampler=name, steps=T, eta=0.3, t_on=0.6, t_off=0.2, alpha_on=0.7)
    sampler = make_sampler(c, LogLinear())
    assert isinstance(sampler, Scheduled)
    expected = torch.tensor([FORMULAS[name](i / T, (i - 1) / T, c) for i in range(T, 0, -1)], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(sampler.rates, dim=1), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("T", "rising", "held", "falling"), [(20, 9, 10, 1), (100, 45, 50, 5), (1000, 450, 500, 50)])
def test_the_phases_of_the_loop_lose_no_step_to_rounding(T, rising, held, falling):
    """Above t_on = 0.55, from there to above t_off = 0.05, and from there on: a step belongs to the phase it starts in.
    The remasking rate is eta to the last digit."""
    sampler = make_sampler(SamplingConfig(sampler="remdm-loop", steps=T), LogLinear())
    assert isinstance(sampler, Scheduled)
    assert sampler.rates.remask.dtype == torch.float64
    assert sampler.rates.remask.tolist() == [0.0] * rising + [0.02] * held + [0.0] * falling


def test_under_parity_the_loop_keeps_the_releases_times():
    """Its grid ends at 1e-5, so the step that starts a little above t_off is held, as the release computes it."""
    sampler = make_sampler(SamplingConfig(sampler="remdm-loop", steps=20, parity="release"), LogLinear())
    assert isinstance(sampler, Scheduled)
    t = torch.linspace(1, 1e-5, 21, dtype=torch.float64)[:-1]
    assert torch.equal((sampler.rates.remask > 0), (t <= 0.55) & (t > 0.05))
    assert sampler.rates.remask[-1] == 0.02
    assert torch.equal(sampler.t, t), "the network gets the plain time"


MARGINAL = ["mdlm", "ddpm", "analytic", "remdm-cap", "remdm-rescale", "remdm-loop", "forward-backward", "dfm"]


@pytest.mark.parametrize("T", [1, 7, 40])
@pytest.mark.parametrize("name", MARGINAL)
def test_the_network_is_conditioned_on_the_masks_it_sees(name, T):
    """The time of an event is the expected fraction of masks, and so is that of the filling step; also where
    remdm-loop holds it."""
    sampler = make_sampler(SamplingConfig(sampler=name, steps=T), LogLinear())
    assert isinstance(sampler, Scheduled)
    masked, expected = 1.0, [1.0]
    for reveal, remask in zip(*(p.tolist() for p in sampler.rates)):
        masked = masked * (1 - reveal) + (1 - masked) * remask
        expected.append(masked)
    assert [*sampler.t.tolist(), sampler.last_t] == pytest.approx(expected, abs=1e-12)
    if name == "remdm-loop" and T == 40:
        held = (sampler.rates.remask > 0).nonzero().squeeze(1)
        assert sampler.t[held].tolist() == pytest.approx([0.1] * 20)


def dense_remdm_conf(L: int, T: int, seed: int, pace: float) -> list[tuple]:
    """remdm-conf step by step, as the paper writes it: (step, time, tokens the network sees, positions drawn). `pace`:
    what reveals are multiplied with."""
    seen, psi = [], {}  # psi: the probability that each visible token had when it was drawn

    def coins(stream: Stream, step: int) -> list[float]:
        return uniforms(seed, stream, step, torch.arange(L)).tolist()

    for i in range(T):
        t, s = (T - i) / T, (T - i - 1) / T
        reveal, again = coins(Stream.REVEAL, i), coins(Stream.REMASK, i)
        doubt = {l: np.exp(-p) for l, p in psi.items()}
        eta = {l: sigma_max(1 - s, 1 - t) * w / sum(doubt.values()) for l, w in doubt.items()}
        drawn = [l for l in range(L) if l not in psi and reveal[l] < pace * (t - s) / t]
        if drawn:
            seen.append((i, t, sorted(psi), drawn))
        psi = {l: p for l, p in psi.items() if again[l] >= eta[l]}
        psi |= {l: sureness(i, l) for l in drawn}
    left = [l for l in range(L) if l not in psi]
    return seen + ([(T, 0.0, sorted(psi), left)] if left else [])


def sureness(step: int, position: int) -> float:
    """What the network's probability of a drawn token shall be."""
    return (0.02, 0.98)[(step + position) % 2]


@pytest.mark.parametrize("pace", [1.0, 0.6])
def test_remdm_conf_takes_the_trajectories_of_the_dense_loop(pace):
    """Unsure tokens are masked again, sure ones stay. At a slower pace some are left, and filled at time 0."""
    T, L, filled = 12, 9, 0
    sampler = make_sampler(SamplingConfig(sampler="remdm-conf", steps=T), LogLinear())
    assert isinstance(sampler, Scheduled)
    sampler.rates = sampler.rates._replace(reveal=pace * sampler.rates.reveal)
    for seed in range(30):
        trajectory, visible, found, prediction = sampler.trajectory(np.arange(L), seed), set(), [], None
        while True:
            try:
                e = next(trajectory) if prediction is None else trajectory.send(prediction)
            except StopIteration:
                break
            visible -= set(e.mask.tolist())
            found.append((e.step, pytest.approx(e.t), sorted(visible), e.draw.tolist()))
            visible |= set(e.draw.tolist())
            prediction = Prediction(probability=np.array([sureness(e.step, l) for l in e.draw.tolist()]))
        assert found == dense_remdm_conf(L, T, seed, pace)
        filled += found[-1][0] == T
    assert (filled > 5) == (pace < 1)


@pytest.mark.parametrize("T", [1, 2, 16])
def test_dfm_takes_the_papers_steps(T):
    sampler = make_sampler(SamplingConfig(sampler="dfm", steps=T), LogLinear())
    assert isinstance(sampler, Scheduled)
    expected, t = [], 1.0
    while t > 1 / T:
        a = 10 * t**0.25 * (1 - t) ** 0.25 + 1
        out = 0.0 if t == 1 else (a - 1) / (1 - t)
        dt = min(1 / T, 1 / (a / t + out))
        expected.append((t, a * dt / t, out * dt))
        t -= dt
    found = torch.stack([sampler.t, *sampler.rates], dim=1)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(-1, 3), rtol=1e-9, atol=1e-12)


def test_every_sampler_made_of_rates_has_its_formula_written_out():
    made_of_rates = {n for n in SAMPLERS.entries if issubclass(SAMPLERS.load(n), Scheduled)}
    assert made_of_rates == {*FORMULAS, "dfm", "score"}, "write the formula of a new one into FORMULAS"
