"""What the scheduler's half asks for, loads and stores, call by call as vLLM makes them; no vLLM needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.connectors.vllm_bridge.groups import Group, prefix_keys
from kvtide.connectors.vllm_bridge.messages import Answer, FromWorker, ToWorker
from kvtide.connectors.vllm_bridge.scheduler import SchedulerSide

FULL, WINDOW = Group(0, 4), Group(1, 4, window=8)


@dataclass
class FakeRequest:
    request_id: str
    tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.tokens
        self.grow(0)

    def grow(self, count: int) -> None:
        self.tokens += count
        self.block_hashes = [f"{self.request_id} {at}".encode() for at in range(self.tokens // 4)]

    @property
    def num_tokens(self) -> int:
        return self.tokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(groups: list[Group], **more: object) -> SchedulerSide:
    settings = {"loads": True, "stores": True, "window_interval": 0, "num_workers": 1, "look_up_timeout_s": 1.0}
    return SchedulerSide(groups, hash_block=4, **{**settings, **more})  # type: ignore[arg-type]


def tables(count: int, groups: int = 1) -> list[list[int]]:
    return [[100 * group + at + 1 for at in range(count)] for group in range(groups)]


def answer(side: SchedulerSide, work: ToWorker, *ends: int, run: int | None = None) -> None:
    for end in ends:
        side.heard(FromWorker({work.look_ups[0].ticket: Answer(end, end if run is None else run)}))


def saved(work: ToWorker) -> list[list[int]]:
    """Block numbers by group."""
    groups = len(work.saves[0].blocks) if work.saves else 0
    return [[block for save in work.saves for _, block in save.blocks[group]] for group in range(groups)]


def test_asks_until_answered_then_loads_what_is_beyond_the_device() -> None:
    side, request = make([FULL, WINDOW]), FakeRequest("a", 41)
    assert side.matched(request, 8) is None
    work = side.step({}, tables)
    assert work.idle
    assert (work.look_ups[0].start, work.look_ups[0].limit) == (8, 40)
    assert side.matched(request, 8) is None
    assert not side.step({}, tables).look_ups
    answer(side, work, 32, run=36)
    assert side.matched(request, 8) == 24
    side.allocated(request, tables(8, 2), 24)
    load = side.step({}, tables).loads[0]
    assert [block for _, block in load.blocks[0]] == [3, 4, 5, 6, 7, 8]
    assert [block for _, block in load.blocks[1]] == [107, 108]  # tokens 25 to 31: the next one's window


def test_a_late_answer_is_a_miss() -> None:
    clock = Clock()
    side, request = make([FULL], clock=clock), FakeRequest("a", 41)
    assert side.matched(request, 0) is None
    work = side.step({}, tables)
    clock.now = 1.5
    assert side.matched(request, 0) == 0
    answer(side, work, 40)
    assert side.matched(request, 0) == 0
    assert side.counts["look_up_late"] == 1


def test_workers_that_disagree_are_asked_again_up_to_the_shortest() -> None:
    side, request = make([FULL], num_workers=2), FakeRequest("a", 41)
    assert side.matched(request, 0) is None
    work = side.step({}, tables)
    answer(side, work, 40)
    assert side.matched(request, 0) is None
    answer(side, work, 24)
    assert side.matched(request, 0) is None
    work = side.step({}, tables)
    assert work.look_ups[0].limit == 24
    answer(side, work, 20, 20)
    assert side.matched(request, 0) == 20


def test_after_a_failed_load_the_request_is_computed() -> None:
    side, request = make([FULL]), FakeRequest("a", 41)
    side.matched(request, 0)
    answer(side, side.step({}, tables), 40)
    assert side.matched(request, 0) == 40
    side.allocated(request, tables(10), 40)
    side.step({}, tables)
    side.heard(FromWorker(failed={"a"}))
    assert side.matched(request, 0) == 0
    assert not side.step({}, tables).look_ups


def test_only_decided_tokens_are_stored() -> None:
    side, request = make([FULL]), FakeRequest("a", 7)
    side.allocated(request, tables(2), 0)
    assert saved(side.step({"a": 7}, lambda _: tables(2))) == [[1]]
    request.num_computed_tokens = 7
    request.grow(1)  # token 8 is known; with it three drafts are computed
    assert saved(side.step({"a": 4}, lambda _: tables(3))) == [[2]]
    request.num_computed_tokens = 9  # one draft was right, and one more was decided after it
    request.grow(2)
    assert side.step({"a": 4}, lambda _: tables(4)).saves == []
    request.num_computed_tokens = 12
    request.grow(3)
    # At the end, all that is decided and computed.
    assert side.finished(request, tables(4), sound=True)
    work = side.step({}, tables)
    assert saved(work) == [[3]]
    assert work.saves[0].last


def test_windows_are_stored_at_the_ends_and_where_a_prefix_was_shared() -> None:
    side, request = make([FULL, WINDOW]), FakeRequest("a", 41)
    side.matched(request, 0)
    answer(side, side.step({}, tables), 0, run=24)
    assert side.matched(request, 0) == 0
    side.allocated(request, tables(11, 2), 0)
    work = side.step({"a": 41}, lambda _: tables(11, 2))
    assert saved(work) == [list(range(1, 11)), [105, 106, 109, 110]]
    request.num_computed_tokens = 41
    request.grow(8)
    table = tables(12, 2)
    side.step({"a": 7}, lambda _: table)
    request.num_computed_tokens = 48
    assert side.finished(request, table, sound=True)
    assert saved(side.step({}, tables))[1] == [111, 112]


def test_what_a_request_ran_on_is_told_when_it_is_over() -> None:
    side, request = make([FULL, WINDOW]), FakeRequest("a", 41)
    side.allocated(request, tables(11, 2), 0)
    side.step({"a": 41}, lambda _: tables(11, 2))
    request.num_computed_tokens = 41
    assert not side.finished(request, tables(11, 2), sound=True)
    (served,) = side.step({}, tables).served
    assert (served.length, served.ends) == (40, [40])
    keys = prefix_keys([(FULL, b"f" * 16), (WINDOW, b"w" * 16)], served.chains, served.length, served.ends)
    joined = served.chains[4]
    chains = [joined[16 * at : 16 * at + 16] for at in range(10)]
    full, window = [b"f" * 16 + chain for chain in chains], [b"w" * 16 + chain for chain in chains]
    assert keys == [*full[:9], window[8], full[9], window[9]]


def test_a_request_that_failed_has_served_nothing() -> None:
    side, request = make([FULL]), FakeRequest("a", 41)
    side.allocated(request, tables(11), 0)
    side.step({"a": 41}, lambda _: tables(11))
    request.num_computed_tokens = 41
    side.finished(request, tables(11), sound=False)
    assert side.step({}, tables).served == []


def test_windows_of_which_a_part_has_gone_are_not_stored() -> None:
    side, request = make([FULL, WINDOW], window_interval=16), FakeRequest("a", 33)
    side.allocated(request, tables(9, 2), 0)
    table = tables(9, 2)
    table[1][2] = 0  # of the window before token 16
    assert saved(side.step({"a": 33}, lambda _: table))[1] == [107, 108]


def test_roles_and_requests_that_failed() -> None:
    consumer, producer = make([FULL], stores=False), make([FULL], loads=False)
    for side in (consumer, producer):
        request = FakeRequest("a", 41)
        asks = side.matched(request, 0) is None
        side.allocated(request, tables(11), 0)
        work = side.step({"a": 41}, lambda _: tables(11))
        assert asks == (side is consumer)
        assert bool(work.saves) == (side is producer)
        assert not side.finished(request, tables(11), sound=True)
    broken = FakeRequest("b", 41)
    producer.allocated(broken, tables(11), 0)
    producer.step({"b": 3}, lambda _: tables(11))
    broken.num_computed_tokens = 40
    assert not producer.finished(broken, tables(11), sound=False)


def test_a_load_that_is_aborted_stores_nothing() -> None:
    side, request = make([FULL]), FakeRequest("a", 41)
    side.matched(request, 0)
    answer(side, side.step({}, tables), 40)
    side.matched(request, 0)
    side.allocated(request, tables(10), 40)
    request.num_computed_tokens = 40  # as vLLM counts before anything has arrived
    assert not side.finished(request, tables(10), sound=True)
    assert side.step({}, tables).over == ["a"]


def test_forgetting_changes_every_key() -> None:
    side, request = make([FULL]), FakeRequest("a", 41)
    side.matched(request, 0)
    before = side.step({}, tables).look_ups[0].chains[4]
    side.forget()
    side.matched(request, 0)
    assert side.step({}, tables).look_ups[0].chains[4] != before


def test_states_are_stored_where_vllm_offers_them() -> None:
    state = Group(1, 4, is_state=True)
    side = make([FULL, state], window_interval=8)
    request = FakeRequest("a", 10)
    side.added(request)
    side.matched(request, 0)
    side.allocated(request, tables(3, 2), 0)
    work = side.step({"a": 10}, lambda _: tables(3, 2), {"a": [(1, 77, 8), (1, 0, 4), (1, 78, 10), (5, 79, 4)]})
    # Not vLLM's placeholder, nor a part of a block, nor another group's; and never what a table says.
    assert saved(work) == [[1, 2], [77]]
    chains = [chain for save in work.saves for group in save.blocks for chain, _ in group]
    assert chains[1] == chains[2]  # the state has the name of the block that it ends
    # Of what is generated every so many tokens; of a request that is over, or unknown, nothing.
    request.num_computed_tokens = 10
    request.grow(10)
    work = side.step({"a": 10}, lambda _: tables(5, 2), {"a": [(1, 80, 12), (1, 81, 16)], "b": [(1, 82, 16)]})
    assert saved(work) == [[3, 4, 5], [81]]
    assert not side.finished(request, tables(5, 2), sound=True)
    assert side.step({}, lambda _: [], {"a": [(1, 83, 16)]}).saves == []


def test_a_hit_loads_the_last_state_alone() -> None:
    side = make([FULL, Group(1, 4, is_state=True)])
    request = FakeRequest("a", 13)
    side.added(request)
    assert side.matched(request, 0) is None
    work = side.step({}, lambda _: [])
    answer(side, work, 12)
    assert side.matched(request, 0) == 12
    side.allocated(request, [[1, 2, 3], [0, 0, 9]], 12)
    (load,) = side.step({}, lambda _: []).loads
    assert [[block for _, block in group] for group in load.blocks] == [[1, 2, 3], [9]]


def test_what_is_stored_of_states_depends_on_the_role() -> None:
    side = make([FULL, Group(1, 4, is_state=True)], stores=False)
    request = FakeRequest("a", 8)
    side.added(request)
    side.allocated(request, tables(2, 2), 0)
    assert side.step({"a": 8}, lambda _: tables(2, 2), {"a": [(1, 77, 8)]}).saves == []
