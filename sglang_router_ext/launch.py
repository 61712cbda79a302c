"""Presets of servers: ``launch_configs/NAME.yaml`` -> the command that starts one. Imports no torch and no SGLang.

A preset says what it is for and what justifies it; SGLang's own parser judges its flags. There is none for a server that the
preflight would refuse.
"""

from __future__ import annotations

import math
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

import msgspec

from sglang_router_ext import TESTED_SGLANG
from sglang_router_ext.backends import BACKENDS, GATE_MODES, GATES
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import BenchRecord, Record
from sglang_router_ext.contract import KNOWN_GPUS, Gpu, expect
from sglang_router_ext.designs import PACKAGE

FOLDER = PACKAGE / "launch_configs"
DETERMINISTIC = "deterministic"
GOALS = ("low latency", "throughput", DETERMINISTIC)
UNMEASURED = "not measured"
GATE = "SGLANG_ROUTER_EXT_GATE"
NAMED_GATES = tuple(gate for gate in GATES if gate not in GATE_MODES)
GPUS = re.compile(r"([1-9]\d*) x (.+?)(, .+)?")
"""How many, of which kind, and how they are spread."""
Flag = str | int | float | bool
ALIASES = {"model": "model-path", "tensor-parallel-size": "tp-size", "pipeline-parallel-size": "pp-size"}
"""Other names of SGLang's for options that are looked at here."""
WAYS = {"launch_server": (sys.executable, "-m", "sglang.launch_server"), "serve": ("sglang", "serve")}
"""How SGLang starts a server."""


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server."""

    model: str
    """``--model-path``."""
    sglang: str
    """The version that the flags are of."""
    gpus: str
    """As in ``8 x NVIDIA H200``."""
    goal: str
    why: str
    """Where the flags come from, and what differs there."""
    measured: str
    """The run of a record that shows what our backend gains with this model's router alone, or ``not measured``."""
    flags: dict[str, Flag]
    """Options of SGLang's server without their dashes; true stands for an option without a value."""
    environment: dict[str, str] = {}
    case: str = ""
    """The case of ``bench`` that has the model's router; "" where none has."""
    name: str = ""
    """The file's."""

    @property
    def gpu(self) -> Gpu:
        return next(gpu for gpu in KNOWN_GPUS.values() if gpu.name == _gpus(self.gpus)[1])

    @property
    def gate(self) -> str | None:
        """The gate of ours that runs under whatever backend; None: the backend's choice."""
        named = self.environment.get(GATE)
        return named if named in NAMED_GATES else None

    @property
    def ours(self) -> str:
        """What of ours it runs, in words."""
        backend = str(self.flags.get("moe-runner-backend", "auto"))
        return backend if self.gate is None else f"{backend}, gate {self.gate}"

    @property
    def tokens(self) -> int:
        """Rows that a request has in a step: those that are verified, with a draft model."""
        return int(self.flags.get("speculative-num-draft-tokens", 1))


def _gpus(text: str) -> tuple[int, str]:
    found = GPUS.fullmatch(text)
    return (int(found[1]), found[2]) if found else (0, "")


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read(name: str) -> Preset:
    """The preset ``name``. Raises :class:`~sglang_router_ext.contract.ContractError` naming file, key, and what is allowed."""
    expect(name in names(), "preset", name, " | ".join(names()))
    file = FOLDER / f"{name}.yaml"
    return msgspec.structs.replace(parse(file.read_bytes(), file.name), name=name)


def parse(text: bytes, file: str) -> Preset:
    """A preset of ``text``; ``file`` names it in errors."""
    try:
        preset = msgspec.yaml.decode(text, type=Preset)
    except msgspec.DecodeError as error:  # a ValidationError, of a key, or no YAML at all
        expect(False, file, str(error).replace("\n", " "), ", ".join(Preset.__struct_fields__[:-1]))
        raise
    expect(preset.sglang == TESTED_SGLANG, f"{file}: sglang", preset.sglang, TESTED_SGLANG)
    expect(preset.goal in GOALS, f"{file}: goal", preset.goal, " | ".join(GOALS))
    count, gpu = _gpus(preset.gpus)
    known = " | ".join(one.name for one in KNOWN_GPUS.values())
    expect(count > 0 and gpu in known.split(" | "), f"{file}: gpus", preset.gpus, f"a number, x, and one of {known}")
    expect(preset.case in ("", *CASES), f"{file}: case", preset.case, " | ".join(CASES))
    gate = preset.environment.get(GATE, "auto")
    expect(gate in GATES, f"{file}: environment: {GATE}", gate, " | ".join(GATES))
    backend = preset.flags.get("moe-runner-backend", "auto")
    allowed = f"{' | '.join(BACKENDS)}, or any with {GATE} of {' | '.join(NAMED_GATES)} as its environment"
    expect(backend in BACKENDS or preset.gate is not None, f"{file}: flags: moe-runner-backend", backend, allowed)
    for flag, value in preset.flags.items():
        expect(not flag.startswith("-"), f"{file}: flags", flag, "names without dashes")
        expect(flag not in ("model-path", "model"), f"{file}: flags", flag, "the model stands under `model`")
        expect(value is not False, f"{file}: flags: {flag}", value, "a value, or true; leave it out instead")
    flagged = "enable-deterministic-inference" in preset.flags
    wanted = f"the goal {DETERMINISTIC}" if flagged else "another goal, or the flag enable-deterministic-inference"
    expect(flagged == (preset.goal == DETERMINISTIC), f"{file}: goal", preset.goal, wanted)
    sizes = [preset.flags.get(name, 1) for name in ("tp-size", "pp-size")]
    fits = all(isinstance(size, int) for size in sizes) and math.prod(map(int, sizes)) == count
    expect(fits, f"{file}: flags: tp-size", sizes[0], f"a size that takes {count} GPUs, with pp-size")
    expect(not preset.name, f"{file}: name", preset.name, "nothing: the file has it")
    return preset


def evidence(preset: Preset, records: Sequence[Record]) -> str:
    """What ``measured`` refers to, in words; raises ContractError where no record has that run."""
    if preset.measured == UNMEASURED:
        return UNMEASURED
    benched = (record for record in records if isinstance(record, BenchRecord) and record.case == preset.case)
    runs = sorted({record.run for record in benched if record.gpu == preset.gpu.name})
    wanted = f"{UNMEASURED}, or a run that timed {preset.case or 'the case that it names'}: {' | '.join(runs) or 'none'}"
    expect(preset.measured in runs, f"{preset.name}.yaml: measured", preset.measured, wanted)
    return f"its router alone, run {preset.measured}"


def given(preset: Preset, more: Sequence[str]) -> dict[str, Flag]:
    """The options among ``more``, by the names that presets have for them: SGLang's parser takes others, and the beginning of
    a name. Of several the last one holds.
    """
    known = {"model-path", "tp-size", "pp-size", "nnodes", *preset.flags}
    found: dict[str, Flag] = {}
    for word, following in zip(more, [*more[1:], "--"], strict=False):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            name = ALIASES.get(name[2:], name[2:])
            longer = [one for one in known if one.startswith(name)]
            if name not in known and name and len(longer) == 1:
                (name,) = longer
            found[name] = value if has_value else following.startswith("--") or following
    return found


def flags_of(preset: Preset, more: Sequence[str]) -> dict[str, Flag]:
    """Every option that the server gets."""
    return {"model-path": preset.model, **preset.flags, **given(preset, more)}


def contradictions(preset: Preset, more: Sequence[str]) -> list[str]:
    """Where ``more`` says something else than the preset, which may then be none of what it was made for."""
    own = flags_of(preset, ())
    others = {name: value for name, value in given(preset, more).items() if name in own and str(value) != str(own[name])}
    return [f"--{name}: got {value}, which takes the place of the preset's {own[name]}" for name, value in others.items()]


def not_written(flags: Mapping[str, Flag]) -> list[str]:
    """Why the model is not there, of one that is a folder of this machine: SGLang would look for its name elsewhere."""
    model = str(flags["model-path"])
    missing = model.startswith((".", "/")) and not pathlib.Path(model).is_dir()
    return [f"model-path: got {model}, allowed: a folder with a checkpoint"] if missing else []


def too_few(flags: Mapping[str, Flag], gpus: int) -> list[str]:
    """Why ``gpus`` GPUs are not enough for this node's part of the server; empty: they are, or SGLang will refuse the sizes."""
    try:
        tp, pp, nodes = (int(flags.get(name, 1)) for name in ("tp-size", "pp-size", "nnodes"))
    except ValueError:
        return []
    needed = tp * pp // nodes if nodes > 0 else 0
    sizes = f"--tp-size {tp}" + f" and --pp-size {pp}" * (pp != 1) + f" over {nodes} nodes" * (nodes != 1)
    return [f"GPUs: got {gpus}, allowed: {needed} or more, for {sizes}"] if gpus < needed else []


def command(preset: Preset, *, way: str = "launch_server", more: Sequence[str] = ()) -> list[str]:
    """The words that start the server; ``more`` behind all others, where SGLang's parser lets it win."""
    expect(way in WAYS, "way", way, " | ".join(WAYS))
    flags = {"model-path": preset.model, **preset.flags}
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
    return [*WAYS[way], *(word for pair in words for word in pair), *more]


def shown(words: Sequence[str], environment: dict[str, str]) -> str:
    """The command as a shell takes it, an option a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), *lines])
