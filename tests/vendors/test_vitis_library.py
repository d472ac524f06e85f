"""The page of AMD's operator library counts what differs, and shows what was refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.vitis_library import CASES, NETWORKS, Row, compared, page


def test_what_differs_is_counted_and_a_refusal_is_quoted(tmp_path: Path) -> None:
    expected = np.array([1.0, -0.0, 3.0], np.float32)
    for stem, found in (("000", expected), ("001", expected + np.array([0, 0, 1e-6], np.float32))):
        np.save(tmp_path / f"{stem}.torch.npy", expected)
        np.save(tmp_path / f"{stem}.y.npy", found)
    (tmp_path / "002.txt").write_text("no such type\nmore")
    domains = ("com.vai.quantize", "com.amd.quark", "com.vai.quantize")
    rows = [
        compared(tmp_path, f"00{i}", Row("int8", "cnn" if i < 2 else "wide", domain, 3))
        for i, domain in enumerate(domains)
    ]
    assert [(row.other, row.refused) for row in rows] == [(0, ""), (1, ""), (0, "no such type")]
    text = page([*rows, Row("int8", "wide", "com.amd.quark", 3)], "0.13")
    assert "2 of\n4 files" in text
    assert "no such type" in text


def test_every_case_is_shown_by_networks_there_are() -> None:
    assert all(networks and set(networks) <= NETWORKS.keys() for _, networks in CASES.values())
