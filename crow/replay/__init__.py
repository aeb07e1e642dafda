"""Runs the turns of a stored session again, and makes its edits again, from the log alone.

Nothing here calls a model, runs a command or writes outside a scratch directory, except `crow replay --live`, which
sends requests to the model that the user names.
"""
