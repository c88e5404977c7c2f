"""Compatibility with other projects. Their files are read as data; none of their code is ever executed.

command_lines.py  the public release's command lines
checkpoints.py    the public release's checkpoints
pickles.py        pickles, the release's and torch's
foreign_files.py  files of other projects: sharded checkpoints, tensors by name, vocabularies, GGUF
layouts.py        released models in their own layouts, read and written
modeling_adlm.py  the code with which transformers loads our models
"""
