#!/bin/bash
# Draw samples under Slurm. A job that is cut short goes on where its file ends when it is queued again.
#
#   sbatch --gpus=1 scripts/slurm_sample.sh runs/owt sampling=remdm-loop sampling.n=5000 out=samples.jsonl
#SBATCH --job-name=adlm-sample
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

srun python -m adlm sample "$@"
