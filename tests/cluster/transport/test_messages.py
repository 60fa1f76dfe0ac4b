"""Messages that are stored keep their form."""

from __future__ import annotations

import msgspec

from dovetail.cluster.transport.messages import Described


def test_a_stored_description_keeps_its_field_names() -> None:
    """The coordinator's job store holds it as JSON, and so do the stores of earlier releases."""
    stored = b'{"type":"Described","job":"1","epoch":2,"workers":3,"iterations":10,"off_device":0.5}'
    described = msgspec.json.decode(stored, type=Described)
    assert described == Described(job="1", attempt=2, workers=3, iterations=10, off_device=0.5)
    assert msgspec.json.encode(described) == stored
