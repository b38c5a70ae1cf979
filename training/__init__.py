"""How the drafters that ship with Stretto were made: prompts, the target's own answers, one command a head.

    python -m training.prompts ../shared/data prompts.jsonl.xz       on any machine, half a minute
    python -m training.generate prompts.jsonl.xz answers.npz         the target answers them, on a GPU, in minutes
    python -m training.eagle3 answers.npz heads/eagle3               and dflash, dspark: a head, in minutes each

See README.md. Nothing of this package is needed to serve.
"""
