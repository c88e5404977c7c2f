"""Training, of every objective and of the reasoning tasks.

loop        `adlm train`: the training loop, top to bottom
run         what surrounds the gradient steps: resuming, updates, log lines, saving, stopping
setup       what stands before the first step: data, corrupted batches, model, objective, the plan of the run
optim       AdamW, Muon, learning rate, gradient guard, EMA
kernels     the same update in one pass over memory, on a GPU
parallel    processes and devices, DDP and FSDP2, compiling, CUDA graphs, signals
checkpoint  saving and reading checkpoints; storage: what makes one whole, and where it lies
prediction  cost and failures of a run on GPUs that are not here
metrics     log lines, metrics.jsonl, curves
"""
