"""A whole server over the scripted core, as a program: PORT, then JSON for CoreOptions and for ServeSettings."""

from __future__ import annotations

import json
import logging
import sys

from stretto.serve.server import run_server
from stretto.serve.settings import ServeSettings
from tests.serve.fakes import ByteTokenizer, CoreOptions

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    options, settings = (json.loads(text) for text in sys.argv[2:4])
    sys.exit(run_server(CoreOptions(**options), ByteTokenizer, ServeSettings(port=int(sys.argv[1]), **settings)))
