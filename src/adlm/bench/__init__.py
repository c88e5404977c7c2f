"""`adlm bench`: how fast this machine trains and samples, beside the slow twin that computes the same, in one run.

dense.py    the twins: every position through every head, every step of the sampler
train.py    one optimizer step
sample.py   one step of a sampler
command.py  `adlm bench train | sample`
"""
