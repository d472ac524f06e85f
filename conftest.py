"""The root names `passes`, `observers` and `export` are links into the package: collect it once, nested."""

collect_ignore = ["passes", "observers", "export"]
