"""Reasoning with anchors (section 4 of the paper): tasks, ways to lay out their examples, staged fine-tuning, answers.

command     `adlm reason train | eval | table | data`
training    staged fine-tuning, through the `Run` of `adlm train`
tasks       where examples come from and when an answer is right; GSM8K
examples    what an example is, how it reads as text
logic       the language of ProsQA and ProntoQA
generators  new questions of ProsQA and ProntoQA, and stories
methods     how a method lays out examples, stage by stage
networks    our causal stack, or a Hugging Face model; sequences and continuous thoughts through it
answers     asking and grading a network; reasoning runs on disk
"""
