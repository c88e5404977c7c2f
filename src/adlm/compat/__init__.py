"""The release's world: its override names (`overrides.py`) and its checkpoints (`release.py`)."""

from adlm.compat.command_lines import RELEASE_KEYS, release_argv, rewrite

__all__ = ["RELEASE_KEYS", "release_argv", "rewrite"]
