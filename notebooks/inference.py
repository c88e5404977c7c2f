# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Using a trained model
#
# Load, generate, fill holes, watch a text appear, score. Any run folder, exported folder or release checkpoint will do:
# set ADLM_MODEL. Here it is the small model that comes with the package.

# %%
import os

import torch

import adlm

lm = adlm.load(os.environ["ADLM_MODEL"]) if "ADLM_MODEL" in os.environ else adlm.load()
print(lm)

# %% [markdown]
# ## Generate
# Sample i belongs to seed + i: ask for it again, alone or among others, and it is the same text. `nfe` is the number of
# network evaluations, which is smaller than the number of steps.

# %%
texts = lm.generate(n=2, length=min(64, lm.length), sampler="remdm-loop", steps=64, top_p=0.9, seed=0)
for g in texts:
    print(f"seed {g.seed}, {g.nfe} evaluations, {g.seconds:.2f} s\n{g.text}\n")
again = lm.generate(length=min(64, lm.length), sampler="remdm-loop", steps=64, top_p=0.9, seed=1)[0]
assert again.text == texts[1].text

# %% [markdown]
# ## Continue a prompt

# %%
print(lm.generate(prompt="The", length=min(48, lm.length), steps=48, top_p=0.9)[0].text)

# %% [markdown]
# ## Fill a template
# A diffusion model sees what stands after a hole as well as before it.

# %%
filled = lm.generate("a [MASK:3] of [MASK:2].", n=3, steps=16, temperature=0.8)
for g in filled:
    print(g.text)

# %% [markdown]
# ## Words that must, and must not, appear

# %%
print(lm.generate(length=min(32, lm.length), required=["is"], banned=["the"], steps=32)[0].text)

# %% [markdown]
# ## Watch
# `stream` yields the canvas after every evaluation. In a terminal: `adlm sample --watch`.

# %%
for frame in lm.stream(prompt="A", length=min(32, lm.length), steps=8, seed=3):
    print(f"{frame.nfe:3d}  {frame.text.replace(lm.tokenizer.token(lm.tokenizer.mask_id), '_')!r}")

# %% [markdown]
# ## Score
# An upper bound on the negative log-likelihood, with its standard error over draws of noise and every token's share.

# %%
score = lm.score("This is a sentence.", draws=128)
print(f"{score.nll:.3f} +- {score.stderr:.3f} nats per token, perplexity at most {score.ppl:.1f}")
for token, nats in zip(score.tokens, score.per_token):
    print(f"{lm.tokenizer.token(token)!r:>12} {nats:6.2f}")

# %% [markdown]
# ## Look inside
# Dense predictions at every position of a canvas, from both networks.

# %%
tok = lm.tokenizer
canvas = torch.tensor([[tok.bos_id, *tok.encode("This is"), tok.mask_id, tok.mask_id]])
best = lm.log_probs(canvas)[0, -2].topk(5)
print("denoiser:", [(tok.token(int(t)), round(p.exp().item(), 3)) for p, t in zip(best.values, best.indices)])
if lm.model.anchor_head is not None:
    best = lm.anchor_logits(canvas)[0, -2].softmax(-1).topk(5)
    print("anchors: ", [(tok.token(int(t)), round(p.item(), 3)) for p, t in zip(best.values, best.indices)])
