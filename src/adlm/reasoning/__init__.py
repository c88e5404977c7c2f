"""Reasoning with anchors (section 4 of the paper): tasks, ways to lay out their examples, staged fine-tuning, answers.

command     `adlm reason train | eval | ask | table | data`; runs beside each other and beside the paper
training    staged fine-tuning, through the `Run` and the loss of `adlm train`
tasks       where examples come from and when an answer is right; GSM8K
logic       the language of ProsQA and ProntoQA; what questions are like, and which of them a blind rule answers
generators  new questions of ProsQA and ProntoQA, and stories
methods     what an example is, and how a method lays it out, stage by stage
networks    our causal stack, or a Hugging Face model; sequences and continuous thoughts through it
answers     asking and grading a network, and its anchor slots; a diffusion model is asked by infilling
runs        reasoning runs on disk: export, answers, results; the first stage that methods share
"""
