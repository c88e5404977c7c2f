"""Reasoning with anchors (section 4 of the paper): tasks, ways to lay out their examples, staged fine-tuning, answers.

examples -> methods (a Plan per stage) -> thoughts (batches through a network) -> training -> answers.
The tables are `tasks.TASKS` and `methods.METHODS`.
"""
