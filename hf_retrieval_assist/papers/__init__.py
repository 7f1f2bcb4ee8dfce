"""The published systems' own rules, one module each, with their parameters and defaults.

A preset follows its paper under `budget="paper"`. Otherwise it drafts from the same sources, and
what was measured decides what is verified.
"""
