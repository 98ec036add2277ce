"""``python -m bridge`` is the command."""

from bridge.cli.commands import main

if __name__ == "__main__":
    main()
