"""Wording: numbers as people read them."""

from streampack.interval import Estimate

_HIDDEN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_HIDDEN |= {127: "\u2421"} | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}


def visible(text: str) -> str:
    """A text from data or a file's name with its control characters made visible: a terminal would obey them."""
    return text.translate(_HIDDEN)


def number(value: float | None) -> str:
    """A number for people: whole ones with commas, others with three figures."""
    if value is None:
        return "?"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """A share in per cent; of what is nearly all, as many figures as tell it from all."""
    if 0.9999 <= value < 1:
        return ">99.99%" if value > 0.9999 else "99.99%"
    return f"{value:.2%}" if 0.99 < value < 1 else f"{value:.1%}"


def about(estimate: Estimate | None) -> str:
    """ "6,525", or with its interval "6,441 (6,295 .. 6,587)"."""
    if estimate is None:
        return "?"
    if estimate.is_exact:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} .. {number(estimate.high)})"


def many(count: int, what: str) -> str:
    """ "1 shard", "1,200 shards"."""
    return f"{count:,} {what}{'s' * (count != 1)}"
