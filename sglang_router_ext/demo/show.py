"""The demo's reports as tables on a rich console."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sglang_router_ext.demo import pace
from sglang_router_ext.demo.cpu import CpuReport
from sglang_router_ext.demo.determinism import PROMPT_TOKENS, DeterminismReport
from sglang_router_ext.demo.launches import LaunchReport
from sglang_router_ext.demo.pace import Spread
from sglang_router_ext.demo.prefill import TOKENS, PrefillReport
from sglang_router_ext.demo.serve import STOCK, Judged, ServeReport
from sglang_router_ext.demo.trace import RouterTime, StepTime

SHOWN = 4
MOVED = 4
"""Kernels of a batch size, at most, that are shown for taking another time."""


Report = CpuReport | ServeReport | LaunchReport | PrefillReport | DeterminismReport


def show(report: Report, console: Console) -> None:
    if isinstance(report, CpuReport):
        _show_cpu(report, console)
    elif isinstance(report, PrefillReport):
        _show_prefill(report, console)
    elif isinstance(report, DeterminismReport):
        _show_determinism(report, console)
    elif isinstance(report, LaunchReport):
        _show_launches(report, console)
    else:
        _show_serve(report, console)
    verdict = "[green]Everything that must hold does.[/]" if report.agrees else "[red]Something that must hold does not.[/]"
    console.print(f"{verdict} {report.seconds:.0f} s")


def _show_cpu(report: CpuReport, console: Console) -> None:
    console.print(
        f"No CUDA GPU here: SGLang's MoE gate and top-k on the CPU, {report.problem}. No kernel runs, no time is measured."
    )
    table = Table(
        title_justify="left", title=f"SGLang's modules with the hooks of {report.backend}, the oracle in place of the kernels"
    )
    for name in ("layer", "rows", "hooks = oracle", "SGLang's top-k = oracle", "moved by bf16 logits", "moved by a bf16 bias"):
        table.add_column(name, justify="right")
    for check in report.checks:
        moved = (f"{count} of {check.rows}" for count in (check.moved_by_logits, check.moved_by_bias))
        table.add_row(str(check.layer), str(check.rows), _yes(check.hooked), _yes(check.native), *moved)
    console.print(table)
    console.print(
        "moved: rows that go to other experts. SGLang's gate rounds its logits to bf16 on a CPU, and not on a GPU; a bf16 bias"
        " is what this comparison has to notice."
    )
    for check in report.checks:
        for difference in [*check.hooked, *check.native][:SHOWN]:
            console.print(f"[red]layer {check.layer}, {check.rows} rows: {difference}[/]")
    console.print("Calls that the hooks saw: " + "; ".join(report.paths))
    table = Table(
        "GPU",
        "rows",
        "runs",
        title_justify="left",
        title=f"What {report.backend} would run elsewhere (sglang-router-ext explain says why)",
    )
    for gpu, choice in report.choices.items():
        for rows, what in choice.items():
            table.add_row(gpu, rows, what)
    console.print(table)
    console.print("Blackwell (sm_100, sm_103): the kernels are compiled for it, not run.")


def _yes(differences: list[str]) -> str:
    return "[red]no[/]" if differences else "yes"


def _model(report: ServeReport | LaunchReport | PrefillReport | DeterminismReport) -> str:
    experts = f"{report.size.experts} experts of {report.size.moe_intermediate}"
    return f"{report.gpu}: SGLang serving {report.problem}, {len(report.size.moe_layers)} MoE layers, {experts}"


def _show_launches(report: LaunchReport, console: Console) -> None:
    console.print(_model(report))
    order = ", ".join(f"{launch.variant} {launch.start_s:.0f} s" for launch in report.launches)
    console.print(f"Launches, in this order, with the time of each start: {order}")
    count = sum(launch.variant == STOCK for launch in report.launches)
    title = f"A decode step by the clock: median (p10 to p90) of {count} launches each, of every launch its median"
    table = _numbers(title, "requests", *report.variants)
    for batch in report.launches[0].step_ms:
        stock = report.over_launches(STOCK, batch)
        cells = [stock.text(3, "ms")]
        for name in report.variants[1:]:
            ours = report.over_launches(name, batch)
            cells.append(f"{ours.text(3, 'ms')}\n{_difference(stock, ours, pace.by_clock(stock, ours))}")
        table.add_row(str(batch), *cells)
    console.print(table)
    table = _numbers("The router of one layer, in a profile of each variant's first launch", "requests", *report.variants)
    for batch in report.router[STOCK]:
        table.add_row(str(batch), *(_router(report.router[name][batch]) for name in report.variants))
    console.print(table)
    console.print(_tokens(report.same))
    for judged in report.same:
        _show_differences(judged, console)


def _tokens(same: list[Judged]) -> Table:
    table = Table("comparison", "equal sequences", "largest shift", "verdict", title_justify="left", title="Greedy tokens")
    for judged in same:
        table.add_row(judged.what, *_counts(judged), _verdict(judged, wanted_equal=True))
    return table


def _show_serve(report: ServeReport, console: Console) -> None:
    console.print(_model(report))
    starts = ", ".join(f"{name} {served.start_s:.0f} s" for name, served in report.served.items())
    console.print(f"Engine starts: {starts}")
    _show_clock(report, console)
    _show_gpu(report, console)
    table = _tokens(report.same)
    noticed, followed = report.changed
    table.add_row(noticed.what, *_counts(noticed), _verdict(noticed, wanted_equal=False))
    table.add_row(followed.what, *_counts(followed), _verdict(followed, wanted_equal=True))
    console.print(table)
    console.print(
        f"Two stock runs of different batch sizes differ in up to {report.stock.differing:.0%} of the sequences. Where the"
        f" prefix is the same, their log-probabilities are up to {report.stock.shift:.3f} apart (shift)."
    )
    for judged in [*report.same, followed]:
        _show_differences(judged, console)


def _show_clock(report: ServeReport, console: Console) -> None:
    stock, ours = report.served[STOCK].clock_ms, report.served[report.backend].clock_ms
    turns = "in turn" if report.together else "one engine after the other"
    rounds = next(iter(stock.values())).count
    table = _numbers(
        f"A decode step by the clock: median (p10 to p90) of {rounds} rounds each, {turns}",
        "requests",
        STOCK,
        report.backend,
        "difference",
    )
    for size in stock:
        pair = stock[size], ours[size]
        table.add_row(str(size), *(found.text(3, "ms") for found in pair), _difference(*pair, pace.by_clock(*pair)))
    console.print(table)
    console.print("While timed, every sequence repeats one token, so that both engines run the same experts.")
    if not report.together:
        console.print(
            "The GPU's memory does not hold both engines, so what drifted between their runs is part of the difference."
        )
    shares = [pair[0].median / 1000 / stock[size].median for size, pair in report.spans.items() if pair is not None]
    if shares and max(shares) < 1:  # under the profiler a step may take longer than without
        console.print(
            f"In stock, a step's span on the GPU (below) is {min(shares):.0%} to {max(shares):.0%} of its time by the clock;"
            " the rest is the CPU's."
        )


def _show_gpu(report: ServeReport, console: Console) -> None:
    stock, ours = report.served[STOCK], report.served[report.backend]
    steps = next((pair[0].count for pair in report.spans.values() if pair is not None), 0)
    table = _numbers(
        f"A decode step on the GPU, under the profiler: first to last kernel, median (p10 to p90) of {steps} steps each",
        *("requests", STOCK, report.backend, "difference", f"busy / sum, {STOCK}", f"busy / sum, {report.backend}"),
    )
    for size, pair in report.spans.items():
        times = stock.gpu[size], ours.gpu[size]
        table.add_row(
            str(size),
            *("[red]not found[/]" if time is None else _step(time) for time in times),
            "" if pair is None else _difference(*pair, pace.by_gpu(*pair)),
            *("" if time is None else f"{time.busy_us:.1f} / {time.sum_us:.1f} us" for time in times),
        )
    console.print(table)
    console.print("busy: at least one kernel runs. sum: all kernels' times, also where they overlap or wait for one another.")
    moved = _moved(report)
    if moved.row_count:
        console.print(moved)
    if not report.timed:
        console.print("[red]The profiles do not show the decode steps of both engines at every batch size.[/]")
    if report.too_slow:
        sizes = ", ".join(map(str, report.too_slow))
        console.print(
            f"[red]On the GPU, {report.backend} is slower than stock by more than {pace.ALLOWED:.0%} with {sizes} requests.[/]"
        )
    table = _numbers("The router of one layer, in the same steps", "requests", STOCK, report.backend)
    for size in stock.router:
        table.add_row(str(size), *(_router(served.router[size]) for served in (stock, ours)))
    console.print(table)
    if not report.replaced:
        console.print("[red]The profile does not show the plugin's kernels at every batch size.[/]")


def _show_prefill(report: PrefillReport, console: Console) -> None:
    console.print(_model(report))
    stock, ours = report.served[STOCK], report.served[report.backend]
    clocks = stock.clock_ms, ours.clock_ms
    turns = "in turn" if report.together else "one engine after the other"
    title = (
        f"A prompt of {TOKENS:,} tokens: median (p10 to p90) of {report.prompts} prompts by the clock, {turns}, and of profiles"
    )
    table = _numbers(title, "", STOCK, report.backend, "difference")
    table.add_row(
        "to the first token", *(clock.text(2, "ms") for clock in clocks), _difference(*clocks, pace.by_clock(*clocks))
    )
    spans = [None if one.gpu is None else one.gpu.span_us for one in (stock, ours)]
    cells = ["[red]not found[/]" if span is None else span.text(0, "us") for span in spans]
    before, after = spans
    table.add_row("on the GPU", *cells, _difference(before, after, pace.by_gpu(before, after)) if before and after else "")
    table.add_row("router of one layer", *(_router(one.router) for one in (stock, ours)))
    console.print(table)
    if not report.whole:
        console.print("[red]The profiles do not show every layer's router once a prompt: prompts may not be one chunk.[/]")
    console.print(_tokens(report.same))
    console.print(
        f"Where the chunks of prompts end elsewhere, stock differs from itself in {report.stock.differing:.0%} of the first"
        f" tokens, and its log-probabilities by up to {report.stock.shift:.3f} (shift)."
    )
    for judged in report.same:
        _show_differences(judged, console)


def _show_determinism(report: DeterminismReport, console: Console) -> None:
    console.print(_model(report))
    title = f"The same prompts of {PROMPT_TOKENS} tokens one at a time and among others, while the tokens before are equal"
    columns = ("engine", "at a time", "tokens", "sequences that part", "expert ids", "ids that differ", "rows that differ")
    table = _numbers(title, *columns)
    for name, found in report.found.items():
        for one in found:
            apart = (str(count) for count in (one.tokens_apart, one.ids_apart, one.rows_apart))
            colour = "red" if name == report.backend else "yellow"
            parted, ids, rows = (text if text == "0" else f"[{colour}]{text}[/]" for text in apart)
            table.add_row(name, str(one.size), f"{one.tokens:,}", parted, f"{one.ids:,}", ids, f"{rows} of {one.rows:,}")
    console.print(table)
    console.print(f"row: a token in a layer. All but {STOCK} run with deterministic inference.")
    for name, found in report.found.items():
        for one in found:
            if one.first:
                console.print(f"  {name}, {one.size} at a time, differs first in {one.first}")
    if not report.noticed:
        console.print("[yellow]Stock as it is does not differ either, so this says little.[/]")
    console.print(f"Paths of {report.backend}, its start included: {'; '.join(report.ran) or 'none was counted'}")


def _step(time: StepTime) -> str:
    apart = max(time.profiles_us) > (1 + pace.NOTICED) * min(time.profiles_us)
    return time.span_us.text(1, "us") + (f"\nby profile {', '.join(f'{us:.0f}' for us in time.profiles_us)}" if apart else "")


def _moved(report: ServeReport) -> Table:
    """The kernels whose time in a step differs most between the engines: the router's, or whatever else it is."""
    table = _numbers("What differs in a step, us a kernel", "requests", "kernel", STOCK, report.backend)
    for size, stock in report.served[STOCK].gpu.items():
        ours = report.served[report.backend].gpu[size]
        if stock is None or ours is None:
            continue
        pairs = {
            name: (stock.kernel_us.get(name, 0.0), ours.kernel_us.get(name, 0.0)) for name in stock.kernel_us | ours.kernel_us
        }
        far = sorted(pairs, key=lambda name: -abs(pairs[name][1] - pairs[name][0]))[:MOVED]
        for name in far:
            one, other = pairs[name]
            if abs(other - one) > pace.NOTICED * stock.sum_us:
                table.add_row(str(size), name, f"{one:.1f}", f"{other:.1f}")
    return table


def _numbers(title: str, *columns: str) -> Table:
    table = Table(title_justify="left", title=title)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _difference(stock: Spread, ours: Spread, word: str) -> str:
    colour = {pace.SLOWER: "red", pace.FASTER: "green"}.get(word)
    text = f"{pace.change(stock, ours):+.1%}, {word}"
    return f"[{colour}]{text}[/]" if colour else text


def _router(time: RouterTime | None) -> str:
    if time is None:
        return "not found"
    sorting = (f"then {name}{'' if number == 1 else f' ({number:g} a layer)'}" for name, number in time.sorting.items())
    return "\n".join((f"{time.median_us:.2f} us", *time.kernels, *sorting))


def _counts(judged: Judged) -> tuple[str, str]:
    return f"{judged.found.equal} of {judged.found.sequences}", f"{judged.found.largest:.3f}"


def _verdict(judged: Judged, *, wanted_equal: bool) -> str:
    if wanted_equal:
        text = "differs" if judged.against else "equal" if not judged.found.differences else "equal but for near-ties"
        return f"[red]{text}[/]" if judged.against else text
    return "noticed" if judged.against else "[red]not noticed[/]"


def _show_differences(judged: Judged, console: Console) -> None:
    for difference in judged.found.differences[:SHOWN]:
        one, other = difference.tokens
        console.print(
            f"  {judged.what}: sequence {difference.sequence}, step {difference.step}: token {one} against {other}. With the"
            f" same prefix, {one} led by {difference.lead:.3f}, and log-probabilities differ by {difference.shift:.3f}."
        )
    for text in judged.against[:SHOWN]:
        console.print(f"[red]  {judged.what}: {text}[/]")
