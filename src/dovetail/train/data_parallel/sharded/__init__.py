"""The second line, `dovetail.optimizer`: every bucket whole or split, and a rank updates its share of the split ones.

May import `wire/` and, only from `optimizer.py`, the room above it. Begin with `optimizer.py` and `exchange.py`;
`slot.py` has the states of a gradient, `scattered.py` what stands in `.grad` and `gradients.py` what is behind it,
`together.py` calls that all ranks must make, `arriving.py` parameters on their way, `shard_layout.py` who has which
elements, `transfers.py` how a bucket travels, `references.py` who else reads a parameter, `reducer_surface.py` what
others expect of a DDP's reducer, `compiled.py` what torch.compile needs.
`whole_tensors.py` has optimisers that need whole parameters, and their owners.
"""
