"""How the drafters that ship with Stretto were made: prompts, the target's own answers, one command for all heads.

    python -m training.prompts ../shared/data prompts.jsonl.xz       on any machine, a minute
    python -m training.generate prompts.jsonl.xz answers.npz         the target answers them, on a GPU, in minutes
    python -m training.train heads answers.npz                       the heads, side by side, in minutes

See README.md. Nothing of this package is needed to serve.
"""
