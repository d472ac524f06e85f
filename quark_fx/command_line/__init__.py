"""The command `quark-fx`, one file per command; typer and rich are imported when it runs."""
