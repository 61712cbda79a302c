"""Measured results: one JSON object a line in ``records/<gpu>.jsonl``, written only by runs of ``bench`` and ``check``.

A file keeps the newest line of each result, so that it stays small and a change of it can be read. A line whose
``source_hash`` is not that of today's sources is stale: it speaks of a kernel that is no more. Imports no torch.
"""

from __future__ import annotations

import datetime
import pathlib
import re
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from sglang_router_ext.bench import machine
from sglang_router_ext.designs import DESIGNS, PACKAGE, Design, source_hash
from sglang_router_ext.files import write_whole

DIRECTORY = PACKAGE / "records"
ROUTER = "gate+selection"
PLANNED = "gate+selection+plan"
FLOOR = "floor-read"
HOST = {PLANNED: "sglang-pair+align", "gate+selection": "sglang-pair", "gate": "sglang-gemm", "selection": "sglang-topk"}
"""What SGLang runs, per group of stages."""
NOT_RACED = {("sglang-pair+align", ROUTER), ("flashinfer-gemm", "gate")}
"""Peers and stages that are not raced: one does more than its stages say in older records, the other's logits are bf16."""
WIDE = 1.25
"""p90 / p10 from which on a time is shown with both."""


class RecordError(ValueError):
    """A line is not a record; the text names the file, the line and the cause."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which run a line comes from. Lines of other kinds have these fields and any others."""

    schema: Literal[1]
    run: str
    """Shared by everything that one process measured."""
    time: str
    """When the run began, UTC, ISO 8601."""
    gpu: str
    """As the driver names it."""
    commit: str
    """Hash of the checkout, ``dirty``, or ``unknown`` outside one."""
    versions: dict[str, str | None]
    """Library -> version, None where it is not installed."""


class BenchRecord(Identity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One time: a design, or a peer, on one case at one row count. Times in microseconds."""

    case: str
    experts: int
    hidden: int
    topk: int
    rows: int
    design: str
    stages: str
    """Joined by ``+``; ``floor`` for the floors."""
    cache: Literal["cold", "warm"]
    median_us: float
    p10_us: float
    p90_us: float
    kernels: int
    replays: int
    correct: Literal[True]
    """A wrong result has no time, so no line says false."""
    source_hash: str
    """Of the design's sources; "" for peers and floors."""
    clocks: dict[str, int | None]
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return ("bench", self.case, self.cache, self.rows, self.stages, self.design)


class CheckRecord(Identity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole ``check`` of one design: how many cases it was judged on, and how many of them failed."""

    kind: Literal["check"]
    design: str
    stages: str
    cases: int
    failures: int
    source_hash: str

    @property
    def key(self) -> tuple[Any, ...]:
        return ("check", self.design)


class OtherRecord(msgspec.Struct, frozen=True):
    """A line of another kind, kept as it is. A newer one takes its place if all of its texts and whole numbers are the same:
    they say what was measured, while fractions, lists and objects are what was found.
    """

    kind: str
    identity: Identity
    line: bytes

    @property
    def key(self) -> tuple[Any, ...]:
        fields = msgspec.json.decode(self.line)
        names = sorted(fields.keys() - set(Identity.__struct_fields__))
        return ("other", *(f"{name}={fields[name]}" for name in names if isinstance(fields[name], str | int)))


Record = BenchRecord | CheckRecord | OtherRecord


def is_raced(line: Any) -> bool:
    """Whether the time of ``line``, of a design or a peer, is compared with others of its stages."""
    return (line.design, line.stages) not in NOT_RACED


def other_record(identity: Identity, kind: str, fields: dict[str, Any]) -> OtherRecord:
    record = decode(msgspec.json.encode(msgspec.structs.asdict(identity) | {"kind": kind} | fields))
    assert isinstance(record, OtherRecord)
    return record


def soak_record(identity: Identity, design: str, case: str, found: Sequence[Any], source_hash: str) -> OtherRecord:
    """A ``soak`` as a record; ``found`` as ``bench/soak.py`` gives it. A newer one takes an older one's place."""
    body = {
        "design": design,
        "case": case,
        "rows": [one.rows for one in found],
        "replays": [one.replays for one in found],
        "judged": [one.judged for one in found],
        "failures": [len(one.failures) for one in found],
        "seconds": [round(one.seconds, 1) for one in found],
        "sources": [source_hash],
    }
    return other_record(identity, "soak", body)


def flips_record(
    identity: Identity, case: str, rows: int, seed: int, batches: Sequence[int], found: Sequence[Any]
) -> OtherRecord:
    """A ``flips`` as a record; ``found`` as ``bench/flips.py`` gives it. A newer one takes an older one's place."""
    hashes = {one.path: current_hash(one.designs or one.path) for one in found if one.row_stable}
    body = {
        "case": case,
        "rows": rows,
        "seed": seed,
        "batches": ",".join(map(str, batches)),
        "flips": [msgspec.structs.asdict(one) for one in found],
        "sources": list(hashes.values()),
    }
    return other_record(identity, "flips", body)


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def new_run(gpu: str) -> Identity:
    """The identity of a run that starts now in this process on the GPU that the driver calls ``gpu``."""
    run = uuid.uuid4().hex[:12]
    return Identity(schema=1, run=run, time=now(), gpu=gpu, commit=machine.commit(), versions=machine.versions())


def microseconds(median: float, p10: float, p90: float) -> str:
    """A time; where its replays are far apart, with their spread, since a median of two clusters says little."""
    spread = f" ({p10:.1f} to {p90:.1f})" if p90 > WIDE * p10 else ""
    return f"{median:.2f}{spread}"


def identity_of(record: Record) -> Identity:
    return record.identity if isinstance(record, OtherRecord) else record


def short_name(gpu: str) -> str:
    """``NVIDIA H200`` -> ``h200``, ``NVIDIA H100 80GB HBM3`` -> ``h100``: the name of a GPU's file of records."""
    model = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    return model.group().lower() if model else re.sub(r"\W+", "-", gpu.lower()).strip("-")


def path_of(gpu: str, directory: pathlib.Path = DIRECTORY) -> pathlib.Path:
    return directory / f"{short_name(gpu)}.jsonl"


def decode(line: bytes) -> Record:
    """One line as the record that it is; raises :class:`msgspec.MsgspecError` where it is none."""
    kind = msgspec.json.decode(line, type=dict).get("kind")
    if kind is None:
        return msgspec.json.decode(line, type=BenchRecord)
    if kind == "check":
        return msgspec.json.decode(line, type=CheckRecord)
    return OtherRecord(str(kind), msgspec.json.decode(line, type=Identity), line)


def encode(record: Record) -> bytes:
    return record.line if isinstance(record, OtherRecord) else msgspec.json.encode(record)


def read(path: pathlib.Path) -> list[Record]:
    """Every record of a file; raises :class:`RecordError` for a line that is none, or that belongs to another GPU's file."""
    found = []
    try:
        if path.exists() and not path.is_file():
            raise RecordError(f"{path}: not a file; allowed: a file of lines as bench, check and demo write them")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            allowed = "allowed: lines as bench, check and demo write them; git checkout brings the file back"
            raise RecordError(f"{path.name}:{number}: {error}; {allowed}") from error
        gpu = identity_of(record).gpu
        if path_of(gpu, path.parent) != path:
            raise RecordError(f"{path.name}:{number}: gpu: got {gpu}, whose file is {path_of(gpu).name}")
        found.append(record)
    return found


def read_all(directory: pathlib.Path = DIRECTORY) -> list[Record]:
    """The records of every GPU."""
    return [record for path in sorted(directory.glob("*.jsonl")) for record in read(path)]


def check_writable(gpu: str, directory: pathlib.Path = DIRECTORY) -> None:
    """Raise :class:`RecordError` if :func:`write` could not do it, so that no long run ends with that."""
    path = path_of(gpu, directory)
    try:
        if path.exists():
            read(path)
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise RecordError(f"record: got {directory}: {error.strerror}, allowed: a folder that can be written") from error


def write(records: Iterable[Record], directory: pathlib.Path = DIRECTORY) -> list[pathlib.Path]:
    """Put ``records`` into the files of their GPUs, each in place of an older one with the same key. Files change whole."""
    files: dict[pathlib.Path, list[Record]] = {}
    for record in records:
        files.setdefault(path_of(identity_of(record).gpu, directory), []).append(record)
    for path, new in files.items():
        merged = {record.key: record for record in [*(read(path) if path.exists() else []), *new]}
        lines = [encode(merged[key]) for key in sorted(merged, key=_order)]
        write_whole(path, b"\n".join(lines) + b"\n")
    return list(files)


def _order(key: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """Sorts keys whose parts are numbers or texts."""
    return [(isinstance(part, str), str(part)) if not isinstance(part, int) else (False, part) for part in key]


def current_hash(name: str, designs: Sequence[Design] = DESIGNS) -> str | None:
    """The hash of today's sources of a design, or of several chained as ``gate+selection``; None: not in the table."""
    table = {design.name: design for design in designs}
    parts = name.split("+")
    if not all(part in table for part in parts):
        return None
    if len(parts) == 1:
        return table[name].source_hash
    return source_hash(tuple({source for part in parts for source in table[part].sources}))


def stale(records: Iterable[Record], designs: Sequence[Design] = DESIGNS) -> list[str]:
    """Records that speak of kernels that are no more, one text per design, GPU and kind of record. Peers do not age."""
    found: dict[str, int] = {}
    for record in records:
        if isinstance(record, OtherRecord) or not record.source_hash:
            continue
        now = current_hash(record.design, designs)
        if now != record.source_hash:
            kind = "check" if isinstance(record, CheckRecord) else "bench"
            cause = "the design is not in the table" if now is None else f"sources {record.source_hash}, today {now}"
            text = f"{record.design} on {record.gpu}: {kind} of {record.time[:10]} is stale: {cause}"
            found[text] = found.get(text, 0) + 1
    return [f"{text} ({count} line{'s' if count > 1 else ''})" for text, count in found.items()]


def unproven(records: Sequence[Record], designs: Sequence[Design] = DESIGNS) -> list[str]:
    """What designs with status ``on`` lack: per GPU of their bands, a clean check and a time of today's sources."""
    found = []
    for design in designs:
        if design.status != "on" or not design.target:
            continue
        for gpu in design.bands:
            mine = [
                record
                for record in records
                if not isinstance(record, OtherRecord)
                and (record.design, record.gpu, record.source_hash) == (design.name, gpu, design.source_hash)
            ]
            if not any(isinstance(record, CheckRecord) and record.cases and not record.failures for record in mine):
                found.append(f"{design.name} is on for {gpu} without a check record of its sources ({design.source_hash})")
            if not any(isinstance(record, BenchRecord) for record in mine):
                found.append(f"{design.name} is on for {gpu} without a bench record of its sources ({design.source_hash})")
    return found
