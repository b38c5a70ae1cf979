"""The page at `/` and the reference at `/docs`: static files of the package. They talk to the same API as every other
client."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from stretto.serve.errors import ApiError

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page loads nothing from elsewhere, and nothing else may frame it.
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
           "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline';"
                                      " frame-ancestors 'none'"}


def page() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    names = frozenset(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)

    @router.get("/")
    async def index() -> Response:
        return FileResponse(FOLDER / "index.html", media_type=TYPES[".html"], headers=HEADERS)

    @router.get("/docs")
    async def docs() -> Response:
        return FileResponse(FOLDER / "docs.html", media_type=TYPES[".html"], headers=HEADERS)

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in names:
            raise ApiError(404, f"the page has no file {name[:100]!r}", code="unknown_url")
        return FileResponse(FOLDER / name, media_type=TYPES[Path(name).suffix], headers=HEADERS)

    return router
