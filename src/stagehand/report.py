"""What a runtime did, for people."""

from dataclasses import dataclass

from stagehand.residency.seats import Holding
from stagehand.units import format_bytes

__all__ = ["Report", "advise"]

_TRAINED = (
    "what trains crosses in each step, as its gradients do; a larger {budget} saves"
    " it the second load, that of backward, and other weights both"
)
_ADVICE = {
    "compute": "weights arrive in time; a faster device would help, more memory not",
    "link": "weights arrive late; a larger {budget} keeps more of them there",
    "disk": "files are read late; a larger budget keeps more weights in memory",
    "budget": "too little room to load ahead; raise {budget}",
    "unknown": "run a few passes to measure",
}
_OF_ROOM = ("link", "disk", "budget")


def advise(
    limit: str, *, budget: str, trains: bool, lacking_bytes: int, taker: str
) -> str:
    """Return what would help against a limit.

    Args:
        limit: See `Report.limit`.
        budget: What the setting is called that gives weights more room.
        trains: Whether blocks of the model do.
        lacking_bytes: What weights may not take of the budget now.
        taker: For whom that is.
    """
    known = _TRAINED if trains and limit == "link" else _ADVICE[limit]
    advice = known.format(budget=budget)
    if lacking_bytes > 0 and limit in _OF_ROOM:
        advice += f"; {format_bytes(lacking_bytes)} of this one are left to {taker}"
    return advice


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A runtime's budget, plan and work so far; `str()` makes a short text of it."""

    budget_bytes: int
    """Device bytes that weights may take now: what is left of what was given, by other
    models, watermarks, and changed weights in host memory."""
    given_bytes: int
    """Device bytes that weights may take at most: the budget as it was given."""
    shared_bytes: int
    """Device bytes that all models on the device may take together."""
    holdings: tuple[Holding, ...]
    """What each of them holds, and why."""
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
    pinning_bytes: int
    """Bytes of weights that are still being page-locked, in the background."""
    startup_seconds: float
    """What making the runtime took, without casting the model."""
    first_output_seconds: float | None
    """What that and the first pass took, on the host's clock; None before its end."""
    blocks: int
    """Number of blocks."""
    slots: int
    """Number of device slots."""
    lookahead: int
    """Blocks that are loaded ahead at most; of small ones more than `prefetch_k`."""
    streamed_bytes: int
    """Bytes copied to the device."""
    saved_bytes: int
    """Bytes copied from the device: gradients, blocks that were changed there, and
    those that stayed, which are compared when they leave: users may edit them."""
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
    compact_blocks: int
    """Blocks that cross the link packed or quantized."""
    compact_bytes: int
    """Bytes of these blocks on the device."""
    compact_link_bytes: int
    """Bytes in which they cross, at most."""
    decoder_bytes: int
    """Device bytes set aside to decode them."""
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
            f"budget    {format_bytes(self.budget_bytes)}{self._given()}, peak"
            f" {format_bytes(self.peak_device_bytes)};"
            f" {format_bytes(self.resident_bytes)} stay in {self.slots} slots,"
            f" {self.lookahead} blocks ahead",
            f"host      {format_bytes(self.pinned_bytes)} pinned,{self._pinning()}"
            f" {format_bytes(self.gathered_bytes)} gathered by rows",
            f"moved     {format_bytes(self.streamed_bytes)} to the device,"
            f" {format_bytes(self.saved_bytes)} back,"
            f" {format_bytes(self.disk_bytes)} from disk",
            *self._compact(),
            *self._neighbours(),
            f"passes    {self.passes}, {pace} each; {self._start()}",
            f"limit     {self.limit}: {self.advice}",
        )
        return "\n".join(lines)

    def _given(self) -> str:
        """Say what the budget is a part of, if it is one: the peak may be above it."""
        if self.budget_bytes >= self.given_bytes:
            return ""
        return f" of {format_bytes(self.given_bytes)}"

    def _pinning(self) -> str:
        """Say how much more will be pinned, if any."""
        if not self.pinning_bytes:
            return ""
        return f" {format_bytes(self.pinning_bytes)} more in the background,"

    def _start(self) -> str:
        """Say how long the first output took."""
        if self.first_output_seconds is None:
            return f"{self.startup_seconds:.2f} s to start"
        return f"{self.first_output_seconds:.2f} s to the first output"

    def _compact(self) -> list[str]:
        """Say what crosses in a smaller form, if anything does."""
        if not self.compact_blocks:
            return []
        return [
            f"link      {self.compact_blocks} blocks of"
            f" {format_bytes(self.compact_bytes)} cross in"
            f" {format_bytes(self.compact_link_bytes)};"
            f" {format_bytes(self.decoder_bytes)} to decode them"
        ]

    def _neighbours(self) -> list[str]:
        """Say who holds what, where there is more than one, or somebody is held."""
        if len(self.holdings) < 2 and all(h.why == "not held" for h in self.holdings):
            return []
        first = f"shared    {format_bytes(self.shared_bytes)}: {self.holdings[0]}"
        return [first, *(f"          {holding}" for holding in self.holdings[1:])]
