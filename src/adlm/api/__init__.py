"""The public face: `adlm.load(...)` gives a LanguageModel that generates, streams and scores.

language_model.py  load, LanguageModel
arguments.py       what Python hands over, checked by the types of the schema
results.py         Generation, Partial, Score
scoring.py         the bound (or exact likelihood) of given text
command.py         `adlm sample`
watch.py           the live view in the terminal
"""

from adlm.api.language_model import LanguageModel, load
from adlm.api.results import Generation, Partial, Score

__all__ = ["Generation", "LanguageModel", "Partial", "Score", "load"]
