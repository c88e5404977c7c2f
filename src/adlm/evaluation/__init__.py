"""Measuring models, by command.

ppl        perplexity.py: bounds and likelihoods of a corpus; intervals.py: their errors
zeroshot   zeroshot.py: the same on eight public data sets
evaluate   evaluate.py: samples over a sweep of settings; judge.py: a causal model that scores them; measures.py: every
           number about them; evaluate_report.py: the page with the frontiers
anchors    anchors.py: what both networks predict where anchors are hidden; anchor_report.py: the command and its page
           (the demo's page shows the same)
lm-eval    harness.py: our models in lm-evaluation-harness

results.py holds what all result files carry. `adlm compare` is adlm/compare.py: it also trains.
"""
