"""Counters and a histogram in Prometheus' text format (version 0.0.4); written here because it is one page.

Workers and the event loop count at once, so every change takes the one lock.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 300.0)
Labels = tuple[str, ...]


class ServerMetrics:
    """What the server counts. Gauges are added by the service."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.help: dict[str, tuple[str, str, Labels]] = {}
        self.values: dict[str, dict[Labels, float]] = {}
        self.buckets: dict[str, dict[Labels, list[float]]] = {}
        self.gauges: dict[str, Callable[[], Iterable[tuple[Labels, float]]]] = {}
        path, model = ("path",), ("model",)
        self.counter(
            "adlm_requests_total", "HTTP requests by route and status (499: the client left).", ("path", "status")
        )
        self.histogram(
            "adlm_request_seconds",
            "Time from the end of a request's head, before its body, to the end of its answer.",
            path,
        )
        self.counter(
            "adlm_rows_total", "Sequences by how they ended: finished, cancelled or failed.", ("model", "outcome")
        )
        self.counter("adlm_tokens_total", "Tokens drawn.", model)
        self.counter("adlm_evaluations_total", "Network evaluations of single sequences.", model)
        self.counter("adlm_steps_total", "Steps of the engine: each evaluates every sequence in a slot.", model)

    def counter(self, name: str, help: str, labels: Labels = ()) -> None:
        self.help[name], self.values[name] = ("counter", help, labels), {}

    def histogram(self, name: str, help: str, labels: Labels = ()) -> None:
        self.help[name], self.values[name], self.buckets[name] = ("histogram", help, labels), {}, {}

    def gauge(self, name: str, help: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """A value that is read when somebody asks."""
        self.help[name], self.gauges[name] = ("gauge", help, labels), read

    def add(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        with self.lock:
            self.values[name][labels] = self.values[name].get(labels, 0) + amount

    def observe(self, name: str, seconds: float, labels: Labels = ()) -> None:
        with self.lock:
            counts = self.buckets[name].setdefault(labels, [0.0] * (len(SECONDS) + 1))
            counts[bisect_left(SECONDS, seconds)] += 1
            self.values[name][labels] = self.values[name].get(labels, 0) + seconds

    def text(self) -> str:
        """Everything, as `GET /metrics` answers."""
        lines = []
        with self.lock:
            for name, (kind, help, labels) in self.help.items():
                lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
                if kind == "gauge":
                    lines += [line(name, labels, at, value) for at, value in self.gauges[name]()]
                elif kind == "counter":
                    lines += [line(name, labels, at, value) for at, value in self.values[name].items()]
                else:
                    for at, counts in self.buckets[name].items():
                        below = 0.0
                        for edge, count in zip((*map(str, SECONDS), "+Inf"), counts):
                            below += count
                            lines.append(line(f"{name}_bucket", (*labels, "le"), (*at, edge), below))
                        lines.append(line(f"{name}_sum", labels, at, self.values[name][at]))
                        lines.append(line(f"{name}_count", labels, at, below))
        return "\n".join(lines) + "\n"


def line(name: str, labels: Labels, at: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{escape(text)}"' for label, text in zip(labels, at))
    return f"{name}{{{pairs}}} {value:.10g}" if pairs else f"{name} {value:.10g}"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def merged(own: str, others: list[str]) -> str:
    """The metrics of a front, and the sums of its workers' for what it does not count itself."""
    known = {line.split()[2] for line in own.splitlines() if line.startswith("# TYPE")}
    counted = {re.sub(r"[{ ].*", "", line) for line in own.splitlines() if line and not line.startswith("#")}
    known = {name for name in known if any(sample.startswith(name) for sample in counted)}
    sums: dict[str, float] = {}
    for text in others:
        for sample in text.splitlines():
            name = sample.split()[2] if sample.startswith("#") else re.sub(r"(_bucket|_sum|_count)?[{ ].*", "", sample)
            if name in known:
                continue
            key, value = (sample, 0.0) if sample.startswith("#") else sample.rsplit(" ", 1)
            sums[key] = sums.get(key, 0.0) + float(value)
    heads = {line for line in own.splitlines() if line.startswith("#")}
    lines = [key if key.startswith("#") else f"{key} {value:.10g}" for key, value in sums.items()]
    return own + "".join(f"{line}\n" for line in lines if line not in heads)
