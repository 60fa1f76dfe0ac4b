"""`dovetail profile` and `dovetail network`: measure a model, measure a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.core.network import CollectiveName, Contention, Network
    from dovetail.core.profile import Profile

MIB = 2**20
MODEL = """mlp, cnn, gpt, resnet50; hf:resnet-50, hf:bert-base, hf:gpt2, hf:vit-base, with options as in
"hf:bert-base?layers=4"; or a Python file that defines model(), batch(size) and, where needed, loss(output)."""
EMULATED = "DOVETAIL_EMULATED"
"""Set for ranks whose network is rate-limited on purpose."""
MaxNoise = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Refuse a result whose error is above this share; default: 0.5, never: 1."),
]
START_SECONDS = 90.0
"""What starting the ranks may take beside measuring, on a busy machine."""


def profile(
    model: Annotated[str, typer.Argument(metavar="SCRIPT|MODEL", help=MODEL)],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the profile.")] = Path(
        "job.json"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Local batch.")] = 16,
    batches: Annotated[
        str | None,
        typer.Option(metavar="1,2,4", help="Other local batches to measure too; default: a half and a quarter."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps for each batch.")] = 20,
    name: Annotated[str | None, typer.Option(help="The profile's name; default: the model's.")] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Also find out where the model branches, for `dovetail plan --burst`.")
    ] = False,
    max_noise: MaxNoise = None,
    json: console.Json = False,
) -> None:
    """Measure a model: the time of every layer, and when each gradient is ready."""
    from dovetail import measure
    from dovetail.core import files
    from dovetail.core.errors import Error
    from dovetail.view import tables

    sizes = sorted({batch, *inputs.counts(batches)}) if batches else None
    inputs.not_an_input(output, model)
    console.writable(output)
    with console.stdout_to_stderr(), console.working(f"loading {model}") as tell:
        workload = measure.load(model)
        found = measure.profile(
            workload.model,
            workload.make_batch(batch),
            loss=workload.loss,
            batches=sizes,
            steps=steps,
            name=name or workload.name,
            progress=tell,
        )
        if graph:
            from dovetail.measure.layer_graph import input_names, with_graph

            try:
                fills = input_names(workload.model, workload.make_batch(1))
                found = with_graph(found, workload.model, inputs=fills)
            except Error as e:
                console.say(f"note: {e}")
    _judge("repeated passes", found, max_noise)
    files.write(output, found)
    console.wrote(output)
    if json:
        console.emit(console.builtins(found))
    else:
        console.show(tables.profile(found))


def network(
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the network.")] = Path(
        "net.json"
    ),
    preset: Annotated[
        str | None, typer.Option(metavar="10gbe-16", help="Known figures instead of a measurement: FABRIC-RANKS.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=2, help="Local ranks to measure with; default: 2.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="1gbit", help="Join the local ranks by an emulated network of this speed (root)."),
    ] = None,
    max_mib: Annotated[float, typer.Option(min=0.001, max=65536, help="The largest message, in MiB.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, max=86400, help="About how long to measure.")] = 20,
    collectives: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="What to measure; plans of buckets need all_reduce only.")
    ] = "all_reduce,reduce_scatter,all_gather,all_to_all",
    name: Annotated[str | None, typer.Option(help="The network's name.")] = None,
    contention: Annotated[
        bool | None,
        typer.Option(
            "--contention/--no-contention",
            help="Also measure what computing and communicating cost each other; default: unless --rate is given.",
        ),
    ] = None,
    max_noise: MaxNoise = None,
    json: console.Json = False,
) -> None:
    """Measure a network, or take the figures of a known one.

    Under torchrun it measures the group it runs in; otherwise it starts ranks on this machine.
    """
    import msgspec

    from dovetail.core import files
    from dovetail.view import tables

    names = inputs.collectives(collectives)
    if os.environ.get("RANK", "0") == "0":  # the others write nothing
        console.writable(output)
    if preset and (workers or rate):
        raise typer.BadParameter("takes neither --workers nor --rate: a preset is not measured", param_hint="--preset")
    if preset:
        from dovetail.measure.presets import preset as known

        found = known(preset)
        found = msgspec.structs.replace(found, name=name or found.name)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if workers or rate:
            raise typer.BadParameter("--workers and --rate start ranks, but this already is one (RANK is set)")
        beside = contention is not False
        measured = _measure_group(names, int(max_mib * MIB), seconds, name, contention=beside)
        if measured is None:
            return  # rank 0 speaks for all
        found = measured
    else:
        options = ["--max-mib", str(max_mib), "--seconds", str(seconds), "--collectives", ",".join(names)]
        # The ranks leave the verdict to us. Devices behind an emulated link compute elsewhere, not on our cores.
        options += [
            "--max-noise",
            "1",
            "--no-contention" if contention is False or (rate and not contention) else "--contention",
        ]
        found = _measure_here(workers or 2, rate, seconds, name, options)
    if found.measured:
        _judge("repeated collectives", found, max_noise)
    if found.contention:
        _tell_contention(found.contention)
    files.write(output, found)
    console.wrote(output)
    if json:
        console.emit(console.builtins(found))
    else:
        console.show(tables.network(found))


def _judge(repeats: str, found: Profile | Network, max_noise: float | None) -> None:
    """Prints how noisy a measurement is and what others took; an Error if it says nothing."""
    from dovetail.core.errors import Error
    from dovetail.core.profile import NOISY, WORTHLESS
    from dovetail.view.units import percent

    said = f"{repeats} leave an error of {percent(found.noise)}; {percent(found.lost)} of the time was lost to others"
    if found.noise > (WORTHLESS if max_noise is None else max_noise):
        raise Error(f"worthless: {said}: measure again on a quiet machine, or accept it with --max-noise 1")
    if found.noise > NOISY:
        said += "; warning: gains below that error are not to be believed, measure again on a quiet machine"
    console.say(said)


def _tell_contention(found: Contention) -> None:
    from dovetail.view.units import percent, seconds

    console.say(
        f"computing takes {percent(found.compute)} longer beside a collective, a collective takes "
        f"{percent(found.collective)} longer beside computing; {seconds(found.gap)} between two collectives"
    )


def _measure_group(
    collectives: list[CollectiveName], max_bytes: int, seconds: float, name: str | None, *, contention: bool
) -> Network | None:
    """Measures the group that torchrun, or `_measure_here`, has started; the network on rank 0, None elsewhere."""
    import torch.distributed as dist

    from dovetail import measure
    from dovetail.measure.contention import busy_device

    dist.init_process_group("nccl" if _has_nccl() else "gloo")
    try:
        with console.working(f"measuring {dist.get_world_size()} ranks, about {seconds:g} s"):
            found = measure.network(
                max_bytes=max_bytes,
                collectives=collectives,
                budget=seconds,
                name=name,
                emulated=EMULATED in os.environ,
                compute=busy_device("cuda" if _has_nccl() else "cpu") if contention else None,
            )
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _has_nccl() -> bool:
    import torch
    import torch.distributed as dist

    return torch.cuda.is_available() and dist.is_nccl_available()


def _measure_here(workers: int, rate: str | None, seconds: float, name: str | None, options: list[str]) -> Network:
    """Starts this same command once per rank, on loopback or on an emulated network, and reads what it wrote."""
    import contextlib

    from dovetail.core import files
    from dovetail.core.network import Network
    from dovetail.core.scratch import scratch
    from dovetail.emulate.launch import launch
    from dovetail.emulate.shaped_network import shaped

    links = f"links of {rate}, emulated" if rate else "loopback"
    name = name or (f"emulated-{rate}-{workers}" if rate else f"loopback-{workers}")
    with (
        scratch("network") as folder,
        shaped(workers, rate=rate) if rate else contextlib.nullcontext() as wires,
        console.working(f"measuring {workers} ranks on {links}, about {seconds:g} s"),
    ):
        file = Path(folder, "net.json")
        argv = ["-m", "dovetail", "network", "-o", str(file), "--name", name, *options]
        env = {EMULATED: "1"} if rate else {}
        launch(argv, ranks=workers, network=wires, timeout=3 * seconds + START_SECONDS, env=env)
        return files.read(file, Network)
