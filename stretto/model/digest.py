"""Whether two hosts have the same checkpoint: a digest of the files that would be loaded.

    file   |# first MiB #|...|#|...|#|...|#|...|#|    SAMPLES blocks of BLOCK bytes, evenly spaced to the file's end

Reading hundreds of gigabytes would take longer than loading them. Samples are dense enough to meet every large matrix:
a fine-tuned or otherwise quantised model differs in all of them. A few bytes that a disk has spoilt may be missed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stretto.model.source import INDEX_FILE, SINGLE_FILE
from stretto.text.gguf_names import parts_of

BEGINNING, SAMPLES, BLOCK = 1 << 20, 256, 4096


def digest(path: Path) -> str:
    """Of the folder of a model, a drafter or an adapter, or of a GGUF file; of the files in it that are loaded. Raises
    OSError."""
    found = hashlib.sha256()
    for file in parts_of(path) if path.is_file() else _loaded(path):
        size = file.stat().st_size
        found.update(f"{'' if file == path else file.name}\n{size}\n".encode())
        with file.open("rb") as stream:
            found.update(stream.read(BEGINNING))
            for i in range(1, SAMPLES + 1 if size > BEGINNING else 1):
                stream.seek(i * (size - BLOCK) // SAMPLES)
                found.update(stream.read(BLOCK))
    return found.hexdigest()


def _loaded(folder: Path) -> list[Path]:
    """Where there is an index, it alone says which shards are loaded; pickles are where there is nothing else."""
    index, shards = folder / INDEX_FILE, [SINGLE_FILE, "adapter_model.safetensors"]
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif not any(folder.glob("*.safetensors")):
        shards = ["pytorch_model.bin"]
    names = "config.json", "adapter_config.json", INDEX_FILE, *shards
    return [folder / name for name in names if (folder / name).is_file()]
