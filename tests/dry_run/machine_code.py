"""Reads nvdisasm's listing of one kernel: loops, loads ahead of their use, trips to memory.

Only text: no Triton and no GPU, so that it is tested anywhere. A warp issues in order and stops at
the first instruction that names a register still being loaded. What is counted follows from that:

    code = Listing(nvdisasm_text); code.trips(), code.trips_after_atomic(), code.ahead()
"""

import re

WEIGHT = re.compile(r"\bLDG(?:STS)?\.\S*EF")       # evict-first: read once, so a weight
MMA = re.compile(r"\b(?:HMMA|IMMA|HGMMA|IGMMA)\.")
LOAD = re.compile(r"\b(?:LDG|LDGSTS|LD|ATOMG|ATOM)\.")
FENCE = re.compile(r"\bMEMBAR\.\S*(?:GPU|SYS|VC)")
# cycles until another instruction may use the result; the others take about four
SLOW = re.compile(r"\b(?:SHFL|BAR|LDS|LDSM|MUFU|HMMA|IMMA|S2R|LDC|WARPSYNC|REDUX|VOTE)\b")
SLOW_CYCLES, CYCLES = 25, 4


class Listing:
    """code: the instructions; loops: (first, last) of each, innermost or not."""

    def __init__(self, text: str):
        self.code, self.loops, labels = [], [], {}
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L_\w+):", line):
                labels[label[1]] = len(self.code)
            elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                self.code.append(instruction[1])
        while self.code and re.match(r"NOP|BRA `", self.code[-1]):
            self.code.pop()
        for i, line in enumerate(self.code):
            target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
            if target and labels.get(target[1], len(self.code)) < i:
                self.loops.append((labels[target[1]], i))

    def main_loop(self) -> tuple[int, int]:
        """The loop with the most weight loads, else the longest; (0, -1) without one."""
        def weight(loop):
            inside = self.code[loop[0]:loop[1] + 1]
            return sum(map(bool, map(WEIGHT.search, inside))), len(inside)
        return max(self.loops, key=weight, default=(0, -1))

    def peeled(self) -> int:
        """Turns of the main loop that also stand outside of it, by tensor-core instructions."""
        first, last = self.main_loop()
        inside = sum(map(bool, map(MMA.search, self.code[first:last + 1])))
        return round(sum(map(bool, map(MMA.search, self.code))) / inside) - 1 if inside else 0

    def instructions(self, turns: int) -> int:
        """Of one warp, if its main loop runs so often."""
        first, last = self.main_loop()
        return len(self.code) + (last - first + 1) * (turns - 1)

    def loaded_bytes(self, inside: range) -> int:
        """Of weights, by a thread, once through these instructions."""
        return sum(width(self.code[i]) for i in inside if WEIGHT.search(self.code[i]))

    def ahead(self) -> float:
        """The share of a turn of the main loop that passes between a weight's load and its first
        use, by estimated latency: the median of the widest loads. 0 without such a loop."""
        first, last = self.main_loop()
        body = self.code[first:last + 1]
        cycles = [SLOW_CYCLES if SLOW.search(line) else CYCLES for line in body]
        loads = [i for i, line in enumerate(body) if WEIGHT.search(line)]
        widest = max((width(body[i]) for i in loads), default=0)
        shares = []
        for i in loads:
            if width(body[i]) < widest:
                continue
            goal = destination(body[i])
            turn = [*range(i + 1, len(body)), *range(i + 1)]
            used = next((n for n, j in enumerate(turn) if mentions(body[j], goal)), len(turn))
            shares.append(sum(cycles[j] for j in turn[:used]) / sum(cycles))
        return sorted(shares)[len(shares) // 2] if shares else 0.0

    def trips(self, turns: int = 1) -> int:
        """How often a warp waits for memory that it asked for after it last waited; branches count
        as taken, the main loop as `turns`, other loops by their constant bound, else once."""
        return self._waits(0, turns)

    def trips_after_atomic(self, turns: int = 1) -> int:
        """Of these, those after the first atomic: what the last program does alone."""
        atomic = next((i for i, line in enumerate(self.code) if re.search(r"\bATOMG?\.", line)), None)
        return 0 if atomic is None else self._waits(atomic + 1, turns)

    def _waits(self, begin: int, turns: int) -> int:
        total, pending, stored = 0, set(), False
        main = self.main_loop()
        for i, line in enumerate(self.code):
            waits = mentions(line, pending) or "shared" in pending and "DEPBAR.LE" in line
            fence = stored and FENCE.search(line)
            if waits or fence:
                pending, stored = set(), False
                if i >= begin:
                    total += self._repeats(i, main, turns)
            if re.search(r"\bSTG\.|\bST\.", line):
                stored = True
            if LOAD.search(line):
                pending |= {"shared"} if "LDGSTS" in line else destination(line)
        return total

    def _repeats(self, i: int, main: tuple[int, int], turns: int) -> int:
        n = 1
        for loop in self.loops:
            if loop[0] <= i <= loop[1]:
                n *= turns if loop == main and WEIGHT.search("\n".join(self.code[loop[0]:loop[1]])) \
                    else self.bound(loop)
        return n

    def bound(self, loop: tuple[int, int]) -> int:
        """How often a loop runs, if it counts to a constant in its own code, else 1."""
        body = self.code[loop[0]:loop[1] + 1]
        predicate = re.match(r"@!?(U?P\d)", body[-1])
        for line in reversed(body[:-1] if predicate else []):
            if f" {predicate[1]}," not in line or ".EX " in line:      # the high half of 64 bits
                continue
            limit = re.search(rf"ISETP\.\S+ {predicate[1]}, U?PT, (U?R\d+)(?:\.reuse)?, (0x[0-9a-f]+)",
                              line)
            if limit:
                step = next((re.search(rf"(?:IADD3|VIADD|IADD) {limit[1]},.*?(?:, |\b)(0x[0-9a-f]+)", x)
                             for x in body if re.search(rf"(?:IADD3|VIADD|IADD) {limit[1]},", x)), None)
                return max(1, int(limit[2], 16) // (int(step[1], 16) if step else 1))
            break
        return 1


def width(line: str) -> int:
    """Bytes that a load brings to a thread."""
    size = re.search(r"\.(128|64|U16|S16|16|U8|S8)\b", line.split("[")[0])
    return {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}[size[1]] if size else 4


def destination(line: str) -> set:
    """The registers that a load writes."""
    target = re.search(r"\b(?:LDG|LD|ATOMG|ATOM)\.\S+ (?:PT, |P\d, )?R(\d+)", line)
    if target is None:
        return set()
    first = int(target[1])
    return set(range(first, first + max(1, width(line) // 4)))


def mentions(line: str, registers: set) -> bool:
    """Does it read or write one of these registers? Wide operands reach over several."""
    if not registers:
        return False
    opcode = next((word for word in line.split() if not word.startswith("@")), "")
    wide = 4 if "MMA" in opcode else 2 if ".WIDE" in opcode else 1
    if LOAD.search(line) or opcode.startswith(("STG", "STS", "LDS", "ST.")):
        wide = max(1, width(line) // 4)            # of the data; addresses say .64
    data, addresses = re.sub(r"\[[^\]]*\]", "", line), " ".join(re.findall(r"\[[^\]]*\]", line))
    reach = [(int(n), wide) for n in re.findall(r"\bR(\d+)", data)]
    if wide == 4 and "MMA" in opcode and len(reach) > 2:       # D, A, B, C: B has half of A
        reach[2] = (reach[2][0], 2)
    reach += [(int(n), 2 if pair else 1) for n, pair in re.findall(r"\bR(\d+)(\.64)?", addresses)]
    return any(first + i in registers for first, n in reach for i in range(n))
