"""`dovetail.PartialBackprop`: each worker backpropagates through the last segments of the model only.

May import `core`, `measure` and `planning`.
Begin with `module.py`, then `lifecycle.py` (its states) and `planned.py` (what happens at each event).
"""
