"""The public release's world: its command lines (command_lines.py) and its checkpoints (checkpoints.py). Pickles, its
and torch's, are read as data and never executed (pickles.py, distributed.py)."""
