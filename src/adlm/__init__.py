"""adlm: anchored diffusion language models.

    import adlm
    lm = adlm.load()  # the small model that comes with the package, or a path
    print(lm.generate("Once upon a time", max_new_tokens=64)[0].text)

Importing the package loads nothing heavy: the names below bring torch with them when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adlm import config as config
    from adlm.api import Generation, LanguageModel, Partial, Score, load
    from adlm.api.command import train
    from adlm.finetuning import finetune

    __version__: str

# Public name -> where it is.
NAMES = {
    "load": "adlm.api:load",
    "train": "adlm.api.command:train",
    "finetune": "adlm.finetuning:finetune",
    "LanguageModel": "adlm.api:LanguageModel",
    "Generation": "adlm.api:Generation",
    "Partial": "adlm.api:Partial",
    "Score": "adlm.api:Score",
    "config": "adlm.config:",
    "__version__": "importlib.metadata:version",
}
__all__ = ["Generation", "LanguageModel", "Partial", "Score", "config", "finetune", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'adlm' has no attribute {name!r}")
    module, _, attribute = NAMES[name].partition(":")
    found = importlib.import_module(module)
    if name == "__version__":
        return found.version("adlm")
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
