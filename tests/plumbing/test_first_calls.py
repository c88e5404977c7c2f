"""What a user guesses first: calls from threads, prompts as texts, typed settings, a quick start."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from exports import export

import adlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("calls") / "export")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder, device="cpu")


# Threads

SAMPLERS = ("mdlm", "remdm-cap", "confidence")


def call(lm, i):
    """One of many kinds of calls, and what it says."""
    kind, seed = i % 5, i // 5
    if kind == 0:
        return lm.generate(n=2, steps=6, seed=seed, sampler=SAMPLERS[i % 3])[1].tokens
    if kind == 1:
        return lm.generate("ab [MASK:4] c", steps=4, seed=seed)[0].tokens
    if kind == 2:
        *_, last = lm.stream(prompt="ab", length=16, steps=8, seed=seed)
        return last.tokens
    if kind == 3:
        return next(iter(lm.stream(length=16, steps=8, seed=seed))).tokens  # and the rest is given up
    return lm.score("some text", draws=4).nll


def test_calls_from_many_threads_say_what_one_thread_says(lm):
    alone = [call(lm, i) for i in range(200)]
    start = threading.Barrier(16)
    interval = sys.getswitchinterval()

    def together(thread):
        start.wait(20)
        return {i: call(lm, i) for i in range(thread, 200, 16)}

    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(16) as pool:
            found = {i: said for part in pool.map(together, range(16), timeout=60) for i, said in part.items()}
    finally:
        sys.setswitchinterval(interval)
    assert [i for i in range(200) if found[i] != alone[i]] == []


def test_a_stream_that_is_given_up_inside_a_step_is_dropped_later(lm):
    """The garbage collector closes generators at any moment, also in the middle of another one's step."""
    engine = lm.engine(16)
    other = engine.stream(lm.request(steps=8))
    next(other)
    with engine.lock:
        other.close()  # as the collector would: without waiting for the lock
    assert lm.generate(steps=4, seed=3)[0].tokens == lm.generate(steps=4, seed=3)[0].tokens
    assert not engine.busy and not engine.awaited


# A quick start


def test_sampling_on_a_cpu_does_not_import_the_compiler(folder):
    code = (
        f"import sys, adlm; lm = adlm.load({str(folder)!r}); lm.generate(steps=2); lm.score('ab', draws=1)\n"
        "slow = ('torch._dynamo', 'torch._inductor', 'torch.distributed.checkpoint', 'sympy', 'hydra', 'pandas')\n"
        "print([name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
