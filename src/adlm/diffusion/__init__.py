"""Pure mathematics of masked diffusion: tensors in, tensors out; no configuration, no state, no modules.

schedules.py    alpha(t), its derivative and inverse, loss weights, times and sampling grids
absorbing.py    forward process, posteriors (Eq. 1, 2, 3, 6), SUBS
score.py        the same process in concrete-score form (SEDD)
categorical.py  cutting and drawing tokens
uniforms.py     random numbers as a function of (seed, counters)
"""

from adlm.diffusion.schedules import SCHEDULES, Schedule, make_schedule
from adlm.diffusion.uniforms import Stream, uniforms, uniforms32

__all__ = ["SCHEDULES", "Schedule", "Stream", "make_schedule", "uniforms", "uniforms32"]
