"""The rules by which published systems choose between drafts, with their parameters and defaults.

A preset follows its paper under `budget="paper"`. Otherwise it drafts from the same sources, and
what was measured decides what is verified.
"""
