"""Pure mathematics of masked diffusion: tensors in, tensors out; no state, no modules.

schedules.py    alpha(t), noise levels, loss weights; times of batches and of sampling steps
absorbing.py    forward process, posteriors (Eq. 1, 2, 3, 6), SUBS
categorical.py  filtering and drawing tokens
uniforms.py     random numbers as a function of (seed, counters)
checks.py       checks of values that never make a GPU wait
"""
