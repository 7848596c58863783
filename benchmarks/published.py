"""Figures of the two papers, to stand beside what is measured here.

paper 1: arXiv 2407.09105: 20,000 examples of FLAN, Mistral-7B, 8 A100-80GB, rows of 4096 tokens, one epoch, one seed.
paper 2: arXiv 2410.08081: LLaMA-3-8B and 70B, 32 A800-80GB, rows of 4096 tokens, without isolation, one seed.
"""

from typing import NamedTuple

import ways


class Table2(NamedTuple):
    """A line of paper 1's Table 2 (FLAN_20k, Mistral-7B)."""

    rows: int
    tokens_per_second: int
    peak_mb: int
    loss: float


TABLE_2 = {
    ways.PADDING: Table2(19_961, 742, 30_625, 1.129),
    ways.CONTAMINATED: Table2(2_294, 2_986, 30_783, 1.306),
    ways.FLAT: Table2(585, 3_010, 30_783, 1.284),
    ways.FLATTENED: Table2(19_961, 1_408, 24_549, 1.127),
}

TABLE_4 = {
    ways.PADDING: ((311, 1.117), None),
    ways.CONTAMINATED: ((35, 1.294), (281, 1.252)),
    ways.WRAPPED: ((35, 1.221), (281, 1.170)),
}
"""Paper 1's Table 4 (FLAN_20k, Mistral-7B): (steps, validation loss) with 32 and with 4 accumulated batches a step."""

TABLE_3 = {
    "WildChat (GPT-4) 69K, 8B": ((1964, 728, 492), (1188.8, 445.3, 308.3)),
    "WildChat (GPT-4) 69K, 70B": ((2943, 1092, 741), (9533, 3749, 2573)),
    "TULU 326K, 8B": ((9183, 1928, 1956), (4907, 1175, 1328)),
    "TULU 326K, 70B": ((13761, 2889, 2931), (40735, 9759, 10314)),
    "WildChat 652K, 8B": ((18340, 5348, 4780), (11738, 3423, 3124)),
    "WildChat 652K, 70B": ((27510, 8025, 7170), (97894, 28905, 25125)),
    "Open-source 1.2M, 8B": ((33064, 5400, 5104), (19918, 3253, 3175)),
    "Open-source 1.2M, 70B": ((49596, 8103, 7653), (184709, 29894, 27427)),
}
"""Paper 2's Table 3 in its README (Table 5 in the paper): steps, and seconds, of padding, random and greedy packing.
Its seconds do not agree with its steps per second (by a factor of about 10), so only ratios are used."""
