"""Counter-based uniforms: Philox4x32-10 keyed by (seed, absolute position, purpose).

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), with
its published constants and ten rounds. Nothing is stored between calls, so a kernel gets the same bits from

    key     = ( seed & 0xffffffff, seed >> 32 )
    counter = ( position & 0xffffffff, position >> 32, purpose, 0 )
    u       = ( word 0 of the output >> 8 ) * 2**-24

u is a multiple of 2**-24 in [0, 1): float32 and float64 hold it exactly. An event's probability is therefore off by at
most 2**-24, which is below the rounding of float32 logits.

Why a position may key the randomness although drafts are thrown away and drawn again
-------------------------------------------------------------------------------------
The position is that of the token being chosen: 0 is the first prompt token, n the first new one behind n prompt tokens.
A position p can be drafted in several steps, each time with the same DRAFT uniform, but it is *settled* once: in the
one step where all earlier positions of the block were accepted, by ACCEPT(p) and, after a rejection or past the last
draft, SAMPLE(p). Let F(p) be everything determined by uniforms of positions below p. By induction over p:

- the tokens before p, and the step in which p is settled, are in F(p): a step ends at a rejection, and whether position
  r < p is rejected depends on the text before r, on the draft up to r and on ACCEPT(r);
- the proposal distribution q at p is in F(p): it depends on the committed text and on the block's drafts before p,
  never on a draft after p (the selector walks forwards; the block's rows see masks, not each other's drafts);
- earlier drafts of p in steps that ended before p were discarded without any decision looking at them.

So, given F(p), the uniforms of p are fresh and independent of q and of the target distribution there; the usual
argument for rejection sampling then gives the token at p exactly the target's distribution given the text before it.

What would break this: a rule that lets acceptance at p depend on drafts after p (block verification), or a verify width
chosen by looking at the draft at p, or at what an earlier step drafted there. Such a rule must key by step as well. The
trees and automatic widths of this package are made not to: `tree` draws no drafts, and `width` decides about p from
drafts before p and from outcomes at settled positions (`calibration`).
"""

from enum import IntEnum

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_KEY_STEP_0 = 0x9E3779B9  # golden ratio
_KEY_STEP_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10
_MASK = 0xFFFFFFFF

SEED_LIMIT = 1 << 64


class Purpose(IntEnum):
    """What a uniform decides; third word of the counter, so that no two decisions share a stream."""

    DRAFT = 0  # the selector's walk picks the draft token at the position
    ACCEPT = 1  # the draft token at the position is kept or not
    SAMPLE = 2  # the token at the position is drawn from the target or from the residual


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32: four 32-bit words from a 128-bit counter and a 64-bit key, all as unsigned words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0 = (k0 + _KEY_STEP_0) & _MASK
        k1 = (k1 + _KEY_STEP_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """The uniform in [0, 1) of one decision; `seed` and `position` are unsigned 64-bit integers."""
    key = (seed & _MASK, seed >> 32)
    word = philox((position & _MASK, position >> 32, int(purpose), 0), key)[0]
    return (word >> 8) * 2.0**-24
