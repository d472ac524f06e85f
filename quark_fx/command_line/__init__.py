"""The command `quark-fx`, with one module per subcommand; typer and rich are imported when the command runs."""
