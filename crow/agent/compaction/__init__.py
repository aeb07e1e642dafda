"""Compaction: keeping the context small without losing anything.

Strategy: `window`, `measuring` and `limits` say how full the context is and may be, `planner` decides, `contents` keeps
words and files, `summary` asks the model, `compactor` puts them together on a branch, `outcome` and `breakdown` have
the words and the picture for the user, `hooks` lets others have a say. The history itself is never changed: a mask or
a checkpoint is one more entry, and the projection does the rest.
"""
