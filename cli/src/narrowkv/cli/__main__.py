"""`python -m narrowkv.cli` is the command `narrowkv`."""

from narrowkv.cli.app import main

if __name__ == "__main__":
    main()
