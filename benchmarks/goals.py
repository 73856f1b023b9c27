"""What is asked of the times, and whether it is reached."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.methods import MALLOC, PURE
from benchmarks.rows import Row, least, relative
from benchmarks.startup import COMMANDS, FIRST, STARTUP

FOUR = ("mnist_cnn b256", "mlp b256", "small_alexnet b128", "densenet40 b64")
_ENGINE, _HARNESS = (1.18, 1.35, 1.00, 1.03), (1.36, 1.55, 1.05, 1.11)
_WITHOUT_COMPILER, _DISCRETIZED_PURE = (1.7, 1.45, 1.3, 1.4), 1.6
_OTHER_CLIPPING, _FASTER = (1.15, 1.3, 1.10, 1.10), (3.5, 1.8, 3.5, 2)
_DISCRETIZED, _MICRO, _MEMORY, _LAYERS = 1.25, 1.05, 1.4, 2.0
_CONVOLUTIONS, _SEQUENCES = ("mnist_cnn b256", "small_alexnet b128"), ("lstm b128", "attention b128")
_STARTUP_S, _FIRST_S = 1.5, 4.0  # CPU seconds of a command; wall seconds until the first release
_WALL, _CPU = "wall_ms", "cpu_ms"


def goal_row(
    what: str, asked: float, reached: float | None, more: bool = False, beside: Sequence[float | None] = ()
) -> str:
    """A line of a goals' table.

    Args:
        what: The goal.
        asked: The most it may be, or the least.
        reached: What was measured.
        more: Whether `asked` is the least.
        beside: Further cells, which are not judged.
    """
    cells = "".join(f"{'–' if cell is None else f'{cell:.2f}'} | " for cell in beside)
    if reached is None:
        return f"| {what} | {asked:g} | – | {cells}not measured |"
    met = round(reached, 2) >= asked if more else round(reached, 2) <= asked
    return f"| {what} | {asked:g} | {reached:.2f} | {cells}{'met' if met else '**not met**'} |"


class _Times:
    """Ratios of what was measured: (of wall time, of CPU time on one thread), None where something is missing."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = {(row["workload"], row["method"]): row for row in rows}

    def get(self, workload: str, method: str, key: str) -> float | None:
        """A number of a row."""
        value: float | None = self._rows.get((workload, method), {}).get(key)
        return value

    def limit(self, workload: str, method: str) -> tuple[float | None, float | None]:
        """÷ the fastest step without privacy."""
        wall, cpu = (self.get(workload, method, f"{kind}ratio_to_limit") for kind in ("", "cpu_"))
        return wall, cpu

    def over(self, workload: str, method: str, other: str, base: str = "") -> tuple[float | None, float | None]:
        """÷ another method, of the same workload if no other is given."""
        pairs = zip(self.limit(workload, method), self.limit(base or workload, other), strict=True)
        wall, cpu = (_over(*pair) for pair in pairs)
        return wall, cpu

    def dearest(self, workload: str, methods: Sequence[str]) -> tuple[float | None, float | None]:
        """÷ the limit, of the slowest of some methods."""
        found = [self.limit(workload, method) for method in methods]
        return max((pair for pair in found if pair[0] is not None), default=(None, None), key=lambda pair: pair[0] or 0)

    def faster(self, workload: str, method: str) -> tuple[float | None, float | None]:
        """How many times as fast as the best mode of Opacus at its defaults."""
        peers = [row for (name, kind), row in self._rows.items() if name == workload and MALLOC in kind]
        own = self._rows.get((workload, method))
        both = [own and _over(least(peers, ("opacus/",), key), relative(own, key)) for key in (_WALL, _CPU)]
        return both[0] or None, both[1] or None

    def memory(self, workload: str, method: str, other: str) -> float | None:
        """÷ that of another method."""
        return _over(self.get(workload, method, "peak_mb"), self.get(workload, other, "peak_mb"))


def _over(a: float | None, b: float | None) -> float | None:
    return None if not a or not b else a / b


def _line(what: str, asked: float, both: tuple[float | None, float | None], more: bool = False) -> str:
    return goal_row(what, asked, both[0], more, [both[1]])


def goals(rows: list[Row]) -> list[str]:
    """Lines of the goals' table: asked, reached, the same in CPU time on one thread, met or not."""
    times, lines = _Times(rows), []
    for what, method, asked in (
        ("the engine ÷ limit", "ours/flat", _ENGINE),
        ("the whole harness ÷ limit", "harness/flat", _HARNESS),
    ):
        for workload, most in zip(FOUR, asked, strict=True):
            lines.append(_line(f"{workload}: {what}", most, times.limit(workload, method)))
    for workload in _CONVOLUTIONS:
        both = times.over(workload, f"ours/discretized {PURE}", f"ours/flat {PURE}")
        lines.append(_line(f"{workload}, without a compiler: discretized ÷ flat clipping", _DISCRETIZED_PURE, both))
    for workload in _SEQUENCES:
        both = times.faster(workload, "ours/flat")
        lines.append(_line(f"{workload}: times as fast as Opacus' layer", _LAYERS, both, more=True))
    for command in COMMANDS:
        cpu = _over(times.get(STARTUP, command, _CPU), 1e3)
        lines.append(_line(f"`{command}`, CPU seconds", _STARTUP_S, (cpu, cpu)))
    first = _over(times.get(STARTUP, FIRST, _WALL), 1e3), _over(times.get(STARTUP, FIRST, _CPU), 1e3)
    return [*lines, _line(f"{FIRST}, seconds from the start of the process", _FIRST_S, first)]


def older_goals(rows: list[Row]) -> list[str]:
    """Lines of the table of goals that were set before and still say something."""
    times, lines = _Times(rows), []
    others = [f"ours/{kind}" for kind in ("per_layer", "adaptive_quantile", "adaptive_mean")]
    for workload, most in zip(FOUR, _OTHER_CLIPPING, strict=True):
        what = f"{workload}: the slowest of per-layer and adaptive clipping ÷ limit"
        lines.append(_line(what, most, times.dearest(workload, others)))
    for workload, most in zip(FOUR, _WITHOUT_COMPILER, strict=True):
        both = times.limit(workload, f"ours/flat {PURE}")
        lines.append(_line(f"{workload}, without a compiler: the engine ÷ limit", most, both))
    for workload, fewest in zip(FOUR, _FASTER, strict=True):
        both = times.faster(workload, "ours/flat")
        lines.append(_line(f"{workload}: times as fast as Opacus", fewest, both, more=True))
    for workload in _CONVOLUTIONS:
        both = times.over(workload, "ours/discretized", "ours/flat")
        lines.append(_line(f"{workload}: discretized ÷ flat clipping", _DISCRETIZED, both))
    micro = times.over(f"{FOUR[3]}, microbatches of 8", "ours/flat", "ours/flat", base=FOUR[3])
    lines.append(_line("densenet40: microbatches of 8 ÷ examples", _MICRO, micro))
    memory = times.memory(FOUR[2], "ours/flat", "plain/channels_last")
    lines.append(_line(f"{FOUR[2]}: memory ÷ plain", _MEMORY, (memory, None)))
    for workload in _SEQUENCES:
        memory = times.memory(workload, "ours/flat", f"opacus/hooks {MALLOC}")
        lines.append(_line(f"{workload}: memory ÷ Opacus' layer", 1.0, (memory, None)))
    return lines
