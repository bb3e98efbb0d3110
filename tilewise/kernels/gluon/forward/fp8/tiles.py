"""How an e4m3 attention call is cut on Hopper: a pure table."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.kernels.spec import AttentionSpec

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """The tile and the compile-time choices of the e4m3 kernel for a call; `variant_of` makes
    it."""

    HEAD_DIM: int
    TILE_N: int
    NUM_CONSUMERS: int
    STAGES: int
    PARTS: int
    DYNAMIC: bool
    HAS_RIGHT: bool
    HAS_LEFT: bool
    HAS_SEQLENS: bool
    HAS_TAIL: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PER_TOKEN: bool = False
    softcap: str = "none"
    sinks: bool = False
    packed: bool = False
    mask_rows: int = 0
    mask_keys: int = 0

    @property
    def rows(self) -> int:
        """Queries of a CTA's tile, 64 for each consumer."""
        return 64 * self.NUM_CONSUMERS

    @property
    def keys(self) -> int:
        """Keys of a tile of keys."""
        return self.TILE_N

    @property
    def dynamic(self) -> bool:
        """Whether tiles come from a counter."""
        return self.DYNAMIC

    @property
    def right(self) -> bool:
        """Whether keys to the right of the diagonal are hidden."""
        return self.HAS_RIGHT

    @property
    def left(self) -> bool:
        """Whether keys far to the left of the diagonal are hidden."""
        return self.HAS_LEFT

    @property
    def lengths(self) -> bool:
        """Whether dense sequences have a number of keys of their own."""
        return self.HAS_SEQLENS

    @property
    def ruled(self) -> bool:
        """Whether windows or lengths hide keys of blocks of a block mask."""
        return self.HAS_LEFT or self.HAS_RIGHT or self.HAS_SEQLENS or self.packed

    @property
    def shares_bias(self) -> bool:
        """False: e4m3 calls have no bias that sequences could share."""
        return False


def variant_of(spec: AttentionSpec) -> Variant:
    """Return the tile sizes and compile-time choices with which an e4m3 call runs.

    Chosen on an H200, 2026-11-20, 16,384 tokens, hidden 2,048 (TFLOP/s at N 4,096, not causal):
    three warpgroups that take turns 1,004 and two that overlap their own products 915 at D 128;
    fewer stages, or passing the turn between the two products, gained nothing.
    """
    # The first query ends Sq - 1 keys before the last one, and the last begins at the first of Sk.
    has_right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    has_left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    tile_n = 128
    cut: dict[str, int | bool] = {
        "TILE_N": tile_n,
        "NUM_CONSUMERS": 3,
        "STAGES": 4,
        "PARTS": 1,
        "CONSUMER_REGISTERS": 160,
        "PRODUCER_REGISTERS": 32,
    }
    if spec.head_dim == 256:
        cut |= {"NUM_CONSUMERS": 2, "STAGES": 2, "PARTS": 2}
        cut |= {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    mask_rows, mask_keys = spec.mask_tile or (0, 0)
    if mask_rows > 0 and spec.head_dim < 256:  # a tile of rows lies in one of the mask
        cut |= {"NUM_CONSUMERS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    uneven = has_right or has_left or spec.has_seqlens_k or spec.is_varlen or mask_rows > 0
    return Variant(
        HEAD_DIM=spec.head_dim,
        DYNAMIC=uneven,
        HAS_RIGHT=has_right,
        HAS_LEFT=has_left,
        HAS_SEQLENS=spec.has_seqlens_k,
        HAS_TAIL=uneven or spec.max_seqlen_k % tile_n != 0,
        softcap="fast" if spec.softcap > 0 else "none",  # tanh has 11 bits, e4m3 has 4
        sinks=spec.has_sinks,
        packed=spec.is_varlen,
        mask_rows=mask_rows,
        mask_keys=mask_keys,
        **cut,  # type: ignore[arg-type]
    )
