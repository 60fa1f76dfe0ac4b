"""What moves gradients and parameters between ranks: rings of messages, the thread that drives them, and codecs.

May import `core`, and nothing of the rest of `train`. Begin with `ring.py`; `lane.py` runs transfers one behind the
other, `coded.py` are the same transfers with fewer bytes, `codec.py` makes and reads those bytes. `buffers.py` is the
memory that they use again, `usage.py` says how long the link was idle.
"""
