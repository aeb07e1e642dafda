"""Builds the requests of a stored session again, from the log alone.

Nothing here calls a model, runs a tool or writes outside a scratch directory, except `crow replay --live`, which sends
requests to the model that the user names.
"""
