"""A running cluster as contents of a page that somebody else shows: `dovetail view --cluster`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from dovetail.cluster.client import Client, Unreachable
from dovetail.view.page import Contents
from dovetail.view.page.document import Document


@dataclass(frozen=True)
class Cluster:
    """A `view.page.Source`: what the cluster's own page shows, whenever it is asked."""

    client: Client
    live: bool = True

    def contents(self) -> Contents:
        try:
            found = msgspec.json.decode(self.client.raw("/data.json"), type=Document)
        except msgspec.MsgspecError:
            raise Unreachable(f"{self.client.url}: expected a cluster of this dovetail's version") from None
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        named = "a running cluster" if self.live else f"a running cluster, {when}"
        return Contents(files=(named,), clusters=found.schedules, only=("cluster",))
