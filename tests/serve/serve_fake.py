"""A whole server over the scripted core, as a program: PORT, then JSON for CoreOptions and for ServeSettings, with a
"tokenizer" among them that names one of the fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stretto.logs import set_up_logging
from stretto.serve.server import Model, run_server
from stretto.serve.settings import ServeSettings
from tests.serve.fakes import TOKENIZERS, CoreOptions

if __name__ == "__main__":
    options, settings = (json.loads(text) for text in sys.argv[2:4])
    settings |= {name: Path(settings[name]) for name in ("uds", "ssl_certfile", "ssl_keyfile") if name in settings}
    tokenizer = TOKENIZERS[settings.pop("tokenizer", "bytes")]
    set_up_logging("info", settings.get("log_format", "text"))
    sys.exit(run_server(lambda: Model(CoreOptions(**options), tokenizer),
                        ServeSettings(port=int(sys.argv[1]), **settings)))
