"""Rules that join several settings of model, noise, objective and sampling; each message names the key to change."""

from adlm.errors import require
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig, SamplingConfig


def check_noise(n: NoiseConfig) -> None:
    require(
        n.sigma_min < n.sigma_max,
        f"noise.sigma_min={n.sigma_min} must be below noise.sigma_max={n.sigma_max}",
    )


def check_objective(o: ObjectiveConfig, m: ModelConfig) -> None:
    require(
        (o.name == "autoregressive") == m.causal,
        f"objective.name={o.name} does not fit model.causal={str(m.causal).lower()}: "
        + ("autoregressive needs a causal model (algo=ar or a2r)" if not m.causal
           else "a causal model needs objective.name=autoregressive"),
    )  # fmt: skip
    require(
        o.name != "anelbo" or m.anchored,
        "objective.name=anelbo needs model.anchored=true (algo=adlm); without anchors choose objective.name=nelbo",
    )
    require(
        o.name not in ("d3pm", "score-entropy") or not m.anchored,
        f"objective.name={o.name} is a baseline without anchors: set model.anchored=false (algo=d3pm or sedd)",
    )
    require(
        o.gamma_end < 0 or o.gamma_warmup < 1,
        "objective.gamma_warmup=1 leaves nothing of the run for objective.gamma_end",
    )
    require(o.name != "d3pm" or o.T >= 1, "objective.name=d3pm is a discrete-time bound: set objective.T, e.g. 1000")
    require(
        o.T == 0 or o.name in ("nelbo", "d3pm"),
        f"objective.T={o.T} (discrete time) exists for nelbo and d3pm; objective.name={o.name} needs objective.T=0",
    )


def check_sampling(s: SamplingConfig) -> None:
    if s.sampler != "remdm-loop":
        return
    require(
        0 < s.t_off < s.t_on < 1,
        f"sampling.t_off={s.t_off} must lie below sampling.t_on={s.t_on}, both inside (0, 1), for remdm-loop",
    )
    require(0 < s.alpha_on < 1, f"sampling.alpha_on={s.alpha_on} must be in (0, 1) for remdm-loop")
    require(
        s.eta * s.alpha_on <= 1 - s.alpha_on + 1e-12,
        f"sampling.eta={s.eta} re-masks more than is revealed: remdm-loop needs eta * alpha_on <= 1 - alpha_on, "
        f"so sampling.eta <= {(1 - s.alpha_on) / s.alpha_on:.4g} at sampling.alpha_on={s.alpha_on}",
    )
