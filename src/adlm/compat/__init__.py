"""The public release's world: its command lines (command_lines.py), its checkpoints (checkpoints.py), which are read
as data and never executed (pickles.py)."""
