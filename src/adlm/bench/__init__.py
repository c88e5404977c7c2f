"""`adlm bench`: how fast this machine trains and samples, beside the slow implementation of the same, in one run.

dense.py    the reference implementation: every position through every head, every step of the sampler
measure.py  one optimizer step, one step of a sampler, and `adlm bench train | sample`
"""
