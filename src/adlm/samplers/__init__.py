"""Samplers: which positions of a canvas change at each step. tables.SAMPLERS names them; docs/sampling.md lists them.

base.py       what a sampler is: Sampler, Event, Prediction
rates.py      the formulas: probability of reveal and remask at each step, one function each
scheduled.py  samplers that read no predictions: those made of rates, first-hitting, left to right
reading.py    samplers that read predictions: score, remdm-conf, confidence, entropy, anchor-first
"""
