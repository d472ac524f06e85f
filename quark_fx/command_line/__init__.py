"""The command `quark-fx`: one file a command; typer and rich are imported when it runs."""
