"""Published layer times as a Profile: the CSV of DeepPool's A100 measurements, one row per layer and local batch.

The time of a convolution's backward is booked on the ReLU behind it there, so a ReLU or a flatten counts to the layer
before it. Rows of identical layers are real layers. Parameters follow from the layers' sizes, in float32.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from dovetail.core.errors import InputError
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly

COLUMNS = ("file", "batch", "pos", "layer", "params_json", "input_dim", "total_us", "fw_us")
_JOINS = ("ReLU2d", "ReLU1d", "flatten")
_FLOAT = 4  # bytes


def read_layer_table(path: str | Path, model: str) -> Profile:
    """The profile of the model whose rows name a file that contains `model`, for example "vgg" or "wrn"."""
    rows = _rows(Path(path), model)
    batches = sorted({int(r["batch"]) for r in rows})
    by_batch = {b: sorted((r for r in rows if int(r["batch"]) == b), key=lambda r: int(r["pos"])) for b in batches}
    first = by_batch[batches[0]]
    layers: list[list[int]] = []
    for at, row in enumerate(first):
        if layers and row["layer"] in _JOINS:
            layers[-1].append(at)
        else:
            layers.append([at])
    made = []
    for members in layers:
        head, behind = first[members[0]], members[-1] + 1
        sizes = json.loads(head["params_json"])
        elements = _elements(first[behind]["input_dim"]) if behind < len(first) else int(sizes["out_features"])
        made.append(
            Layer(
                name=f"{head['pos']}.{head['layer']}",
                type=head["layer"],
                parameter_bytes=_FLOAT * _parameters(head["layer"], sizes),
                activation_bytes=_FLOAT * elements,
                times=tuple(_time(b, [by_batch[b][i] for i in members]) for b in batches),
            )
        )
    at = batches[-1]
    return Profile(
        name=model,
        device="A100",
        source=f"published with DeepPool, {Path(path).name}; not measured here",
        batch=at,
        layers=tuple(made),
        tensors=_tensors(made, at),
    )


def _rows(path: Path, model: str) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [c for c in COLUMNS if c not in (reader.fieldnames or ())]:
                raise InputError(path, missing[0], f"missing, expected the columns {', '.join(COLUMNS)}")
            rows = [r for r in reader if model in r["file"]]
    except OSError as e:
        raise InputError(path, "", f"cannot be read: {(e.strerror or str(e)).lower()}") from None
    if not rows:
        raise InputError(path, "file", f"expected rows of a model {model!r}, got none")
    return rows


def _time(batch: int, rows: list[dict[str, str]]) -> LayerTime:
    """Backward is the total less forward: the published parts are rounded down, each."""
    total = sum(float(r["total_us"]) for r in rows) * 1e-6
    forward = min(total, sum(float(r["fw_us"]) for r in rows) * 1e-6)
    return LayerTime(batch=batch, forward=exactly(forward), backward=exactly(total - forward))


def _elements(text: str) -> int:
    dimensions = json.loads(text)
    return math.prod(dimensions) if isinstance(dimensions, list) else int(dimensions)


def _parameters(layer: str, sizes: dict[str, Any]) -> int:
    if layer == "conv2d":
        return int(sizes["in_channels"] * sizes["out_channels"] * sizes["kernel_size"] ** 2 + sizes["out_channels"])
    if layer == "linear":
        return int((sizes["in_features"] + 1) * sizes["out_features"])
    if layer == "ResnetBottleneck":
        width, out = sizes["planes"] * sizes["base_width"] // 64 * sizes["groups"], 4 * sizes["planes"]
        convolutions = sizes["inplanes"] * width + 9 * width**2 // sizes["groups"] + width * out
        norms = 2 * (2 * width + out)
        if "downsampleParams" in sizes:
            convolutions += sizes["inplanes"] * out
            norms += 2 * out
        return int(convolutions + norms)
    return 0


def _tensors(layers: list[Layer], batch: int) -> tuple[ParameterTensor, ...]:
    """One per layer that has parameters; ready when the backward of its layer is over."""
    found, now = [], 0.0
    for index in reversed(range(len(layers))):
        now += layers[index].backward(batch)
        if nbytes := layers[index].parameter_bytes:
            found.append(
                ParameterTensor(name=layers[index].name, layer=index, bytes=nbytes, dtype="float32", ready=now)
            )
    return tuple(found)
