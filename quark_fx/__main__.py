"""Entry point of `python -m quark_fx`, which runs the command `quark-fx`."""

from quark_fx.command_line.entry import main

if __name__ == "__main__":
    main()
