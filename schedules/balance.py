"""How evenly the work tiles of a call spread over the multiprocessors, simulated by list scheduling.

Each CTA computes one work tile after another, and takes the next one `lead` before it ends the present one. The unit of
time is a KV tile; a work tile costs `START` besides.
"""

from __future__ import annotations

import heapq

from schedules.domain import Bounds, Dense
from schedules.work import work_of

START = 0.7  # KV tiles: Q's way in and O's way out, as far as nothing hides them (1.2 us of 1.7 us at head dim 128)
LEAD = 4.0  # KV tiles: one that is asked for the moment the last are loaded, and as many as the rings hold


def idle(
    domain: Dense,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    group: int,
    multiprocessors: int,
    lead: float = LEAD,
) -> float:
    """The part of all multiprocessors' time, from the first work tile to the end of the last, without a work tile.

    heads  of the queries, over all batch entries, which run in groups of `group` (`schedules.work.work_of`)
    lead   KV tiles before the end of a work tile at which the next one is taken; math.inf is when it begins
    """
    q_tiles = -(-seqlen_q // domain.tile_m)
    bounds = Bounds(seqlen_q, seqlen_k)
    costs = [START + domain.visits(q_tile, bounds).total for q_tile in range(q_tiles)]
    total = q_tiles * heads

    def cost(index: int) -> float:
        return costs[work_of(index, q_tiles, heads, 1, group).q_tile]

    taken = min(total, multiprocessors)
    # (when it takes its next work tile, when it ends the present one)
    running = [(max(0.0, cost(i) - lead), cost(i)) for i in range(taken)]
    heapq.heapify(running)
    ends = []
    while running:
        _, end = heapq.heappop(running)
        if taken == total:
            ends.append(end)
            continue
        begin, end = end, end + cost(taken)
        heapq.heappush(running, (max(begin, end - lead), end))
        taken += 1
    return 1 - heads * sum(costs) / (max(ends) * multiprocessors)
