"""Texts that must match: a JSON schema, a regular expression or a list of choices.

json_schema.py  a schema as a regular expression
patterns.py     the pieces it is made of: numbers between bounds, patterns inside of quotes
automaton.py    a regular expression as an automaton over tokens
matching.py     forward-backward: a step's draw, given that the finished text matches
"""
