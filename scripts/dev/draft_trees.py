"""Would a tree of drafts beat a chain? Expected tokens of the best static trees, over their costs.

A node is right with the probability of its path: the drafter's first choice at a place is right
with probability `acceptance`, the second with a share of what the first leaves, and so on. The best
tree of n nodes has the n most probable ones. Costs are in plain steps; a level of drafts is a step
of the drafter.

    python scripts/dev/draft_trees.py --verify 4:2.4,8:3.2,16:5.1 --draft 0.09
"""

import argparse
import heapq

BUDGETS = 4, 8, 16
DEEPEST = 16
N_RANK = 4                                         # choices of the drafter at a place


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--verify", type=costs, required=True, help="tokens:plain steps, …")
    p.add_argument("--draft", type=float, required=True, help="plain steps of a level of drafts")
    p.add_argument("--acceptance", type=float, nargs="*", default=(0.6, 0.7, 0.79, 0.855))
    p.add_argument("--second", type=float, nargs="*", default=(0.3, 0.45),
                   help="share of what earlier choices leave")
    args = p.parse_args()

    print("| acceptance | second choice | " + " | ".join(f"tokens of {n}" for n in BUDGETS)
          + " | best chain | best tree | tree / chain |")
    print("|---" * (len(BUDGETS) + 5) + "|")
    for acceptance in args.acceptance:
        for share in args.second:
            print(row(acceptance, share, args.verify, args.draft))


def costs(text: str) -> dict[int, float]:
    return {1: 1.0} | {int(n): float(cost) for n, _, cost in
                       (part.partition(":") for part in text.split(","))}


def interpolated(known: dict[int, float], n: int) -> float:
    above = min((m for m in known if m >= n), default=max(known))
    below = max(m for m in known if m <= n)
    if above == below:
        return known[above]
    return known[below] + (known[above] - known[below]) * (n - below) / (above - below)


def row(acceptance: float, share: float, verify: dict[int, float], draft: float) -> str:
    by_rank = [acceptance]
    while len(by_rank) < N_RANK:
        by_rank.append((1 - sum(by_rank)) * share)
    limit = max(verify) - 1                        # drafts whose cost is known

    def speed(tokens, n, depth):
        return tokens / (interpolated(verify, n + 1) + depth * draft)
    chains = {n: tree([acceptance], n, DEEPEST) for n in range(1, limit + 1)}
    chain, n_chain = max((speed(*chains[n]), n) for n in chains)
    found = {(n, depth): tree(by_rank, n, depth) for n in range(1, limit + 1)
             for depth in range(1, DEEPEST + 1)}
    best, n_best, cap = max((speed(*found[key]), *key) for key in found)
    counts = [f"{tree([acceptance], n, DEEPEST)[0]:.2f}, {tree(by_rank, n, DEEPEST)[0]:.2f}"
              for n in BUDGETS]
    depth = found[n_best, cap][2]
    return (f"| {acceptance:g} | {by_rank[1]:.2f} | " + " | ".join(counts)
            + f" | {n_chain} drafts, {chain:.2f} | {n_best} of depth {depth}, {best:.2f} "
              f"| {best / chain:.2f} |")


def tree(by_rank: list[float], n: int, deepest: int) -> tuple[float, int, int]:
    """The best tree of up to n nodes -> expected tokens of a round, nodes, depth."""
    heap, nodes = [(-chance, 1) for chance in by_rank], []
    heapq.heapify(heap)
    while heap and len(nodes) < n:
        chance, depth = heapq.heappop(heap)
        nodes.append((-chance, depth))
        if depth < deepest:
            for rank in by_rank:
                heapq.heappush(heap, (chance * rank, depth + 1))
    return 1 + sum(chance for chance, _ in nodes), len(nodes), max(d for _, d in nodes)


if __name__ == "__main__":
    main()
