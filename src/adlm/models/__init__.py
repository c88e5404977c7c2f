"""Networks: one transformer stack, the two-stage anchored model made of it, and the loss behind a large head."""

from adlm.models.language_model import Cache, Hidden, LanguageModel, build_model
from adlm.models.linear_cross_entropy import linear_cross_entropy, linear_nll, linear_row_losses

__all__ = ["Cache", "Hidden", "LanguageModel", "build_model", "linear_cross_entropy", "linear_nll", "linear_row_losses"]
