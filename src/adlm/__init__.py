"""adlm: anchored diffusion language models.

    import adlm
    lm = adlm.load()  # the small model that comes with the package, or a path
    print(lm.generate(prompt="Once upon a time", length=128)[0].text)

Importing the package loads nothing heavy: the names below bring torch with them when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adlm import config as config
    from adlm.api import Generation, LanguageModel, Partial, Score, load
    from adlm.finetuning import finetune

__all__ = ["Generation", "LanguageModel", "Partial", "Score", "finetune", "load"]


def __getattr__(name: str) -> Any:
    if name == "finetune":
        return importlib.import_module("adlm.finetuning").finetune
    if name in __all__:
        from adlm import api

        return getattr(api, name)
    if name == "config":
        return importlib.import_module("adlm.config")
    raise AttributeError(f"module 'adlm' has no attribute {name!r}")
