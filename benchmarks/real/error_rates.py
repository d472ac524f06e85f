"""How far what a model reads or hears is from what was written or said, and what it finds from what is there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def edit_distance(found: Sequence[Hashable], expected: Sequence[Hashable]) -> int:
    """Return the smallest number of insertions, deletions and substitutions between two sequences.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(expected) + 1))
    for i, one in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(expected, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def error_rate(found: Sequence[Sequence[Hashable]], expected: Sequence[Sequence[Hashable]]) -> float:
    """Return the edits between sequences of characters or words in percent of the expected ones.

    >>> error_rate(["a red".split(), ["fox"]], ["a red fox".split(), ["fox"]])
    25.0
    """
    edits = sum(edit_distance(one, other) for one, other in zip(found, expected, strict=True))
    return 100 * edits / sum(map(len, expected))


def overlap(one: Box, other: Box) -> float:
    """Return the intersection of two boxes over their union.

    >>> overlap((0, 0, 2, 2), (1, 0, 3, 2))
    0.3333333333333333
    """
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    return common / (_area(one) + _area(other) - common)


def best_overlaps(found: Sequence[Box], expected: Sequence[Box]) -> list[float]:
    """Return the overlap of each expected box with the found one nearest to it, 0 where there is none."""
    return [max((overlap(one, other) for one in found), default=0.0) for other in expected]


def detection_figures(found: Sequence[Sequence[Box]], expected: Sequence[Sequence[Box]]) -> dict[str, float]:
    """Return how well boxes were found, image by image, in percent.

    `overlap` is the mean overlap of expected boxes with the nearest found one, `found` counts those whose overlap is at
    least one half, and `extra` counts found boxes that overlap no expected one by that much, in percent of the latter.

    Raises:
        ValueError: if no box is expected.

    >>> detection_figures([[(0, 0, 4, 2), (9, 9, 10, 10)], []], [[(0, 0, 4, 1)], [(0, 0, 4, 1)]])
    {'overlap, %': 25.0, 'found, %': 50.0, 'extra, %': 50.0}
    """
    if not any(expected):
        raise ValueError("no box is expected anywhere; give other pages")
    pairs = list(zip(found, expected, strict=True))
    overlaps = [best for boxes, there in pairs for best in best_overlaps(boxes, there)]
    extra = sum(best < 0.5 for boxes, there in pairs for best in best_overlaps(there, boxes))
    return {
        "overlap, %": 100 * sum(overlaps) / len(overlaps),
        "found, %": 100 * sum(best >= 0.5 for best in overlaps) / len(overlaps),
        "extra, %": 100 * extra / len(overlaps),
    }


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
