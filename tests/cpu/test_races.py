"""From fabricated times to bands: who wins where, what a chain's win gives its designs, and where a band ends."""

from __future__ import annotations

import msgspec
import pytest

from sglang_router_ext.bench import races
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.races import Time, bands, places, race, ways
from sglang_router_ext.bench.record import BenchRecord, read_all
from sglang_router_ext.choose import ORDER
from sglang_router_ext.designs import TABLE, Rows

ROUTER, PLANNED = "gate+selection", "gate+selection+plan"
HOST = {"gate": "sglang-gemm", "selection": "sglang-topk", ROUTER: "sglang-pair", PLANNED: "sglang-pair+align"}


def theirs(rows: int, pair: float | None = 6.0, planned: float | None = 9.0, gate: float = 3.0, top: float = 4.0) -> list[Time]:
    found = {"gate": gate, "selection": top, ROUTER: pair, PLANNED: planned}
    return [Time(rows, HOST[stages], stages, us, False) for stages, us in found.items() if us is not None]


def ours(rows: int, design: str, us: float, stages: str = ROUTER) -> Time:
    return Time(rows, design, stages, us, True)


def texts(found: dict[str, tuple[Rows, ...]]) -> dict[str, list[str]]:
    return {name: list(map(str, rows)) for name, rows in found.items()}


def test_a_measured_count_has_the_rows_down_to_the_one_before_it() -> None:
    assert texts(bands({4: ["pair"], 8: ["pair"], 16: ["single"], 32: []})) == {"single": ["9-16"], "pair": ["4-8"]}


def test_crossovers_need_not_be_monotonic() -> None:
    winners = {1: ["single"], 2: ["pair"], 4: ["single"], 8: [], 16: ["single"], 24: ["single"], 32: ["pair"]}
    assert texts(bands(winners)) == {"single": ["1", "3-4", "9-24"], "pair": ["2", "25-32"]}


@pytest.mark.parametrize("rows", [1, 7, 8192])
def test_a_single_point_speaks_of_itself(rows: int) -> None:
    assert bands({rows: ["pair"]}) == {"pair": (Rows(rows, rows),)}
    assert bands({rows: []}) == bands({}) == {}


def test_every_row_count_up_to_the_largest_is_decided_by_the_next_measured_one() -> None:
    measured = {1: "a", 6: "b", 16: "a", 17: "b", 100: "a"}
    names = {"a": "pair", "b": "single"}
    found = bands({rows: [names[who]] for rows, who in measured.items()})
    for rows in range(1, 101):
        decided = names[measured[min(count for count in measured if count >= rows)]]
        assert [name for name, mine in found.items() if any(rows in band for band in mine)] == [decided]


def test_ours_must_be_faster_than_sglangs() -> None:
    for us, found in ((5.99, {"pair": ["4"]}), (6.0, {}), (6.01, {})):
        assert texts(race([*theirs(4), ours(4, "pair", us)], [4], plan=False).bands) == found


def test_a_tie_goes_to_what_choose_asks_first() -> None:
    times = [*theirs(4), ours(4, "pair", 5.0), ours(4, "single", 5.0), ours(4, "small_rows+warp_select", 5.0)]
    assert [str(way) for way in places(*ways(times, plan=False))] == ["single", "pair", "small_rows+warp_select"]


@pytest.mark.parametrize(("us", "winner"), [(4.19, "tensor_pair"), (4.21, "split_gemm+warp_select")])
def test_a_way_in_which_no_row_depends_on_its_batch_may_take_a_little_longer(
    us: float, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "split_gemm", msgspec.structs.replace(TABLE["split_gemm"], status="on"))
    times = [*theirs(4), ours(4, "split_gemm+warp_select", 4.0), ours(4, "tensor_pair", us), ours(4, "triton_select", 0.1)]
    found = race(times, [4], plan=False)
    assert found.races[0].ours == winner and set(winner.split("+")) <= set(found.bands)
    alone = race([*theirs(4, pair=4.1), *times[4:]], [4], plan=False)  # nor does it run where SGLang's is faster
    assert alone.races[0].ours == "split_gemm+warp_select"


def test_what_makes_no_plan_has_a_time_with_one_only_where_that_of_count_and_sort_is_known() -> None:
    chain, single = ours(8, "small_rows+warp_select", 9.0), ours(8, "single", 12.0, PLANNED)
    slow = theirs(8, pair=17.1, planned=17.0, gate=8.1, top=4.3)  # a pair that is slower than its two stages
    assert race([*slow, chain, single], [8], plan=True).races[0].ours == "single"  # 9.0 and 4.6 behind it
    none = [time for time in theirs(8, pair=None, planned=17.0) if time.stages != "selection"]
    assert race([*none, chain, single], [8], plan=True).races[0].ours == "single"
    odd = theirs(8, pair=17.0, planned=12.1, gate=8.1, top=4.3)
    assert race([*odd, chain, single], [8], plan=True).races[0].ours == "single"


def test_the_margin_of_an_estimate_is_not_one_of_a_stable_way_too() -> None:
    times = [*theirs(512, pair=12.0, gate=6.0, top=5.0), ours(512, "warp_select", 3.2, "selection")]
    assert race([*times, ours(512, "tensor_pair", 11.7)], [512], plan=False).races[0].ours == "host+warp_select"


def test_a_chain_gives_its_band_to_both_designs() -> None:
    times = [*theirs(4), ours(4, "small_rows+warp_select", 4.0), ours(4, "pair", 4.5)]
    assert texts(race(times, [4], plan=False).bands) == {"warp_select": ["4"], "small_rows": ["4"]}


def test_behind_one_design_for_both_stages_the_next_ones_stand_in() -> None:
    chain = ours(4, "small_rows+warp_select", 5.0)
    found = race([*theirs(4), ours(4, "single", 4.0), ours(4, "pair", 4.5), chain], [4], plan=False)
    assert set(found.bands) == {"single", "pair", "warp_select", "small_rows"}
    found = race([*theirs(4), ours(4, "single", 4.2), ours(4, "pair", 4.0), chain], [4], plan=False)
    assert set(found.bands) == {"pair", "warp_select", "small_rows"}  # `single` would be asked before `pair`
    assert found.races[0].ours == "pair"


def test_one_stage_beside_sglangs_other_is_estimated_from_sglangs_pair() -> None:
    times = [*theirs(512), ours(512, "warp_select", 2.5, "selection"), ours(512, "small_rows", 3.5, "gate")]
    host, found = ways(times, plan=False)
    assert (host, [(str(way), way.us) for way in found]) == (6.0, [("host+warp_select", 4.5), ("small_rows+host", 6.5)])
    assert texts(race(times, [512], plan=False).bands) == {"warp_select": ["512"]}
    assert race(times, [512], plan=False).races[0].estimated


def test_an_estimate_must_be_clearly_faster_than_what_was_timed() -> None:
    times = [*theirs(4), ours(4, "warp_select", 2.5, "selection")]
    assert set(race([*times, ours(4, "pair", 4.6)], [4], plan=False).bands) == {"pair", "warp_select"}
    assert race([*times, ours(4, "pair", 4.6)], [4], plan=False).races[0].ours == "pair"
    assert set(race([*times, ours(4, "pair", 5.5)], [4], plan=False).bands) == {"warp_select"}


def test_a_model_that_rounds_its_logits_mixes_no_stages() -> None:
    times = [*theirs(4), ours(4, "warp_select", 2.5, "selection"), ours(4, "small_rows", 2.5, "gate")]
    assert race(times, [4], plan=False, rounded=True).bands == {}


def test_with_a_plan_what_makes_none_has_sglangs_count_and_sort_behind_it() -> None:
    times = [*theirs(4), ours(4, "single", 5.0, PLANNED), ours(4, "single", 4.4), ours(4, "pair", 4.0)]
    planned, alone = (race(times, [4], plan=plan) for plan in (True, False))
    assert (planned.races[0].host_us, planned.races[0].ours, planned.races[0].ours_us) == (9.0, "single", 5.0)
    assert (alone.races[0].host_us, alone.races[0].ours, alone.races[0].ours_us) == (6.0, "pair", 4.0)
    assert dict(ways(times, plan=True)[1][1:][0]._asdict())["us"] == 7.0  # `pair` and 3 us of count-and-sort
    assert set(planned.bands) == {"single", "pair"} and set(alone.bands) == {"pair"}


def test_a_plan_may_lose() -> None:
    times = [*theirs(4, planned=6.5), ours(4, "single", 5.5, PLANNED), ours(4, "pair", 4.0)]
    assert race(times, [4], plan=True).races[0].ours == "pair"


def test_a_chain_whose_selection_plans_is_raced_as_one() -> None:
    times = [*theirs(4), ours(4, "small_rows+warp_select", 5.0, PLANNED), ours(4, "warp_select", 2.0, "selection+plan")]
    host, found = ways(times, plan=True)
    assert (host, [(str(way), way.us) for way in found]) == (9.0, [("small_rows+warp_select", 5.0), ("host+warp_select", 4.0)])
    assert ways(times, plan=False)[1] == []


def test_where_sglangs_was_not_timed_nothing_is_faster() -> None:
    times = [*theirs(4, pair=None, planned=None), ours(4, "pair", 1.0), ours(4, "single", 1.0, PLANNED)]
    for plan in (True, False):
        found = race(times, [4, 8], plan=plan)
        assert found.bands == {}
        assert [(one.rows, one.host_us) for one in found.races] == [(4, None), (8, None)]
    times = [*theirs(4, planned=None), ours(4, "single", 1.0, PLANNED), ours(4, "pair", 4.0)]
    assert texts(race(times, [4], plan=True).bands) == {"pair": ["4"]}  # nothing to hold a plan against


def test_a_row_count_without_times_is_sglangs() -> None:
    times = [time for rows in (1, 4) for time in (*theirs(rows), ours(rows, "pair", 5.0))]
    assert texts(race(times, [1, 2, 4], plan=False).bands) == {"pair": ["1", "3-4"]}


def test_what_is_on_trial_does_not_race() -> None:
    trial = next(name for name in ORDER if TABLE[name].stages == ("gate",) and TABLE[name].status == "trial")
    times = [*theirs(4), ours(4, trial, 0.1, "gate"), ours(4, f"{trial}+warp_select", 0.1)]
    assert race(times, [4], plan=False).bands == {}
    assert not races.is_wanted(trial, ours=True) and not races.is_wanted("torch-bf16", ours=False)
    assert races.is_wanted("small_rows+warp_select", ours=True) and races.is_wanted("sglang-pair", ours=False)


@pytest.mark.parametrize("case", ["glm-5.3-flash", "glm-4.6", "qwen3-30b-a3b"])
@pytest.mark.parametrize("plan", [True, False])
def test_the_times_on_record_give_what_is_on_its_bands(case: str, plan: bool) -> None:
    lines = [line for line in read_all() if isinstance(line, BenchRecord) and (line.case, line.cache) == (case, "cold")]
    times = [Time(line.rows, line.design, line.stages, line.median_us, bool(line.source_hash)) for line in lines]
    rounded = CASES[case].problem.logits_dtype == "bfloat16"
    found = race(times, {time.rows for time in times}, plan=plan, rounded=rounded)
    assert all(TABLE[name].status == "on" for name in found.bands)
    for rows in (1, 6, 16, 64, 96):
        assert any(rows in band for mine in found.bands.values() for band in mine)
