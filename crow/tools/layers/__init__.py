"""Layers: commands write into a layer over the workspace, and crow then keeps or drops their changes.

This is what other parts of crow need:

- `Place(directory)` is where layers and before-images are on disk. `Place.open(roots)` opens a :class:`Layer`. Its
  `overlays` are mounted over the roots, for one command or for many: see `Confinement.overlays`. Commands in the same
  layer see each other's changes, and nobody else does.
- `look(layer, rules)` returns the :class:`Changes` in a layer: what was created, changed and deleted, and what changed
  in the workspace meanwhile. A layer whose commands still run is looked at with `is_live=True`.
- `prepare(place, changes, about)` writes a :class:`ChangeSet` to disk. Nothing has moved yet. Store the id of the
  change set in the log now. `apply(change_set)` then moves all files, or none. It raises `Conflict` if somebody else
  has changed some of these files, and names them.
- `invert(place, change_set, about)` prepares the change set that undoes another. Undo and redo are the same operation.
- `Layer.locate(path)` returns where the content of a workspace's path is, as the layer's commands see it.
- `open_child(place, id, roots)` opens the layer of a subagent, a :class:`ChildLayer`, which outlives processes. Call
  its `begin` before and its `note` after each command. `View(layer)` finds its files without a command. `merge(child)`
  says which of its changes can be kept, and `prepare_merge` prepares them.
- `Layer.drop()` removes a layer. `recover(place)` completes or takes back what a killed process has left.

All calls block. A change set belongs to this machine. The log only knows its id.

Where to look: `comparison.py` finds changes, with `conflicts.py`, `cleaning.py` and the user's rules (`rules.py`,
`ignored.py`). `keep.py` moves change sets (`sets.py`), one operation after another (`moves.py`). `children.py`,
`merge.py` and `view.py` are about subagents. `session.py` calls all of this in threads. `place.py` knows the
directories on disk, and `states.py` what is at a path.
"""

from crow.tools.layers.changes import Change, Changes, LookRules
from crow.tools.layers.children import ChildLayer, LayerBusy, RootsChanged
from crow.tools.layers.comparison import look
from crow.tools.layers.keep import Recovered, apply, invert, prepare, recover
from crow.tools.layers.merge import Merge
from crow.tools.layers.moves import Conflict
from crow.tools.layers.place import Layer, Overlay, Place
from crow.tools.layers.sets import ChangeSet, find_set

__all__ = [
    "Change",
    "ChangeSet",
    "Changes",
    "ChildLayer",
    "Conflict",
    "Layer",
    "LayerBusy",
    "LookRules",
    "Merge",
    "Overlay",
    "Place",
    "Recovered",
    "RootsChanged",
    "apply",
    "find_set",
    "invert",
    "look",
    "prepare",
    "recover",
]
