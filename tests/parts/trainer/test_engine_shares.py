"""Prompts over several engines, without one of them."""

from __future__ import annotations

import asyncio

from appliance.trainer.engine_shares import EngineShares, Prompt


def test_prompts_that_come_a_few_at_a_time_reach_all_engines() -> None:
    """And the one that has answered gets the next ones."""
    shares, loop = EngineShares([None] * 4), asyncio.new_event_loop()

    def assign(count: int) -> list[list[Prompt]]:
        return shares.assign([Prompt({}, [1], None, loop.create_future()) for _ in range(count)])

    assigned = [assign(2) for _ in range(50)]
    counts = [sum(len(prompts[number]) for prompts in assigned) for number in range(4)]
    assert counts == [25] * 4
    for prompt in (prompt for prompts in assigned for prompt in prompts[2]):
        prompt.group.set_result(None)
    loop.run_until_complete(asyncio.sleep(0))
    assert [len(share) for share in assign(25)] == [0, 0, 25, 0]
    assert [len(share) for share in assign(6)] == [2, 2, 1, 1]
    loop.close()


def test_new_engines_have_nothing_to_answer() -> None:
    """Answers to their predecessors do not count for them."""
    shares, loop = EngineShares([None] * 2), asyncio.new_event_loop()
    (prompt,), _ = shares.assign([Prompt({}, [1], None, loop.create_future())])
    shares.serve_by([None] * 2)
    prompt.group.set_result(None)
    loop.run_until_complete(asyncio.sleep(0))
    assigned = shares.assign([Prompt({}, [1], None, loop.create_future()) for _ in range(4)])
    assert [len(share) for share in assigned] == [2, 2]
    loop.close()
