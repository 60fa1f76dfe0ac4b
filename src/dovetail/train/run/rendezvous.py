"""How the launchers of several machines find each other: torchrun's own arguments, under torchrun's names."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dovetail.core.errors import Error


@dataclass(frozen=True)
class Rendezvous:
    """One launcher's place among those of all machines. Every field is the torchrun argument of that name."""

    nnodes: str
    """Number of machines, or "least:most"."""
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    """HOST:PORT of the machine at which the others call, reachable for all."""
    rdzv_backend: str | None = None
    """torchrun's "static" if this machine has a rank, else "c10d", which gives ranks in the order of arrival."""
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    """The address of this machine at which the others can reach its ranks."""

    def arguments(self) -> list[str]:
        """torchrun's command line. Raises an Error where the launchers could not find each other."""
        least, _, most = self.nnodes.partition(":")
        if not (least.isdecimal() and int(least) > 0 and (not most or (most.isdecimal() and int(most) >= int(least)))):
            raise Error(f"nnodes: expected a number of machines or LEAST:MOST, got {self.nnodes!r}")
        if self.rdzv_endpoint is None and self.master_addr is None:
            raise Error(
                f"nnodes {self.nnodes}: expected rdzv-endpoint, the HOST:PORT of one machine that all of them can reach"
            )
        backend = self.rdzv_backend or ("c10d" if self.node_rank is None else "static")
        if backend == "static" and self.node_rank is None:
            raise Error("rdzv-backend static: expected node-rank, from 0 on, another on every machine")
        given = {field.name: getattr(self, field.name) for field in fields(self)} | {"rdzv_backend": backend}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
