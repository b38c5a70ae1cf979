"""`python -m stretto`: the command `stretto`, for launchers that start modules, such as torchrun."""

from stretto.cli.main import main

if __name__ == "__main__":
    main()
