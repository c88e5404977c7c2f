"""Training, of every objective and of the reasoning tasks.

loop        `adlm train`: the training loop, top to bottom
run         what surrounds the gradient steps: resuming, updates, log lines, saving, stopping
setup       what stands before the first step: data, model, objective, the plan of the run
batches     sequences of a batch become corrupted batches; the bound on the validation split
optim       AdamW, Muon, learning rate, gradient guard, EMA
kernels     the same update in one pass over memory, on a GPU
parallel    processes and devices, DDP and FSDP2, compiling, CUDA graphs, signals
checkpoint  saving and reading checkpoints
metrics     log lines, metrics.jsonl, curves
"""
