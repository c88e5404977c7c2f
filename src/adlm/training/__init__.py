"""Training, for every objective and the reasoning tasks.

loop        `adlm train`: the training loop, top to bottom
run         everything around the gradient steps: resuming, updates, log lines, saving, stopping
setup       everything before the first step: data, corrupted batches, model, objective, the plan of the run
optim       AdamW, Muon, learning rate, gradient guard, EMA
kernels     the same update in one pass over memory, on a GPU
parallel    processes and devices, DDP and FSDP2, compiling, CUDA graphs, signals
watch       detecting ranks that hang
checkpoint  saving and reading checkpoints; storage: their manifest, and checkpoints at a URL
prediction  predicted cost and failures of a run on other GPUs
metrics     log lines, metrics.jsonl, curves
"""
