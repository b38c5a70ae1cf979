"""`stretto completion`: what makes a shell complete the commands and their flags."""

from __future__ import annotations

from typing import Literal

from stretto.cli.main import build_app


def completion(shell: Literal["bash", "zsh", "fish"], /, *, install: bool = False) -> int:
    """Print what makes a shell complete `stretto`, for `eval "$(stretto completion bash)"`.

    Parameters
    ----------
    shell
        Which shell.
    install
        Write it where the shell looks, and name it in the shell's start-up file where that is needed.
    """
    app = build_app()
    if install:
        print(f"installed: {app.install_completion(shell=shell)}")
    else:
        print(app.generate_completion(shell=shell))
    return 0
