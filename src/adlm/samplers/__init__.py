"""Samplers: which positions of a canvas change at each step. tables.SAMPLERS names them; docs/sampling.md lists them.

base.py       the interface: Sampler, Event, Prediction
scheduled.py  the formulas: probability of reveal and remask at each step, one function each; samplers that read no
              predictions: those defined by such rates, first-hitting, left to right
reading.py    samplers that read predictions: score, remdm-conf, confidence, entropy, anchor-first
"""
