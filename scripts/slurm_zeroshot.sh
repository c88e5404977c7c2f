#!/bin/bash
# Zero-shot perplexity of one checkpoint on the paper's data sets, one JSON line each.
#
#   sbatch --gpus=1 scripts/slurm_zeroshot.sh runs/owt zeroshot.jsonl data.root=FOLDER_WITH_LOCAL_COPIES
#
# Without data.root the sets come from the Hugging Face hub. A set that is already in the file is not run again.
#SBATCH --job-name=adlm-zeroshot
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

checkpoint=${1:?"usage: slurm_zeroshot.sh CHECKPOINT RESULTS.jsonl [key=value ...]"}
results=${2:?"usage: slurm_zeroshot.sh CHECKPOINT RESULTS.jsonl [key=value ...]"}
shift 2
touch "$results"
for data in lambada ptb wikitext2 wikitext103 lm1b-gpt2 ag_news pubmed arxiv; do
    if ! grep -q "\"set\": \"$data\"" "$results"; then
        line=$(srun python -m adlm ppl "$checkpoint" data="$data" "$@" --json | tail -n 1)
        echo "{\"set\": \"$data\", \"result\": $line}" >> "$results"
    fi
done
