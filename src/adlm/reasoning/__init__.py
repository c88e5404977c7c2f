"""Reasoning with anchors (section 4 of the paper): tasks, ways to lay out their examples, staged fine-tuning, answers.

command     `adlm reason train | eval | ask | table | data`; tables of runs beside the paper's numbers
training    staged fine-tuning, through the `Run` and the loss of `adlm train`
tasks       where examples come from and when an answer is right; GSM8K
logic       the language of ProsQA and ProntoQA; statistics of questions, and blind rules that answer some of them
generators  new questions of ProsQA and ProntoQA, and stories
methods     examples, and how a method lays them out, stage by stage
networks    our causal stack, or a Hugging Face model; sequences and continuous thoughts through it
answers     answering questions with a network, grading, anchor slots; a diffusion model answers by infilling
runs        reasoning runs on disk: export, answers, results; the first stage that methods share
"""
