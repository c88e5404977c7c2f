"""Reasoning with anchors (section 4 of the paper): tasks, ways to lay out their examples, staged fine-tuning, answers.

command       `adlm reason train | eval | ask | table | data`
training      staged fine-tuning, through the `Run` and the loss of `adlm train`
shared_stage  the weights after the first stage, for methods that begin alike
tasks         where examples come from and when an answer is right; GSM8K
examples      what an example is, how it reads as text
logic         the language of ProsQA and ProntoQA
generators    new questions of ProsQA and ProntoQA, and stories
questions     what questions are like, in numbers, and which of them a blind rule answers
methods       how a method lays out examples, stage by stage
networks      our causal stack, or a Hugging Face model; sequences and continuous thoughts through it
answers       asking and grading a network, and its anchor slots
runs          reasoning runs on disk: export, answers, results
comparison    runs beside each other and beside the paper
infilling     ProsQA for the diffusion model: path and answer are filled in, the path's nodes are anchors
"""
