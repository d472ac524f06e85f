"""NF4: the 16 numbers that halve the probability mass of a normal distribution evenly, as a number format.

Importing this file registers it: `TensorSpec(format="nf4", granularity="group", group_size=64)`.

Source:
    Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", appendix E.
"""

from __future__ import annotations

from quark_fx.numbers.formats import Codebook, register_format

NF4 = register_format(
    Codebook(
        "nf4",
        (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ),
    )
)
