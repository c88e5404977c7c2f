"""What the public release wrote, in our terms: its toy model, and the command lines of its README and scripts."""

from adlm.compat.checkpoints import from_release
from adlm.models import build_model
from adlm.schema import ModelConfig

MASK, V = 99, 100
MINI = {
    "hidden_size": 32,
    "cond_dim": 16,
    "length": 32,
    "n_blocks": 4,
    "n_denoiser_blocks": 2,
    "n_heads": 4,
    "dropout": 0.0,
}


def load(state_dict, **options):
    cfg = ModelConfig(**(MINI | {"dropout": 0.0} | options))
    model = build_model(cfg, V, MASK)
    named = {from_release(k, cfg.anchored): v for k, v in state_dict.items()}
    named.pop(None, None)
    model.load_state_dict(named)
    return model.eval()


README_TRAIN = """
loader.global_batch_size=64 model=small data=openwebtext-split wandb.name=adlm parameterization=subs model.length=1024
eval.compute_generative_perplexity=True sampling.steps=1000 checkpointing.save_dir="outputs/adlm/" trainer.num_nodes=1
trainer.val_check_interval=10000 trainer.log_every_n_steps=1000 trainer.max_steps=1_000_000
checkpointing.resume_from_ckpt=True time_conditioning=False enable_anchor_loss=True base_scaling_factor1=3e-3
base_scaling_factor2=1 threshold=5
"""
README_SAMPLE = """
mode=sample_eval data=openwebtext-split model=small parameterization=subs backbone=dit model.length=1024
eval.checkpoint_path="ckpts/adlm-medium.ckpt" loader.batch_size=1 loader.eval_batch_size=1 eval.perplexity_batch_size=1
sampling.steps=128 sampling.num_sample_batches=10 sampling.generated_seqs_path="outputs/adlm_samples-10_seed-5.json"
sampling.sampler=remdm-loop sampling.nucleus_p=0.9 sampling.eta=0.02 sampling.t_on=0.55 sampling.t_off=0.05
sampling.alpha_on=0.9 seed=5 T=0 time_conditioning=false +wandb.offline=true hydra.run.dir="/home/me/outputs/adlm-10-5"
"""
