"""``sglang-router-ext demo``: stock SGLang and the plugin side by side. Imports no torch until it runs.

checkpoint.py   a small model with GLM-5.3-Flash's router, from seeds; weights.py draws it inside an engine
serve.py        with a GPU: two real engines, same prompts; worker.py is a process of one, engine.py runs in it
compare.py      whether their tokens agree
pace.py         which is faster, by the clock and on the GPU; trace.py reads the profiles
cpu.py          without one: SGLang's own modules on the CPU, with the oracle behind the plugin's hooks
show.py         the report as tables
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_router_ext.demo.cpu import CpuReport
    from sglang_router_ext.demo.serve import ServeReport

LAYERS, MOE_INTERMEDIATE = 4, 64
MAX_LAYERS, MAX_INTERMEDIATE = 256, 8192


def run(
    *,
    layers: int = LAYERS,
    moe_intermediate: int = MOE_INTERMEDIATE,
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
    record: bool = False,
    say: Callable[[str], None] = print,
) -> CpuReport | ServeReport:
    """Run the demo that fits this machine; ``report.agrees`` says whether everything agreed that must.

    ``keep``: folder for checkpoint, logs and traces. ``in_memory``: draw the weights on the GPU instead of writing them,
    so that a model of any size can be served. ``record``: write the times to the records of this GPU, slower ones too, if all
    else holds. These three matter with a GPU only. ``say`` gets a line of progress at a time.
    Raises :class:`~sglang_router_ext.contract.ContractError`.
    """
    import torch

    from sglang_router_ext.contract import expect
    from sglang_router_ext.demo.checkpoint import Size

    expect(2 <= layers <= MAX_LAYERS, "layers", layers, f"2 to {MAX_LAYERS}: the first has no experts")
    fits = 16 <= moe_intermediate <= MAX_INTERMEDIATE and moe_intermediate % 16 == 0
    expect(fits, "moe-intermediate", moe_intermediate, f"multiples of 16 up to {MAX_INTERMEDIATE}")
    size = Size(layers, moe_intermediate)
    if not torch.cuda.is_available():
        for option, given in (("record", record), ("in-memory", in_memory), ("keep", keep is not None)):
            expect(not given, option, "no CUDA GPU", "a machine with one: nothing is served without")
        from sglang_router_ext.demo import cpu

        return cpu.run(size, say)
    from sglang_router_ext.bench import record as records
    from sglang_router_ext.demo import serve

    if record:
        records.check_writable(torch.cuda.get_device_name())
    report = serve.run(size, say, keep=keep, in_memory=in_memory)
    if record and report.right:
        records.write([serve.record_of(report)])
    return report
