"""MGI117: every loader takes the same routers of the folder.

Looked for: files of the folder in which transformers, vLLM, SGLang or llama.cpp's converter, or
transformers with another option, finds other routers than those that are judged, bit for bit; and
an adapter that PEFT lays over a router. The line "weights" says whose answer is judged.

A finding means: which routers a model has depends on who loads it. A shard holds a router that the
index places in another one, a second copy of the weights lies beside the first, or the config names
another file.

Copies that are equal give no finding.

What to do: keep one copy of the weights in the folder, and write the index anew, as
``save_pretrained`` does. Merge an adapter that belongs to the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import listing, number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    facts = measured.run["loaders"]
    for other in facts["others"]:
        loaders = listing(other["loaders"])
        if other["routers"]:
            broken = len(other["not_finite"])
            files = ", ".join(other["files"][:3]) + (", ..." if len(other["files"]) > 3 else "")
            finding = CHECK.finding(
                tuple(other["routers"]),
                f"other routers are loaded by {loaders}{f', from {files}' if files else ''}"
                + (f": {number_of(broken, 'router')} not finite." if broken else "."),
                f"Judged: {facts['entry'] or 'the files of the folder'}.",
            )
            is_broken = broken and other["is_default"]
            yield dataclasses.replace(finding, severity="error") if is_broken else finding
        elif other["is_default"] and not other.get("is_missing"):
            yield Unknown("checkpoint", f"what {loaders} load: {other['reason']}")
    if other := facts["class_of_others"]:
        yield CHECK.finding(
            (),
            f"the class {other['class']} of 'architectures' is of family {other['family']}, the "
            "'model_type' of another.",
            "transformers goes by the type, which is judged; vLLM and SGLang by the class.",
        )
    adapter = facts["adapter"]
    if adapter and adapter["routers"]:
        yield CHECK.finding(
            tuple(adapter["routers"]),
            f"transformers with PEFT lays {adapter['file']} over them.",
            "Judged are the routers without the adapter.",
        )
    elif adapter and adapter["reason"]:
        yield Unknown("checkpoint", f"whether the adapter changes routers: {adapter['reason']}")


CHECK = Check(
    "MGI117",
    "loaders take different routers",
    "warning",
    _judge,
    facts="loaders",
    absent="these results do not say what lies beside the weights",
    severities={"release": "error"},
)
