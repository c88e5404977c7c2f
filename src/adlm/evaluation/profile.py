"""`adlm profile CHECKPOINT`: what a masked token costs when a share t of its row is masked, and where a sampler's steps
matter.

m(t) is the model's mean cross-entropy at masked positions, measured with exactly k masks for every level of k. Where it
changes fast, tokens tell much about each other, and drawing several at once loses most: `sampling.grid=FILE` puts the
steps there (`schedules.profile_grid`). The area under m is the bound itself.
"""

from typing import Any

import numpy as np
import torch

from adlm.data.preparation import prepare
from adlm.diffusion.schedules import make_schedule, parallel_cost, profile_grid, uniform_grid
from adlm.errors import require
from adlm.evaluation.perplexity import (
    BATCH_TOKENS,
    my_batches,
    open_checkpoint,
    over_ranks,
    own_data,
    progress,
    read_rows,
    token_counts,
)
from adlm.evaluation.results import data_facts, model_facts, result_path, versions, write_result
from adlm.objectives import SUBS_OBJECTIVES, row_bounds
from adlm.objectives.exact_count import draw_exact_count
from adlm.schema import Config
from adlm.training.parallel import world

LEVELS = 32
ROWS = 128
"""Rows unless eval.sequences says otherwise: each is read once for every level."""
DEGREE = 5
SHOWN_STEPS = (32, 128, 512)


@torch.no_grad()
def run_profile(cfg: Config) -> dict[str, Any]:
    require(bool(cfg.eval.checkpoint), "which model? adlm profile FOLDER (eval.checkpoint)")
    with world(cfg.train) as ranks:
        loaded = open_checkpoint(cfg, ranks)
        model, schedule = loaded.model, make_schedule(loaded.noise)
        require(
            loaded.objective.name in SUBS_OBJECTIVES,
            f"a model trained with objective.name={loaded.objective.name} has no profile: it is for masked diffusion",
        )
        with ranks.main_first():
            blocks = prepare(own_data(loaded, cfg.data), loaded.tokenizer, model.config.length, "valid")
        n = min(len(blocks), cfg.eval.sequences or ROWS)
        size = cfg.train.valid_batch_size or max(1, BATCH_TOKENS[ranks.device.type] // blocks.length)
        share_K = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
        values_NK, batches = np.zeros((n, LEVELS)), list(my_batches(n, size, ranks))
        with progress("profile", len(batches) * LEVELS, ranks) as advance:
            for indices in batches:
                rows = read_rows(blocks, indices, n, ranks)
                for k, share in enumerate(share_K.tolist()):
                    times_B = torch.full((len(indices),), share, dtype=torch.float64, device=ranks.device)
                    task = draw_exact_count(rows._replace(times_B=times_B), cfg.eval.seed, model.mask_id, schedule)
                    with ranks.autocast():
                        values_NK[indices, k] = row_bounds(model, task).cpu().numpy()
                    advance()
        measured_K = over_ranks(values_NK, ranks).sum(0) / token_counts(blocks, n).sum()
        nats_K = smooth(share_K, measured_K)
        result = {
            **model_facts(loaded, cfg.eval.checkpoint, cfg.eval.ema),
            "share": share_K.tolist(),
            "nats": nats_K.tolist(),
            "measured": measured_K.tolist(),
            "rows": n,
            "cost": {str(T): costs(T, share_K, nats_K) for T in SHOWN_STEPS},
            "data": data_facts(blocks),
            "versions": versions(ranks.device),
        }
        if ranks.is_main:
            print(describe(share_K, nats_K, result["cost"]))
            path = result_path(cfg.eval.out, cfg.eval.checkpoint, "profile.json")
            write_result(path, result)
            print(f"adlm sample {cfg.eval.checkpoint} sampling.grid={path}")
        return result


def smooth(share_K: torch.Tensor, nats_K: np.ndarray) -> torch.Tensor:
    """A curve through the measured values. Steps follow its slope, and the slope of the values themselves is noise:
    long steps would be taken where it happens to be small, and look free there."""
    return torch.from_numpy(np.polynomial.Polynomial.fit(share_K.numpy(), nats_K, DEGREE)(share_K.numpy()))


def costs(T: int, share_K: torch.Tensor, nats_K: torch.Tensor) -> dict[str, float]:
    """Nats per token that T parallel steps lose, to second order, by where the steps are."""
    grids = {"uniform": uniform_grid(T), "profile": profile_grid(T, share_K, nats_K)}
    return {name: parallel_cost(grid, share_K, nats_K) for name, grid in grids.items()}


def describe(share_K: torch.Tensor, nats_K: torch.Tensor, cost: dict[str, dict[str, float]]) -> str:
    most = max(1e-9, float(nats_K.max()))
    lines = ["masked   nats per masked token"]
    lines += [f"{share:5.0%}  {nats:7.3f} {'#' * round(50 * max(0.0, nats) / most)}" for share, nats in
              zip(share_K.tolist()[::2], nats_K.tolist()[::2])]  # fmt: skip
    lines.append("lost by parallel steps, nats per token (second order): " + "; ".join(
        f"T={T}: {c['uniform']:.4f} uniform, {c['profile']:.4f} with this profile" for T, c in cost.items()
    ))  # fmt: skip
    return "\n".join(lines)
