"""The public API: `adlm.load(...)` returns a LanguageModel that generates, streams and scores.

language_model.py  load, LanguageModel, and its results: Generation, Partial
scoring.py         the bound (or exact likelihood) of a given text: Score
command.py         `adlm sample`, with the live view in the terminal
"""

from adlm.api.language_model import Generation, LanguageModel, Partial, load
from adlm.api.scoring import Score

__all__ = ["Generation", "LanguageModel", "Partial", "Score", "load"]
