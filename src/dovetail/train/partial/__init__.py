"""`dovetail.PartialBackprop`: each worker backpropagates through the last segments of the model only.

May import `core`, `measure` and `planning`.
Begin with `module.py`; `courier.py` averages gradients over those who have them.
"""
