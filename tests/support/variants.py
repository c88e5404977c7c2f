"""Settings of the networks that every form must reproduce."""

from tiny import MODERN

VARIANTS = {
    "published": {},
    "modern": MODERN,
    "time": {"conditioning": "sigma"},
    "one-stage": {"anchored": False},
    "causal": {"causal": True, "conditioning": "none"},
}
