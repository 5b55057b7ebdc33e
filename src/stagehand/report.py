"""What a runtime did, for people."""

from dataclasses import dataclass

from stagehand.units import format_bytes

__all__ = ["Report", "advise"]

_ADVICE = {
    "compute": "weights arrive in time; a faster device would help, more memory not",
    "link": "weights arrive late; a larger vram_budget keeps more of them there",
    "disk": "files are read late; a larger budget keeps more weights in memory",
    "budget": "too little room to load ahead; raise vram_budget",
    "unknown": "run a few passes to measure",
}


def advise(limit: str) -> str:
    """Return what would help against a limit."""
    return _ADVICE[limit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A runtime's budget, plan and work so far; `str()` makes a short text of it."""

    budget_bytes: int
    """Device bytes that weights may take."""
    peak_device_bytes: int
    """The most that they took at once."""
    weight_bytes: int
    """Bytes of all parameters and buffers."""
    resident_bytes: int
    """Bytes of blocks that stay on the device."""
    gathered_bytes: int
    """Bytes of tables that stay on the host."""
    pinned_bytes: int
    """Page-locked host bytes that are held."""
    blocks: int
    """Number of blocks."""
    slots: int
    """Number of device slots."""
    lookahead: int
    """Blocks that are loaded ahead at most."""
    streamed_bytes: int
    """Bytes copied to the device."""
    saved_bytes: int
    """Bytes copied from the device."""
    disk_bytes: int
    """Bytes read from files."""
    passes: int
    """Passes that are over."""
    seconds_per_pass: float | None
    """Mean time of the latest passes on the host's clock; None before the second."""
    stall_ms: float | None
    """Mean time a step waited for blocks; None unless measured."""
    hit_rate: float | None
    """Streamed uses whose block was ready, from 0 to 1; None unless measured."""
    link_bytes_per_second: float
    """The link's rate: measured, or a guess before the first timed pass."""
    abandoned_slots: int
    """Slots whose memory somebody else still held when it was needed."""
    limit: str
    """What a faster pass lacks: "compute", "link", "disk", "budget" or "unknown"."""
    advice: str
    """What would help."""

    def __str__(self) -> str:
        """Return a few lines of text."""
        pace = "not measured"
        if self.seconds_per_pass is not None:
            pace = f"{self.seconds_per_pass * 1e3:.1f} ms"
        lines = (
            f"weights   {format_bytes(self.weight_bytes)} in {self.blocks} blocks",
            f"budget    {format_bytes(self.budget_bytes)}, peak"
            f" {format_bytes(self.peak_device_bytes)};"
            f" {format_bytes(self.resident_bytes)} stay in {self.slots} slots,"
            f" {self.lookahead} blocks ahead",
            f"host      {format_bytes(self.pinned_bytes)} pinned,"
            f" {format_bytes(self.gathered_bytes)} gathered by rows",
            f"moved     {format_bytes(self.streamed_bytes)} to the device,"
            f" {format_bytes(self.saved_bytes)} back,"
            f" {format_bytes(self.disk_bytes)} from disk",
            f"passes    {self.passes}, {pace} each",
            f"limit     {self.limit}: {self.advice}",
        )
        return "\n".join(lines)
