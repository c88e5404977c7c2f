"""Rules that join several sampling settings. No tensors: the command line checks them before torch is loaded."""

from adlm import tables
from adlm.errors import require
from adlm.schema import SamplingConfig


def check_sampling(cfg: SamplingConfig) -> None:
    """Refuse settings that are valid one by one, but not together.

    Those of our samplers are here. A sampler of another package states its own in `Sampler.check`: it is loaded, and
    asked.
    """
    if cfg.sampler not in tables.SAMPLERS.entries:
        tables.SAMPLERS.load(cfg.sampler, "sampling.sampler").check(cfg)
    if cfg.sampler != "remdm-loop":
        return
    require(
        cfg.t_off < cfg.t_on,
        f"sampling.t_off={cfg.t_off} must lie below sampling.t_on={cfg.t_on} for remdm-loop",
    )
    require(
        cfg.eta * cfg.alpha_on <= 1 - cfg.alpha_on + 1e-12,
        f"sampling.eta={cfg.eta} re-masks more than is revealed: remdm-loop needs eta * alpha_on <= 1 - alpha_on, "
        f"so sampling.eta <= {(1 - cfg.alpha_on) / cfg.alpha_on:.4g} at sampling.alpha_on={cfg.alpha_on}",
    )
