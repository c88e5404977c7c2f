"""Draw the plots of docs/results.md from the numbers beside it: `python scripts/plot_results.py` (extra: plot)."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from adlm.reasoning.command import PAPER

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RELEASE, OURS = "#b8b8b8", "#1f6f8b"


def plot_speed() -> None:
    """Bars: the speedup over the public release, with the measured values."""
    rows = json.loads((RESULTS / "speed.json").read_text())["rows"]
    figure, axis = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.2), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        more = row["unit"] == "tokens/s"
        gain = row["ours"] / row["release"] if more else row["release"] / row["ours"]
        axis.barh(y + 0.2, gain, 0.36, color=OURS)
        axis.barh(y - 0.2, 1, 0.36, color=RELEASE)
        axis.text(gain + 0.4, y + 0.2, f"{row['ours']:,} {row['unit']}  ({gain:.1f}x)", va="center", fontsize=9)
        axis.text(1.4, y - 0.2, f"{row['release']:,} {row['unit']}", va="center", fontsize=9, color="#555555")
    axis.set_yticks(range(len(rows)), [row["what"] for row in reversed(rows)])
    axis.set(xlim=(0, 62), xlabel="speed over the public release's (grey), one NVIDIA H200")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, "speed.png")


def plot_adaptation() -> None:
    """Training loss of the adaptation over training tokens, and the held-out bound of every block length at its end."""
    lines = [e for e in events_of("adaptation") if e["kind"] == "train"]
    bounds = json.loads((RESULTS / "adaptation" / "bounds.json").read_text())
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    tokens = [e["step"] * 40 * 1024 / 1e6 for e in lines]
    axis.plot(tokens, [e["nelbo"] for e in lines], color=RELEASE, linewidth=1, label="training loss, all block lengths")
    for name in ("K=1024", "K=64", "K=16", "K=4", "K=1"):
        nats = bounds[name]["nats_per_token"]
        axis.plot(tokens[-1], nats, color=OURS, marker="o", markersize=4)
        axis.annotate(name, (tokens[-1], nats), (6, -3), textcoords="offset points", fontsize=8)
    axis.plot([], [], color=OURS, marker="o", markersize=4, linestyle="", label="held-out bound at the end")
    axis.set(xlabel="million tokens", ylabel="nats per token", ylim=(2.9, 4.2), xlim=(0, 1.1 * tokens[-1]))
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, "adaptation.png")


def plot_evidence() -> None:
    """Held-out bound over training tokens, one line per run; lines of one colour differ only in the seed."""
    families = {
        "adlm+recipe=fast": ("ours: anchors read inside one stack", OURS, "-"),
        "mdlm-matched+recipe=fast": ("the same block and optimizer, no anchors", "#e08e45", "-"),
        "adlm": ("ADLM as published", OURS, ":"),
        "mdlm-matched": ("its recipe, as many blocks, no anchors", "#e08e45", ":"),
    }
    table = json.loads((RESULTS / "evidence" / "table.json").read_text())
    tokens = {entry["name"]: entry["training_tokens"] / 1e6 for entry in table["entries"]}
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events_of("evidence"):
        if event["kind"] == "valid" and event["step"]:
            curves.setdefault(event["run"], []).append((event["step"], event["nll"]))
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for family, (label, color, dashes) in families.items():
        for name in (f"{family}+seed={seed}" for seed in (1, 2, 3)):
            steps, nats = zip(*curves[name])
            x = [step / steps[-1] * tokens[name] for step in steps]
            axis.plot(x, nats, dashes, color=color, marker="o", markersize=3, label=label)
            label = None
    axis.set(xlabel="million training tokens", ylabel="held-out bound, nats per token (128 rows)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    save(figure, "evidence.png")


def plot_first_quarter() -> None:
    """Held-out bound over training compute, with anchors in the first quarter of the run and without: mean and range
    of three seeds."""
    entries = json.loads((RESULTS / "evidence-first-quarter" / "table.json").read_text())["entries"]
    compute = {e["name"]: e["flops_per_token"] * e["training_tokens"] / 1e15 for e in entries}
    curves: dict[str, list[list[float]]] = {}
    for event in events_of("evidence-first-quarter"):
        if event["kind"] == "valid" and event["step"]:
            family, done = event["run"].split("+")[0], event["step"] / (2200 if "adlm" in event["run"][:4] else 2228)
            curves.setdefault(family, []).append([done * compute[event["run"]], event["nll"]])
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for family, color, label in (
        ("mdlm-matched", "#e08e45", "no anchors"),
        ("adlm", OURS, "anchors in the first quarter of the run"),
    ):
        points = sorted(curves[family])
        steps = [points[i : i + 3] for i in range(0, len(points), 3)]  # the three seeds of a step are adjacent
        x = [sum(c for c, _ in step) / 3 for step in steps]
        bounds = [[nats for _, nats in step] for step in steps]
        axis.plot(x, [sum(b) / 3 for b in bounds], color=color, marker="o", markersize=4, label=label)
        axis.fill_between(x, [min(b) for b in bounds], [max(b) for b in bounds], color=color, alpha=0.25, linewidth=0)
    axis.set(xlabel="training compute, PFLOP", ylabel="held-out bound, nats per token (128 sequences)")
    axis.grid(alpha=0.3)
    axis.legend(title="mean and range of three seeds")
    save(figure, "first-quarter.png")


def plot_compute() -> None:
    """Held-out bound against training compute, one point per run: recipe fast, three seeds each."""
    share = "adlm+recipe=fast+objective.anchor_rule=all+objective.anchor_share=0.25"
    kinds = {  # runs: colour, marker, label
        ("evidence", "mdlm-matched+recipe=fast"): ("#e08e45", "o", "no anchors: 2,200, 2,314 and 2,478 steps"),
        ("evidence-share", "mdlm-matched+recipe=fast+train.steps=2314"): ("#e08e45", "o", None),
        ("evidence-equal-compute", "mdlm-matched+recipe=fast+train.steps=2478"): ("#e08e45", "o", None),
        ("evidence", "adlm+recipe=fast"): (OURS, "s", "rare tokens as anchors (tau=5), 2,200 steps"),
        ("evidence-share", share): (OURS, "o", "a quarter of all masked tokens, 2,200 steps"),
    }
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    line = []
    for (folder, kind), (color, marker, label) in kinds.items():
        entries = json.loads((RESULTS / folder / "table.json").read_text())["entries"]
        runs = [entry for entry in entries if entry["name"] in {f"{kind}+seed={seed}" for seed in (1, 2, 3)}]
        assert len(runs) == 3, kind
        compute = [run["flops_per_token"] * run["training_tokens"] / 1e15 for run in runs]
        nats = [run["estimate"]["nats_per_token"] for run in runs]
        axis.scatter(compute, nats, color=color, marker=marker, s=18, alpha=0.6)
        axis.scatter([sum(compute) / 3], [sum(nats) / 3], color=color, marker=marker, s=90, label=label)
        if kind.startswith("mdlm"):
            line.append((sum(compute) / 3, sum(nats) / 3))
    axis.plot(*zip(*line), color="#e08e45", linewidth=1)
    axis.set(xlabel="training compute, PFLOP", ylabel="held-out bound, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(title="large: mean of three seeds")
    save(figure, "compute.png")


def plot_quick() -> None:
    """Held-out bound after 8.0M tokens, one point for each change of the recipe."""
    ends = {e["run"]: e["nll"] for e in events_of("quick") if e["kind"] == "valid" and e["tokens"] == 488 * 16 * 1024}
    names = sorted(ends, key=lambda name: ends[name], reverse=True)
    colors = [OURS if name.startswith("quick") else "#9aa5b1" for name in names]
    figure, axis = plt.subplots(figsize=(7.5, 6.2), layout="constrained")
    axis.scatter([ends[name] for name in names], names, color=colors)
    for y, name in enumerate(names):
        axis.text(ends[name] + 0.02, y, f"{ends[name]:.2f}", va="center", fontsize=8)
    axis.axvline(6.726, color="black", linestyle=":", label="published recipe after 36M tokens, 768 wide")
    axis.set(xlim=(6.2, 7.7), xlabel="held-out bound after 8.0M tokens, nats per token (512 rows)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left")
    save(figure, "quick.png")


def plot_time() -> None:
    """Held-out bound over seconds, including compilation and validation, and when the release reaches its bound."""
    runs = {
        ("time-to-bound", "model=small"): ("243M parameters, recipe quick, 6.5M tokens", OURS, "-"),
        ("time-to-bound", "model=tiny"): ("115M parameters, the same", OURS, ":"),
        ("ten-minutes", "model=tiny"): ("115M parameters, 360M tokens", "#e08e45", "-"),
    }
    figure, axis = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for (folder, name), (label, color, dashes) in runs.items():
        events = [e for e in events_of(folder) if e["run"] == name and e["kind"] == "valid" and e["step"]]
        axis.plot(
            [e["seconds"] for e in events],
            [e["nll"] for e in events],
            dashes,
            color=color,
            marker="o",
            markersize=3,
            label=label,
        )
    axis.scatter([1070], [6.726], marker="*", s=120, color="black", label="public release: 36M tokens at its speed")
    axis.axhline(6.726, color="black", linestyle=":", linewidth=0.8)
    axis.set(xscale="log", xlabel="seconds from before the first step, one H200", ylabel="held-out bound, nats a token")
    axis.set_xticks([20, 50, 100, 200, 500, 1000], ["20", "50", "100", "200", "500", "1000"])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, "time.png")


def plot_controls() -> None:
    """Paired differences to the run without anchors at equal tokens, one dot per continuation; and the base models."""
    lines = json.loads((RESULTS / "controls" / "continuations.json").read_text())
    bound = {(e["base"], e["base_seed"], e["variant"], e["seed"]): e["bound"] for e in lines}
    names = ["shuffled", "probe", "rare", "tied", "gamma-off", "random", "common", "anchors"]
    figure, (early, late) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(1, 2.2), layout="constrained")
    bases = json.loads((RESULTS / "controls" / "bases.json").read_text())
    for kind, colour, label in (("probe", "#e08e45", "without anchors"), ("anchors", OURS, "with anchors")):
        early.plot(range(1, 4), bases[kind], "o", color=colour, label=label)
    early.set(title="bound after the first 10M tokens", xlabel="seed", ylabel="nats per token", xticks=(1, 2, 3))
    early.legend()
    for base, seed, colour, label in (("probe", 1, "#e08e45", "without"), ("anchors", 2, OURS, "with")):
        dots = [
            (bound[base, seed, name, s] - bound[base, seed, "plain-equal-tokens", s], y)
            for y, name in enumerate(names)
            for s in (1, 2, 3)
            if (base, seed, name, s) in bound
        ]
        late.plot(*zip(*dots), "o", color=colour, alpha=0.8, label=f"from a base {label} anchors")
    late.axvline(0, color="#888888", linewidth=1)
    late.set(title="the next 10M tokens: minus no anchors, equal tokens", xlabel="nats per token")
    late.set_yticks(range(len(names)), names)
    late.legend()
    save(figure, "controls.png")


def plot_reasoning() -> None:
    """Accuracy on the published test files with intervals, beside the paper's, and training losses."""
    results = json.loads((RESULTS / "reasoning" / "results.json").read_text())
    events = events_of("reasoning")
    tasks = {"prosqa": "ProsQA", "prontoqa": "ProntoQA", "gsm8k": "GSM8K"}
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for (task, title), bars, curve in zip(tasks.items(), *axes):
        runs = {name: run for name, run in results.items() if run["task"] == task}
        for x, (name, run) in enumerate(runs.items()):
            test = next(test for test_name, test in run["tests"].items() if not test_name.endswith("generated"))
            accuracy = 100 * test["accuracy"]
            error = [[accuracy - 100 * test["low"]], [100 * test["high"] - accuracy]]
            drawn = bars.bar(x, accuracy, 0.6, yerr=error, capsize=4)
            bars.text(x, 100 * test["high"] + 1, f"{accuracy:.1f}", ha="center", fontsize=9)
            bars.hlines(float(PAPER[run["method"]][task].split()[0]), x - 0.38, x + 0.38, color="black", linestyle=":")
            points = [(e["step"], e["nll"]) for e in events if e["run"] == name and e["kind"] == "train"]
            curve.plot(*zip(*points), color=drawn.patches[0].get_facecolor(), label=run["method"])
        bars.set_xticks(range(len(runs)), [run["method"] for run in runs.values()])
        bars.set(title=title, ylim=(0, 109), ylabel="accuracy %, published test")
        curve.set(xlabel="step", ylabel="training loss, nats a token", yscale="log")
        curve.grid(alpha=0.3)
        curve.legend()
    figure.suptitle("dotted: the paper's, which starts from GPT-2 and trains far longer", fontsize=10)
    save(figure, "reasoning.png")


def events_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / folder / "metrics.jsonl").read_text().splitlines()]


def save(figure, name: str) -> None:
    figure.savefig(RESULTS / name, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    plot_speed()
    plot_adaptation()
    plot_evidence()
    plot_first_quarter()
    plot_controls()
    plot_compute()
    plot_quick()
    plot_time()
    plot_reasoning()
