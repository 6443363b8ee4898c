"""Ranks are 0, 1, 2, ... at every block; nobody waits for ever; what the order costs (unit: one step of one tile)."""

import heapq


def schedule(tiles, nq, queries, key_tile, causal, group, alternate, ordered=True):
    def tile_of(h, pos):
        return (tiles - 1 - pos if h % 2 == 0 else pos) if alternate else pos

    def steps(h, tile):
        up = h % 2 == 0 if alternate else True
        first = tile * key_tile // queries if causal else 0
        n = nq - first
        gsize = min(128, tiles, nq)
        gn = tile // gsize
        gs = gn * gsize
        size = min(tiles - gs, gsize)
        stride = nq // size
        member = tile - gs
        start = 0 if causal else member * stride
        out = []
        for s in range(n * group):
            head, turn = s // n, s % n
            if not causal:
                b = start + turn
                b = b - nq if b >= nq else b
                rank = (
                    min(b // stride, size - 1)
                    - member
                    + (size if b < start else 0)
                    + gs
                )
                last = rank == tiles - 1
            else:
                b = first + turn if up else nq - 1 - turn
                lt = min((b * queries + queries - 1) // key_tile, tiles - 1)
                rank = lt - tile if up else tile
                last = rank == lt
            out.append((head, b, rank, last))
        return out

    return tile_of, steps


def simulate(
    heads,
    tiles,
    nq,
    queries,
    key_tile,
    causal,
    group,
    alternate,
    sms=132,
    hop=0.3,
    ordered=True,
):
    tile_of, steps = schedule(tiles, nq, queries, key_tile, causal, group, alternate)
    progs = [
        [(h,) + x for x in steps(h, tile_of(h, p))]
        for h in range(heads)
        for p in range(tiles)
    ]
    seen = {}
    for pr in progs:
        for h, hd, b, r, last in pr:
            seen.setdefault((h, hd, b), []).append((r, last))
    for k, v in seen.items():
        v.sort()
        assert [r for r, _ in v] == list(range(len(v))), (k, v[:5])
        assert [l for _, l in v] == [False] * (len(v) - 1) + [True], (k, v)
    # event simulation: compute takes 1 a step; addition needs rank; computing may be one step ahead of the adding
    count, waiting, events, t, nxt = {}, {}, [], 0.0, 0
    state = {}

    def want(c, now):  # CTA c, its step s computed at `now`, wants to add
        s = state[c]
        key = progs[c][s][:3]
        r = progs[c][s][3]
        if not ordered or count.get(key, (0, 0.0))[0] == r:
            heapq.heappush(events, (now + hop, c))
        else:
            waiting[(key, r)] = (c, now)

    free = sms
    done = 0
    order_time = 0.0
    ready = {}
    while nxt < len(progs) and free:
        state[nxt] = 0
        ready[nxt] = 1.0
        want(nxt, 1.0)
        nxt += 1
        free -= 1
    while events:
        t, c = heapq.heappop(events)
        s = state[c]
        key = progs[c][s][:3]
        r = progs[c][s][3]
        count[key] = (r + 1, t)
        if (key, r + 1) in waiting:
            c2, w = waiting.pop((key, r + 1))
            heapq.heappush(events, (max(t, w) + hop, c2))
        if s + 1 < len(progs[c]):
            state[c] = s + 1
            # computing of step s+1 began when step s was computed, but may be at most one step ahead
            ready[c] = max(ready[c] + 1.0, t)
            want(c, ready[c])
        else:
            done += 1
            if nxt < len(progs):
                state[nxt] = 0
                ready[nxt] = t + 1.0
                want(nxt, t + 1.0)
                nxt += 1
    assert done == len(progs), f"deadlock: {done} of {len(progs)}"
    work = sum(map(len, progs)) / sms
    return t, work


if __name__ == "__main__":
    for name, args in {
        "S=16384 full": (16, 128, 256, 64, 128, False, 1, False),
        "S=4096 full": (64, 32, 64, 64, 128, False, 1, False),
        "S=1024 full": (256, 8, 16, 64, 128, False, 1, False),
        "S=16384 causal": (16, 128, 256, 64, 128, True, 1, True),
        "S=4096 causal": (64, 32, 64, 64, 128, True, 1, True),
        "S=1024 causal": (256, 8, 16, 64, 128, True, 1, True),
        "q128 S=4096 full": (64, 32, 32, 128, 128, False, 1, False),
        "q128 S=16384 causal": (16, 128, 128, 128, 128, True, 1, True),
        "S=32768 full": (2, 256, 512, 64, 128, False, 1, False),
        "GQA S=4096 causal": (16, 32, 64, 64, 128, True, 4, True),
        "T=4096 S=512": (64, 4, 64, 64, 128, False, 1, False),
        "T=512 S=4096": (64, 32, 8, 64, 128, False, 1, False),
    }.items():
        o = simulate(*args)
        u = simulate(*args, ordered=False)
        h = simulate(*args[:-1], False, ordered=False)
        print(
            f"{name}: ordered {o[0]:.0f}, unordered {u[0]:.0f}, heavy first unordered {h[0]:.0f}, work / 132 {o[1]:.0f}",
            flush=True,
        )
