"""The plots of docs/results.md, from the numbers beside it: `python scripts/plot_results.py` (extra: plot)."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RELEASE, OURS = "#b8b8b8", "#1f6f8b"


def plot_speed() -> None:
    """Bars: how many times faster than the public release, and the figures themselves."""
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


def plot_box() -> None:
    """Bound over training tokens."""
    lines = [json.loads(line) for line in (RESULTS / "box" / "metrics.jsonl").read_text().splitlines()]
    tokens = json.loads((RESULTS / "box" / "run.json").read_text())["tokens_per_step"] / 1e6
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    train = [(e["step"] * tokens, e["nelbo"]) for e in lines if e["kind"] == "train"]
    valid = [(e["step"] * tokens, e["nll"]) for e in lines if e["kind"] == "valid" and e["step"]]
    axis.plot(*zip(*train), color=RELEASE, linewidth=1, label="training loss (times reweighted up to 80%)")
    axis.plot(*zip(*valid), color=OURS, marker="o", markersize=4, label="held-out bound")
    axis.set(xlabel="million tokens", ylabel="nats per token", ylim=(3.4, 5.2))
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, "box.png")


def save(figure, name: str) -> None:
    figure.savefig(RESULTS / name, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    plot_speed()
    plot_box()
